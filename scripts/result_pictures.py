"""Pictures of the results page: scores beside published ones, and a heat map of algorithms and environments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.comparison import Row
from scripts.pages import Picture

from rl_training.algorithms.registry import registry
from rl_training.reports.aggregates import place_name
from rl_training.reports.statistics import aggregate

SCORES_NOTE = """\
Presets as they ship, on a scale from a random policy (0) to the suite's reference (1). Dots are the interquartile mean
over seeds of the final policy's return, with a 95 % bootstrap interval; hollow where the result was measured with
earlier settings or without a commit, smaller where only the best checkpoint was measured. Diamonds are published
figures, with the deviation over seeds where there were several; hollow if they are of another number of steps or of
another task. Values outside of the axis are drawn at its edge.
"""
LEFT, RIGHT = -0.15, 1.55
"""The ends of the axis of scores."""
NOT_MEASURED = "·"
OURS, THEIRS = "#0b6e99", "#d9730d"


@dataclass(frozen=True)
class Published:
    """A published figure on the scale of scores."""

    score: float
    spread: float
    """Deviation over seeds; 0 for a single run."""
    is_alike: bool
    """Whether it is of the same task and number of steps."""


@dataclass(frozen=True)
class Line:
    """One preset in the picture of a suite."""

    label: str
    place: str
    scores: tuple[float, ...]
    judge: str
    is_reliable: bool
    published: tuple[Published, ...]


@dataclass(frozen=True)
class Scores(Picture):
    """The normalised scores of a suite's presets with intervals, beside published figures."""

    lines: tuple[Line, ...]

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to draw."""
        return bool(self.lines)

    def figure(self) -> Any:
        """See `Picture.figure`."""
        from matplotlib.figure import Figure

        heights = _heights([line.place for line in self.lines])
        figure = Figure(figsize=(7.2, 0.9 + 0.22 * (heights[-1] + 1)), layout="constrained")
        ax = figure.subplots()
        for value in (0.0, 1.0):
            ax.axvline(value, color="0.8", linewidth=0.8, zorder=0)
        for y, line in zip(heights, self.lines, strict=True):
            _draw_published(ax, y, line.published)
            _draw_scores(ax, y, line)
        for place in dict.fromkeys(line.place for line in self.lines):
            first = min(y for y, line in zip(heights, self.lines, strict=True) if line.place == place)
            ax.text(LEFT, first - 0.95, place, fontsize=8, fontweight="bold", va="center")
        ax.set_yticks(heights, [line.label for line in self.lines], fontsize=7.5)
        ax.set_ylim(heights[-1] + 0.8, -0.4)
        ax.set_xlim(LEFT - 0.02, RIGHT + 0.02)
        ax.set_xlabel("normalised return of the final policy")
        ax.tick_params(axis="y", length=0)
        ax.spines[["top", "right", "left"]].set_visible(False)
        return figure


def _heights(places: Sequence[str]) -> list[float]:
    """The vertical place of each line, with room for a heading where the environment changes."""
    found, y = [], 0.0
    for index, place in enumerate(places):
        y += 1.0 if index and places[index - 1] == place else 2.0
        found.append(y - 1.0)
    return found


def _draw_published(ax: Any, y: float, published: Iterable[Published]) -> None:
    for figure in published:
        at = min(max(figure.score, LEFT), RIGHT)
        ends = [min(max(figure.score + sign * figure.spread, LEFT), RIGHT) for sign in (-1, 1)]
        if figure.spread:
            ax.plot(ends, [y + 0.3, y + 0.3], color=THEIRS, linewidth=0.8, alpha=0.7)
        face = THEIRS if figure.is_alike else "white"
        ax.plot([at], [y + 0.3], "D", markersize=3.5, color=THEIRS, markerfacecolor=face, markeredgewidth=0.9)


def _draw_scores(ax: Any, y: float, line: Line) -> None:
    found = aggregate([line.scores])
    at = min(max(found.value, LEFT), RIGHT)
    if found.low is not None and found.high is not None:
        ends = [min(max(value, LEFT), RIGHT) for value in (found.low, found.high)]
        ax.plot(ends, [y, y], color=OURS, linewidth=2.2, alpha=0.45, solid_capstyle="butt")
    face, size = (OURS if line.is_reliable else "white"), (5.5 if line.judge == "final" else 3.5)
    ax.plot([at], [y], "o", markersize=size, color=OURS, markerfacecolor=face, markeredgewidth=1.2)


def score_picture(rows: Iterable[Row]) -> Scores:
    """The picture of a suite's rows, by environment."""
    lines = [line for row in rows if (line := _line(row)) is not None]
    return Scores(tuple(sorted(lines, key=lambda line: (line.place, line.label))))


def _line(row: Row) -> Line | None:
    task, scores = row.task, row.scores(row.judge)
    if task is None or not scores:
        return None
    scale, seeds = task.normalization, len(scores)
    size = scale.high - scale.low
    published = [
        Published(
            round(scale.score(figure.mean), 4),
            round(figure.std / size, 4) if figure.seeds > 1 else 0.0,
            row.other_task(figure) is None and figure.steps == row.steps,
        )
        for figure in row.figures
    ]
    label = f"{registry()[row.preset.algo].title}, {_short(task.total_timesteps)}, {seeds} seed{'s' * (seeds > 1)}"
    normalised = tuple(round(scale.score(score), 4) for score in scores)
    return Line(label, place(row), normalised, row.judge, row.state == "measured", tuple(published))


def place(row: Row) -> str:
    """The environment of a row, with its arguments and, in few words, its wrappers."""
    wrappers = row.config.to_dict()["wrappers"]
    names = [wrapper["name"] for wrapper in wrappers]
    bare = place_name(row.config.env_id, row.config.env_kwargs, [])
    if "AddRenderObservation" in names:
        return f"{bare} from pixels"
    return f"{bare} with {len(names)} wrappers" if len(names) > 2 else place_name(bare, {}, wrappers)


def _short(steps: int) -> str:
    return f"{steps / 1e6:g}M" if steps >= 1_000_000 else f"{steps / 1e3:g}k"


@dataclass(frozen=True)
class Cell:
    """One preset in the heat map."""

    algo: str
    place: str
    scores: tuple[float, ...]
    """Empty if it is not measured."""
    mark: str


@dataclass(frozen=True)
class HeatMap(Picture):
    """The normalised scores of all presets as they ship: algorithms and environments."""

    cells: tuple[Cell, ...]

    def figure(self) -> Any:
        """See `Picture.figure`."""
        import numpy as np
        from matplotlib.figure import Figure

        algos = sorted({cell.algo for cell in self.cells}, key=str.lower)
        places = list(dict.fromkeys(cell.place for cell in self.cells))
        values = np.full((len(algos), len(places)), np.nan)
        texts: dict[tuple[int, int], str] = {}
        for cell in self.cells:
            where = algos.index(cell.algo), places.index(cell.place)
            if cell.scores:
                values[where] = aggregate([cell.scores]).value
            texts[where] = f"{values[where]:.2f}{cell.mark}" if cell.scores else NOT_MEASURED
        figure = Figure(figsize=(1.6 + 0.46 * len(places), 2.0 + 0.27 * len(algos)), layout="constrained")
        ax = figure.subplots()
        image = ax.imshow(np.clip(values, 0, 1), cmap="viridis", vmin=0, vmax=1, aspect="auto")
        for (i, j), text in texts.items():
            color = "white" if values[i, j] < 0.6 else "black"
            ax.text(j, i, text, ha="center", va="center", fontsize=12 if text == NOT_MEASURED else 7, color=color)
        ax.set_xticks(range(len(places)), places, rotation=45, ha="right", rotation_mode="anchor", fontsize=7.5)
        ax.set_yticks(range(len(algos)), algos, fontsize=8)
        ax.set_xticks(np.arange(len(places) + 1) - 0.5, minor=True)
        ax.set_yticks(np.arange(len(algos) + 1) - 0.5, minor=True)
        ax.grid(which="minor", color="0.9", linewidth=0.5)
        ax.tick_params(which="both", length=0)
        ax.spines[:].set_visible(False)
        figure.colorbar(image, ax=ax, label="normalised return", fraction=0.025, pad=0.01)
        return figure


SUITE_ORDER = ("CartPole", "Acrobot", "MountainCar", "Pendulum", "LunarLander", "BipedalWalker")
"""Environments that come first in the heat map, simplest first; then the others by name."""


def heat_map(rows: Iterable[Row]) -> HeatMap:
    """The heat map of all rows of presets as they ship for one environment."""
    cells = [_cell(row) for row in rows if row.is_shipped and not row.preset.is_family]
    return HeatMap(tuple(sorted(cells, key=lambda cell: (_rank(cell.place), cell.place, cell.algo))))


def _rank(name: str) -> int:
    found = [index for index, start in enumerate(SUITE_ORDER) if name.startswith(start)]
    return found[0] if found else len(SUITE_ORDER) + name.startswith("ALE/")


def _cell(row: Row) -> Cell:
    scores: tuple[float, ...] = ()
    if row.task is not None:
        scores = tuple(round(row.task.normalization.score(score), 4) for score in row.scores())
    known: Mapping[str, str] = {"measured": ""}
    return Cell(registry()[row.preset.algo].title, place(row), scores, known.get(row.state, "*"))
