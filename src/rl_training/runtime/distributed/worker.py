"""A worker: environments, and a copy of the policy that acts in them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from torch import nn

from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.arrays import map_observation
from rl_training.contracts.batches import Progress, Step
from rl_training.data.normalize import RunningMoments
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.runtime.collector import Collector, CollectStats, Exploration
from rl_training.runtime.distributed.messages import Message
from rl_training.runtime.threads import using_threads

UNLIMITED = 2**62


class Recorder:
    """Keeps the steps of a collector, to be stored elsewhere later."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, step: Step) -> None:
        """See `Sink.add`."""
        self.steps.append(step)

    def export(self) -> dict[str, Any]:
        """The steps as arrays [T, N, ...], for `steps_of`."""
        steps, self.steps = self.steps, []

        def stacked(name: str) -> Any:
            values = [getattr(step, name) for step in steps]
            if isinstance(values[0], dict):
                return {key: np.stack([value[key] for value in values]) for key in values[0]}
            return np.stack(values)

        names = ("obs", "action", "reward", "policy_reward", "terminated", "truncated", "valid")
        return {
            **{name: stacked(name) for name in names},
            "ended": [step.ended for step in steps],
            "final_obs": [step.final_obs for step in steps],
            "last_obs": steps[-1].next_obs,
        }


def steps_of(rows: Mapping[str, Any]) -> list[Step]:
    """The steps that `Recorder.export` returned; without the policy's inputs, which replay does not store."""
    count = len(rows["reward"])
    obs: list[Any] = [map_observation(lambda x, t=t: x[t], rows["obs"]) for t in range(count)]  # type: ignore[misc]
    obs.append(rows["last_obs"])
    return [
        Step(
            obs=obs[t],
            policy_obs=obs[t],
            action=rows["action"][t],
            extras={},
            reward=rows["reward"][t],
            policy_reward=rows["policy_reward"][t],
            terminated=rows["terminated"][t],
            truncated=rows["truncated"][t],
            valid=rows["valid"][t],
            ended=np.asarray(rows["ended"][t], np.intp),
            final_obs=rows["final_obs"][t],
            final_policy_obs=rows["final_obs"][t],
            next_obs=obs[t + 1],
        )
        for t in range(count)
    ]


class Task(Protocol):
    """What a worker collects."""

    def collect(self, collector: Collector, progress: Progress, num_steps: int) -> CollectStats:
        """Make so many steps in every environment."""
        ...

    def export(self) -> dict[str, Any]:
        """What was collected, as arrays."""
        ...


class RolloutTask:
    """Collects rollouts for on-policy algorithms, judged by the weights that acted."""

    def __init__(self, buffer: RolloutBuffer, algorithm: Algorithm[Any]) -> None:
        self.buffer, self.algorithm = buffer, algorithm

    def collect(self, collector: Collector, progress: Progress, num_steps: int) -> CollectStats:
        """See `Task.collect`."""
        return collector.fill(self.buffer, self.algorithm, progress, num_steps=num_steps)

    def export(self) -> dict[str, Any]:
        """See `Task.export`."""
        return self.buffer.export()


class StepsTask:
    """Collects steps for replay; one of `share` workers, which advance together."""

    def __init__(self, exploration: Exploration, share: int) -> None:
        self.exploration, self.share = exploration, share
        self.recorder = Recorder()

    def collect(self, collector: Collector, progress: Progress, num_steps: int) -> CollectStats:
        """See `Task.collect`."""
        return collector.gather(self.recorder, self.exploration, progress, num_steps, UNLIMITED, self.share)

    def export(self) -> dict[str, Any]:
        """See `Task.export`."""
        return self.recorder.export()


class RolloutWorker:
    """Carries out the orders of a fleet: collects with the weights of the order and returns what it collected."""

    def __init__(
        self, collector: Collector, algorithm: Algorithm[Any], task: Task, obstacle: str | None = None
    ) -> None:
        self.collector, self.algorithm, self.task = collector, algorithm, task
        self.obstacle = obstacle
        """Why unfinished episodes cannot be restored, if they cannot."""

    def run(self, order: Message) -> Message:
        """Carry out one order.

        Keys of an order: `state` of the collector to continue from, or None; `steps` to make, 0 for none; `progress`
        of the run; `acting`, the weights, their version and the normalisers' moments; `wants_state`.
        """
        with using_threads(1):  # results must not depend on where a worker runs
            if order["state"] is not None:
                self.collector.load_state_dict(order["state"])
            answer = self._collect(order) if order["steps"] else {}
        if order["wants_state"]:
            answer["state"] = copy.deepcopy(self.collector.state_dict())  # a worker in this process goes on changing it
        return answer

    def _collect(self, order: Message) -> Message:
        acting, progress = order["acting"], Progress()
        progress.load_state_dict(order["progress"])
        policy = self.algorithm.policy
        assert isinstance(policy, nn.Module)
        policy.load_state_dict(acting["policy"])
        moments = moments_of(self.collector)
        for name, part in moments.items():
            part.recent = None
            part.load_state_dict(acting["moments"][name])
            part.recent = RunningMoments(part.mean.shape)
        stats = self.task.collect(self.collector, progress, order["steps"])
        return {
            "version": acting["version"],
            "rows": self.task.export(),
            "stats": list(stats),
            "episodes": self.collector.statistics.take_finished(),
            "moments": {name: copy.deepcopy(part.state_dict()) for name, part in moments.items()},
            "recent": {name: part.recent.state_dict() for name, part in moments.items() if part.recent is not None},
        }

    def close(self) -> None:
        """Close the environments."""
        self.collector.close()


def moments_of(owner: Any) -> dict[str, RunningMoments]:
    """The running moments of a collector's or a fleet's normalisers, by name."""
    found: dict[str, RunningMoments] = {}
    if owner.obs_normalizer is not None:
        found |= {f"obs/{key}": moments for key, moments in owner.obs_normalizer.moments.items()}
    if owner.reward_normalizer is not None:
        found["reward"] = owner.reward_normalizer.moments
    return found
