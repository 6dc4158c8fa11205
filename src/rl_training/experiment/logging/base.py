"""The logger interface, and the callback that calls loggers at their interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rl_training.contracts.batches import EvaluationResult
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.plugins import LOGGERS, FactoryT
from rl_training.contracts.settings import setting
from rl_training.experiment.normalized_scores import Reference
from rl_training.runtime.callbacks import Callback, Every, RunView


class Logger(Protocol):
    """Records named scalars."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics at an environment step."""
        ...

    def close(self) -> None:
        """Flush and release resources."""
        ...


@dataclass(frozen=True)
class LoggedRun:
    """Information about the run that a logger receives on creation."""

    directory: Path
    config: Mapping[str, Any]
    """The resolved config as plain data."""
    run_id: str
    """A short id of the run that stays the same when it is resumed."""
    history: Sequence[Mapping[str, Any]]
    """Metrics logged before a resume, one mapping per line; `global_step` is the environment step."""


@dataclass
class LoggerConfig:
    """One logger: its registered name and its keyword arguments."""

    name: str = setting(help="Registered name of the logger.", registry=LOGGERS)
    kwargs: dict[str, Any] = setting(factory=dict, help="Keyword arguments of the logger.")


def register_logger(name: str) -> Callable[[FactoryT], FactoryT]:
    """Make a logger available under a name in the `loggers` setting.

    The class or function is called with a `LoggedRun` and the keyword arguments from the settings, and returns a
    `Logger`.

    Example:
        >>> @register_logger("print")
        ... class Printer:
        ...     def __init__(self, run, prefix=""):
        ...         self.prefix = prefix
        ...
        ...     def log(self, step, metrics):
        ...         print(self.prefix, step, dict(metrics))
        ...
        ...     def close(self):
        ...         pass
    """
    return LOGGERS.register(name)


def make_logger(config: LoggerConfig, run: LoggedRun) -> Logger:
    """Create a registered logger; an error if it has no `log` or `close` method."""
    logger: Logger = LOGGERS.make(config.name, (run,), config.kwargs, "loggers")
    if missing := [part for part in ("log", "close") if not callable(getattr(logger, part, None))]:
        raise ConfigError(
            f"loggers: '{config.name}' must return an object with the methods log and close; "
            f"{type(logger).__name__} has no {' and no '.join(missing)}"
        )
    return logger


@dataclass
class LoggingCallback(Callback):
    """Passes the metrics to the loggers every so many steps."""

    loggers: Sequence[Logger]
    every: Every
    logged_at: int = -1
    """The last step that was logged."""
    reference: Reference | None = None
    """The scale of normalised scores, if the environment has one."""

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        if self.every.due(run.position):
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
        if self.reference is not None:
            metrics["eval/normalized_score"] = self.reference.score(result.mean)
        if result.num_cut:
            metrics["eval/cut_episodes"] = float(result.num_cut)
        for logger in self.loggers:
            logger.log(run.position, metrics)

    def on_stop(self, run: RunView) -> None:
        """See `Callback.on_stop`. An interrupted run logs no line that an uninterrupted run would not have."""
        if self.logged_at != run.position and run.iterations > 0 and not run.interrupted:
            self._log(run)

    def close(self) -> None:
        """See `Callback.close`."""
        for logger in self.loggers:
            logger.close()

    def _log(self, run: RunView) -> None:
        self.logged_at = run.position
        metrics = run.metrics()
        for logger in self.loggers:
            logger.log(run.position, metrics)
