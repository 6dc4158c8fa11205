"""Offline training: gradient steps on recorded data, without an environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.state import check_keys
from rl_training.data.recorded import DatasetSampler
from rl_training.runtime.callbacks import Callback, Every, RunView
from rl_training.runtime.collector import NoCollector
from rl_training.runtime.guards import check_update
from rl_training.runtime.trainer import OFFLINE_PHASE, Trainer

UPDATES_PER_ITERATION = 50
"""Gradient steps between calls of the callbacks."""


class OfflineTrainer(Trainer):
    """Updates the algorithm with batches of a dataset; the budget, logs and checkpoints count gradient steps."""

    unit = "updates"

    def __init__(
        self, algorithm: Algorithm[Any], collector: NoCollector, sampler: DatasetSampler, batch_size: int
    ) -> None:
        super().__init__(algorithm, collector)
        self.sampler = sampler
        self.batch_size = batch_size

    def prepare(self) -> None:
        """See `Trainer.prepare`."""
        self.sampler.opened()

    def iterate(self) -> None:
        """See `Trainer.iterate`."""
        began = time.perf_counter()
        for _ in range(min(UPDATES_PER_ITERATION, self.end - self.position)):
            batch = self.sampler.sample(self.batch_size, self.progress)
            result = self.algorithm.update(batch, self.progress)
            self.sampler.update_priorities(batch.indices, result.priorities)
            self.progress.updates += result.num_updates
            self.progress.offline_updates += 1
        self._latest = {**self._latest, **result.metrics}  # delayed updates are not in every result
        check_update(result.metrics, f"{self.updates} gradient steps")
        self._timers.update += time.perf_counter() - began
        self.progress.iterations += 1

    def state_dict(self) -> dict[str, Any]:
        """State of all parts; of the data, its hash and the sampler's random state."""
        return {**super().state_dict(), "phase": OFFLINE_PHASE, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all parts; without the sampler's state, it starts anew.

        The state of an online phase starts an offline one: weights, optimizers and statistics are kept.
        """
        state = dict(state)
        if state.pop("phase", None) != OFFLINE_PHASE and state.pop("workload", None) is not None:
            super().load_state_dict({name: value for name, value in state.items() if name != "sampler"})
            self.progress.begin_phase()
            return
        check_keys("the sampler", ("sampler",), {name: state[name] for name in ("sampler",) if name in state})
        sampler = state.pop("sampler")
        super().load_state_dict(state)
        if sampler is not None:
            self.sampler.load_state_dict(sampler)


@dataclass
class ValidationCallback(Callback):
    """Records what the algorithm reports about transitions that were not learned from (`Algorithm.validate`)."""

    batches: Callable[[], Sequence[TransitionBatch]]
    every: Every

    def on_iteration(self, run: RunView) -> None:
        """See `Callback.on_iteration`."""
        assert isinstance(run, OfflineTrainer)
        if not self.every.due(run.position):
            return
        totals: dict[str, list[float]] = {}
        for batch in self.batches():
            for name, value in run.algorithm.validate(batch).items():
                totals.setdefault(name, []).append(float(value))
        run.record({f"validation/{name}": sum(values) / len(values) for name, values in totals.items()})
