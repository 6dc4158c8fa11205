"""Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971): TD3 without its three additions."""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces

from rl_training.algorithms.td3 import TD3Algorithm, TD3Config
from rl_training.contracts.settings import choices, documented, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, Regime


@documented
@dataclass
class DDPGConfig(TD3Config):
    """Settings of DDPG. Exploration uses Gaussian noise; the paper uses `noise.kind: ou`, `noise.std: 0.2`."""

    num_critics: int = setting(
        1, "Number of critics; targets use their minimum, the actor uses the first.", ge=1, le=1_000
    )
    policy_delay: int = setting(
        1,
        "Gradient steps of the critics per update of the actor and the target networks.",
        ge=1,
        search=choices(1, 2, 4),
        added_later=True,
    )
    target_noise: float = setting(
        0.0, "Standard deviation of target policy smoothing noise.", ge=0, search=uniform(0.0, 0.5), added_later=True
    )
    target_noise_clip: float = setting(0.5, "Clip range of target policy smoothing noise.", ge=0, added_later=True)


class DDPGAlgorithm(TD3Algorithm[DDPGConfig]):
    """A deterministic actor that maximises the Q-values of one critic."""


SPEC = AlgorithmSpec(
    name="ddpg",
    title="DDPG",
    config=DDPGConfig,
    algorithm=DDPGAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Lillicrap et al. 2016, Continuous Control with Deep Reinforcement Learning, arXiv:1509.02971",
)
