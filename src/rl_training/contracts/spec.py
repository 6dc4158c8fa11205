"""What algorithms and environments announce about themselves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from gymnasium import spaces

from rl_training.contracts.settings import documented, setting

if TYPE_CHECKING:
    from rl_training.contracts.algorithm import Algorithm

BoxActions = Literal["clip", "rescale", "squash"]
"""How a policy's real-valued action becomes one within the bounds of a Box space (see `envs.actions`)."""


class Regime(Enum):
    """Where an algorithm's data comes from."""

    ON_POLICY = "on-policy"
    OFF_POLICY = "off-policy"
    OFFLINE = "offline"


@dataclass(frozen=True)
class EnvSpec:
    """All that a learner may know about an environment."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    env_id: str = "environment"


@documented
@dataclass
class AlgorithmConfig:
    """Settings that every algorithm has."""

    gamma: float = setting(0.99, "Discount factor.", ge=0, le=1)

    def problems(self) -> list[str]:
        """Combinations of settings that cannot work, as sentences that begin with the setting's name."""
        return []


@documented
@dataclass
class OnPolicyConfig(AlgorithmConfig):
    """Settings that every on-policy algorithm has."""

    num_steps: int = setting(256, "Steps of each environment per rollout.", ge=1)


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
    layer: Literal["core", "contrib"] = "core"
