"""The training loop of every run: iterate, call callbacks (log, evaluate, checkpoint, ...), check whether to stop."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_training.accelerate import keep_memory
from rl_training.contracts.algorithm import Algorithm, Policy
from rl_training.contracts.batches import EvaluationResult, Metrics, Progress
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.state import Stateful, check_keys, check_plain
from rl_training.policies.changes import NetworkChanges
from rl_training.runtime.callbacks import Callback
from rl_training.runtime.collector import Collector, NoCollector
from rl_training.runtime.distributed.fleet import Fleet
from rl_training.runtime.evaluator import EvaluationStoppedError


@dataclass
class TrainResult:
    """How a run ended."""

    env_steps: int
    metrics: dict[str, float]
    """The last metrics; `global_step` is the number of environment steps, plus gradient steps made offline."""
    stop_reason: str
    interrupted: bool = False
    """Whether a signal ended the run early; it can be resumed."""
    best_return: float | None = None
    """Best mean return over evaluations."""
    final_evaluation: EvaluationResult | None = None
    updates: int = 0
    """Gradient steps."""
    run_dir: Path | None = None
    checkpoint_path: Path | None = None


@dataclass
class Timers:
    """Seconds spent since the start of this process; not state."""

    began: float = field(default_factory=time.perf_counter)
    env: float = 0.0
    policy: float = 0.0
    update: float = 0.0
    steps: int = 0
    updates: int = 0

    def metrics(self) -> dict[str, float]:
        """Speed, and the shares of wall time."""
        wall = max(time.perf_counter() - self.began, 1e-9)
        if not self.steps:
            return {"time/updates_per_second": self.updates / wall, "time/update_fraction": self.update / wall}
        return {
            "time/env_steps_per_second": self.steps / wall,
            "time/env_fraction": self.env / wall,
            "time/policy_fraction": self.policy / wall,
            "time/update_fraction": self.update / wall,
        }


OFFLINE_PHASE = "offline"
"""Marks the saved state of an offline phase, from which an online one may begin."""


class Trainer(Stateful, ABC):
    """Runs iterations until a position, or until a stop is requested.

    Trainers supply data and algorithms consume it: no maths here, and nothing specific to one algorithm.
    """

    unit = "steps"
    """See `RunView.unit`."""

    def __init__(self, algorithm: Algorithm[Any], collector: Collector | Fleet | NoCollector) -> None:
        self.algorithm = algorithm
        self.collector = collector
        self.progress = Progress()
        self.callbacks: list[Callback] = []
        self._best_return: float | None = None
        self._latest: Metrics = {}
        self._end = 0
        self._stop_reason: str | None = None
        self._signal: str | None = None
        self._recorded: dict[str, float] = {}
        self._timers = Timers()
        self._callback_state: dict[str, Any] = {}
        self._just_restored = False
        self._changes = NetworkChanges(algorithm)
        self.undone: list[str] = []
        """Names of callbacks that a signal skipped in this iteration; the next `run` calls them first."""
        self.restored_from = "the saved state"
        """Where the state was read from, for messages."""

    @abstractmethod
    def iterate(self) -> None:
        """Collect, learn, and update `progress`."""

    def prepare(self) -> None:
        """Open what training needs and acting does not (recorded data); problems are raised before work starts."""

    def run(self, end: int, callbacks: Sequence[Callback] = (), *, new: Sequence[Callback] = ()) -> TrainResult:
        """Train until `progress.position` reaches `end`; the first call of a phase fixes the schedules' horizon.

        Callbacks continue with the state that callbacks of the same class had at the end of the last call, except those
        that are also in `new`: they get a state only from a checkpoint.
        """
        keep_memory()
        self.callbacks = list(callbacks)
        self._end = end
        self._stop_reason = self._signal = None
        self._timers = Timers()
        if self.progress.horizon == 0:
            self.progress.horizon = end - self.progress.phase_start
        self._changes.take_over()
        with ExitStack() as closing:
            for callback in reversed(self.callbacks):  # closed in order, each even if closing another fails
                closing.callback(callback.close)
            self._restore_callbacks(new)
            for callback in self.callbacks:
                callback.on_start(self)
            if self.undone:
                self._call_back(self.undone)
            while self.position < end and self._stop_reason is None:
                steps, updates = self.env_steps, self.updates
                if self._changes.found():
                    self._changes.take_over()
                self.iterate()
                self._timers.steps += self.env_steps - steps
                self._timers.updates += self.updates - updates
                self._call_back(_named(self.callbacks))
            for callback in self.callbacks:
                callback.on_stop(self)
        self._callback_state = self._read_callbacks()
        reason = self._stop_reason or "finished"
        return TrainResult(
            self.env_steps, self.metrics(), reason, self.interrupted, self.best_return, updates=self.updates
        )

    def _call_back(self, names: Iterable[str]) -> None:
        """Call these callbacks after an iteration.

        If a signal stops one in the middle of an evaluation, it and those after it are called after the resume, so the
        resumed run is the same as one that was never interrupted.
        """
        waiting, self.undone = [(name, call) for name, call in _named(self.callbacks).items() if name in names], []
        for place, (_, callback) in enumerate(waiting):
            try:
                callback.on_iteration(self)
            except EvaluationStoppedError:
                if self._stop_reason == self._signal:
                    self.undone = [name for name, _ in waiting[place:]]
                    return

    # The view of the run that callbacks get (`RunView`)

    @property
    def env_steps(self) -> int:
        """See `RunView.env_steps`."""
        return self.progress.env_steps

    @property
    def total_timesteps(self) -> int:
        """See `RunView.total_timesteps`."""
        return self._end - self.progress.offline_updates

    @property
    def position(self) -> int:
        """See `RunView.position`."""
        return self.progress.position

    @property
    def end(self) -> int:
        """See `RunView.end`."""
        return self._end

    @property
    def iterations(self) -> int:
        """See `RunView.iterations`."""
        return self.progress.iterations

    @property
    def updates(self) -> int:
        """See `RunView.updates`."""
        return self.progress.updates

    @property
    def best_return(self) -> float | None:
        """See `RunView.best_return`."""
        return self._best_return

    @property
    def policy(self) -> Policy:
        """See `RunView.policy`."""
        return self.algorithm.policy

    @property
    def interrupted(self) -> bool:
        """See `RunView.interrupted`. A signal does not interrupt a run that has nothing left to do."""
        is_early = self.position < self._end or bool(self.undone)
        return self._signal is not None and self._stop_reason == self._signal and is_early

    @property
    def signal(self) -> str | None:
        """The name of the signal that requested a stop, or None; an evaluation then stops at once."""
        return self._signal

    def record(self, metrics: Mapping[str, float]) -> None:
        """See `RunView.record`."""
        self._recorded.update(metrics)

    def _lasting(self) -> dict[str, float]:
        """Metrics of callbacks without timings, which are not restored."""
        return {name: value for name, value in self._recorded.items() if not name.startswith("time/")}

    def metrics(self) -> dict[str, float]:
        """See `RunView.metrics`."""
        found: dict[str, float] = {"global_step": self.position, "train/updates": self.updates}
        found.update(self.collector.metrics())
        found.update({name: float(value) for name, value in self._latest.items()})
        found.update(self._recorded)
        found.update(self._timers.metrics())
        return found

    def report_evaluation(self, result: EvaluationResult) -> None:
        """See `RunView.report_evaluation`."""
        self._best_return = result.mean if self._best_return is None else max(self._best_return, result.mean)
        for callback in self.callbacks:
            callback.on_evaluation(self, result)

    def stop(self, reason: str) -> None:
        """See `RunView.stop`; takes precedence over a signal, after which the run would be resumed."""
        if self._stop_reason in (None, self._signal):
            self._stop_reason = reason

    def interrupt(self, name: str) -> None:
        """End the run after this iteration, to be resumed later. `name` is that of the signal."""
        self._signal = name
        self._stop_reason = self._stop_reason or name

    def state_dict(self) -> dict[str, Any]:
        """State of all parts; callbacks by their class name, so that a resumed run may have others."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "collector": self.collector.state_dict(),
            "progress": self.progress.state_dict(),
            "best_return": self.best_return,
            "metrics": {name: float(value) for name, value in {**self._latest, **self._lasting()}.items()},
            "callbacks": self._read_callbacks(),
            **({"undone": list(self.undone)} if self.undone else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all parts; callbacks are restored by the next `run`."""
        state = {"undone": [], **state}
        names = ("algorithm", "collector", "progress", "best_return", "metrics", "callbacks", "undone")
        check_keys("the run", names, state)
        check_plain("the callbacks that were not called", list[str], state["undone"])
        check_plain("the best return", float | None, state["best_return"])
        check_plain("the metrics", dict[str, float], state["metrics"])
        check_plain("the state of callbacks", dict[str, dict[str, Any]], state["callbacks"])
        self.algorithm.load_state_dict(state["algorithm"])
        self.collector.load_state_dict(state["collector"])
        self.progress.load_state_dict(state["progress"])
        self._best_return, self._callback_state = state["best_return"], state["callbacks"]
        self._latest = dict(state["metrics"])
        self.undone = list(state["undone"])
        self._just_restored = True

    def _restore_callbacks(self, new: Sequence[Callback]) -> None:
        skipped = () if self._just_restored else new
        self._just_restored = False
        for name, callback in _named(self.callbacks).items():
            if name in self._callback_state and not any(callback is other for other in skipped):
                try:
                    callback.load_state_dict(self._callback_state[name])
                except CheckpointError as error:
                    raise CheckpointError(f"{self.restored_from}: {error}") from error

    def _read_callbacks(self) -> dict[str, Any]:
        """State of this run's callbacks, merged into the state saved for earlier ones."""
        current = {name: callback.state_dict() for name, callback in _named(self.callbacks).items()}
        return {**self._callback_state, **{name: state for name, state in current.items() if state}}

    def close(self) -> None:
        """Close the environments."""
        self.collector.close()


def _named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by class name, numbered where a class occurs more than once."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__name__
        count = sum(type(other) is type(callback) for other in named.values())
        named[f"{name}#{count + 1}" if count else name] = callback
    return named
