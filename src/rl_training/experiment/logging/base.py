"""The logger's interface, and the callback that feeds loggers on their own schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rl_training.contracts.batches import EvaluationResult
from rl_training.runtime.callbacks import Callback, Every, RunView


class Logger(Protocol):
    """Takes numbers under their names."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics at an environment step."""
        ...

    def close(self) -> None:
        """Flush and release what the logger holds."""
        ...


@dataclass
class LoggingCallback(Callback):
    """Reads the metrics every so many steps and hands them to the loggers."""

    loggers: Sequence[Logger]
    every: Every
    logged_at: int = -1
    """The last step that the loggers have."""

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        if self.every.due(run.env_steps):
            self._log(run)

    def on_evaluation(self, run: RunView, result: EvaluationResult) -> None:
        """See `Callback.on_evaluation`."""
        metrics = {
            "eval/return_mean": result.mean,
            "eval/return_std": result.std,
            "eval/length_mean": sum(result.lengths) / len(result.lengths),
        }
        if result.success_rate is not None:
            metrics["eval/success_rate"] = result.success_rate
        for logger in self.loggers:
            logger.log(run.env_steps, metrics)

    def on_stop(self, run: RunView) -> None:
        """See `Callback.on_stop`. An interrupted run adds no line that the uninterrupted one would not have."""
        if self.logged_at != run.env_steps and run.iterations > 0 and not run.interrupted:
            self._log(run)

    def close(self) -> None:
        """See `Callback.close`."""
        for logger in self.loggers:
            logger.close()

    def _log(self, run: RunView) -> None:
        self.logged_at = run.env_steps
        metrics = run.metrics()
        for logger in self.loggers:
            logger.log(run.env_steps, metrics)
