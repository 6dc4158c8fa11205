"""Statistics of a recorded dataset, computed in pieces so that it may be larger than memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray
from rl_training.data.dataset import ColumnStatistics, Dataset, DatasetStatistics, chunks, parts_of

NUM_ACTION_BINS = 10
NUM_STATE_BINS, MAX_STATE_DIMS, MAX_STATE_ROWS = 8, 16, 50_000


def measure(dataset: Dataset) -> DatasetStatistics:
    """The statistics of a dataset."""
    returns, lengths = dataset.episode_returns, dataset.episode_lengths
    rewards, actions = column_statistics(dataset.rewards), column_statistics(dataset.actions)
    observations = {name: column_statistics(column) for name, column in parts_of(dataset.observations).items()}
    return DatasetStatistics(
        num_episodes=dataset.num_episodes,
        num_transitions=dataset.num_transitions,
        num_terminated=int(np.count_nonzero(dataset.terminated)),
        num_truncated=int(np.count_nonzero(np.asarray(dataset.truncated) & ~np.asarray(dataset.terminated))),
        return_mean=float(returns.mean()),
        return_std=float(returns.std()),
        return_min=float(returns.min()),
        return_median=float(np.median(returns)),
        return_max=float(returns.max()),
        length_mean=float(lengths.mean()),
        length_min=int(lengths.min()),
        length_max=int(lengths.max()),
        reward_min=float(rewards.low),
        reward_max=float(rewards.high),
        actions=actions,
        observations=observations,
        action_coverage=action_coverage(dataset, actions),
        state_coverage=state_coverage(dataset, observations),
    )


def column_statistics(column: Any) -> ColumnStatistics:
    """Range, mean and standard deviation of a column; NaN is left out."""
    low = np.full(column.shape[1:], np.inf)
    high = np.full(column.shape[1:], -np.inf)
    total, squares, count = np.zeros(low.shape), np.zeros(low.shape), np.zeros(low.shape)
    shift: AnyArray | None = None
    for _, chunk in chunks(column):
        values = chunk.astype(np.float64)
        known = np.isfinite(values)
        if shift is None:  # sums of squares around a value that is near the mean lose no digits
            shift = np.where(known, values, 0).mean(axis=0)
        low = np.minimum(low, np.where(known, values, np.inf).min(axis=0))
        high = np.maximum(high, np.where(known, values, -np.inf).max(axis=0))
        around = np.where(known, values - shift, 0)
        total, squares, count = total + around.sum(0), squares + (around**2).sum(0), count + known.sum(0)
    assert shift is not None
    count = np.maximum(count, 1)
    variance = np.maximum(squares / count - (total / count) ** 2, 0)
    return ColumnStatistics(low, high, shift + total / count, np.sqrt(variance))


def action_coverage(dataset: Dataset, ranges: ColumnStatistics) -> float:
    """See `DatasetStatistics.action_coverage`."""
    space = dataset.action_space
    if isinstance(space, spaces.Box):
        low = np.where(np.isfinite(space.low), space.low, ranges.low).reshape(-1).astype(np.float64)
        high = np.where(np.isfinite(space.high), space.high, ranges.high).reshape(-1).astype(np.float64)
        bins = np.full(low.shape, NUM_ACTION_BINS)
    elif isinstance(space, spaces.Discrete):
        low, bins = np.array([float(space.start)]), np.array([int(space.n)])
        high = low + bins
    elif isinstance(space, spaces.MultiDiscrete):
        low, bins = space.start.reshape(-1).astype(np.float64), space.nvec.reshape(-1)
        high = low + bins
    else:
        low, bins = np.zeros(int(np.prod(space.shape or (1,)))), np.full(int(np.prod(space.shape or (1,))), 2)
        high = low + bins
    met = [np.zeros(int(number), bool) for number in bins]
    for _, chunk in chunks(dataset.actions):
        cells = _cells(chunk.reshape(len(chunk), -1), low, high, bins)
        for dimension, seen in enumerate(met):
            seen[np.unique(cells[:, dimension])] = True
    return float(np.mean([seen.mean() for seen in met]))


def state_coverage(dataset: Dataset, ranges: dict[str, ColumnStatistics]) -> float:
    """See `DatasetStatistics.state_coverage`."""
    rows = np.unique(np.linspace(0, dataset.num_transitions - 1, MAX_STATE_ROWS).astype(np.int64))
    columns = []
    for name, column in parts_of(dataset.observations).items():
        values = np.asarray(column[rows]).reshape(len(rows), -1)[:, :MAX_STATE_DIMS]
        low, high = (bound.reshape(-1)[:MAX_STATE_DIMS] for bound in (ranges[name].low, ranges[name].high))
        columns.append(_cells(values, low, high, np.full(values.shape[1], NUM_STATE_BINS)))
    cells = np.concatenate(columns, axis=1)[:, :MAX_STATE_DIMS]
    codes = cells @ (NUM_STATE_BINS ** np.arange(cells.shape[1]))
    return len(np.unique(codes)) / len(codes)


def _cells(values: AnyArray, low: AnyArray, high: AnyArray, bins: AnyArray) -> AnyArray:
    """The bin [B, D] of each value; values outside of the bounds count to the first and last bins."""
    width = np.where(high > low, high - low, 1.0)
    share = np.nan_to_num((values.astype(np.float64) - low) / width, posinf=1.0, neginf=0.0)
    cells: AnyArray = np.clip(share * bins, 0, bins - 1).astype(np.int64)
    return cells
