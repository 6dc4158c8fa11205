"""Recorded transitions: a dataset that samplers read like a replay buffer, opened when training needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from rl_training.contracts.arrays import AnyArray, ArrayObservation, BoolArray, map_observation
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.errors import CheckpointError
from rl_training.contracts.state import Stateful
from rl_training.data.dataset import Dataset, DatasetError
from rl_training.data.processing import returns_to_go
from rl_training.data.replay_buffer import Indices, RewardFn, Window
from rl_training.data.samplers import ReplaySampler

ActionFn = Callable[[AnyArray], AnyArray]


class PolicyActions:
    """The action column of a dataset, as policies store actions: converted when rows are read."""

    def __init__(self, actions: AnyArray, to_policy: ActionFn) -> None:
        self.actions, self.to_policy = actions, to_policy

    def take(self, index: Indices, axis: int = 0) -> AnyArray:
        """Rows of the column."""
        return self.to_policy(self.actions.take(index, axis=axis))


class RecordedTransitions(Stateful):
    """The rows of a dataset with the reading side of `ReplayBuffer`: columns by index, windows, episodes.

    Columns stay where they are, in memory or in memory-mapped files. The state is the hash of the data, so a run that
    is resumed with other data is refused.
    """

    num_envs: ClassVar[int] = 1
    oldest: ClassVar[int] = 0
    num_invalid: ClassVar[int] = 0
    is_stacked: ClassVar[bool] = False
    transient: ClassVar[tuple[str, ...]] = ("_return_to_go",)  # computed from the data when it is first needed

    def __init__(self, dataset: Dataset, to_policy: ActionFn) -> None:
        self.dataset = dataset
        self.added = self.num_slots = self.num_rows = self.num_transitions = dataset.num_transitions
        self.action = PolicyActions(dataset.actions, to_policy)
        self.reward = np.asarray(dataset.rewards, np.float32)
        self.terminated = np.asarray(dataset.terminated, np.bool_)
        self._is_end = self.terminated | np.asarray(dataset.truncated, np.bool_)
        self._return_to_go: AnyArray | None = None

    @property
    def valid(self) -> BoolArray:
        """All rows are transitions."""
        return np.ones(self.num_slots, np.bool_)

    def everything(self) -> Indices:
        """Indices of all rows."""
        return np.arange(self.num_slots)

    def pick(self, positions: Indices) -> Indices:
        """See `ReplayBuffer.pick`."""
        return positions

    def observations(self, index: Indices) -> ArrayObservation:
        """Observations before these steps."""
        return map_observation(lambda column: _rows(column, index), self.dataset.observations)

    def next_observations(self, index: Indices) -> ArrayObservation:
        """True next observations of these steps, also where an episode ended."""
        return map_observation(lambda column: _rows(column, index), self.dataset.next_observations)

    def window(self, index: Indices, num_steps: int) -> Window:
        """Up to n steps starting at each transition, ending early at the end of its episode."""
        steps = np.minimum(index[:, None] + np.arange(num_steps), self.num_slots - 1)
        used = np.ones(steps.shape, np.bool_)
        np.logical_and.accumulate(~self._is_end.take(steps[:, :-1]), axis=1, out=used[:, 1:])
        return Window(steps, used)

    def column(self, name: str, index: Indices, last: Indices, gamma: float, scale: RewardFn) -> AnyArray:
        """See `ReplayBuffer.column`; further names are the extra columns of the dataset."""
        if name == "return_to_go":
            if self._return_to_go is None:
                self._return_to_go = returns_to_go(self.dataset, gamma)
            return self._return_to_go.take(index)
        if name == "next_action":
            return self.action.take(last + ~self._is_end.take(last))
        if name not in self.dataset.extras:
            known = ", ".join(["return_to_go", "next_action", *self.dataset.extras])
            raise DatasetError(f"the algorithm needs the column '{name}', and the dataset has {known}")
        return _rows(self.dataset.extras[name], index)

    def times(self, index: Indices) -> Indices:
        """Times of these steps: their rows."""
        return index

    def episodes(self, index: Indices) -> tuple[Indices, Indices]:
        """First and last row of the episode that each step belongs to."""
        number = self.dataset.episode_of(index)
        return self.dataset.episode_starts[number], self.dataset.episode_ends[number]

    def at(self, times: Indices, envs: Indices) -> Indices:
        """See `ReplayBuffer.at`."""
        return times

    def state_dict(self) -> dict[str, Any]:
        """The hash of the data; the data itself stays in its files."""
        return {"hash": self.dataset.hash}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to go on with other data."""
        if state.get("hash") != self.dataset.hash:
            raise CheckpointError(
                "the dataset is not the one that this run was trained with: its content (rewards, actions, "
                "observations, ends) differs. Give the original file, or start a new run with init_from."
            )


def _rows(column: Any, index: Indices) -> AnyArray:
    """Rows of a column, real numbers as float32."""
    rows: AnyArray = column.take(index, axis=0)
    return rows.astype(np.float32) if rows.dtype == np.float64 else rows


class DatasetSampler(Stateful):
    """Samples a dataset that is opened when training needs it, so that acting and evaluation do not.

    `open` reads the data and returns its sampler. A state that is loaded before that is kept until then.
    """

    def __init__(self, open_data: Callable[[], ReplaySampler]) -> None:
        self.open_data = open_data
        self._sampler: ReplaySampler | None = None
        self._state: dict[str, Any] | None = None

    def opened(self) -> ReplaySampler:
        """The sampler over the data; the first call opens it."""
        if self._sampler is None:
            sampler = self.open_data()
            if self._state is not None:
                sampler.load_state_dict(self._state)
            self._sampler, self._state = sampler, None
        return self._sampler

    @property
    def ready(self) -> bool:
        """A dataset always has rows."""
        return True

    def sample(self, batch_size: int, progress: Progress) -> TransitionBatch:
        """See `Sampler.sample`."""
        return self.opened().sample(batch_size, progress)

    def update_priorities(self, indices: Any, priorities: Any) -> None:
        """See `Sampler.update_priorities`."""
        self.opened().update_priorities(indices, priorities)

    def state_dict(self) -> dict[str, Any] | None:  # type: ignore[override]
        """See `Stateful.state_dict`; None if nothing was sampled yet."""
        return self._state if self._sampler is None else self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """See `Stateful.load_state_dict`; None leaves it as it is."""
        self._state = state
        if self._sampler is not None and state is not None:
            self._sampler.load_state_dict(state)
            self._state = None
