"""On-policy training: collect a rollout with the current policy, learn from it, discard it."""

from __future__ import annotations

import time
from typing import Any

from rl_training.contracts.algorithm import Algorithm
from rl_training.data.rollout_buffer import RolloutBuffer
from rl_training.runtime.collector import Collector
from rl_training.runtime.distributed.fleet import Fleet
from rl_training.runtime.guards import check_update
from rl_training.runtime.trainer import Trainer


class OnPolicyTrainer(Trainer):
    """Fills a `RolloutBuffer` and passes it to the algorithm.

    The last rollout of a run is shortened so that the step budget is exceeded by less than the number of environments.
    """

    collector: Collector | Fleet

    def __init__(self, algorithm: Algorithm[Any], collector: Collector | Fleet, buffer: RolloutBuffer) -> None:
        super().__init__(algorithm, collector)
        self.buffer = buffer

    def iterate(self) -> None:
        """See `Trainer.iterate`."""
        limit = self.end - self.position
        stats = self.collector.fill(self.buffer, self.algorithm, self.progress, limit)
        began = time.perf_counter()
        if stats.num_transitions:
            result = self.algorithm.update(self.buffer, self.progress)
            check_update(result.metrics, f"{self.env_steps + stats.num_transitions} environment steps")
            self._latest = result.metrics
            self.progress.updates += result.num_updates
        self._timers.update += time.perf_counter() - began
        self._timers.env += stats.env_seconds
        self._timers.policy += stats.policy_seconds
        # schedules see the steps before this rollout, so the learning rate of the last update is not zero yet
        self.progress.env_steps += stats.num_transitions
        self.progress.iterations += 1
