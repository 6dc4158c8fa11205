"""Replay in shards: one buffer for each worker, because workers may advance unevenly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Progress, Step, TransitionBatch
from rl_training.contracts.errors import DataError
from rl_training.contracts.state import Stateful
from rl_training.data.replay_buffer import ReplayBuffer
from rl_training.data.samplers import PrioritizedIndexer, ReplaySampler, joined


class ShardedSampler(Stateful):
    """Samples several replay buffers as if they were one.

    How many transitions of a batch come from each shard is drawn in proportion to its size, or to the sum of its
    priorities. Indices of transitions count through the shards.
    """

    def __init__(self, shards: Sequence[ReplaySampler], rng: np.random.Generator) -> None:
        self.shards = list(shards)
        self.rng = rng

    @property
    def ready(self) -> bool:
        """See `Sampler.ready`."""
        return any(shard.ready for shard in self.shards)

    @property
    def buffer(self) -> ReplayBuffer:
        """See `Sampler.buffer`."""
        raise DataError(f"the replay of this run is in {len(self.shards)} parts, one for each worker")

    @property
    def buffers(self) -> list[ReplayBuffer]:
        """See `Sampler.buffers`."""
        return [shard.buffer for shard in self.shards]

    def add(self, step: Step) -> None:
        """See `Sampler.add`: not possible, because every step belongs to a shard."""
        raise DataError("steps are added to the shard of their worker: use extend")

    def extend(self, index: int, steps: Sequence[Step]) -> None:
        """Add the steps of one worker. Where they do not continue its last ones, its episodes were cut."""
        shard = self.shards[index]
        buffer = shard.buffer
        if buffer.added > buffer.oldest and not _same(buffer.following(), steps[0].obs):
            buffer.close_episodes()
        for step in steps:
            shard.add(step)

    def sample(self, batch_size: int, progress: Progress) -> TransitionBatch:
        """See `Sampler.sample`: the rows of each shard, one shard after the other."""
        masses = np.array([_mass(shard) for shard in self.shards])
        counts = self.rng.multinomial(batch_size, masses / masses.sum())
        parts = []
        for number, count in enumerate(counts.tolist()):
            if count:
                batch = self.shards[number].sample(count, progress)
                weight = self._weights(self.shards[number], batch, masses.sum(), progress)
                parts.append(batch._replace(indices=batch.indices + number * self._slots, weight=weight))
        batch = joined(parts)
        return batch._replace(weight=batch.weight / batch.weight.max())

    def _weights(self, shard: ReplaySampler, batch: TransitionBatch, total: float, progress: Progress) -> Tensor:
        """Importance weights of one shard's rows among all shards."""
        if not isinstance(shard.indexer, PrioritizedIndexer):
            return batch.weight
        count = sum(buffer.num_transitions for buffer in self.buffers)
        weights = shard.indexer.weights(batch.indices.numpy(), total, count, progress)
        return torch.from_numpy(weights.astype(np.float32)).to(batch.weight.device)

    @property
    def _slots(self) -> int:
        return self.shards[0].buffer.num_slots

    def update_priorities(self, indices: Tensor, priorities: Tensor | None) -> None:
        """See `Sampler.update_priorities`."""
        if priorities is None:
            return
        owners = indices // self._slots
        for number, shard in enumerate(self.shards):
            own = owners == number
            if own.any():
                shard.update_priorities(indices[own] - number * self._slots, priorities[own.to(priorities.device)])

    def replace(self, buffer: ReplayBuffer) -> None:
        """See `Sampler.replace`: not possible."""
        raise DataError("the replay of a run with workers cannot be replaced by a saved one")


def _mass(shard: ReplaySampler) -> float:
    """What the chance of a shard is in proportion to."""
    is_prioritized = isinstance(shard.indexer, PrioritizedIndexer)
    return float(shard.indexer.tree.total if is_prioritized else shard.buffer.num_transitions)  # type: ignore[attr-defined]


def _same(one: ArrayObservation, other: ArrayObservation) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_same(one[key], other[key]) for key in one)
    first: AnyArray = np.asarray(one)
    return bool(np.array_equal(first, np.asarray(other).astype(first.dtype)))
