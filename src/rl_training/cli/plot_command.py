"""`rl-training plot`: learning curves of any number of runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from rl_training.cli import parsing
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.text import printable
from rl_training.reports.curves import make_panels, require_plot
from rl_training.reports.records import find_run_dirs, read_runs

if TYPE_CHECKING:
    from rl_training.zoo.manifest import Manifest


@documented
@dataclass
class PlotArgs:
    """Plot learning curves, averaged over seeds, one panel per environment."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional] = setting(
        (), "Run directories, and directories that contain runs."
    )
    metric: str | None = setting(
        None, "Metric to plot; by default eval/return_mean if there are evaluations, otherwise rollout/return_mean."
    )
    smooth: float = setting(0.0, "Smoothing of each run, as in TensorBoard: from 0 (none) to less than 1.")
    average: Literal["mean", "iqm"] = setting(
        "mean", "Average over seeds: the mean, or iqm, the interquartile mean (mean of the middle half)."
    )
    output: Path = setting(
        Path("curves"), "Output file (.png, .svg, .pdf or .html); without a suffix, both a .png and an .html."
    )
    csv: Path | None = setting(None, "Directory for tables as CSV: runs, metrics, curves, results.")
    parquet: Path | None = setting(None, "Directory for the same tables as Parquet.")


def run(args: list[str]) -> int:
    """See the module."""
    options = parsing.parse(PlotArgs, args, prog="rl-training plot", description=str(PlotArgs.__doc__).split("\n")[0])
    require_plot()
    from rl_training.reports.plotting import outputs, write_plots
    from rl_training.reports.tables import make_tables, write_csv, write_parquet

    outputs(options.output)  # raises before any work
    paths, notes = find_run_dirs(options.paths)
    runs, problems = read_runs(paths)
    if not runs:
        raise ConfigError(["no run could be read", *problems])
    panels, left_out = make_panels(runs, metric=options.metric, smooth=options.smooth, average=options.average)
    say_all([*notes, *problems, *left_out])
    written = write_plots(panels, options.output, smooth=options.smooth, average=options.average)
    if options.csv is not None or options.parquet is not None:
        manifests, unread = _manifests(options.paths, paths)
        say_all(unread)
        tables = make_tables(runs, panels, manifests)
        written += write_csv(options.csv, tables) if options.csv is not None else []
        written += write_parquet(options.parquet, tables) if options.parquet is not None else []
    for panel in panels:
        for curve in panel.curves:
            print(printable(f"{panel.title}: {curve.label}, {curve.num_runs} seed(s), {panel.metric}"))
    print("\n".join(f"wrote {path}" for path in written))
    return 0


def _manifests(named: Iterable[Path], runs: Iterable[Path]) -> tuple[list[Manifest], list[str]]:
    """Manifests of the benchmarks in or below the named directories; and notes on those left out."""
    from rl_training.zoo.manifest import manifest_of

    named = set(named)
    places = {path.parent: None for path in runs if named & {path.parent, *path.parent.parents}}
    found = [manifest_of(place) for place in places]
    return [manifest for manifest, _ in found if manifest], [note for _, notes in found for note in notes]


def say_all(problems: Iterable[str]) -> None:
    """Print warnings, one per line."""
    for text in problems:
        print(f"warning: {printable(text)}", file=sys.stderr)
