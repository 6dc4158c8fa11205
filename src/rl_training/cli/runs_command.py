"""`rl-training runs`: a table of runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError, RLTrainingError
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.runs import find_runs


@documented
@dataclass
class RunsArgs:
    """List the runs in a directory, newest first."""

    path: Annotated[Path, tyro.conf.Positional] = setting(Path("runs"), "Directory that holds run directories.")


def run(args: list[str]) -> int:
    """See the module."""
    options = parsing.parse(RunsArgs, args, prog="rl-training runs", description="List the runs in a directory.")
    if not options.path.is_dir():
        raise ConfigError(f"'{options.path}' is not a directory; runs are written to --output-dir, by default ./runs")
    table = Table("run", "status", "steps", "best return", "resume", box=None)
    found = find_runs(options.path)
    for entry in found:
        try:
            data, status, best = entry.metadata(), entry.status(), entry.best_return()
        except RLTrainingError:
            table.add_row(entry.path.name, "damaged", "", "", "")
            continue
        table.add_row(
            entry.path.name,
            status,
            f"{entry.env_steps():,}",
            "-" if best is None else f"{best:.2f}",
            str(data.get("resume_grade", "-")),
        )
    console = Console()
    if console.is_terminal:
        console.print(table)
    else:  # a pipe has no width: never cut names
        Console(width=200).print(table)
    if not found:
        print(f"no runs in {options.path}")
    return 0
