"""`rl-training runs`: a table of runs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError, RLTrainingError
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.text import printable
from rl_training.experiment.runs import RunDirectory, find_runs


@documented
@dataclass
class RunsArgs:
    """List the runs in a directory, newest first."""

    path: Annotated[Path, tyro.conf.Positional] = setting(Path("runs"), "Directory that contains run directories.")
    json: bool = setting(False, "Print one JSON object per run and line.")


def run(args: list[str]) -> int:
    """See the module."""
    options = parsing.parse(RunsArgs, args, prog="rl-training runs", description="List the runs in a directory.")
    if not os.path.isdir(options.path):
        raise ConfigError(f"'{options.path}' is not a directory; runs are written to --output-dir, by default ./runs")
    table = Table("run", "status", "steps", "best return", "resume", box=None)
    found = find_runs(options.path)
    if options.json:
        for entry in found:
            print(json.dumps(_facts(entry)))
        return 0
    for entry in found:
        try:
            data, status, steps, best = entry.metadata(), entry.status(), entry.env_steps(), entry.best_return()
        except RLTrainingError:
            table.add_row(_shown(entry.path.name), "damaged", "", "", "")
            continue
        table.add_row(
            _shown(entry.path.name),
            _shown(status),
            f"{steps:,}",
            "-" if best is None else f"{best:.2f}",
            _shown(data.get("resume_grade", "-")),
        )
    console = Console()
    if console.is_terminal:
        console.print(table)
    else:  # no terminal: never truncate names
        Console(width=200).print(table)
    if not found:
        print(f"no runs in {options.path}")
    return 0


def _facts(entry: RunDirectory) -> dict[str, object]:
    """What the table shows, as plain data."""
    try:
        grade = entry.metadata().get("resume_grade")
        facts = {"status": entry.status(), "env_steps": entry.env_steps(), "best_return": entry.best_return()}
    except RLTrainingError:
        return {"run": str(entry.path), "status": "damaged"}
    return {"run": str(entry.path), **facts, "resume_grade": grade}


def _shown(value: object) -> str:
    """A value from a file as text without markup and control characters."""
    return escape(printable(str(value)))
