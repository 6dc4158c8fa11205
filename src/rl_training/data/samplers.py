"""Replay sampling: choice of transitions (uniform, prioritised), n-step returns, hindsight, and mixed batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_training.contracts.arrays import AnyArray, ArrayObservation, map_observation
from rl_training.contracts.batches import Observation, Progress, Step, TransitionBatch
from rl_training.contracts.errors import CheckpointError, ConfigError
from rl_training.contracts.plugins import SAMPLERS, FactoryT
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.state import Stateful
from rl_training.data.hindsight import Goals, Hindsight
from rl_training.data.normalize import ObservationNormalizer
from rl_training.data.replay_buffer import Indices, ReplayBuffer
from rl_training.data.sum_tree import SumTree

Float32 = npt.NDArray[np.float32]


class RewardScale(Protocol):
    """Changes rewards when they are sampled, such as `RewardNormalizer`."""

    def scale(self, reward: AnyArray) -> AnyArray:
        """Changed rewards of any shape."""
        ...


class TransitionSource(Protocol):
    """Samples batches of transitions."""

    @property
    def ready(self) -> bool:
        """Whether there is anything to sample."""
        ...

    def sample(self, batch_size: int, progress: Progress) -> TransitionBatch:
        """Draw transitions."""
        ...

    def update_priorities(self, indices: Tensor, priorities: Tensor | None) -> None:
        """Update priorities with the errors that an update computed for the last batch."""
        ...

    def state_dict(self) -> dict[str, Any] | None:
        """See `Stateful.state_dict`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stateful.load_state_dict`."""
        ...


class Sampler(TransitionSource, Protocol):
    """Also stores the steps of a collector."""

    def add(self, step: Step) -> None:
        """Add one step of all environments."""
        ...

    @property
    def buffer(self) -> ReplayBuffer:
        """The buffer that new steps are added to."""
        ...

    @property
    def buffers(self) -> list[ReplayBuffer]:
        """All buffers that new steps are added to."""
        ...

    def replace(self, buffer: ReplayBuffer) -> None:
        """Continue with another buffer of the same kind."""
        ...


class Indexer(Protocol):
    """Chooses transitions of a buffer."""

    by_priority: ClassVar[bool]
    """Whether it uses the errors that updates compute."""

    def added(self, buffer: ReplayBuffer) -> None:
        """Called when the buffer has a new row."""
        ...

    def loaded(self, buffer: ReplayBuffer) -> None:
        """Called when the buffer's contents were replaced."""
        ...

    def check(self, buffer: ReplayBuffer) -> None:
        """Refuse a restored state that does not match this buffer."""
        ...

    def draw(self, buffer: ReplayBuffer, batch_size: int, progress: Progress) -> tuple[Indices, Float32]:
        """Transitions [B] and their importance weights [B]."""
        ...

    def update(self, indices: Indices, priorities: AnyArray) -> None:
        """Set new errors of transitions."""
        ...


def register_sampler(name: str) -> Callable[[FactoryT], FactoryT]:
    """Register a sampler under a name for the `sampler` setting.

    The class or function is called with the `ReplayBuffer`, a random generator of its own, and `sampler_kwargs` as
    keyword arguments. It returns an `Indexer`; the easiest way is to derive a class from `UniformIndexer`.

    Example:
        >>> @register_sampler("halves")
        ... class Halves(UniformIndexer):
        ...     def __init__(self, buffer, rng, share=0.5):
        ...         super().__init__(rng)
        ...         self.share = share
    """
    return SAMPLERS.register(name)


def make_indexer(name: str, buffer: ReplayBuffer, rng: np.random.Generator, kwargs: Mapping[str, Any]) -> Indexer:
    """Create the registered sampler with that name for a buffer; an incomplete `Indexer` is refused."""
    indexer: Indexer = SAMPLERS.make(name, (buffer, rng), kwargs, "sampler_kwargs")
    wanted = ("by_priority", "added", "loaded", "check", "draw", "update", "state_dict", "load_state_dict")
    if missing := [part for part in wanted if not hasattr(indexer, part)]:
        raise ConfigError(
            f"sampler: '{name}' must return an Indexer, such as one derived from UniformIndexer; "
            f"{type(indexer).__name__} has no {', '.join(missing)}"
        )
    indexer.loaded(buffer)
    return indexer


class UniformIndexer(Stateful):
    """Uniform sampling with replacement."""

    by_priority: ClassVar[bool] = False

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def draw(self, buffer: ReplayBuffer, batch_size: int, progress: Progress) -> tuple[Indices, Float32]:
        """See `Indexer.draw`."""
        num_slots = (buffer.added - buffer.oldest) * buffer.num_envs
        index = buffer.pick(self.rng.integers(num_slots, size=batch_size))
        if buffer.num_invalid:
            while (wrong := np.flatnonzero(~buffer.valid.take(index))).size:
                index[wrong] = buffer.pick(self.rng.integers(num_slots, size=wrong.size))
        return index, np.ones(batch_size, np.float32)

    def added(self, buffer: ReplayBuffer) -> None:
        """See `Indexer.added`."""

    def loaded(self, buffer: ReplayBuffer) -> None:
        """See `Indexer.loaded`."""

    def check(self, buffer: ReplayBuffer) -> None:
        """See `Indexer.check`."""

    def update(self, indices: Indices, priorities: AnyArray) -> None:
        """See `Indexer.update`."""


class PrioritizedIndexer(Stateful):
    """Proportional prioritised replay (Schaul et al. 2016): P(i) = p_i^alpha / sum_k p_k^alpha, p_i = |error_i| + eps.

    Draws are stratified, one from each of B equal parts of the total. The importance weights (n P(i))^-beta are divided
    by their maximum in the batch. New transitions get the largest priority so far, to be sampled at least once.
    """

    by_priority: ClassVar[bool] = True
    eps: ClassVar[float] = 1e-6

    def __init__(
        self, buffer: ReplayBuffer, rng: np.random.Generator, *, alpha: float = 0.6, beta: ScheduleOrFloat = 0.4
    ) -> None:
        self.rng = rng
        self.alpha, self.beta = alpha, beta
        self.tree = SumTree(buffer.num_slots)
        self.largest = np.ones(())

    def added(self, buffer: ReplayBuffer) -> None:
        """See `Indexer.added`."""
        ages = np.array([buffer.added - 1, buffer.added])  # the row after the newest is not a transition
        items = buffer.rows(ages)
        values = np.zeros(items.size)
        values[: buffer.num_envs] = buffer.valid[items[: buffer.num_envs]] * self.largest
        if buffer.added > buffer.num_rows + buffer.begin:  # the row that has just left the buffer
            gone = buffer.rows(np.array([buffer.oldest - 1]))
            items, values = np.concatenate([gone, items]), np.concatenate([np.zeros(gone.size), values])
        self.tree.set(items, values)

    def loaded(self, buffer: ReplayBuffer) -> None:
        """See `Indexer.loaded`: all transitions start with the largest priority."""
        self.tree = SumTree(buffer.num_slots)
        items = buffer.everything()
        if items.size:
            self.tree.set(items, buffer.valid[items] * self.largest)

    def check(self, buffer: ReplayBuffer) -> None:
        """See `Indexer.check`: only transitions have priorities, and there are some if there are transitions."""
        items = buffer.everything()
        gone = np.ones(buffer.num_slots, np.bool_)
        gone[items[buffer.valid[items]]] = False
        if self.tree.values(np.flatnonzero(gone)).any() or (self.tree.total == 0) != (buffer.num_transitions == 0):
            raise CheckpointError("the priorities do not match the transitions in the replay buffer")
        if not (np.isfinite(self.largest) and self.largest > 0):
            raise CheckpointError(f"the largest priority must be positive and finite, got {self.largest}")

    def draw(self, buffer: ReplayBuffer, batch_size: int, progress: Progress) -> tuple[Indices, Float32]:
        """See `Indexer.draw`."""
        total = self.tree.total
        index = self.tree.find((np.arange(batch_size) + self.rng.random(batch_size)) * (total / batch_size))
        weight = self.weights(index, total, buffer.num_transitions, progress)
        return index, (weight / weight.max()).astype(np.float32)

    def weights(self, indices: Indices, total: float, count: int, progress: Progress) -> AnyArray:
        """Importance weights (n P(i))^-beta among `count` transitions whose priorities add up to `total`."""
        beta = value_of(self.beta, progress.fraction)
        weight: AnyArray = (count * (self.tree.values(indices) / total)) ** -beta
        return weight

    def update(self, indices: Indices, priorities: AnyArray) -> None:
        """See `Indexer.update`."""
        values = (np.abs(priorities).astype(np.float64) + self.eps) ** self.alpha
        self.largest[...] = max(self.largest, values.max())
        self.tree.set(indices, values)


class ReplaySampler(Stateful):
    """Samples one buffer: choice by an indexer, n-step returns, hindsight relabelling and normalisation."""

    transient: ClassVar[tuple[str, ...]] = ("obs_normalizer", "reward_normalizer")  # owned and saved by the collector

    def __init__(
        self,
        buffer: ReplayBuffer,
        indexer: Indexer,
        *,
        gamma: float,
        n_step: int = 1,
        hindsight: Hindsight | None = None,
        device: torch.device | None = None,
        obs_normalizer: ObservationNormalizer | None = None,
        reward_normalizer: RewardScale | None = None,
        columns: tuple[str, ...] = (),
    ) -> None:
        self.buffer = buffer
        self.indexer = indexer
        self.gamma, self.n_step = gamma, n_step
        self.hindsight = hindsight
        self.device = device or torch.device("cpu")
        self.obs_normalizer = obs_normalizer
        self.reward_normalizer = reward_normalizer
        self.columns = columns
        """Further columns of batches (`TransitionBatch.extras`), see `ReplayBuffer.column`."""

    @property
    def ready(self) -> bool:
        """See `Sampler.ready`."""
        return self.buffer.num_transitions > 0

    @property
    def buffers(self) -> list[ReplayBuffer]:
        """See `Sampler.buffers`."""
        return [self.buffer]

    def add(self, step: Step) -> None:
        """See `Sampler.add`."""
        self.buffer.add(step)
        self.indexer.added(self.buffer)

    def sample(self, batch_size: int, progress: Progress) -> TransitionBatch:
        """See `Sampler.sample`."""
        buffer = self.buffer
        index, weight = self.indexer.draw(buffer, batch_size, progress)
        reward, discount, last, goal = self._follow(index)
        obs, next_obs = buffer.observations(index), buffer.next_observations(last)
        if goal is not None:
            goal.put(obs)
            goal.put(next_obs)
        return TransitionBatch(
            obs=self._observation(obs),
            action=self._tensor(buffer.action.take(index, axis=0)),
            reward=self._tensor(reward),
            discount=self._tensor(discount),
            next_obs=self._observation(next_obs),
            weight=self._tensor(weight),
            indices=torch.from_numpy(index),
            extras={name: self._tensor(self._column(name, index, last)) for name in self.columns},
        )

    def _column(self, name: str, index: Indices, last: Indices) -> AnyArray:
        return self.buffer.column(name, index, last, self.gamma, self._scaled)

    def _follow(self, index: Indices) -> tuple[AnyArray, Float32, Indices, Goals | None]:
        """N-step rewards and discounts [B], the last step of each return, and new goals if there is hindsight."""
        buffer = self.buffer
        if self.n_step == 1 and self.hindsight is None:  # the same as below for a single step, but faster
            reward = self._scaled(buffer.reward.take(index))
            return reward, np.float32(self.gamma) * ~buffer.terminated.take(index), index, None
        window = buffer.window(index, self.n_step)
        reward = buffer.reward.take(window.steps)
        terminated = buffer.terminated.take(window.steps)
        used, goal = window.used, None
        if self.hindsight is not None:
            goal = self.hindsight.goals(buffer, index)
            reward, terminated, used = self.hindsight.relabel(buffer, window, goal, reward, terminated)

        length = used.sum(axis=1)
        rows = np.arange(index.size)
        discount = np.float32(self.gamma) ** length.astype(np.float32) * ~terminated[rows, length - 1]
        return self._sum(reward, used), discount, window.steps[rows, length - 1], goal

    def update_priorities(self, indices: Tensor, priorities: Tensor | None) -> None:
        """See `Sampler.update_priorities`."""
        if priorities is not None and self.indexer.by_priority:
            self.indexer.update(indices.numpy(), priorities.detach().cpu().numpy())

    def replace(self, buffer: ReplayBuffer) -> None:
        """See `Sampler.replace`."""
        self.buffer = buffer
        self.indexer.loaded(buffer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Stateful.load_state_dict`."""
        super().load_state_dict(state)
        self.indexer.check(self.buffer)

    def _sum(self, reward: AnyArray, used: AnyArray) -> AnyArray:
        """Discounted sums [B] of the rewards [B, n] that are used."""
        powers = np.float32(self.gamma) ** np.arange(self.n_step, dtype=np.float32)
        summed: AnyArray = (np.where(used, self._scaled(reward), 0.0) * powers).sum(axis=1)
        return summed

    def _scaled(self, reward: AnyArray) -> AnyArray:
        return reward if self.reward_normalizer is None else self.reward_normalizer.scale(reward)

    def _observation(self, obs: ArrayObservation) -> Observation:
        return map_observation(self._tensor, obs if self.obs_normalizer is None else self.obs_normalizer(obs))

    def _tensor(self, array: AnyArray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)


class MixedSampler(Stateful):
    """Takes a fixed share of every batch from a second sampler, such as prior data; new steps go to the first.

    Example: RLPD (Ball et al. 2023) takes half of each batch from an offline dataset.
    """

    def __init__(self, online: ReplaySampler, prior: TransitionSource, prior_ratio: float = 0.5) -> None:
        self.online, self.prior = online, prior
        self.prior_ratio = prior_ratio

    @property
    def ready(self) -> bool:
        """See `Sampler.ready`."""
        return self.online.ready and self.prior.ready

    @property
    def buffer(self) -> ReplayBuffer:
        """See `Sampler.buffer`."""
        return self.online.buffer

    @property
    def buffers(self) -> list[ReplayBuffer]:
        """See `Sampler.buffers`."""
        return self.online.buffers

    def add(self, step: Step) -> None:
        """See `Sampler.add`."""
        self.online.add(step)

    def sample(self, batch_size: int, progress: Progress) -> TransitionBatch:
        """See `Sampler.sample`: the rows of the first sampler, then those of the second."""
        count = self._num_online(batch_size)
        if count in (0, batch_size):
            return (self.online if count else self.prior).sample(batch_size, progress)
        return joined([self.online.sample(count, progress), self.prior.sample(batch_size - count, progress)])

    def update_priorities(self, indices: Tensor, priorities: Tensor | None) -> None:
        """See `Sampler.update_priorities`."""
        if priorities is None:
            return
        count = self._num_online(len(indices))
        for source, rows in ((self.online, slice(0, count)), (self.prior, slice(count, None))):
            if len(indices[rows]):
                source.update_priorities(indices[rows], priorities[rows])

    def replace(self, buffer: ReplayBuffer) -> None:
        """See `Sampler.replace`."""
        self.online.replace(buffer)

    def _num_online(self, batch_size: int) -> int:
        return batch_size - round(batch_size * self.prior_ratio)


def joined(batches: Sequence[TransitionBatch]) -> TransitionBatch:
    """The rows of several batches as one."""
    return TransitionBatch(*(_joined(parts) for parts in zip(*batches, strict=True)))


def _joined(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], dict):  # an observation; or extras, of which all samplers must have the same
        return {key: torch.cat([part[key] for part in parts]) for key in parts[0] if all(key in part for part in parts)}
    return torch.cat(list(parts))
