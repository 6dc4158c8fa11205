"""Runs and curves as tables, in CSV and Parquet, for other tools.

Long format: `runs` (one row per run: identity, status and settings), `metrics` (every value of every metric of every
run), `curves` (what was drawn: averages over seeds with confidence bands), and for benchmarks `results` (one row per
seed of each task, from the manifest).
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import CheckpointError, ConfigError
from rl_training.contracts.state import MAX_NUMBER
from rl_training.experiment.files import write_text
from rl_training.reports.aggregates import place_of
from rl_training.reports.curves import Panel, label_runs
from rl_training.reports.records import RunRecord, clean, leaves, shown
from rl_training.zoo.manifest import Evaluated, Manifest, RunResult, TaskResult

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Rows with equal columns; the values of a column have one type, or are None."""

    name: str
    columns: dict[str, list[Any]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))


def make_tables(runs: Sequence[RunRecord], panels: Sequence[Panel], manifests: Sequence[Manifest] = ()) -> list[Table]:
    """All tables; `results` only if there are manifests."""
    labels = label_runs(runs)
    results = [_result_row(found, task, run) for found in manifests for task in found.tasks for run in task.runs]
    return [
        _table("runs", [_run_row(run, label) for run, label in zip(runs, labels, strict=True)]),
        _table("metrics", [row for run, label in zip(runs, labels, strict=True) for row in _metric_rows(run, label)]),
        _table("curves", [row for panel in panels for row in _curve_rows(panel)]),
        *([_table("results", results)] if results else []),
    ]


def write_csv(directory: Path, tables: Sequence[Table]) -> list[Path]:
    """Write one file per table; unknown values are empty."""
    written = []
    for table in tables:
        path = _place(directory, f"{table.name}.csv")
        write_text(path, csv_text(table.columns, zip(*table.columns.values(), strict=True)))
        written.append(path)
    return written


def csv_text(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """A table as CSV; None is an empty cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()


def write_parquet(directory: Path, tables: Sequence[Table]) -> list[Path]:
    """Write one file per table, with column types."""
    import pyarrow
    from pyarrow import parquet

    written = []
    for table in tables:
        path = _place(directory, f"{table.name}.parquet")
        try:
            parquet.write_table(pyarrow.table(table.columns), path)
        except OSError as error:
            raise CheckpointError(f"{path}: could not be written: {error}") from error
        written.append(path)
    return written


def _place(directory: Path, name: str) -> Path:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the directory '{directory}' for tables cannot be created: {error.strerror}") from error
    return directory / name


def _run_row(run: RunRecord, label: str) -> Row:
    last, versions, hardware = run.last_evaluation, run.metadata.get("versions"), run.metadata.get("hardware")
    facts = {
        **_identity(run, label),
        "path": str(run.path),
        "status": run.status,
        "resume_grade": _text(run.metadata.get("resume_grade")),
        "env_steps": run.env_steps,
        "total_timesteps": run.total_timesteps,
        "final_return_mean": float(last["mean"]) if last else None,
        "final_return_step": last["step"] if last else None,
        "best_return": run.best_return,
        "final_normalized_score": _normalized(run, last["mean"] if last else None),
        "best_normalized_score": _normalized(run, run.best_return),
        "created": _text(run.metadata.get("created")),
        "git_commit": _text(run.metadata.get("git_commit")),
    }
    facts |= {f"versions.{key}": shown(value) for key, value in versions.items()} if isinstance(versions, dict) else {}
    facts |= {f"hardware.{key}": value for key, value in hardware.items()} if isinstance(hardware, dict) else {}
    return {**facts, **{f"config.{name}": value for name, value in leaves(run.config).items()}}


def _normalized(run: RunRecord, mean_return: float | None) -> float | None:
    return None if run.reference is None or mean_return is None else run.reference.score(mean_return)


def _metric_rows(run: RunRecord, label: str) -> Iterator[Row]:
    identity = _identity(run, label)
    for name, series in run.series.items():
        for step, value in zip(series.steps.tolist(), series.values.tolist(), strict=True):
            yield {**identity, "metric": name, "step": int(step), "value": value}


def _curve_rows(panel: Panel) -> Iterator[Row]:
    for curve in panel.curves:
        identity = {"environment": panel.title, "label": curve.label, "metric": panel.metric}
        columns = (curve.steps, curve.center, curve.low, curve.high, curve.counts)
        for step, center, low, high, count in zip(*(column.tolist() for column in columns), strict=True):
            numbers = {"step": float(step), "value": center, "low": _known(low), "high": _known(high), "seeds": count}
            yield {**identity, **numbers}


def _result_row(manifest: Manifest, task: TaskResult, run: RunResult) -> Row:
    """One seed of a task: its score, all evaluations, versions and machine."""
    judged = run.judged(task.judge)
    row = {
        "suite": manifest.suite,
        "task": task.name,
        "environment": place_of(task),
        "score": None if judged is None else judged.mean,
        "normalized_score": None if judged is None else task.normalization.score(judged.mean),
        **{name: getattr(task, name) for name in ("preset", "algo", "judge", "total_timesteps", "config_hash")},
    }
    for item in fields(RunResult):
        value = getattr(run, item.name)
        if isinstance(value, Evaluated):
            row |= {f"{item.name}.{part}": getattr(value, part) for part in ("mean", "std", "episodes", "step")}
        elif isinstance(value, dict):
            row |= {f"{item.name}.{key}": part for key, part in value.items()}
        elif not isinstance(value, list):  # curves are in `metrics`
            row[item.name] = value
    return row


def _identity(run: RunRecord, label: str) -> Row:
    return {
        "run": run.name,
        "environment": run.environment,
        "algorithm": run.algo,
        "label": label,
        "seed": run.seed if type(run.seed) is int else None,
    }


def _table(name: str, rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return Table(name, {clean(key): _typed([row.get(key) for row in rows]) for key in columns})


def _typed(values: list[Any]) -> list[Any]:
    """A column with one type: integers, floats or booleans if all values are, otherwise text."""
    known = [value for value in values if value is not None]
    kinds = {type(value) for value in known}
    if kinds == {bool} or (kinds == {int} and all(abs(value) < MAX_NUMBER for value in known)):
        return values
    if kinds <= {int, float} and all(abs(value) < MAX_NUMBER for value in known if type(value) is int):
        return [None if value is None else float(value) for value in values]
    return [None if value is None else clean(shown(value)) for value in values]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _text(value: Any) -> str | None:
    return None if value is None else shown(value)
