"""Statistics for few runs, after Agarwal et al. 2021 (Deep RL at the Edge of the Statistical Precipice, 2108.13264).

Interquartile means instead of medians and means, stratified bootstrap confidence intervals over runs, and the
probability of improvement between algorithms. The computations use SciPy (extra `plot`).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_training.contracts.errors import MissingExtraError

CONFIDENCE = 0.95
RESAMPLES = 2_000
TRIMMED = 0.25
"""The fraction trimmed on each side: 0.25 leaves the middle half."""

Floats = NDArray[np.float64]
Statistic = Callable[..., Any]
Samples = tuple[tuple[float, ...], ...]
"""The scores of runs, per task."""
Curved = Sequence[tuple[float, float]]
"""(point, score) pairs of one run."""


@dataclass(frozen=True)
class Estimate:
    """A value and its confidence interval; no interval for a single run."""

    value: float
    low: float | None = None
    high: float | None = None

    def leaves_out(self, value: float) -> bool:
        """Whether a value is outside the interval, so that a difference is unlikely to be due to chance."""
        return self.low is not None and self.high is not None and not self.low <= value <= self.high


def _scipy_stats() -> ModuleType:
    try:
        from scipy import stats
    except ImportError as error:
        raise MissingExtraError("statistics of results", "plot") from error
    found: ModuleType = stats
    return found


def interquartile_mean(scores: Sequence[float] | Floats, axis: int | None = None) -> Any:
    """The mean of the middle half: more robust than the mean, and it uses more runs than the median."""
    return _scipy_stats().trim_mean(scores, TRIMMED, axis=axis)


def aggregate(tasks: Sequence[Sequence[float]]) -> Estimate:
    """Interquartile mean over all runs of all tasks, with a stratified bootstrap that resamples runs within each task.

    Example:
        >>> aggregate([[0.0, 1.0, 2.0, 9.0]]).value
        1.5
    """
    return _aggregate(_frozen(tasks))


@functools.lru_cache(maxsize=10_000)  # a report needs the same numbers several times
def _aggregate(tasks: Samples) -> Estimate:
    return _estimate(tasks, _pooled_iqm)


def probability_of_improvement(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> Estimate:
    """Probability that a run of ours is better than one of theirs, averaged over tasks (a tie counts half).

    Per task it is the Mann-Whitney U statistic divided by the number of pairs.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(
            f"ours and theirs need the same number of tasks, at least one; got {len(ours)} and {len(theirs)}"
        )
    return _probability_of_improvement(_frozen(ours), _frozen(theirs))


@functools.lru_cache(maxsize=10_000)
def _probability_of_improvement(ours: Samples, theirs: Samples) -> Estimate:
    stats, count = _scipy_stats(), len(ours)

    def statistic(*samples: Floats, axis: int) -> Any:
        shares = []
        for x, y in zip(samples[:count], samples[count:], strict=True):
            with warnings.catch_warnings(), np.errstate(all="ignore"):  # about its p-value if all runs are equal
                warnings.simplefilter("ignore")
                u = stats.mannwhitneyu(x, y, axis=axis, method="asymptotic").statistic
            shares.append(u / (x.shape[axis] * y.shape[axis]))
        return np.mean(shares, axis=0)

    return _estimate((*ours, *theirs), statistic)


def sample_efficiency(
    tasks: Sequence[Sequence[Curved]], points: Sequence[float] | Floats
) -> tuple[Floats, Floats, Floats]:
    """Interquartile mean of all runs of all tasks at several points of training, and its confidence interval.

    `tasks` holds the runs of each task, each a list of (point, score), interpolated linearly.
    """
    at = [np.array([np.interp(points, *np.transpose(run)) for run in runs]) for runs in tasks]
    return interval(at, _pooled_iqm)


def interval(samples: Sequence[Floats], statistic: Statistic = np.mean) -> tuple[Floats, Floats, Floats]:
    """A statistic over samples of runs [N, ...] and its 95 % bootstrap interval, NaN for a single run.

    The percentile bootstrap draws runs with replacement within each sample. For two or three runs the interval is the
    range from worst to best, for more it is narrower. The random draws are seeded, so results are reproducible.
    """
    value = np.asarray(statistic(*samples, axis=0), np.float64)
    if min(len(sample) for sample in samples) < 2:
        return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
    found = _scipy_stats().bootstrap(
        samples,
        statistic,
        axis=0,
        n_resamples=RESAMPLES,
        batch=max(1, 4_000_000 // sum(sample.size for sample in samples)),  # at most 32 MB at once
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return value, np.asarray(found.confidence_interval.low), np.asarray(found.confidence_interval.high)


def _pooled_iqm(*samples: Floats, axis: int) -> Any:
    return interquartile_mean(np.concatenate(samples, axis=axis), axis=axis)


def _frozen(tasks: Sequence[Sequence[float]]) -> Samples:
    return tuple(tuple(map(float, scores)) for scores in tasks)


def _estimate(samples: Samples, statistic: Statistic) -> Estimate:
    return _known(*interval([np.array(sample) for sample in samples], statistic))


def _known(value: Any, low: Any, high: Any) -> Estimate:
    return Estimate(float(value)) if np.isnan(low) else Estimate(float(value), float(low), float(high))
