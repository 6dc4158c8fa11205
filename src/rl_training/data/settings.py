"""Settings of algorithms that sample transitions: batches, replay, priorities, hindsight, prior data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_training.contracts.plugins import SAMPLERS
from rl_training.contracts.schedule import Linear, ScheduleOrFloat
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import AlgorithmConfig


@documented
@dataclass
class BatchConfig(AlgorithmConfig):
    """Settings of every algorithm that samples transitions; those that learn from recorded data only need no more."""

    batch_size: int = setting(
        256, "Transitions per gradient step.", ge=1, le=1_000_000, search=choices(64, 128, 256, 512)
    )

    def rows_per_update(self, num_envs: int) -> int:
        """See `AlgorithmConfig.rows_per_update`."""
        return self.batch_size


@documented
@dataclass
class ReplayConfig(BatchConfig):
    """What is kept for learning, and how transitions are sampled from it."""

    buffer_size: int = setting(1_000_000, "Capacity of the replay buffer in transitions, over all environments.", ge=1)
    n_step: int = setting(
        1, "Rewards summed before bootstrapping (n-step returns).", ge=1, le=10_000, search=choices(1, 3, 5)
    )
    prioritized: bool = setting(False, "Prioritised replay: sample transitions in proportion to their last TD error.")
    priority_exponent: float = setting(
        0.6, "Priority exponent: 0 is uniform sampling, 1 is proportional to the error.", ge=0
    )
    importance_exponent: ScheduleOrFloat = setting(
        factory=lambda: Linear(0.4, 1.0),
        help="Importance-sampling exponent, a number or a schedule; 1 corrects the bias fully.",
        ge=0,
    )
    sampler: str | None = setting(
        None,
        "Sampler of transitions, by registered name; none for uniform sampling, or prioritised if prioritized is set.",
        registry=SAMPLERS,
        added_later=True,
    )
    sampler_kwargs: dict[str, Any] = setting(factory=dict, help="Keyword arguments of the sampler.", added_later=True)
    her: bool = setting(
        False, "Hindsight experience replay: also learn with goals that were reached in place of the desired ones."
    )
    her_strategy: Literal["future", "final", "episode"] = setting(
        "future", "How hindsight chooses goals: from later in the same episode, from its end, or from anywhere in it."
    )
    her_ratio: float = setting(0.8, "Fraction of transitions that hindsight relabels.", ge=0, le=1)
    prior_replay: Path | None = setting(
        None, "Replay buffer saved by `save_replay`; part of each batch is sampled from it (prior data)."
    )
    prior_ratio: float = setting(0.5, "Fraction of each batch that comes from the prior replay buffer.", ge=0, le=1)
    checkpoint_replay: bool = setting(
        True,
        "Save the replay buffer in checkpoints; without it a resumed run starts with an empty one (grade "
        "learner-only).",
    )

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.sampler is not None and self.prioritized:
            found.append(
                f"sampler: cannot be '{self.sampler}' while prioritized is true, which is a sampler itself; unset "
                "one of them"
            )
        if self.sampler is None and self.sampler_kwargs:
            found.append("sampler_kwargs: need a registered sampler, but sampler is none")
        return found

    def unused(self) -> set[str]:
        """See `AlgorithmConfig.unused`."""
        return set() if self.prioritized else {"priority_exponent", "importance_exponent"}


@documented
@dataclass
class OffPolicyConfig(ReplayConfig):
    """Settings that every replay-based algorithm has: the replay's, and how much is collected and learned."""

    learning_starts: int = setting(
        100, "Environment steps before the first gradient step.", ge=0, search=choices(100, 1_000, 5_000)
    )
    random_steps: int | None = setting(
        None,
        "Environment steps with uniformly random actions at the start; none for the value of learning_starts.",
        ge=0,
    )
    num_steps: int = setting(
        1,
        "Steps of each environment between updates (one update may be several gradient steps).",
        ge=1,
        le=1_000_000,
        search=choices(1, 4, 16, 64),
    )
    updates_per_step: float = setting(
        1.0,
        "Gradient steps per environment step, counted over all environments (0.25, 1, 20).",
        ge=0,
        search=choices(0.25, 0.5, 1.0),
    )

    @property
    def first_random_steps(self) -> int:
        """How many steps are random at the start."""
        return self.learning_starts if self.random_steps is None else self.random_steps
