"""`rl-training report`: an HTML page about a run or a suite."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rl_training.cli import parsing
from rl_training.cli.plot_command import say_all
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.experiment.files import refuse_links, write_text
from rl_training.reports.curves import require_plot
from rl_training.reports.records import is_run_dir

PAGE = "report.html"


@documented
@dataclass
class ReportArgs:
    """Write an HTML report of a run or of a directory of runs, as one file that works offline."""

    path: Annotated[Path, tyro.conf.Positional] = setting(help="Run directory, or a directory that contains runs.")
    output: Path | None = setting(None, "Output file; by default report.html in that directory.")
    video: bool = setting(False, "Record an episode if there is no video yet (extra `video`).")
    trust: bool = setting(False, "Allow the run's config to name a module to import (package:Env-v0), for the video.")


def run(args: list[str]) -> int:
    """See the module."""
    summary = str(ReportArgs.__doc__).split("\n")[0]
    options = parsing.parse(ReportArgs, args, prog="rl-training report", description=summary)
    require_plot()
    if not os.path.isdir(options.path):
        problem = "is not a directory" if os.path.lexists(options.path) else "does not exist"
        raise ConfigError(f"'{options.path}' {problem}: pass a run directory, or a directory of runs")
    place = _place(options.path, options.output)
    from rl_training.reports.run_report import run_report
    from rl_training.reports.suite_report import suite_report

    make = run_report if is_run_dir(options.path) else suite_report
    page, problems = make(options.path, video=options.video, trust=options.trust)
    write_text(place, page.render())
    say_all(problems)
    print(f"wrote {place}")
    return 0


def _place(path: Path, output: Path | None) -> Path:
    """The output path; an error before any work if it cannot be written."""
    place = path / PAGE if output is None else output / PAGE if output.is_dir() else output
    if output is None:
        refuse_links([place], within=path)
    if place.suffix != ".html":
        raise ConfigError(f"output: must end in .html, got '{place}'")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output: '{place}' cannot be written: {error.strerror}") from error
    return place
