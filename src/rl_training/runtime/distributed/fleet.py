"""A fleet of workers, in the collector's place: it hands out weights and takes in what was collected."""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import nn

from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.batches import Progress
from rl_training.contracts.errors import CheckpointError, ConfigError, EnvError
from rl_training.contracts.state import Stateful, check_keys
from rl_training.data.normalize import ObservationNormalizer, RewardNormalizer
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.data.samplers import Sampler
from rl_training.data.shards import ShardedSampler
from rl_training.runtime.collector import CollectStats, EpisodeStatistics, Exploration
from rl_training.runtime.distributed.backends import Backend, WorkerLostError
from rl_training.runtime.distributed.messages import Message
from rl_training.runtime.distributed.settings import WorkersConfig
from rl_training.runtime.distributed.worker import moments_of, steps_of

MAX_DEATHS = 5
"""How often in a row a worker may be lost before the run gives up."""
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before a lost worker is started again; the pause doubles with each loss."""
START_SECONDS = 120.0
"""Time that a worker may take to start, in addition to the deadline of its first answer."""
DEPTH = 2
"""async: orders that a worker has at a time, so that it need not wait for the next one."""
LAGS = 100
"""async: rollouts over which the lag is reported."""


@dataclass
class Lags(Stateful):
    """Learner version when a rollout was used minus the version that acted, of the latest rollouts."""

    version: int = 0
    """Batches that the learner has taken."""
    lags: deque[int] = field(default_factory=lambda: deque(maxlen=LAGS))
    dropped: int = 0

    def metrics(self) -> dict[str, float]:
        """Smallest, mean and largest lag, and the number of rollouts that were too old."""
        if not self.lags:
            return {}
        lags = list(self.lags)
        return {
            "workers/lag_min": float(min(lags)),
            "workers/lag_mean": sum(lags) / len(lags),
            "workers/lag_max": float(max(lags)),
            "workers/dropped": float(self.dropped),
        }


@dataclass
class Meters:
    """What the fleet did since the start of this process; not state."""

    began: float = 0.0
    waited: float = 0.0
    busy: float = 0.0
    num_bytes: int = 0
    restarts: int = 0
    ready: float = 0.0

    def metrics(self, count: int) -> dict[str, float]:
        """Shares of wall time in which the learner waited and the workers did, and what came through the pipes."""
        wall = max(time.perf_counter() - self.began, 1e-9)
        return {
            "time/learner_idle_fraction": self.waited / wall,
            "time/worker_idle_fraction": max(0.0, 1.0 - self.busy / (count * wall)),
            "time/worker_bytes_per_second": self.num_bytes / wall,
            "time/worker_restarts": float(self.restarts),
            "time/worker_queue_fill": self.ready,
        }


class Fleet(Stateful):
    """Collects with several workers; to a trainer it is a collector.

    The workers start when training does. `sync` and `pipelined` take one rollout of every worker per update, in the
    workers' order, so that the result does not depend on how fast each of them is; `async` takes whatever is ready.
    """

    transient: ClassVar[tuple[str, ...]] = ("states", "taken", "orders")
    obs: ClassVar[None] = None

    def __init__(
        self,
        make_backend: Callable[[], Backend],
        settings: WorkersConfig,
        envs_per_worker: int,
        *,
        timeout: float,
        refusal: str | None = None,
        obs_normalizer: ObservationNormalizer | None = None,
        reward_normalizer: RewardNormalizer | None = None,
    ) -> None:
        self.make_backend, self.settings, self.timeout, self.refusal = make_backend, settings, timeout, refusal
        self.count, self.num_envs = settings.count, settings.count * envs_per_worker
        self.obs_normalizer, self.reward_normalizer = obs_normalizer, reward_normalizer
        self.statistics = EpisodeStatistics.start(0)
        self.lags = Lags()
        self.backend: Backend | None = None
        self.obstacles: list[str | None] = [None] * self.count
        self.states: list[Message | None] = [None] * self.count
        """State of each worker's collector before its orders; None where it is that of a new worker."""
        self.is_behind = [True] * self.count
        """Whether a worker must be given its state with the next order."""
        self.orders: list[deque[tuple[Message, Message | None]]] = [deque() for _ in range(self.count)]
        """What each worker was asked for and has not answered yet."""
        self.since = [0.0] * self.count
        self.deaths = [0] * self.count
        self.taken: list[tuple[int, Message]] = []
        """Rollouts that have arrived and were not used yet, with the number of their worker."""
        self.meters = Meters()

    # What trainers use

    def fill(self, buffer: RolloutBuffer, algorithm: Algorithm[Any], progress: Progress, limit: int) -> CollectStats:
        """See `Collector.fill`."""
        rollouts, stats = self._take(algorithm, progress, buffer.num_steps, limit)
        buffer.join([rollout["rows"] for _, rollout in rollouts], math.ceil(limit / self.num_envs))
        transitions = int(buffer.valid[: buffer.size].sum())
        self._go_on(algorithm, progress, buffer.num_steps, limit, transitions)
        return stats._replace(num_transitions=transitions)

    def gather(
        self, sink: Sampler, exploration: Exploration, progress: Progress, num_steps: int, limit: int
    ) -> CollectStats:
        """See `Collector.gather`; the sink keeps the steps of each worker apart."""
        assert isinstance(sink, ShardedSampler)
        algorithm = exploration.algorithm
        rollouts, stats = self._take(algorithm, progress, num_steps, limit)
        transitions, most = 0, math.ceil(limit / self.num_envs)
        for index, rollout in rollouts:
            steps = steps_of(rollout["rows"])[:most]
            sink.extend(index, steps)
            transitions += sum(int(step.valid.sum()) for step in steps)
        self._go_on(algorithm, progress, num_steps, limit, transitions)
        progress.env_steps += transitions
        return stats._replace(num_transitions=transitions)

    @property
    def has_episodes(self) -> bool:
        """See `Collector.has_episodes`."""
        return any(state is None or state["in_flight"] is not None for state in self.states)

    def leave_episodes(self) -> None:
        """See `Collector.leave_episodes`."""
        for state in self.states:
            if state is not None:
                state["in_flight"] = None
        self.is_behind = [True] * self.count

    def metrics(self) -> dict[str, float]:
        """Statistics of episodes, lags, and how busy everybody was."""
        meters = self.meters.metrics(self.count) if self.backend is not None else {}
        return {**self.statistics.metrics(), **self.lags.metrics(), **meters}

    def obstacle(self) -> str | None:
        """Why unfinished episodes cannot be restored, if they cannot; starts the workers."""
        self._start()
        return next((text for text in self.obstacles if text is not None), None)

    def close(self) -> None:
        """End the workers."""
        if self.backend is not None:
            backend, self.backend = self.backend, None
            backend.stop()

    # Rollouts

    def _take(
        self, algorithm: Algorithm[Any], progress: Progress, num_steps: int, limit: int
    ) -> tuple[list[tuple[int, Message]], CollectStats]:
        """One rollout for each worker, and the mean time they took; merges statistics and normalisers."""
        self._start()
        began = time.perf_counter()
        if self.settings.mode == "async":
            self._keep_busy(algorithm, progress, num_steps)
        elif not self.taken and not any(self.orders):
            self._submit_all(algorithm, progress, self._steps(num_steps, limit))
        self.meters.ready = len(self.taken) / self.count
        rollouts = self._chosen(algorithm, progress, num_steps)
        self.meters.waited += time.perf_counter() - began
        self._merge([rollout for _, rollout in rollouts])
        stats = [rollout["stats"] for _, rollout in rollouts]
        return rollouts, CollectStats(0, *(sum(part) / self.count for part in list(zip(*stats, strict=True))[1:]))

    def _chosen(self, algorithm: Algorithm[Any], progress: Progress, num_steps: int) -> list[tuple[int, Message]]:
        if self.settings.mode != "async":
            while any(self.orders):
                self._receive()
            chosen, self.taken = sorted(self.taken, key=lambda item: item[0]), []
        else:
            chosen = []
            while len(chosen) < self.count:
                while not self.taken:
                    self._receive()
                item = self.taken.pop(0)
                if self.lags.version - item[1]["version"] <= self.settings.max_lag:
                    chosen.append(item)
                else:
                    self.lags.dropped += 1
                self._keep_busy(algorithm, progress, num_steps)
        if self.settings.mode != "async":
            self.lags.lags.clear()
        self.lags.lags.extend(self.lags.version - rollout["version"] for _, rollout in chosen)
        return chosen

    def _go_on(
        self, algorithm: Algorithm[Any], progress: Progress, num_steps: int, limit: int, transitions: int
    ) -> None:
        """Let the workers collect while the learner learns, if that is the mode; the learner gets its next version."""
        left = limit - transitions
        if self.settings.mode == "pipelined" and left > 0:
            self._submit_all(algorithm, progress, self._steps(num_steps, left), transitions)
        self.lags.version += 1

    def _steps(self, num_steps: int, limit: int) -> int:
        return min(num_steps, math.ceil(limit / self.num_envs))

    def _acting(self, algorithm: Algorithm[Any]) -> Message:
        """What workers act with. It is a copy if a rollout may have to be made again after the next update."""
        assert isinstance(algorithm.policy, nn.Module)
        assert self.backend is not None
        weights = dict(algorithm.policy.state_dict())
        if self.backend.can_lose_workers:
            weights = {name: weight.detach().clone() for name, weight in weights.items()}
        moments = {name: part.state_dict() for name, part in copy.deepcopy(moments_of(self)).items()}
        return {"version": self.lags.version, "policy": weights, "moments": moments}

    def _submit_all(self, algorithm: Algorithm[Any], progress: Progress, steps: int, transitions: int = 0) -> None:
        order, acting = self._order(progress, steps, transitions), self._acting(algorithm)
        for index in range(self.count):
            self._submit(index, order, acting)

    def _keep_busy(self, algorithm: Algorithm[Any], progress: Progress, num_steps: int) -> None:
        """async: give every worker its next orders."""
        acting: Message | None = None
        for index, orders in enumerate(self.orders):
            while len(orders) + sum(owner == index for owner, _ in self.taken) < DEPTH:
                acting = acting or self._acting(algorithm)
                self._submit(index, self._order(progress, num_steps, 0), acting)

    def _order(self, progress: Progress, steps: int, transitions: int) -> Message:
        ahead = {**progress.state_dict(), "env_steps": progress.env_steps + transitions}
        assert self.backend is not None
        return {"steps": steps, "progress": ahead, "wants_state": self.backend.can_lose_workers, "state": None}

    def _submit(self, index: int, order: Message, acting: Message | None) -> None:
        if not self.orders[index]:
            self.since[index] = time.monotonic()
        self.orders[index].append((order, acting))
        self._send(index, order, acting)

    def _send(self, index: int, order: Message, acting: Message | None) -> None:
        assert self.backend is not None
        state = self.states[index] if self.is_behind[index] else None
        self.is_behind[index] = False
        self.backend.submit(index, {**order, "state": state}, acting)

    def _merge(self, rollouts: list[Message]) -> None:
        """Add episodes, and the moments of what the normalisers saw, in the workers' order."""
        for rollout in rollouts:
            self.statistics.add_finished(rollout["episodes"])
        for name, moments in moments_of(self).items():
            # all began with the same moments: those of the first are the sum so far, the others add what is new
            moments.load_state_dict(rollouts[0]["moments"][name])
            for rollout in rollouts[1:]:
                moments.merge(**rollout["recent"][name])

    # Workers

    def _start(self) -> None:
        if self.backend is not None:
            return
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        self.backend = self.make_backend()
        try:
            for index in range(self.count):
                self.backend.start(index)
                self.orders[index].clear()
            waiting = set(range(self.count))
            self.since = [time.monotonic() + START_SECONDS] * self.count
            while waiting:
                index, answer = self._answer(waiting)
                self.obstacles[index] = answer["obstacle"]
                waiting.discard(index)
        except BaseException:
            self.close()
            raise
        self.is_behind = [True] * self.count
        self.meters = Meters(time.perf_counter())

    def _receive(self) -> None:
        """Take in one answer; a worker that is lost is started again and makes its rollouts again."""
        index, answer = self._answer({index for index, orders in enumerate(self.orders) if orders})
        if "obstacle" in answer:  # of a worker that was started again
            self.since[index] = time.monotonic()
            return
        self.deaths[index] = 0
        self.orders[index].popleft()
        self.since[index] = time.monotonic()
        if "state" in answer:
            self.states[index] = answer.pop("state")
        if "rows" in answer:
            self.meters.busy += sum(answer["stats"][1:])
            self.meters.num_bytes += answer.pop("num_bytes", 0)
            self.taken.append((index, answer))

    def _answer(self, waiting: set[int]) -> tuple[int, Message]:
        """The next message of the workers that owe one."""
        assert self.backend is not None
        while True:
            slowest = min(waiting, key=lambda index: self.since[index])
            left = self.since[slowest] + self.timeout - time.monotonic()
            try:
                found = self.backend.next(max(left, 0.0))
                if found is None:
                    reason = f"did not answer within {self.timeout:g} s (env_timeout)"
                    raise WorkerLostError(slowest, reason)
            except WorkerLostError as error:
                self._start_again(error)
                continue
            index, answer = found
            if "error" in answer:
                raise EnvError(f"worker {index} raised {answer['error']}\n\n{answer['trace']}")
            return index, answer

    def _start_again(self, error: WorkerLostError) -> None:
        assert self.backend is not None
        index = error.index
        self.deaths[index] += 1
        self.meters.restarts += 1
        if self.deaths[index] > MAX_DEATHS:
            raise EnvError(
                f"worker {index} {error}, {self.deaths[index]} times in a row, so the run gives up. If it is slow, "
                "raise env_timeout; if it runs out of memory, use fewer envs_per_worker; to see its errors, try "
                "workers.backend inline"
            ) from error
        time.sleep(min(FIRST_PAUSE * 2.0 ** (self.deaths[index] - 1), LONGEST_PAUSE))
        self.backend.start(index)
        self.since[index] = time.monotonic() + START_SECONDS
        self.is_behind[index] = True
        for order, acting in self.orders[index]:
            self._send(index, order, acting)

    # State

    def state_dict(self) -> dict[str, Any]:
        """The state of every worker, and the rollouts in flight, for which it waits."""
        state = super().state_dict()
        state["workers"] = state["in_flight"] = None
        if self.backend is not None:
            while any(self.orders):
                self._receive()
            missing = [] if self.backend.can_lose_workers else range(self.count)
            for index in missing:
                self._submit(index, {"steps": 0, "wants_state": True, "state": None}, None)
            while any(self.orders):
                self._receive()
        if any(part is not None for part in self.states):
            state["workers"] = list(self.states)
            if all(part is None or part["in_flight"] is not None for part in self.states):
                state["in_flight"] = [{"worker": index, **_lasting(rollout)} for index, rollout in self.taken]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stateful.load_state_dict`; the workers get their states with their next orders."""
        state = dict(state)
        check_keys(
            "the workers", ("workers", "in_flight"), {k: state[k] for k in ("workers", "in_flight") if k in state}
        )
        workers, flight = state.pop("workers"), state.pop("in_flight")
        super().load_state_dict(state)
        if workers is not None and len(workers) != self.count:
            raise CheckpointError(f"the checkpoint has the state of {len(workers)} workers, expected {self.count}")
        self.states = [None] * self.count if workers is None else list(workers)
        if flight is None:
            self.states = [part if part is None else {**part, "in_flight": None} for part in self.states]
        rollouts = [dict(rollout) for rollout in flight or ()]
        self.taken = [(rollout.pop("worker"), rollout) for rollout in rollouts]
        self.is_behind = [True] * self.count
        if self.backend is not None and any(self.orders):
            self.close()


def _lasting(rollout: Message) -> Message:
    """A rollout without timings, which differ between runs that are otherwise equal."""
    return {**rollout, "stats": [rollout["stats"][0], 0.0, 0.0]}
