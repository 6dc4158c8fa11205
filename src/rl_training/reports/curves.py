"""Learning curves: runs grouped by environment and algorithm, averaged over seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rl_training.contracts.errors import ConfigError, MissingExtraError
from rl_training.experiment.restoring import MAY_CHANGE
from rl_training.reports.records import EVALUATION, ROLLOUT, RunRecord, Series, leaves, shown
from rl_training.reports.statistics import Floats, interquartile_mean, interval

Average = Literal["mean", "iqm"]

GRID_POINTS = 500
"""Maximum number of points of an averaged curve whose runs were measured at different steps."""

_TASK = {"algo", "env_id", "env_kwargs", "wrappers"}
"""Settings that determine the panel and the algorithm of a run."""
_BOOKKEEPING = (MAY_CHANGE | {"seed"}) - {"total_timesteps", "init_from", "eval_deterministic", "eval_epsilon"}
"""Settings that may differ between runs of one curve."""


def require_plot() -> None:
    """Raise an error before any work if the plotting packages are not installed."""
    if any(find_spec(module) is None for module in ("matplotlib", "scipy", "plotly", "pyarrow")):
        raise MissingExtraError("plotting curves", "plot")


def label_runs(runs: Sequence[RunRecord]) -> list[str]:
    """For each run, its algorithm and the settings that distinguish it from other runs in the same environment."""
    compared = [_compared(run) for run in runs]
    labels = []
    for run, own in zip(runs, compared, strict=True):
        kin = [
            other
            for peer, other in zip(runs, compared, strict=True)
            if (peer.algo, peer.environment) == (run.algo, run.environment)
        ]
        names = sorted({name for other in kin for name in other})
        differing = [name for name in names if len({shown(other.get(name)) for other in kin}) > 1]
        text = ", ".join(f"{name}={shown(own.get(name))}" for name in differing)
        labels.append(f"{run.title} {text}".strip())
    return labels


def _compared(run: RunRecord) -> dict[str, Any]:
    """The settings that determine the distribution of a run's result."""
    found = {
        name: value for name, value in leaves(run.config).items() if name.partition(".")[0] not in _BOOKKEEPING | _TASK
    }
    found["init_from"] = found.get("init_from") is not None  # each seed may start from its own checkpoint
    if not any(isinstance(value, dict) and "schedule" in value for value in found.values()):
        found.pop("total_timesteps", None)  # no schedule depends on it: a longer run only has more steps
    return found


@dataclass(frozen=True)
class Curve:
    """The average of a metric over the runs of one algorithm, in one environment or in all of a suite."""

    label: str
    steps: Floats
    """The x values: environment steps, or the fraction of training (see `Panel.in_steps`)."""
    center: Floats
    low: Floats
    """Lower end of the confidence band; NaN if there are fewer than two runs."""
    high: Floats
    counts: NDArray[np.int64]
    """The number of runs averaged at each point: some runs may end earlier."""
    num_runs: int
    runs: tuple[RunRecord, ...] = ()
    """The runs behind it; empty if it comes from a manifest."""
    evaluated: bool = True
    """Whether it shows evaluations; if not, it shows training returns beside evaluated curves, and is dashed."""

    @property
    def solid(self) -> NDArray[np.bool_]:
        """Which points are drawn solid: evaluations that all runs have."""
        found: NDArray[np.bool_] = (self.counts == self.num_runs) & self.evaluated
        return found


@dataclass(frozen=True)
class Panel:
    """One chart: all curves of one environment, or aggregated over a suite."""

    title: str
    metric: str
    curves: tuple[Curve, ...]
    in_steps: bool = True
    """Whether the x axis shows steps; otherwise the fraction of training."""


def make_panels(
    runs: Sequence[RunRecord], *, metric: str | None = None, smooth: float = 0.0, average: Average = "mean"
) -> tuple[list[Panel], list[str]]:
    """One panel per environment, one curve per label; and notes on runs that are left out.

    Without a metric, an environment shows evaluations if any of its runs has at least two, otherwise training returns.
    """
    if not 0 <= smooth < 1:
        raise ConfigError(f"smooth: must be at least 0 and less than 1, got {smooth:g}")
    labels = {run.path: label for run, label in zip(runs, label_runs(runs), strict=True)}
    if metric is not None and not any(metric in run.series for run in runs):
        raise ConfigError(_unknown_metric(metric, runs))
    panels, problems = [], []
    for environment in dict.fromkeys(run.environment for run in runs):
        here = [run for run in runs if run.environment == environment]
        name = metric or _default_metric(here)
        drawn = [run for run in here if name in run.series]
        problems += [_left_out(run, name) for run in here if name not in run.series]
        curves = []
        for label in sorted({labels[run.path] for run in drawn}):
            kin = _one_per_seed([run for run in drawn if labels[run.path] == label], problems)
            curves.append(_curve(label, kin, name, smooth, average))
            problems += _ends(curves[-1])
        if curves:
            panels.append(Panel(environment, name, tuple(curves)))
    if not panels:
        raise ConfigError(["there is nothing to plot yet", *problems])
    return panels, problems


def _default_metric(runs: Sequence[RunRecord]) -> str:
    evaluated = any(len(run.series[EVALUATION].steps) > 1 for run in runs if EVALUATION in run.series)
    return EVALUATION if evaluated or not any(ROLLOUT in run.series for run in runs) else ROLLOUT


def _left_out(run: RunRecord, metric: str) -> str:
    if not run.series.keys() & {EVALUATION, ROLLOUT}:
        return f"{run.name}: has neither an evaluation nor a finished episode yet, and no {metric}; ignored"
    return f"{run.name}: has no metric {metric}; ignored"


def _unknown_metric(metric: str, runs: Sequence[RunRecord]) -> str:
    names = sorted({name for run in runs for name in run.series} - {"time/unix"})
    return f"no run has the metric '{metric}'. Available: {', '.join(names) or 'none yet'}"


def _one_per_seed(runs: Sequence[RunRecord], problems: list[str]) -> list[RunRecord]:
    """Of runs with equal settings and seed, the one with the most steps: repeating a seed adds no information."""
    ordered = sorted(runs, key=lambda run: (run.env_steps, str(run.metadata.get("created")), run.name))
    kept = {repr(run.seed): run for run in ordered}
    counts = Counter(repr(run.seed) for run in runs)
    problems += [
        f"{run.name}: repeats seed {run.seed} of {kept[repr(run.seed)].name} with the same settings; ignored"
        for run in ordered
        if counts[repr(run.seed)] > 1 and kept[repr(run.seed)] is not run
    ]
    return sorted(kept.values(), key=lambda run: (str(run.seed).zfill(20), run.name))


def _ends(curve: Curve) -> list[str]:
    """A note if the average covers fewer seeds towards its end."""
    number = curve.num_runs
    if curve.counts.min() == number:
        return []
    return [
        f"{curve.label} on {curve.runs[0].environment}: not all of its {number} seeds reach step "
        f"{curve.steps[-1]:,.0f}; where some are missing, the curve is dashed and averages the others"
    ]


def _curve(label: str, runs: Sequence[RunRecord], metric: str, smooth: float, average: Average) -> Curve:
    series = [Series(s.steps, smoothed(s.values, smooth)) for s in (run.series[metric] for run in runs)]
    grid, slack = common_grid([found.steps for found in series])
    values = np.stack([sample(found, grid, slack) for found in series])
    statistic = np.mean if average == "mean" else interquartile_mean
    center, low, high = (np.full(len(grid), np.nan) for _ in range(3))
    present = ~np.isnan(values)
    for pattern in np.unique(present, axis=1).T:  # intervals covered by the same runs
        columns = (present == pattern[:, None]).all(axis=0)
        if pattern.any():
            center[columns], low[columns], high[columns] = interval([values[pattern][:, columns]], statistic)
    counts = present.sum(axis=0)
    kept = counts > 0
    return Curve(label, grid[kept], center[kept], low[kept], high[kept], counts[kept], len(runs), tuple(runs))


def smoothed(values: Floats, weight: float) -> Floats:
    """Bias-corrected exponential moving average, like TensorBoard's smoothing."""
    if weight == 0:
        return values
    mean, out = 0.0, np.empty_like(values)
    for i, value in enumerate(values):
        mean = weight * mean + (1 - weight) * value
        out[i] = mean / (1 - weight ** (i + 1))
    return out


def common_grid(steps: Sequence[Floats]) -> tuple[Floats, float]:
    """The steps at which curves are compared, and how far a curve may be extended beyond its ends.

    The steps of the runs if they are equal; otherwise evenly spaced steps, no denser than the densest run.
    """
    union = np.unique(np.concatenate(steps))
    longest = max(map(len, steps))
    if len(union) == longest or longest == 1:
        return union, 0.0
    grid = np.linspace(union[0], union[-1], min(longest, GRID_POINTS))
    return grid, float(grid[1] - grid[0])


def sample(series: Series, grid: Floats, slack: float) -> Floats:
    """A series linearly interpolated onto a grid; NaN before its start and after its end."""
    outside = (grid < series.steps[0] - slack) | (grid > series.steps[-1] + slack)
    return np.where(outside, np.nan, np.interp(grid, series.steps, series.values))
