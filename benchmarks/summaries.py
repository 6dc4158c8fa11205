"""Summaries of measurements: medians, ranges and ratios. Pure functions of plain data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Run = Mapping[str, Any]


class Spread(NamedTuple):
    """The median, minimum and maximum of some numbers."""

    median: float
    low: float
    high: float


def spread(values: Iterable[float | None]) -> Spread | None:
    """The spread of the values that are not None.

    Example:
        >>> spread([3.0, 1.0, None, 2.0])
        Spread(median=2.0, low=1.0, high=3.0)
    """
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def spread_of(runs: Sequence[Run], name: str) -> Spread | None:
    """The spread of one metric over several runs."""
    return spread(run.get(name) for run in runs)


def ratios(ours: Sequence[Run], others: Sequence[Run], name: str = "steps_per_second") -> list[float]:
    """The ratio ours / others for each turn: the two runs of a turn were made one after the other.

    Example:
        >>> ratios([{"steps_per_second": 9.0}, {"steps_per_second": 8.0}], [{"steps_per_second": 3.0}])
        [3.0]
    """
    return [one[name] / other[name] for one, other in zip(ours, others, strict=False)]


def fastest(trials: Mapping[str, float]) -> int:
    """The number of threads with the highest speed; the smaller one if equal.

    Example:
        >>> fastest({"2": 90.0, "1": 100.0})
        1
    """
    return int(min(trials, key=lambda threads: (-trials[threads], int(threads))))


def seconds_to(steps: int, run: Run, start: int) -> float:
    """Seconds from the start of the process to a step: measured up to `start`, extrapolated from there on.

    Example:
        >>> seconds_to(1100, {"seconds_to_start": 5.0, "steps_per_second": 50.0}, start=100)
        25.0
    """
    if run.get("steps") == steps:
        return float(run["seconds"])
    return float(run["seconds_to_start"] + (steps - start) / run["steps_per_second"])


class Shares(NamedTuple):
    """Fractions of a run's wall time."""

    env: float
    policy: float
    update: float

    @property
    def rest(self) -> float:
        """The remaining fraction: storing steps, statistics, logging, checkpoints."""
        return max(0.0, 1.0 - self.env - self.policy - self.update)

    @property
    def largest(self) -> str:
        """The name of the largest part."""
        parts = {"environment": self.env, "acting": self.policy, "learning": self.update, "the rest": self.rest}
        return max(parts, key=lambda name: parts[name])


def shares_between(before: Run, after: Run) -> tuple[float, Shares]:
    """Speed and time fractions between two points of a run, from its cumulative metrics.

    Example:
        >>> def metrics(steps, seconds, env): return {
        ...     "steps": steps, "time/env_steps_per_second": steps / seconds, "time/env_fraction": env / seconds,
        ...     "time/policy_fraction": 0.0, "time/update_fraction": 0.5}
        >>> shares_between(metrics(100, 10.0, env=5.0), metrics(300, 20.0, env=6.0))
        (20.0, Shares(env=0.1, policy=0.0, update=0.5))
    """
    walls = [moment["steps"] / moment["time/env_steps_per_second"] for moment in (before, after)]
    seconds = walls[1] - walls[0]

    def share(name: str) -> float:
        key = f"time/{name}_fraction"
        return float((after[key] * walls[1] - before[key] * walls[0]) / seconds)

    return (after["steps"] - before["steps"]) / seconds, Shares(share("env"), share("policy"), share("update"))
