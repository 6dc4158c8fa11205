"""Schedules: typed values that depend on the fraction of the horizon that has passed."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Schedule:
    """A hyper-parameter that changes over training; `value(fraction)` with fraction in [0, 1]."""

    name: ClassVar[str] = ""

    def value(self, fraction: float) -> float:
        """The value when `fraction` of the horizon has passed."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(Schedule):
    """The same value throughout.

    Example:
        >>> Constant(0.5).value(0.9)
        0.5
    """

    name: ClassVar[str] = "constant"
    start: float

    def value(self, fraction: float) -> float:
        """See `Schedule.value`."""
        return self.start


@dataclass(frozen=True)
class Linear(Schedule):
    """A straight line from `start` to `end`, reached after `until` of the horizon, then flat.

    Example:
        >>> Linear(1.0, 0.0).value(0.25)
        0.75
    """

    name: ClassVar[str] = "linear"
    start: float
    end: float = 0.0
    until: float = 1.0

    def __post_init__(self) -> None:
        """Refuse an `until` outside (0, 1]."""
        if not 0 < self.until <= 1:
            raise ValueError(f"until must be in (0, 1], got {self.until}")

    def value(self, fraction: float) -> float:
        """See `Schedule.value`."""
        done = min(1.0, fraction / self.until)
        return self.start + (self.end - self.start) * done


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine wave from `start` to `end`."""

    name: ClassVar[str] = "cosine"
    start: float
    end: float = 0.0

    def value(self, fraction: float) -> float:
        """See `Schedule.value`."""
        return self.end + (self.start - self.end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, fraction)))


@dataclass(frozen=True)
class Piecewise(Schedule):
    """Straight lines between `points` (fraction, value), flat before the first and after the last.

    Example:
        >>> Piecewise(((0.0, 1.0), (0.5, 0.1))).value(0.25)
        0.55
    """

    name: ClassVar[str] = "piecewise"
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Refuse points that are missing, out of order, or given in steps instead of fractions."""
        fractions = [fraction for fraction, _ in self.points]
        inside = all(0 <= fraction <= 1 for fraction in fractions)
        if not fractions or not inside or any(b <= a for a, b in itertools.pairwise(fractions)):
            raise ValueError(f"points must have strictly increasing fractions in [0, 1], got {self.points}")

    def value(self, fraction: float) -> float:
        """See `Schedule.value`."""
        if fraction <= self.points[0][0]:
            return self.points[0][1]
        for (x0, y0), (x1, y1) in zip(self.points, self.points[1:], strict=False):
            if fraction <= x1:
                return y0 + (y1 - y0) * (fraction - x0) / (x1 - x0)
        return self.points[-1][1]


SCHEDULES: dict[str, type[Schedule]] = {cls.name: cls for cls in (Constant, Linear, Cosine, Piecewise)}

ScheduleOrFloat = float | Schedule


def value_of(schedule: ScheduleOrFloat, fraction: float) -> float:
    """The value of a schedule, or the number itself."""
    return schedule.value(fraction) if isinstance(schedule, Schedule) else float(schedule)
