"""Learning curves out of run directories: read, grouped by environment and algorithm, averaged over seeds.

Nothing here needs more than the files of the runs: neither their environments nor their checkpoints are loaded, so that
runs of other machines, runs in progress and runs that were killed can be read as well.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rl_training.algorithms.registry import registry
from rl_training.contracts.errors import CheckpointError, ConfigError, MissingExtraError, RLTrainingError
from rl_training.contracts.state import MAX_NUMBER
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.restoring import MAY_CHANGE
from rl_training.experiment.runs import CONFIG, METRICS, RunDirectory
from rl_training.experiment.yaml_io import read_yaml
from rl_training.zoo.statistics import Floats, interquartile_mean, interval

Average = Literal["mean", "iqm"]

EVALUATION, ROLLOUT = "eval/return_mean", "rollout/return_mean"
SEARCH_DEPTH = 3
"""How many levels below a given directory runs are looked for: `suite/environment/algorithm/run` is found."""
GRID_POINTS = 500
"""The most points of an averaged curve whose runs were not measured at the same steps."""

_TASK = {"algo", "env_id", "env_kwargs", "wrappers"}
"""Settings that decide which panel and which algorithm a run belongs to."""
_BOOKKEEPING = (MAY_CHANGE | {"seed"}) - {"total_timesteps", "init_from", "eval_deterministic", "eval_epsilon"}
"""Settings in which runs of one curve may differ, whatever they are."""


def require_plot() -> None:
    """Refuse before any work is done if pictures cannot be drawn."""
    if any(find_spec(module) is None for module in ("matplotlib", "scipy", "plotly", "pyarrow")):
        raise MissingExtraError("drawing curves", "plot")


# ---------------------------------------------------------------------------------------------------------------------
# Runs
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Series:
    """A metric of one run: finite values at increasing steps."""

    steps: Floats
    values: Floats


@dataclass
class RunRecord:
    """What the files of one run say."""

    path: Path
    config: dict[str, Any]
    """Every setting as plain data; those that are newer than the run have their defaults."""
    metadata: dict[str, Any]
    status: str
    env_steps: int
    series: dict[str, Series]
    evaluations: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    """What could not be read, in words."""

    @property
    def name(self) -> str:
        """The run directory's name."""
        return name_of(self.path)

    @property
    def algo(self) -> str:
        """The algorithm's name."""
        return str(self.config.get("algo", "unknown"))

    @property
    def title(self) -> str:
        """The algorithm's name as it is written: `PPO`."""
        spec = registry().get(self.algo)
        return spec.title if spec else self.algo

    @property
    def environment(self) -> str:
        """The task: the environment's id, its arguments and its wrappers."""
        kwargs = self.config.get("env_kwargs")
        wrappers = self.config.get("wrappers")
        parts = [str(self.config.get("env_id", "unknown"))]
        parts += [f"{key}={shown(value)}" for key, value in kwargs.items()] if isinstance(kwargs, dict) else []
        parts += [f"+ {_wrapper(item)}" for item in wrappers] if isinstance(wrappers, list) else []
        return " ".join(parts)

    @property
    def seed(self) -> Any:
        """The run's seed."""
        return self.config.get("seed")

    @property
    def total_timesteps(self) -> int | None:
        """Steps the run was meant to make."""
        total = self.config.get("total_timesteps")
        return total if type(total) is int else None

    @property
    def last_evaluation(self) -> dict[str, Any] | None:
        """The evaluation at the run's end, or the newest one so far."""
        finals = [entry for entry in self.evaluations if entry.get("final")]
        return max(finals or self.evaluations, key=lambda entry: entry["step"], default=None)

    @property
    def best_return(self) -> float | None:
        """See `RunDirectory.best_return`."""
        during = [entry for entry in self.evaluations if not entry.get("final")]
        return max((entry["mean"] for entry in during or self.evaluations), default=None)

    @property
    def note(self) -> str | None:
        """What to know about a run that is not complete; None of a finished one."""
        total = self.total_timesteps
        reached = f"{self.env_steps:,}" + (f" of {total:,}" if total else "") + " steps"
        notes = {
            "running": f"is still running: shown as far as it is ({reached})",
            "interrupted": f"was killed: shown as far as it came ({reached})",
            "stopped": f"was stopped: shown as far as it came ({reached})",
            "failed": f"failed: shown as far as it came ({reached})",
            "unknown": f"does not say how it ended: shown as far as it came ({reached})",
        }
        return notes.get(self.status)


def find_run_dirs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """Every run directory among and below the paths, once each and in order; and notes on paths that hold none."""
    if not paths:
        raise ConfigError("name run directories, or directories that contain runs, such as `runs`")
    missing = [f"'{path}' does not exist" for path in paths if not os.path.lexists(path)]
    missing += [f"'{path}' is not a directory" for path in paths if os.path.lexists(path) and not os.path.isdir(path)]
    if missing:
        raise ConfigError([*missing, "Name run directories, or directories that contain runs."])
    found: dict[str, Path] = {}
    empty: list[str] = []
    for path in paths:
        below = list(_runs_below(path, SEARCH_DEPTH))
        found.update({os.path.realpath(run): run for run in below if os.path.realpath(run) not in found})
        empty += [] if below else [f"there are no runs in '{path}'"]
    if not found:
        where = ", ".join(f"'{path}'" for path in paths)
        raise ConfigError(
            f"there are no runs in {where} (searched {SEARCH_DEPTH} levels deep). A run is a directory with a "
            f"{CONFIG}, as `rl-training train` writes it below --output-dir (by default ./runs)"
        )
    return list(found.values()), empty


def name_of(path: Path) -> str:
    """A directory's own name, also of `.`."""
    return path.resolve().name or str(path)


def is_run_dir(path: Path) -> bool:
    """Whether a directory is a run's, be it damaged."""
    return os.path.lexists(path / CONFIG) or os.path.lexists(path / METRICS)


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    if is_run_dir(path):
        yield path
    elif depth > 0:
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:  # not ours to read
            return
        for entry in entries:  # links may lead anywhere, and in circles
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _runs_below(path / entry.name, depth - 1)


def read_runs(paths: Iterable[Path]) -> tuple[list[RunRecord], list[str]]:
    """The runs that can be read, and a sentence about each that cannot, or of which a part cannot."""
    records, problems = [], []
    for path in paths:
        try:
            record = read_run(path)
        except RLTrainingError as error:
            problems.append(f"{name_of(path)}: is damaged and left out: {error}")
            continue
        records.append(record)
        problems += [f"{record.name}: {text}" for text in [*record.problems, record.note] if text]
    return records, problems


def read_run(path: Path) -> RunRecord:
    """Read one run. Without a readable config there is nothing to say about it; everything else may be damaged."""
    directory = RunDirectory(path)
    directory.require()
    config = _whole(read_yaml(path / CONFIG))
    if not all(isinstance(config.get(key), str) for key in ("algo", "env_id")):
        raise CheckpointError(f"{path / CONFIG}: does not name an algorithm and an environment")
    problems: list[str] = []
    record = RunRecord(path, config, {}, "unknown", 0, {}, [], problems)
    try:
        record.metadata, record.status = directory.metadata(), directory.status()
        record.env_steps = directory.env_steps()
    except CheckpointError as error:
        problems.append(str(error))
    try:
        record.evaluations = [entry for entry in directory.evaluations() if _is_sound(entry)]
    except CheckpointError as error:
        problems.append(str(error))
    try:
        record.series = _metric_series(path / METRICS, problems)
    except CheckpointError as error:
        problems.append(str(error))
    record.series.update(_evaluation_series(record.evaluations))
    ends = [int(series.steps[-1]) for series in record.series.values()]
    record.env_steps = max([record.env_steps, *ends])
    return record


def _whole(config: dict[str, Any]) -> dict[str, Any]:
    """The config as this version understands it, or as it is if it does not (an algorithm or wrapper of others)."""
    try:
        return TrainConfig.from_dict(config).to_dict()
    except RLTrainingError:
        return config


def _is_sound(entry: Mapping[str, Any]) -> bool:
    return 0 <= entry["step"] <= MAX_NUMBER and math.isfinite(entry["mean"])


def _metric_series(path: Path, problems: list[str]) -> dict[str, Series]:
    entries = list(read_metrics(path))
    damaged = _line_count(path) - len(entries)
    if damaged:
        problems.append(f"{damaged} lines of {path.name} are damaged and passed over")
    points: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for name, value in entry.items():
            if value is not None and name != "global_step" and math.isfinite(value):
                points.setdefault(name, []).append((entry["global_step"], float(value)))
    return {name: _series(found) for name, found in points.items()}


def _line_count(path: Path) -> int:
    """Whole lines: a last one without its end is being written, or was when the run was killed."""
    if not os.path.lexists(path):
        return 0
    with open(path, "rb") as file:
        return sum(1 for line in file if line.endswith(b"\n"))


def _evaluation_series(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Evaluations during training; the final one counts where there is no other of its step."""
    during = {entry["step"]: entry for entry in evaluations if not entry.get("final")}
    entries = {**{entry["step"]: entry for entry in evaluations if entry.get("final")}, **during}
    names = {EVALUATION: "mean", "eval/return_std": "std", "eval/success_rate": "success_rate"}
    found = {}
    for name, key in names.items():
        points = [(step, entry[key]) for step, entry in entries.items() if _is_finite(entry.get(key))]
        if points:
            found[name] = _series(points)
    lengths = [
        (step, float(np.mean(numbers(entry.get("lengths")))))
        for step, entry in entries.items()
        if numbers(entry.get("lengths"))
    ]
    return {**found, "eval/length_mean": _series(lengths)} if lengths else found


def _series(points: Iterable[tuple[int, float]]) -> Series:
    """Points in order of their steps; of several at one step the last counts."""
    ordered = sorted(dict(points).items())
    return Series(np.array([step for step, _ in ordered], float), np.array([value for _, value in ordered], float))


def numbers(value: Any) -> list[float]:
    """The finite numbers of a list out of a file; none if it is no list."""
    return [float(item) for item in value if _is_finite(item)] if isinstance(value, list) else []


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= MAX_NUMBER


# ---------------------------------------------------------------------------------------------------------------------
# Labels
# ---------------------------------------------------------------------------------------------------------------------


def shown(value: Any) -> str:
    """A setting's value on one line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list):
        return "[" + ", ".join(map(shown, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown(item)}" for key, item in value.items()) + "}"
    return str(value)


def clean(text: str) -> str:
    """Text that can be written as UTF-8: JSON and file names may hold halves of characters."""
    return text.encode("utf-8", "replace").decode("utf-8")


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by their name with dots, without the `algorithm.` in front; schedules and lists are one value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and "schedule" not in value and name != "env_kwargs":
            found.update(leaves(value, "" if name == "algorithm" else f"{name}."))
        else:
            found[name] = value
    return found


def label_runs(runs: Sequence[RunRecord]) -> list[str]:
    """For each run its algorithm, and the settings that tell it from others of that algorithm on that environment."""
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
    """The settings that decide what a run's result is a sample of."""
    found = {
        name: value for name, value in leaves(run.config).items() if name.partition(".")[0] not in _BOOKKEEPING | _TASK
    }
    found["init_from"] = found.get("init_from") is not None  # each seed may have a checkpoint of its own
    if not any(isinstance(value, dict) and "schedule" in value for value in found.values()):
        found.pop("total_timesteps", None)  # no horizon depends on it: a longer run is the same, only longer
    return found


def _wrapper(item: Any) -> str:
    if not isinstance(item, dict):
        return shown(item)
    kwargs = item.get("kwargs")
    return str(item.get("name")) + (f" {shown(kwargs)}" if kwargs else "")


# ---------------------------------------------------------------------------------------------------------------------
# Averages over seeds
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """The average of a metric over the seeds of one algorithm on one environment."""

    label: str
    runs: tuple[RunRecord, ...]
    steps: Floats
    center: Floats
    low: Floats
    """Lower end of the confidence band; NaN where there are fewer than two seeds."""
    high: Floats
    counts: NDArray[np.int64]
    """How many seeds each point is the average of: some runs may end before others."""


@dataclass(frozen=True)
class Panel:
    """All curves of one environment."""

    environment: str
    metric: str
    curves: tuple[Curve, ...]


def make_panels(
    runs: Sequence[RunRecord], *, metric: str | None = None, smooth: float = 0.0, average: Average = "mean"
) -> tuple[list[Panel], list[str]]:
    """One panel for each environment, one curve for each label; and notes on runs that are not in them.

    Without a metric, evaluations are drawn where an environment has any two of one run, else training returns.
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
        raise ConfigError(["there is nothing to draw yet", *problems])
    return panels, problems


def _default_metric(runs: Sequence[RunRecord]) -> str:
    evaluated = any(len(run.series[EVALUATION].steps) > 1 for run in runs if EVALUATION in run.series)
    return EVALUATION if evaluated or not any(ROLLOUT in run.series for run in runs) else ROLLOUT


def _left_out(run: RunRecord, metric: str) -> str:
    if not run.series.keys() & {EVALUATION, ROLLOUT}:
        return f"{run.name}: has neither an evaluation nor a finished episode yet, and no {metric}; it is left out"
    return f"{run.name}: has no {metric} and is left out"


def _unknown_metric(metric: str, runs: Sequence[RunRecord]) -> str:
    names = sorted({name for run in runs for name in run.series} - {"time/unix"})
    return f"no run has the metric '{metric}'. There are: {', '.join(names) or 'none yet'}"


def _one_per_seed(runs: Sequence[RunRecord], problems: list[str]) -> list[RunRecord]:
    """Of runs with equal settings and seed, the one that came furthest: repeating a seed is no further evidence."""
    ordered = sorted(runs, key=lambda run: (run.env_steps, str(run.metadata.get("created")), run.name))
    kept = {repr(run.seed): run for run in ordered}
    counts = Counter(repr(run.seed) for run in runs)
    problems += [
        f"{run.name}: repeats seed {run.seed} of {kept[repr(run.seed)].name} with the same settings and is left out"
        for run in ordered
        if counts[repr(run.seed)] > 1 and kept[repr(run.seed)] is not run
    ]
    return sorted(kept.values(), key=lambda run: (str(run.seed).zfill(20), run.name))


def _ends(curve: Curve) -> list[str]:
    """A sentence if the average is over fewer seeds towards its end."""
    number = len(curve.runs)
    if curve.counts.min() == number:
        return []
    return [
        f"{curve.label} on {curve.runs[0].environment}: not all of its {number} seeds reach step "
        f"{curve.steps[-1]:,.0f}; where some are missing the curve is dashed, and the average of the others"
    ]


def _curve(label: str, runs: Sequence[RunRecord], metric: str, smooth: float, average: Average) -> Curve:
    series = [Series(s.steps, smoothed(s.values, smooth)) for s in (run.series[metric] for run in runs)]
    grid, slack = common_grid([found.steps for found in series])
    values = np.stack([sample(found, grid, slack) for found in series])
    statistic = np.mean if average == "mean" else interquartile_mean
    center, low, high = (np.full(len(grid), np.nan) for _ in range(3))
    present = ~np.isnan(values)
    for pattern in np.unique(present, axis=1).T:  # stretches over which the same runs are there
        columns = (present == pattern[:, None]).all(axis=0)
        if pattern.any():
            center[columns], low[columns], high[columns] = interval([values[pattern][:, columns]], statistic)
    counts = present.sum(axis=0)
    kept = counts > 0
    return Curve(label, tuple(runs), grid[kept], center[kept], low[kept], high[kept], counts[kept])


def smoothed(values: Floats, weight: float) -> Floats:
    """Exponential moving average without bias at the start, as TensorBoard's slider has it."""
    if weight == 0:
        return values
    mean, out = 0.0, np.empty_like(values)
    for i, value in enumerate(values):
        mean = weight * mean + (1 - weight) * value
        out[i] = mean / (1 - weight ** (i + 1))
    return out


def common_grid(steps: Sequence[Floats]) -> tuple[Floats, float]:
    """Steps at which curves are compared, and how far beyond its ends a curve may be held.

    If the runs were measured at the same steps, these; else evenly spaced ones, no denser than the densest run.
    """
    union = np.unique(np.concatenate(steps))
    longest = max(map(len, steps))
    if len(union) == longest or longest == 1:
        return union, 0.0
    grid = np.linspace(union[0], union[-1], min(longest, GRID_POINTS))
    return grid, float(grid[1] - grid[0])


def sample(series: Series, grid: Floats, slack: float) -> Floats:
    """Values of a series on a grid, linear in between; NaN before its beginning and after its end."""
    outside = (grid < series.steps[0] - slack) | (grid > series.steps[-1] + slack)
    return np.where(outside, np.nan, np.interp(grid, series.steps, series.values))
