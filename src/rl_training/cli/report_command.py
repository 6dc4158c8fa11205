"""`rl-training report`: one page about a run or a suite."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from rl_training.cli import parsing
from rl_training.cli.plot_command import say_all
from rl_training.contracts.settings import documented, setting
from rl_training.zoo.curves import require_plot


@documented
@dataclass
class ReportArgs:
    """Write one HTML page about a run, or about a directory of runs, that opens from disk without a network."""

    path: Annotated[Path, tyro.conf.Positional] = setting(help="Run directory, or a directory that contains runs.")
    output: Path | None = setting(None, "Where the page goes; by default report.html in that directory.")
    video: bool = setting(False, "Film an episode where there is no film yet (extra `video`).")
    trust: bool = setting(False, "Let the run's config name a module to import (package:Env-v0), to film it.")


def run(args: list[str]) -> int:
    """See the module."""
    summary = str(ReportArgs.__doc__).split("\n")[0]
    options = parsing.parse(ReportArgs, args, prog="rl-training report", description=summary)
    require_plot()
    from rl_training.zoo.run_report import write_report

    place, problems = write_report(options.path, options.output, video=options.video, trust=options.trust)
    say_all(problems)
    print(f"wrote {place}")
    return 0
