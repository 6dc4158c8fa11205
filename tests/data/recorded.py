"""Small recorded datasets with numbers that can be computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from rl_training.data.dataset import Dataset

LENGTHS = (3, 1, 4)
REWARDS = (1.0, 2.0, 4.0, 10.0, 1.0, 1.0, 1.0, 1.0)


def three_episodes(**changes: Any) -> Dataset:
    """Episodes of 3, 1 and 4 steps; the first is terminated, the others are truncated. Observations count from 0.

    The observation of row t is [t, -t]; the last observations are [100, -100], [101, -101] and [102, -102].
    """
    rows = np.arange(8, dtype=np.float32)
    finals = np.arange(100, 103, dtype=np.float32)
    columns: dict[str, Any] = {
        "observations": np.stack([rows, -rows], axis=1),
        "actions": np.array([0, 1, 2, 0, 1, 2, 0, 1]),
        "rewards": np.array(REWARDS),
        "terminated": np.array([0, 0, 1, 0, 0, 0, 0, 0], bool),
        "truncated": np.array([0, 0, 0, 1, 0, 0, 0, 1], bool),
        "final_observations": np.stack([finals, -finals], axis=1),
        "observation_space": spaces.Box(-200, 200, (2,)),
        "action_space": spaces.Discrete(3),
    }
    return Dataset(**{**columns, **changes})


def small_columns(dataset: Dataset) -> dict[str, np.ndarray]:
    """The columns of a dataset by their names in npz files."""
    return {
        "observations": np.asarray(dataset.observations),
        "actions": np.asarray(dataset.actions),
        "rewards": np.asarray(dataset.rewards),
        "next_observations": np.asarray(dataset.next_observations),
        "terminations": np.asarray(dataset.terminated),
        "truncations": np.asarray(dataset.truncated),
        "episode_id": dataset.episode_of(np.arange(len(dataset))),
    }


def any_space(space: spaces.Space[Any], action_space: spaces.Space[Any], lengths: tuple[int, ...] = (4, 2)) -> Dataset:
    """A dataset of samples from two spaces."""
    space.seed(0)
    action_space.seed(0)
    total, count = sum(lengths), len(lengths)
    ends = np.zeros(total, bool)
    ends[np.cumsum(lengths) - 1] = True
    terminated = ends & (np.arange(total) < lengths[0])

    def samples(part: spaces.Space[Any], number: int) -> Any:
        if isinstance(part, spaces.Dict):
            return {key: samples(inner, number) for key, inner in part.spaces.items()}
        return np.array([part.sample() for _ in range(number)])

    return Dataset(
        observations=samples(space, total),
        actions=samples(action_space, total),
        rewards=np.arange(total, dtype=np.float32),
        terminated=terminated,
        truncated=ends & ~terminated,
        final_observations=samples(space, count),
        observation_space=space,
        action_space=action_space,
    )
