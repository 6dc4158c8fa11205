"""Plots of a suite's results for the docs, as SVG. The same results always give the same picture (extra `plot`)."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_training.contracts.errors import MissingExtraError
from rl_training.reports.statistics import Curve, sample_efficiency

COLUMNS, GRID = 3, 21
"""Panels side by side; points at which curves are estimated."""
COLORS = (*(f"C{number}" for number in range(10)), "black", "gold", "navy", "lime", "maroon", "teal")
STYLE_VERSION = 1
"""To be raised when pictures of the same data should look otherwise, so that old ones count as stale."""

Run = list[tuple[float, float]]


@dataclass(frozen=True)
class Line:
    """Learning curves of one algorithm: for each task its runs, each with (step, return)."""

    label: str
    color: int
    tasks: list[list[Run]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """One diagram."""

    title: str
    lines: list[Line]
    in_steps: bool = True
    """Else over the share of the training."""

    @property
    def x_label(self) -> str:
        """What the horizontal axis shows."""
        return "environment steps" if self.in_steps else "share of the training"


@dataclass(frozen=True)
class LearningCurves:
    """Sample-efficiency curves of a suite: interquartile mean and 95 % interval over seeds."""

    panels: list[Panel]

    def digest(self) -> str:
        """Of everything that is drawn. It is written into the picture, which is current if it has it."""
        text = json.dumps([STYLE_VERSION, asdict(self)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_current(self, path: Path) -> bool:
        """Whether a file shows this data."""
        return path.is_file() and f"data {self.digest()}" in path.read_text(encoding="utf-8")

    def write(self, path: Path) -> None:
        """Draw."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _draw(self, path)


def _draw(curves: LearningCurves, path: Path) -> None:
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("plots of results", "plot") from error
    rows = math.ceil(len(curves.panels) / COLUMNS)
    # text stays text, and ids come from the content: small files that are the same every time
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rl_training", "font.size": 8}):
        figure = Figure(figsize=(4 * COLUMNS, 2.8 * rows + 0.6), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots(rows, COLUMNS, squeeze=False).flatten()
        handles: dict[str, Any] = {}
        for ax, panel in zip(axes, curves.panels, strict=False):
            handles.update(_draw_panel(ax, panel))
        for ax in axes[len(curves.panels) :]:
            ax.axis("off")
        names = sorted(handles)
        figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=6, frameon=False)
        about = {"Date": None, "Creator": None, "Description": f"data {curves.digest()}"}
        figure.savefig(path, format="svg", metadata=about)


def _draw_panel(ax: Any, panel: Panel) -> dict[str, Any]:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, MaxNLocator

    handles: dict[str, Any] = {}
    for line in panel.lines:
        color = COLORS[line.color % len(COLORS)]
        curve = estimated(line)
        values = [estimate.value for estimate in curve.estimates]
        style = "--" if line.dashed else "-"
        ax.plot(curve.points, values, style, color=color)
        handles[line.label] = Line2D([], [], color=color)
        known = [(x, e.low, e.high) for x, e in zip(curve.points, curve.estimates, strict=True) if e.low is not None]
        if known:
            ax.fill_between(*zip(*known, strict=True), color=color, alpha=0.15, linewidth=0)
    ax.set_title(panel.title)
    ax.set_xlabel(panel.x_label)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    if panel.in_steps:
        ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    return handles


def estimated(line: Line) -> Curve:
    """A line's curve, over the stretch that all of its runs cover."""
    runs = [run for runs in line.tasks for run in runs]
    first, last = max(run[0][0] for run in runs), min(run[-1][0] for run in runs)
    points = [first + (last - first) * index / (GRID - 1) for index in range(GRID)]
    return sample_efficiency(line.tasks, points)


def shares(run: Sequence[tuple[float, float]], total: int) -> Run:
    """A run over the share of its training instead of steps."""
    return [(step / total, value) for step, value in run]
