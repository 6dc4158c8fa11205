"""Off-policy training: collect a few steps, store them in the replay buffer, and make the gradient steps due."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from rl_training.contracts.algorithm import Algorithm, Policy
from rl_training.contracts.state import Stateful, check_keys
from rl_training.data.replay_buffer import OtherNumberOfEnvsError, ReplayBuffer
from rl_training.data.samplers import Sampler
from rl_training.data.settings import OffPolicyConfig
from rl_training.runtime.collector import Collector, Exploration
from rl_training.runtime.distributed.fleet import Fleet
from rl_training.runtime.guards import check_update
from rl_training.runtime.trainer import OFFLINE_PHASE, Trainer


@dataclass
class Workload(Stateful):
    """Gradient steps due: a fixed number per environment step, counted from the step at which learning started.

    Example: a quarter of a gradient step per environment step, from step 100 on; 3 of 10 have been made:
        >>> Workload(Fraction(1, 4), start=100).due(env_steps=140, updates=3)
        7
    """

    transient: ClassVar[tuple[str, ...]] = ("per_step",)
    per_step: Fraction
    start: int = 0
    """Environment steps at which learning started."""
    updates_before: int = 0
    """Gradient steps that were made before that."""

    def due(self, env_steps: int, updates: int) -> int:
        """Gradient steps to make now."""
        steps = max(0, env_steps - self.start)  # integers, because arithmetic with fractions is slow
        return self.per_step.numerator * steps // self.per_step.denominator - (updates - self.updates_before)


class OffPolicyTrainer(Trainer):
    """Stores collected steps in the replay buffer, and updates the algorithm with batches from it.

    One iteration is `num_steps` steps of every environment, and then the gradient steps that are due. The last
    iteration of a run is shortened so that the step budget is exceeded by less than the number of environments.
    """

    collector: Collector | Fleet

    def __init__(
        self,
        algorithm: Algorithm[Any],
        collector: Collector | Fleet,
        sampler: Sampler,
        settings: OffPolicyConfig,
        random_policy: Policy,
    ) -> None:
        super().__init__(algorithm, collector)
        self.sampler = sampler
        self.settings = settings
        self.exploration = Exploration(algorithm, random_policy, settings.first_random_steps)
        # from the decimal text: the float 0.29 is slightly less than 0.29, so that of 0.29 * 100 only 28 would be due
        self.workload = Workload(Fraction(str(settings.updates_per_step)), settings.learning_starts)

    def iterate(self) -> None:
        """See `Trainer.iterate`."""
        stats = self.collector.gather(
            self.sampler, self.exploration, self.progress, self.settings.num_steps, self.end - self.position
        )
        self._timers.env += stats.env_seconds
        self._timers.policy += stats.policy_seconds
        self._learn()
        self.progress.iterations += 1

    def _learn(self) -> None:
        due = self.workload.due(self.env_steps, self.updates) if self.sampler.ready else 0
        if due <= 0:
            return
        began = time.perf_counter()
        for _ in range(due):
            batch = self.sampler.sample(self.settings.batch_size, self.progress)
            result = self.algorithm.update(batch, self.progress)
            self.sampler.update_priorities(batch.indices, result.priorities)
            self.progress.updates += result.num_updates
        check_update(result.metrics, f"{self.env_steps} environment steps")
        self._latest = {**self._latest, **result.metrics}  # delayed updates are not in every result
        self._timers.update += time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        """State of all parts, with the replay buffer if `checkpoint_replay` is set."""
        keep = self.settings.checkpoint_replay
        return {
            **super().state_dict(),
            "sampler": self.sampler.state_dict() if keep else None,
            "workload": self.workload.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore all parts; without the replay buffer, learning waits for `learning_starts` new steps."""
        state = dict(state)
        if state.pop("phase", None) == OFFLINE_PHASE:  # this is the first start online
            self._begin_online(state)
            return
        check_keys("the replay", ("sampler", "workload"), {k: state[k] for k in ("sampler", "workload") if k in state})
        sampler, workload = state.pop("sampler"), state.pop("workload")
        super().load_state_dict(state)
        self.workload.load_state_dict(workload)
        if sampler is None or not self._load_replay(sampler):
            self.workload.start = self.env_steps + self.settings.learning_starts
            self.workload.updates_before = self.updates
            self._leave_episodes()
        if (
            not self.collector.has_episodes and self.sampler.ready
        ):  # new episodes begin, and those in the replay end here
            for buffer in self.sampler.buffers:
                buffer.close_episodes()

    def _begin_online(self, state: dict[str, Any]) -> None:
        """Go on online from the state at the end of an offline phase."""
        state = {name: value for name, value in state.items() if name != "sampler"}
        new = self.collector.state_dict()
        kept = {name: part for name, part in state["collector"].items() if name == "obs_normalizer"}
        super().load_state_dict({**state, "collector": {**new, **kept, "in_flight": None}})
        self.progress.begin_phase()
        self.workload.start = self.env_steps + self.settings.learning_starts
        self.workload.updates_before = self.updates

    def replace_replay(self, buffer: ReplayBuffer) -> None:
        """Continue with another replay buffer."""
        self.sampler.replace(buffer)
        self._leave_episodes()

    def _leave_episodes(self) -> None:
        """Begin new episodes if the replay buffer stacks frames: it lacks the earlier frames of the current ones."""
        if any(buffer.is_stacked for buffer in self.sampler.buffers):
            self.collector.leave_episodes()

    def _load_replay(self, state: dict[str, Any]) -> bool:
        """Restore the replay buffer; False if it has another number of environments, as user-supplied ones may."""
        try:
            self.sampler.load_state_dict(state)
        except OtherNumberOfEnvsError as error:
            if self.collector.has_episodes:
                raise
            warnings.warn(f"the replay buffer starts empty: {error}", stacklevel=2)
            return False
        return True
