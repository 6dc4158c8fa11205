"""Specifications of algorithms and environments, and base classes of algorithm configs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gymnasium import spaces

from rl_training.contracts.plugins import SAMPLERS
from rl_training.contracts.schedule import Linear, ScheduleOrFloat
from rl_training.contracts.settings import choices, documented, setting

if TYPE_CHECKING:
    from rl_training.contracts.algorithm import Algorithm

BoxActions = Literal["clip", "rescale", "squash"]
"""How a policy's real-valued action is mapped into the bounds of a Box space (see `envs.actions`)."""


ACTION_MASK = "action_mask"
"""The entry of an observation (or of an info) that says which actions are valid."""


class Regime(Enum):
    """Where an algorithm's data comes from."""

    ON_POLICY = "on-policy"
    OFF_POLICY = "off-policy"
    OFFLINE = "offline"


@dataclass(frozen=True)
class FrameStack:
    """Observations that stack the last `size` frames, oldest first.

    At the start of an episode, missing frames are zeros (`zero`) or copies of the first frame (`first`).
    """

    size: int
    padding: Literal["zero", "first"] = "zero"


@dataclass(frozen=True)
class EnvSpec:
    """Everything that an algorithm may know about an environment."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    env_id: str = "environment"
    action_masks: bool = False
    """Whether observations contain an action mask; invalid actions are then never taken."""
    frame_stack: FrameStack | None = None
    """How observations stack frames, so that the replay buffer stores each frame once."""


@documented
@dataclass
class AlgorithmConfig:
    """Settings that every algorithm has."""

    gamma: float = setting(0.99, "Discount factor.", ge=0, le=1, search=choices(0.9, 0.95, 0.98, 0.99, 0.995, 0.999))

    def problems(self) -> list[str]:
        """Invalid combinations of settings, as sentences that begin with the setting's name."""
        return []

    def unused(self) -> set[str]:
        """Settings that have no effect because of others."""
        return set()

    def rows_per_update(self, num_envs: int) -> int:
        """Transitions per gradient step; the number of threads is chosen from it."""
        raise NotImplementedError


@documented
@dataclass
class OnPolicyConfig(AlgorithmConfig):
    """Settings that every on-policy algorithm has."""

    num_steps: int = setting(
        256, "Steps of each environment per rollout.", ge=1, search=choices(16, 32, 64, 128, 256, 512, 1024)
    )

    def rows_per_update(self, num_envs: int) -> int:
        """See `AlgorithmConfig.rows_per_update`; a whole rollout, unless it is split into minibatches."""
        return self.num_steps * num_envs


@documented
@dataclass
class OffPolicyConfig(AlgorithmConfig):
    """Settings that every replay-based algorithm has: how much is collected, kept, sampled and learned."""

    buffer_size: int = setting(1_000_000, "Capacity of the replay buffer in transitions, over all environments.", ge=1)
    batch_size: int = setting(256, "Transitions per gradient step.", ge=1, search=choices(64, 128, 256, 512))
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
        search=choices(1, 4, 16, 64),
    )
    updates_per_step: float = setting(
        1.0,
        "Gradient steps per environment step, counted over all environments (0.25, 1, 20).",
        ge=0,
        search=choices(0.25, 0.5, 1.0),
    )
    n_step: int = setting(1, "Rewards summed before bootstrapping (n-step returns).", ge=1, search=choices(1, 3, 5))
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

    def rows_per_update(self, num_envs: int) -> int:
        """See `AlgorithmConfig.rows_per_update`."""
        return self.batch_size


@dataclass(frozen=True)
class AlgorithmSpec:
    """An algorithm's entry in the registry: `SPEC` in its module."""

    name: str
    """Lower-case name, used in files and on the command line."""
    title: str
    """The name people use; also the name of the facade class."""
    config: type[AlgorithmConfig]
    algorithm: type[Algorithm[Any]]
    regimes: tuple[Regime, ...]
    action_spaces: tuple[type[spaces.Space[Any]], ...]
    paper: str
    default_num_envs: int = 1
    layer: Literal["core", "contrib", "plugin"] = "core"
    """Stability level: core and contrib belong to this package; everything that others register is a plugin."""
    needs_images: bool = False
    """Whether it learns only from pixels and refuses observations without images."""
