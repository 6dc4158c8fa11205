"""A picture of a recorded dataset: returns and lengths of its episodes, and the range of each action."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from rl_training.contracts.errors import ConfigError, MissingExtraError
from rl_training.data.dataset import Dataset, DatasetError
from rl_training.reports.plotting import plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = (".png", ".svg", ".pdf")
MAX_ACTIONS = 24
"""Dimensions of actions that are drawn."""
MAX_ROWS = 100_000
"""Rows that are looked at for the distribution of actions."""
BLUE, ORANGE = "#4477aa", "#ee7733"


def require_picture(path: Path) -> None:
    """Raise an error before any work if the picture could not be drawn: its suffix, or matplotlib is missing."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"output: must end in {', '.join(SUFFIXES)}, got '{path}'")
    if find_spec("matplotlib") is None:
        raise MissingExtraError("plotting a dataset", "plot")


def draw_dataset(dataset: Dataset, title: str, path: Path) -> Path:
    """Draw a dataset into an image file."""
    require_picture(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), dpi=150, layout="constrained")
    returns, lengths, actions = figure.subplots(1, 3)
    _histogram(returns, dataset.episode_returns, "return of an episode")
    _lengths(lengths, dataset)
    _actions(actions, dataset)
    about = f"{len(dataset):,} transitions, {dataset.num_episodes:,} episodes"
    about += f" of {dataset.metadata.env_id}" * bool(dataset.metadata.env_id)
    figure.suptitle(plain(f"{title.rstrip('/').rpartition('/')[2]}: {about}"), fontsize=10)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise DatasetError(f"{path}: could not be written: {error.strerror or error}") from error
    return path


def _histogram(ax: Axes, values: NDArray[Any], label: str) -> None:
    known = values[np.isfinite(values)]
    ax.hist(known, bins=_edges(known), color=BLUE)
    if len(known):
        ax.axvline(float(known.mean()), color=ORANGE, linewidth=1.5, label=f"mean {known.mean():,.1f}")
        _legend(ax)
    _finish(ax, label, "episodes")


def _edges(values: NDArray[Any]) -> list[float]:
    """Edges of up to 40 bins; values that are all equal get one narrow bar in the middle."""
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)
    if low == high:
        width = 0.02 * max(1.0, abs(low))
        return [low - 10 * width, low - width, low + width, low + 10 * width]
    return [float(edge) for edge in np.linspace(low, high, min(40, len(np.unique(values))) + 1)]


def _legend(ax: Axes) -> None:
    """A legend below the axes, where it hides nothing."""
    ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)


def _lengths(ax: Axes, dataset: Dataset) -> None:
    from matplotlib.ticker import MaxNLocator

    lengths = dataset.episode_lengths
    terminated = np.asarray(dataset.terminated)[dataset.episode_ends]
    kinds = [lengths[terminated], lengths[~terminated]]
    labels = [f"terminated ({terminated.sum():,})", f"truncated ({(~terminated).sum():,})"]
    ax.hist(kinds, bins=_edges(lengths), stacked=True, color=[BLUE, ORANGE], label=labels)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _legend(ax)
    _finish(ax, "steps of an episode", "episodes")


def _actions(ax: Axes, dataset: Dataset) -> None:
    rows = np.unique(np.linspace(0, len(dataset) - 1, MAX_ROWS).astype(np.int64))
    actions, space = np.asarray(dataset.actions[rows]), dataset.action_space
    flat = actions.reshape(len(actions), -1)[:, :MAX_ACTIONS]
    if isinstance(space, spaces.Discrete):
        values, counts = np.unique(flat, return_counts=True)
        ax.bar(values, counts / counts.sum(), color=BLUE)
        ax.set_xticks(np.arange(space.start, space.start + min(space.n, MAX_ACTIONS)))
        _finish(ax, "action", "share of the steps")
        return
    places = np.arange(flat.shape[1])
    points = np.nanpercentile(np.where(np.isfinite(flat), flat, np.nan), [0, 5, 25, 50, 75, 95, 100], axis=0)
    ax.vlines(places, points[0], points[6], color=BLUE, alpha=0.35, linewidth=1.5, label="lowest to highest")
    ax.vlines(places, points[1], points[5], color=BLUE, alpha=0.6, linewidth=5, label="5 to 95 %")
    ax.vlines(places, points[2], points[4], color=BLUE, linewidth=10, label="25 to 75 %")
    ax.plot(places, points[3], "_", color="white", markersize=9)
    if isinstance(space, spaces.Box) and dataset.metadata.spaces_known:
        for bound in (space.low, space.high):
            edge = bound.reshape(-1)[:MAX_ACTIONS].astype(np.float64)
            shown = np.where(np.isfinite(edge), edge, np.nan)
            ax.plot(places, shown, "_", color=ORANGE, markersize=14, label=None if bound is space.low else "bounds")
    ax.set_xticks(places)
    ax.set_xlim(-0.8, len(places) - 0.2)
    ax.margins(y=0.12)
    _legend(ax)
    _finish(ax, "dimension of the action", "value")


def _finish(ax: Axes, x_label: str, y_label: str) -> None:
    ax.set_xlabel(x_label, fontsize=9)
    ax.set_ylabel(y_label, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
