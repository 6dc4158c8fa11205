"""Specifications of algorithms and environments, and base classes of algorithm configs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from gymnasium import spaces

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
        256,
        "Steps of each environment per rollout.",
        ge=1,
        le=1_000_000,
        search=choices(16, 32, 64, 128, 256, 512, 1024),
    )

    def rows_per_update(self, num_envs: int) -> int:
        """See `AlgorithmConfig.rows_per_update`; a whole rollout, unless it is split into minibatches."""
        return self.num_steps * num_envs


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
    discrete: type[Algorithm[Any]] | None = None
    """The class for Discrete actions, if that is another one than `algorithm`."""

    def algorithm_for(self, action_space: spaces.Space[Any]) -> type[Algorithm[Any]]:
        """The class that learns actions of this space."""
        return self.discrete if self.discrete and isinstance(action_space, spaces.Discrete) else self.algorithm
