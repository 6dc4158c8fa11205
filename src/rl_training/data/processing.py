"""Processing of recorded datasets before training: filters, splits, rewards, further columns, normalisation.

`process` never copies observations. Rewards that are large are computed when they are indexed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rl_training.contracts.arrays import AnyArray
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.settings import documented, range_problem, setting
from rl_training.data.dataset import SMALL_BYTES, Dataset, DatasetError, Indices, LazyColumn, chunks, parts_of
from rl_training.data.normalize import ObservationNormalizer, RunningMoments

RewardPreset = Literal["none", "standardize", "iql_locomotion", "sparse_maze"]
ExtraColumn = Literal["return_to_go", "n_step_return", "next_action"]
Float64 = npt.NDArray[np.float64]

MIN_VARIANCE = 1e-6
"""Smallest variance of an observation's component: components that hardly change are not blown up."""


@documented
@dataclass
class DataConfig:
    """How a recorded dataset is processed before training.

    Order: filters by length and return, the best share of what is left, down-sampling, split, rewards, further columns.
    Rewards become `(preset(reward) + reward_shift) * reward_scale`, then they are clipped. Numbers that come from the
    data (returns, means, standard deviations) come from the training part only.
    """

    min_length: int = setting(1, "Leave out episodes that are shorter than this many steps.", ge=1)
    min_return: float | None = setting(None, "Leave out episodes with a lower return.")
    max_return: float | None = setting(None, "Leave out episodes with a higher return.")
    best_fraction: float = setting(1.0, "Keep this share of the episodes, those with the highest returns.", gt=0, le=1)
    sample_fraction: float = setting(1.0, "Keep this share of the episodes, chosen at random by seed.", gt=0, le=1)
    validation_fraction: float = setting(
        0.0, "Hold out this share of the episodes, chosen at random by seed, for validation.", ge=0, lt=1
    )
    reward_preset: RewardPreset = setting(
        "none",
        "Change of rewards: 'standardize' to mean 0 and standard deviation 1; 'iql_locomotion' times 1000 / (highest - "
        "lowest return); 'sparse_maze' minus 1 (both from the IQL paper).",
    )
    reward_shift: float = setting(0.0, "Is added to rewards.")
    reward_scale: float = setting(1.0, "Rewards are multiplied by this.")
    reward_clip: float | None = setting(None, "Clip rewards to [-x, x].", gt=0)
    columns: tuple[ExtraColumn, ...] = setting(
        (),
        "Further columns in `extras`: return_to_go, n_step_return (with n_step_discount), next_action.",
    )
    gamma: float = setting(1.0, "Discount factor in return_to_go and n_step_return.", ge=0, le=1)
    n_step: int = setting(1, "Rewards in n_step_return.", ge=1, le=10_000)
    seed: int = setting(0, "Seed of down-sampling and of the split.", ge=0)

    def problems(self) -> list[str]:
        """Combinations that cannot work."""
        found = []
        if None not in (self.min_return, self.max_return) and cast(float, self.min_return) > cast(
            float, self.max_return
        ):
            found.append(f"min_return: must be at most max_return, got {self.min_return} and {self.max_return}")
        if self.reward_scale == 0:
            found.append("reward_scale: must not be 0, which makes all rewards equal")
        if self.n_step > 1 and "n_step_return" not in self.columns:
            found.append(f"n_step: is for the column n_step_return, which is not in columns {list(self.columns)}")
        return found


class Processed(NamedTuple):
    """What `process` returns."""

    train: Dataset
    validation: Dataset | None
    change: RewardChange
    """How rewards were changed."""


def process(dataset: Dataset, config: DataConfig) -> Processed:
    """The training part, the validation part (or None), and how rewards were changed.

    Example:
        train, validation, change = process(dataset, DataConfig(best_fraction=0.1))
    """
    _check(config)
    chosen = choose_episodes(dataset, config)
    train = dataset if len(chosen) == dataset.num_episodes else dataset.select(chosen)
    validation: Dataset | None = None
    if config.validation_fraction:
        train, validation = train.split(config.validation_fraction, np.random.default_rng([config.seed, 1]))
    change = reward_change(train, config)
    train = with_columns(_with_rewards(train, change), config)
    if validation is not None:
        validation = with_columns(_with_rewards(validation, change), config)
    return Processed(train, validation, change)


def _check(config: DataConfig) -> None:
    problems = config.problems()
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        if isinstance(value, (int, float)) and (problem := range_problem(entry, value)):
            problems.append(f"{entry.name}: {problem}, got {value}")
    if problems:
        raise ConfigError([f"data > {problem}" for problem in problems])


# Episodes


def choose_episodes(dataset: Dataset, config: DataConfig) -> Indices:
    """Numbers of the episodes that are left after filters and down-sampling, in order."""
    returns, lengths = dataset.episode_returns, dataset.episode_lengths
    keep = lengths >= config.min_length
    if config.min_return is not None:
        keep &= returns >= config.min_return
    if config.max_return is not None:
        keep &= returns <= config.max_return
    chosen = np.flatnonzero(keep)
    if not len(chosen):
        raise DatasetError(
            f"no episode is left: of {dataset.num_episodes}, the longest has {lengths.max()} steps (min_length "
            f"{config.min_length}), returns are from {returns.min():.6g} to {returns.max():.6g} (min_return "
            f"{config.min_return}, max_return {config.max_return})"
        )
    if config.best_fraction < 1:
        order = np.argsort(-returns[chosen], kind="stable")
        chosen = np.sort(chosen[order[: _share(config.best_fraction, len(chosen))]])
    if config.sample_fraction < 1:
        rng = np.random.default_rng([config.seed, 0])
        chosen = np.sort(rng.permutation(chosen)[: _share(config.sample_fraction, len(chosen))])
    return chosen.astype(np.int64, copy=False)


def _share(fraction: float, count: int) -> int:
    return max(1, round(fraction * count))


# Rewards


class RewardChange(NamedTuple):
    """Rewards become `clip(factor * reward + offset)`."""

    factor: float = 1.0
    offset: float = 0.0
    clip: float | None = None

    def __call__(self, rewards: AnyArray) -> AnyArray:
        """Changed rewards, of the same dtype."""
        changed = rewards.astype(np.float64) * self.factor + self.offset
        if self.clip is not None:
            changed = np.clip(changed, -self.clip, self.clip)
        return changed.astype(rewards.dtype)


class ChangedRewards(LazyColumn):
    """Rewards that are changed when they are indexed."""

    def __init__(self, rewards: Any, change: RewardChange) -> None:
        super().__init__(rewards.shape, rewards.dtype)
        self._rewards, self._change = rewards, change

    def _rows(self, rows: Indices) -> AnyArray:
        return self._change(np.asarray(self._rewards[rows]))


def reward_change(train: Dataset, config: DataConfig) -> RewardChange:
    """How the settings change rewards, with the numbers of the training part."""
    factor, offset = _preset(train, config.reward_preset)
    scale = config.reward_scale
    return RewardChange(factor * scale, (offset + config.reward_shift) * scale, config.reward_clip)


def _preset(train: Dataset, preset: RewardPreset) -> tuple[float, float]:
    if preset == "sparse_maze":
        return 1.0, -1.0
    if preset == "iql_locomotion":
        low, high = float(train.episode_returns.min()), float(train.episode_returns.max())
        if not high > low:
            raise DatasetError(
                f"reward_preset 'iql_locomotion' divides by the range of returns, and all {train.num_episodes} "
                f"episodes have {low:.6g}; use 'none' or 'standardize'"
            )
        return 1000.0 / (high - low), 0.0
    if preset == "standardize":
        moments = _moments(train.rewards, "rewards")
        if moments.var <= 0:
            raise DatasetError(f"reward_preset 'standardize': all rewards are {float(moments.mean):.6g}; use 'none'")
        factor = 1.0 / float(np.sqrt(moments.var))
        return factor, -float(moments.mean) * factor
    return 1.0, 0.0


def _with_rewards(dataset: Dataset, change: RewardChange) -> Dataset:
    if change == RewardChange():
        return dataset
    rewards: Any = ChangedRewards(dataset.rewards, change)
    if rewards.nbytes <= SMALL_BYTES:
        rewards = rewards[:]
    return dataclasses.replace(dataset, rewards=rewards)


def _moments(column: Any, name: str) -> RunningMoments:
    moments = RunningMoments(tuple(column.shape[1:]))
    for _, chunk in chunks(column):
        moments.update(chunk)
    if not (np.isfinite(moments.mean).all() and np.isfinite(moments.var).all()):
        raise DatasetError(f"{name}: NaN or infinity in the data; `rl-training data check` counts them")
    return moments


# Observations


def fit_normalizer(dataset: Dataset, clip: float = 10.0) -> ObservationNormalizer:
    """A normaliser with mean and variance of a dataset's real-valued observations."""
    normalizer = ObservationNormalizer(dataset.observation_space, clip)
    columns = parts_of(dataset.observations)
    for key in normalizer.moments:
        name = f"observations.{key}" if key else "observations"
        moments = _moments(columns[name], name)
        moments.var[...] = np.maximum(moments.var, MIN_VARIANCE)
        normalizer.moments[key] = moments
    return normalizer


# Further columns


class NextActions(LazyColumn):
    """The action that followed in the same episode; at an episode's end, where there is none, its last action again."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset.actions.shape, dataset.actions.dtype)
        self._dataset = dataset

    def _rows(self, rows: Indices) -> AnyArray:
        data = self._dataset
        return np.asarray(data.actions[np.minimum(rows + 1, data.episode_ends[data.episode_of(rows)])])


class NStepReturns(NamedTuple):
    """Discounted sums of up to n rewards; the bootstrap value is that of the next observation of `last_rows`."""

    returns: npt.NDArray[np.float32]
    discounts: npt.NDArray[np.float32]
    """0 if the episode terminated within the n steps, otherwise gamma to the number of rewards."""
    last_rows: Indices


def returns_to_go(dataset: Dataset, gamma: float = 1.0) -> npt.NDArray[np.float32]:
    """Discounted sum of the rewards from each row to the end of its episode; nothing is added after a truncation.

    Example:
        An episode with rewards 1, 2, 4 and gamma 0.5 has 3, 4, 4.
    """
    found: Float64 = np.array(dataset.rewards, np.float64)
    order = np.argsort(-dataset.episode_lengths, kind="stable")
    ends, lengths = dataset.episode_ends[order], dataset.episode_lengths[order]
    left = len(ends)
    for back in range(1, int(lengths[0])):
        while lengths[left - 1] <= back:
            left -= 1
        rows = ends[:left] - back
        found[rows] += gamma * found[rows + 1]
    return found.astype(np.float32)


def n_step_returns(dataset: Dataset, num_steps: int, gamma: float) -> NStepReturns:
    """n-step returns of all rows; fewer rewards count where the episode ends earlier.

    Example:
        A terminated episode with rewards 1, 2, 4, gamma 0.5 and n = 2 has the returns 2, 4, 4 and the discounts
        0.25, 0, 0.
    """
    rewards: Float64 = np.asarray(dataset.rewards, np.float64)
    rows = np.arange(len(rewards))
    ends = np.repeat(dataset.episode_ends, dataset.episode_lengths)
    returns = np.zeros(len(rewards))
    for step in range(min(num_steps, int(dataset.episode_lengths.max()))):
        inside = rows + step <= ends
        returns[inside] += gamma**step * rewards[rows[inside] + step]
    last = np.minimum(rows + num_steps - 1, ends)
    discounts = np.where(np.asarray(dataset.terminated)[last], 0.0, float(gamma) ** (last - rows + 1))
    return NStepReturns(returns.astype(np.float32), discounts.astype(np.float32), last)


def with_columns(dataset: Dataset, config: DataConfig) -> Dataset:
    """The dataset with the `extras` columns that the settings name, computed from its rewards as they are."""
    extras = dict(dataset.extras)
    for name in config.columns:
        if name == "return_to_go":
            extras[name] = returns_to_go(dataset, config.gamma)
        elif name == "next_action":
            extras[name] = cast(AnyArray, NextActions(dataset))
        else:
            found = n_step_returns(dataset, config.n_step, config.gamma)
            extras[name], extras["n_step_discount"] = found.returns, found.discounts
    return dataclasses.replace(dataset, extras=extras) if config.columns else dataset
