"""Callbacks that a run calls around its iterations; they get a small typed view of it, not its internals."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from rl_training.contracts.algorithm import Policy
from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.random import draw_seed, random_stream
from rl_training.contracts.state import Stateful


class RunView(Protocol):
    """The view of a run that callbacks get."""

    @property
    def env_steps(self) -> int:
        """Transitions seen so far, over all environments."""
        ...

    @property
    def total_timesteps(self) -> int:
        """The environment step at which this run ends."""
        ...

    @property
    def position(self) -> int:
        """How far the run is: environment steps, plus gradient steps made offline. Logs and checkpoints count it."""
        ...

    @property
    def end(self) -> int:
        """The position at which this run ends."""
        ...

    @property
    def unit(self) -> str:
        """What the position counts now: `steps`, or `updates` in an offline phase."""
        ...

    @property
    def iterations(self) -> int:
        """Iterations (collect and learn) so far."""
        ...

    @property
    def updates(self) -> int:
        """Gradient steps so far."""
        ...

    @property
    def best_return(self) -> float | None:
        """Best mean return over all evaluations of the run."""
        ...

    @property
    def policy(self) -> Policy:
        """The policy being trained."""
        ...

    def metrics(self) -> dict[str, float]:
        """The latest metrics as numbers. Reads tensors from the device: call it when you need it."""
        ...

    @property
    def interrupted(self) -> bool:
        """Whether the run is ending early, to be resumed (Ctrl-C, SIGTERM)."""
        ...

    def record(self, metrics: Mapping[str, float]) -> None:
        """Add a callback's metrics to those that are logged; they stay until they are recorded again."""
        ...

    def report_evaluation(self, result: EvaluationResult) -> None:
        """Notify every callback of an evaluation."""
        ...

    def stop(self, reason: str) -> None:
        """End the run after this iteration."""
        ...


class Callback(Stateful):
    """Base of callbacks; override what you need.

    State to be restored on resume belongs in a `Stateful` attribute, or in a dataclass field with `init=False`; fields
    that the constructor takes are settings.

    Example:
        >>> class PrintReturn(Callback):
        ...     def on_iteration(self, run):
        ...         print(run.env_steps, run.metrics().get("rollout/return_mean"))
    """

    def keeps(self, field: dataclasses.Field[Any]) -> bool:
        """See `Stateful.keeps`."""
        return not field.init or isinstance(getattr(self, field.name), Stateful)

    def on_start(self, run: RunView) -> None:
        """Before the first iteration of `learn`, `train` or `resume`."""

    def on_iteration(self, run: RunView) -> None:
        """After each iteration."""

    def on_evaluation(self, run: RunView, result: EvaluationResult) -> None:
        """After each evaluation."""

    def on_stop(self, run: RunView) -> None:
        """After the last iteration, when the run ended or was asked to stop; not when it failed."""

    def close(self) -> None:
        """Release resources; called however the run ended."""


CallbackLike = Callback | Callable[[RunView], bool | None]


def as_callbacks(callback: CallbackLike | Sequence[CallbackLike] | None) -> list[Callback]:
    """A list of callbacks from what users pass: None, one, several, or plain functions."""
    if callback is None:
        return []
    if isinstance(callback, Sequence):
        return [item for entry in callback for item in as_callbacks(entry)]
    return [callback if isinstance(callback, Callback) else FunctionCallback(callback)]


class FunctionCallback(Callback):
    """A plain function called after each iteration; returning False ends the run."""

    def __init__(self, function: Callable[[RunView], bool | None]) -> None:
        self.function = function

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        answer = self.function(run)
        if isinstance(answer, (bool, np.bool_)) and not answer:  # comparing numpy numbers gives `np.False_`
            run.stop(f"stopped by {getattr(self.function, '__name__', 'a callback')}")


@dataclass
class Every(Stateful):
    """A period in steps: due once every `period` steps; 0 means never.

    `last` is a step, not a count of periods, because a resumed run may have another period.
    """

    transient: ClassVar[tuple[str, ...]] = ("period",)
    period: int
    last: int = 0

    def due(self, position: int) -> bool:
        """Whether another period has been completed since the last time this was true."""
        if not self.completed(position):
            return False
        self.last = position
        return True

    def completed(self, position: int) -> bool:
        """What `due` will return, without recording it."""
        return self.period > 0 and position // self.period > self.last // self.period


class EvaluateFn(Protocol):
    """What `EvaluationCallback` calls: `Evaluator.evaluate`."""

    def __call__(self, policy: Policy, num_episodes: int, *, deterministic: bool, seed: int) -> EvaluationResult:
        """Evaluate a policy."""
        ...


@dataclass
class EvaluationCallback(Callback):
    """Evaluates periodically and notifies the other callbacks, which keep the best checkpoint, stop, and so on."""

    evaluate: EvaluateFn
    every: Every
    num_episodes: int = 10
    deterministic: bool = True
    seed: int = 0
    num_evaluations: int = field(default=0, init=False)

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        if self.every.completed(run.position):
            # fresh start states each time, from a counter that is saved
            seed = draw_seed(random_stream(self.seed, "evaluation", self.num_evaluations))
            began = time.perf_counter()
            result = self.evaluate(run.policy, self.num_episodes, deterministic=self.deterministic, seed=seed)
            self.every.last = run.position  # not before: if a signal stops it, it is repeated after the resume
            self.num_evaluations += 1
            run.record({"time/evaluation_seconds": time.perf_counter() - began})
            run.report_evaluation(result)


@dataclass
class StopOnReward(Callback):
    """Ends the run when an evaluation's mean return reaches a threshold."""

    threshold: float

    def on_evaluation(self, run: RunView, result: EvaluationResult) -> None:
        """See `Callback.on_evaluation`."""
        if result.mean >= self.threshold:
            run.stop(f"mean evaluation return {result.mean:.2f} reached {self.threshold:g}")


@dataclass
class StopOnNoImprovement(Callback):
    """Ends the run after `patience` evaluations without a new best mean return."""

    patience: int
    best: float | None = field(default=None, init=False)
    waited: int = field(default=0, init=False)

    def on_evaluation(self, run: RunView, result: EvaluationResult) -> None:
        """See `Callback.on_evaluation`."""
        if self.best is None or result.mean > self.best:
            self.best, self.waited = result.mean, 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            run.stop(f"no evaluation better than {self.best:.2f} in the last {self.waited}")


@dataclass
class StopAfterSeconds(Callback):
    """Ends the run after a number of seconds of training, summed over resumes."""

    transient: ClassVar[tuple[str, ...]] = ("_began",)
    seconds: float
    spent: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)

    def on_start(self, run: RunView) -> None:
        """See `Callback.on_start`."""
        self._began = time.monotonic()

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        now = time.monotonic()
        self.spent, self._began = self.spent + now - self._began, now
        if self.spent >= self.seconds:
            run.stop(f"time limit of {self.seconds:g} s")
