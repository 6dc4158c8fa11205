"""Plots of the sweeps of `scaling.py` and the ratios of `throughput.py`, as SVG (extra `plot`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.pages import Picture

PARTS = ("environment", "acting", "learning", "the rest")
PART_COLORS = ("#4c9f70", "#e0a458", "#33658a", "#c9c9c9")


@dataclass(frozen=True)
class SweepPlot(Picture):
    """Speed along a sweep, and below it the fractions of time."""

    title: str
    axis: str
    values: list[int]
    medians: list[float]
    lows: list[float]
    highs: list[float]
    shares: list[list[float]]
    """For each of `PARTS`, its fraction of time at each value."""

    def figure(self) -> Any:
        """See `Picture.figure`."""
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, FixedLocator, NullFormatter, NullLocator, PercentFormatter

        figure = Figure(figsize=(6.4, 4.6), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        top.fill_between(self.values, self.lows, self.highs, color=PART_COLORS[2], alpha=0.2, linewidth=0)
        top.plot(self.values, self.medians, "o-", color=PART_COLORS[2], markersize=4)
        top.set_xscale("log", base=2)
        top.set_yscale("log")
        top.yaxis.set_major_formatter(EngFormatter(sep=""))
        top.yaxis.set_minor_formatter(NullFormatter())
        top.set_ylabel("environment steps\nper second")
        top.set_title(self.title, fontsize=8)
        top.grid(alpha=0.25, which="both")
        bottom.stackplot(self.values, *self.shares, labels=PARTS, colors=PART_COLORS)
        bottom.set_ylim(0, 1)
        bottom.yaxis.set_major_formatter(PercentFormatter(1))
        bottom.set_ylabel("share of the time")
        bottom.set_xlabel(self.axis)
        bottom.xaxis.set_major_locator(FixedLocator(self.values))
        bottom.xaxis.set_minor_locator(NullLocator())
        bottom.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        bottom.set_xlim(self.values[0], self.values[-1])
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        return figure


@dataclass(frozen=True)
class RatioPlot(Picture):
    """The speed ratio to each peer, per task."""

    tasks: list[str]
    ratios: dict[str, list[float | None]]
    """For each peer, one ratio per task."""

    def figure(self) -> Any:
        """See `Picture.figure`."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6.4, 1.2 + 0.42 * len(self.tasks)), layout="constrained")
        ax = figure.subplots()
        height = 0.8 / max(1, len(self.ratios))
        for number, (peer, values) in enumerate(self.ratios.items()):
            known = [(place + number * height, value) for place, value in enumerate(values) if value is not None]
            bars = ax.barh(
                *zip(*known, strict=True), height=height, label=f"against {peer}", color=PART_COLORS[2 - 2 * number]
            )
            ax.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
        ax.axvline(1, color="black", linewidth=0.8)
        middle = 0.4 - height / 2
        ax.set_yticks([place + middle for place in range(len(self.tasks))], self.tasks)
        ax.invert_yaxis()
        ax.margins(x=0.1)
        ax.set_xlabel("times as fast (1: equal)")
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False, loc="lower right")
        return figure
