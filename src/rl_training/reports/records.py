"""Reads the files of runs: settings, metrics, evaluations, status.

Only these files are read. Environments and checkpoints are not loaded, so runs from other machines, active runs and
killed runs can be read as well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl_training.algorithms.registry import registry
from rl_training.contracts.errors import CheckpointError, ConfigError, RLTrainingError
from rl_training.contracts.state import MAX_NUMBER
from rl_training.experiment.config import TrainConfig
from rl_training.experiment.files import open_file
from rl_training.experiment.logging import read_metrics
from rl_training.experiment.normalized_scores import Reference, recorded_reference
from rl_training.experiment.runs import CONFIG, METRICS, RunDirectory
from rl_training.experiment.yaml_io import read_yaml
from rl_training.reports.statistics import Floats

EVALUATION, ROLLOUT = "eval/return_mean", "rollout/return_mean"
SEARCH_DEPTH = 3
"""How many levels below a given directory are searched for runs: `suite/environment/algorithm/run` is found."""


@dataclass(frozen=True)
class Series:
    """A metric of one run: finite values at increasing steps."""

    steps: Floats
    values: Floats


@dataclass
class RunRecord:
    """The content of one run's files."""

    path: Path
    config: dict[str, Any]
    """All settings as plain data; settings newer than the run have their defaults."""
    metadata: dict[str, Any]
    status: str
    env_steps: int
    series: dict[str, Series]
    evaluations: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list)
    """Messages about what could not be read."""

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
        """The algorithm's display name: `PPO`."""
        spec = registry().get(self.algo)
        return spec.title if spec else self.algo

    @property
    def environment(self) -> str:
        """The task: environment id, arguments and wrappers."""
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
        """The number of steps the run was configured for."""
        total = self.config.get("total_timesteps")
        return total if type(total) is int else None

    @property
    def last_evaluation(self) -> dict[str, Any] | None:
        """The final evaluation, or the newest one so far."""
        finals = [entry for entry in self.evaluations if entry.get("final")]
        return max(finals or self.evaluations, key=lambda entry: entry["step"], default=None)

    @property
    def best_return(self) -> float | None:
        """See `RunDirectory.best_return`."""
        during = [entry for entry in self.evaluations if not entry.get("final")]
        return max((entry["mean"] for entry in during or self.evaluations), default=None)

    @property
    def reference(self) -> Reference | None:
        """The scale of D4RL's normalised score, if the environment has one."""
        return recorded_reference(self.metadata, str(self.config.get("env_id")))

    @property
    def note(self) -> str | None:
        """Why the run is incomplete; None if it is finished."""
        total = self.total_timesteps
        reached = f"{self.env_steps:,}" + (f" of {total:,}" if total else "") + " steps"
        notes = {
            "running": f"is still running: shown up to now ({reached})",
            "interrupted": f"was killed: shown up to its end ({reached})",
            "stopped": f"was stopped: shown up to its end ({reached})",
            "failed": f"failed: shown up to its end ({reached})",
            "unknown": f"has no recorded status: shown up to its end ({reached})",
        }
        return notes.get(self.status)


def find_run_dirs(paths: Sequence[Path]) -> tuple[list[Path], list[str]]:
    """All run directories among and below the paths, in order, without duplicates; and notes on paths without runs."""
    if not paths:
        raise ConfigError("paths: missing; pass run directories, or directories that contain runs, such as `runs`")
    missing = [f"'{path}' does not exist" for path in paths if not os.path.lexists(path)]
    missing += [f"'{path}' is not a directory" for path in paths if os.path.lexists(path) and not os.path.isdir(path)]
    if missing:
        raise ConfigError([*missing, "Pass run directories, or directories that contain runs."])
    found: dict[str, Path] = {}
    empty: list[str] = []
    for path in paths:
        below = list(_runs_below(path, SEARCH_DEPTH))
        found.update({os.path.realpath(run): run for run in below if os.path.realpath(run) not in found})
        empty += [] if below else [f"there are no runs in '{path}'"]
    if not found:
        where = ", ".join(f"'{path}'" for path in paths)
        raise ConfigError(
            f"there are no runs in {where} (searched {SEARCH_DEPTH} levels deep). A run directory contains a "
            f"{CONFIG}; `rl-training train` creates it in --output-dir (by default ./runs)"
        )
    return list(found.values()), empty


def name_of(path: Path) -> str:
    """A directory's name, also for `.`."""
    return path.resolve().name or str(path)


def is_run_dir(path: Path) -> bool:
    """Whether a directory is a run directory, even a damaged one."""
    return os.path.lexists(path / CONFIG) or os.path.lexists(path / METRICS)


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    if is_run_dir(path):
        yield path
    elif depth > 0:
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:  # no permission
            return
        for entry in entries:  # links may lead anywhere, or form cycles
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                yield from _runs_below(path / entry.name, depth - 1)


def read_runs(paths: Iterable[Path]) -> tuple[list[RunRecord], list[str]]:
    """The runs that can be read, and a message for each that cannot be read or only in part."""
    records, problems = [], []
    for path in paths:
        try:
            record = read_run(path)
        except RLTrainingError as error:
            problems.append(f"{name_of(path)}: is damaged and ignored: {error}")
            continue
        records.append(record)
        problems += [f"{record.name}: {text}" for text in [*record.problems, record.note] if text]
    return records, problems


def read_run(path: Path) -> RunRecord:
    """Read one run. The config must be readable; everything else may be damaged."""
    directory = RunDirectory(path)
    directory.require()
    config = _whole(read_yaml(path / CONFIG))
    if not all(isinstance(config.get(key), str) for key in ("algo", "env_id")):
        raise CheckpointError(f"{path / CONFIG}: 'algo' and 'env_id' are required")
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
    """The config completed by this version, or unchanged if this version does not know its algorithm or wrappers."""
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
        problems.append(f"{damaged} lines of {path.name} are damaged and skipped")
    points: dict[str, list[tuple[int, float]]] = {}
    for entry in entries:
        for name, value in entry.items():
            if value is not None and name != "global_step" and math.isfinite(value):
                points.setdefault(name, []).append((entry["global_step"], float(value)))
    return {name: _series(found) for name, found in points.items()}


def _line_count(path: Path) -> int:
    """The number of complete lines: an incomplete last line is still being written, or the run was killed."""
    if not os.path.lexists(path):
        return 0
    with open_file(path) as file:
        return sum(1 for line in file if line.endswith(b"\n"))


def _evaluation_series(evaluations: Sequence[Mapping[str, Any]]) -> dict[str, Series]:
    """Evaluations during training; the final one is used if its step has no other."""
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
    """Points sorted by step; of several at one step, the last is used."""
    ordered = sorted(dict(points).items())
    return Series(np.array([step for step, _ in ordered], float), np.array([value for _, value in ordered], float))


def numbers(value: Any) -> list[float]:
    """The finite numbers of a list read from a file; empty if it is not a list."""
    return [float(item) for item in value if _is_finite(item)] if isinstance(value, list) else []


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= MAX_NUMBER


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
    """Text that can be encoded as UTF-8: JSON and file names may contain lone surrogates."""
    return text.encode("utf-8", "replace").decode("utf-8")


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, without the prefix `algorithm.`; schedules and lists are one value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value and "schedule" not in value and name != "env_kwargs":
            found.update(leaves(value, "" if name == "algorithm" else f"{name}."))
        else:
            found[name] = value
    return found


def _wrapper(item: Any) -> str:
    if not isinstance(item, dict):
        return shown(item)
    kwargs = item.get("kwargs")
    return str(item.get("name")) + (f" {shown(kwargs)}" if kwargs else "")
