"""Plots of learning curves: PNG, SVG or PDF (matplotlib), and interactive HTML pages (plotly, inlined)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_training.contracts.errors import CheckpointError, ConfigError
from rl_training.experiment.files import write_text
from rl_training.reports.curves import Average, Curve, Panel
from rl_training.reports.page import COLORS, Html, Page, element, fold, join, plot_text, table
from rl_training.reports.records import EVALUATION, ROLLOUT, Series, clean
from rl_training.reports.statistics import CONFIDENCE, Floats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
SUFFIXES = (*PICTURES, ".html")
CHART_POINTS = 1_000
"""Maximum number of points per line in a page: more are not visible, and slow it down."""

_NAMES = {EVALUATION: "mean return of evaluations", ROLLOUT: "mean return of training episodes"}


def outputs(path: Path) -> list[Path]:
    """The files that `--output` names: that file, or without a suffix both a PNG and an HTML file."""
    if path.is_dir():
        path = path / "curves"
    if path.suffix in SUFFIXES:
        return [path]
    if path.suffix[1:].isalpha():
        raise ConfigError(
            f"output: '{path}' must end in {', '.join(SUFFIXES)}, or have no suffix for both .png and .html"
        )
    return [path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.html")]


def write_plots(panels: Sequence[Panel], path: Path, *, smooth: float = 0.0, average: Average = "mean") -> list[Path]:
    """Draw the panels into the files for `path` (see `outputs`); returns the files."""
    written = outputs(path)
    for place in written:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.suffix == ".html":
                write_text(place, curves_page(panels, caption(smooth, average)))
            else:
                draw_figure(panels, caption(smooth, average), place)
        except OSError as error:
            raise CheckpointError(f"{place}: could not be written: {error.strerror or error}") from error
    return written


def caption(smooth: float = 0.0, average: Average = "mean") -> str:
    """The explanation of lines and bands below a plot."""
    line = {"mean": "mean", "iqm": "interquartile mean"}[average]
    text = f"Lines: {line} over seeds. Bands: {CONFIDENCE:.0%} bootstrap intervals; a single seed has none."
    return text + (f" Smoothed by {smooth:g}." if smooth else "")


def metric_title(metric: str) -> str:
    """A readable title of a metric; by default its name."""
    return _NAMES.get(metric, metric)


def legend(curve: Curve, panel: Panel) -> str:
    """A curve's name and its number of seeds (or of runs in several environments)."""
    number, word = curve.num_runs, "seed" if panel.in_steps else "run"
    return f"{curve.label} ({number} {word}{'s' if number > 1 else ''})"


def color_of(panels: Iterable[Panel]) -> dict[str, str]:
    """One colour per label, the same in all panels."""
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    return {label: COLORS[i % len(COLORS)] for i, label in enumerate(labels)}


# ---------------------------------------------------------------------------------------------------------------------
# Pictures
# ---------------------------------------------------------------------------------------------------------------------


def draw_figure(panels: Sequence[Panel], note: str, path: Path) -> None:
    """Draw a grid of panels into one image file."""
    figure = panel_figure(panels, note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about characters missing in the font
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def panel_figure(
    panels: Sequence[Panel], note: str = "", *, columns: int | None = None, one_legend: bool = False
) -> Figure:
    """A grid of panels as a matplotlib figure, with a legend per panel or one for all."""
    from matplotlib.figure import Figure

    columns = columns or min(len(panels), max(2, math.ceil(math.sqrt(len(panels)))), 6)
    rows = math.ceil(len(panels) / columns)
    colors = color_of(panels)
    width = max(6.4, (4 if one_legend else 4.6) * columns)
    height = 2.8 if one_legend else 3.5 + 0.2 * max(len(panel.curves) for panel in panels)
    figure = Figure(figsize=(width, height * rows + 0.4), dpi=150, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, panels, strict=False):
        _draw_panel(ax, panel, colors)
        if not one_legend:
            ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(-0.02, -0.14))
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    if one_legend:
        from matplotlib.lines import Line2D

        handles = [Line2D([], [], color=color, label=plain(label)) for label, color in sorted(colors.items())]
        figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    if note:
        figure.supxlabel(note, fontsize=7.5, color="0.4")
    return figure


def _draw_panel(ax: Any, panel: Panel, colors: dict[str, str]) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

    for curve in panel.curves:
        color, single = colors[curve.label], "o" if len(curve.steps) == 1 else None
        ax.fill_between(curve.steps, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
        ax.plot(curve.steps, curve.center, color=color, linewidth=1.0, linestyle="--")
        solid = np.where(curve.solid, curve.center, np.nan)
        ax.plot(curve.steps, solid, color=color, linewidth=1.7, marker=single, label=plain(legend(curve, panel)))
    ax.set_title(plain(panel.title), fontsize=10)
    ax.set_xlabel(x_title(panel), fontsize=8.5)
    ax.set_ylabel(plain(metric_title(panel.metric)), fontsize=8.5)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(EngFormatter(sep="") if panel.in_steps else PercentFormatter(1))
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def plain(text: str) -> str:
    """Text that matplotlib shows literally: no formulas, no control characters, shortened."""
    shown = "".join(character if character.isprintable() else " " for character in clean(text)).lstrip("_")
    return (shown if len(shown) <= 90 else shown[:87] + "...").replace("$", r"\$")


# ---------------------------------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------------------------------


def curves_page(panels: Sequence[Panel], note: str) -> str:
    """A page with a chart per environment, and a table of the last values."""
    page = Page("Learning curves")
    page.add(element("h1", "Learning curves"), element("p", note, class_="soft"))
    page.add(panel_charts(page, panels))
    page.add(fold("Last values", last_values(panels)))
    return page.render()


def panel_charts(page: Page, panels: Sequence[Panel]) -> Html:
    """A chart per panel; more than two are placed side by side if there is space."""
    colors = color_of(panels)
    charts = [
        page.chart(
            panel.title,
            [trace for curve in panel.curves for trace in _band_traces(curve, colors[curve.label])]
            + [trace for curve in panel.curves for trace in _line_traces(curve, panel, colors[curve.label])],
            height=400 + 22 * len(panel.curves),
            showlegend=True,
            xaxis=STEPS if panel.in_steps else SHARE,
            yaxis={"title": {"text": plot_text(metric_title(panel.metric)), "standoff": 8}},
        )
        for panel in panels
    ]
    return element("div", *charts, class_="pairs") if len(charts) > 2 else join(charts)


STEPS = {"title": {"text": "environment steps", "standoff": 6}, "hoverformat": ",.0f"}
SHARE = {"title": {"text": "fraction of training", "standoff": 6}, "hoverformat": ".0%", "tickformat": ".0%"}


def x_title(panel: Panel) -> str:
    """The title of the x axis."""
    return "environment steps" if panel.in_steps else "fraction of training"


def _band_traces(curve: Curve, color: str) -> list[dict[str, Any]]:
    """A confidence band: two invisible lines with the area between them filled."""
    if np.isnan(curve.low).all():
        return []
    band = {"mode": "lines", "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    low, high = {"y": plain_numbers(curve.low)}, {"y": plain_numbers(curve.high)}
    return [
        {**_common(curve), **band, **low},
        {**_common(curve), **band, "fill": "tonexty", "fillcolor": _faint(color), **high},
    ]


def _line_traces(curve: Curve, panel: Panel, color: str) -> list[dict[str, Any]]:
    """The line, dashed if it shows no evaluations, and a dashed one behind it, visible where seeds are missing."""
    whole = curve.counts == curve.num_runs
    traces: list[dict[str, Any]] = []
    if not whole.all():
        dashed = {"mode": "lines", "line": {"color": color, "width": 1.2, "dash": "dash"}, "showlegend": False}
        traces.append({**_common(curve), **dashed, "y": plain_numbers(curve.center), "hoverinfo": "skip"})
    hover = [f"{value:,.4g}{_band_text(curve, i)}" for i, value in enumerate(curve.center.tolist())]
    line = {"color": color, "width": 2, **({} if curve.evaluated else {"dash": "dash"})}
    marks = {"line": line, "marker": {"color": color, "size": 5 if len(curve.steps) > 1 else 9}}
    mode = {"mode": "lines+markers" if len(curve.steps) <= 60 else "lines", "name": plot_text(legend(curve, panel))}
    shown = {"y": plain_numbers(np.where(whole, curve.center, np.nan)), "text": hover, "hovertemplate": "%{text}"}
    return [*traces, {**_common(curve), **mode, **marks, **shown}]


def _common(curve: Curve) -> dict[str, Any]:
    return {"type": "scatter", "x": plain_numbers(curve.steps), "legendgroup": plot_text(curve.label)}


def _band_text(curve: Curve, index: int) -> str:
    low, high = curve.low[index], curve.high[index]
    return "" if math.isnan(low) else f" ({low:,.4g} to {high:,.4g})"


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def last_values(panels: Sequence[Panel]) -> Html:
    """A table of each curve's last value that all of its seeds reached."""
    rows: list[list[str]] = []
    for panel in panels:
        for curve in panel.curves:
            whole = np.flatnonzero(curve.counts == curve.num_runs)
            if len(whole):
                i = int(whole[-1])
                numbers = [f"{curve.center[i]:,.4g}", _band_text(curve, i).strip(" ()") or "-"]
                rows.append([panel.title, curve.label, str(curve.num_runs), f"{curve.steps[i]:,.0f}", *numbers])
    head = ["environment", "algorithm", "seeds", "step", "value", f"{CONFIDENCE:.0%} interval"]
    return join([table(head, rows, numeric=(2, 3, 4, 5))])


def series_trace(series: Series, name: str, color: str, **more: Any) -> dict[str, Any]:
    """A line with the values of one run."""
    steps, values = thinned(series)
    mode = "lines+markers" if len(steps) <= 20 else "lines"
    line = {"line": {"color": color, "width": 1.6}, "marker": {"color": color, "size": 4}}
    where = {"x": plain_numbers(steps), "y": plain_numbers(values)}
    hover = {"hovertemplate": "%{y:,.5~g}"}
    return {"type": "scatter", "mode": mode, "name": plot_text(name), **where, **line, **hover, **more}


def thinned(series: Series) -> tuple[Floats, Floats]:
    """Evenly selected points of a series, at most as many as a chart can show, including the first and last."""
    number = len(series.steps)
    chosen = np.unique(np.linspace(0, number - 1, min(number, CHART_POINTS)).round().astype(int))
    return series.steps[chosen], series.values[chosen]


def plain_numbers(values: Floats) -> list[float | None]:
    """Values for JSON, with None for NaN."""
    return [float(f"{value:.8g}") if math.isfinite(value) else None for value in values.tolist()]
