"""Dropout Q-functions (Hiraoka et al. 2022, arXiv:2110.02034): REDQ with two critics that have dropout and layer norm.

Random dropout masks do what REDQ's large ensemble does, at a fifth of its cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces

from rl_training.algorithms.redq import REDQAlgorithm, REDQConfig
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.policies.actors import StochasticNetworkConfig
from rl_training.policies.layers import Norm


@documented
@dataclass(kw_only=True)
class DroQNetworkConfig(StochasticNetworkConfig):
    """Networks of a stochastic actor and its critics, which have dropout and layer norm."""

    critic_norm: Norm = setting("layer", "Normalisation in the critic's hidden layers.", added_later=True)
    critic_dropout: float = setting(
        0.01,
        "Dropout rate in the critic's hidden layers, during updates.",
        ge=0,
        le=0.99,
        search=choices(1e-4, 5e-3, 0.01, 0.1),
        added_later=True,
    )


@documented
@dataclass
class DroQConfig(REDQConfig):
    """Settings of DroQ. The defaults are the paper's, except for `learning_starts` (there 5,000)."""

    num_critics: int = setting(2, "Number of critics; the actor maximises their mean.", ge=1)
    num_target_critics: int = setting(
        2, "Critics drawn at random for each update; targets use their minimum.", ge=1, search=choices(1, 2)
    )
    network: DroQNetworkConfig = setting(factory=DroQNetworkConfig, help="Networks.")


class DroQAlgorithm(REDQAlgorithm[DroQConfig]):
    """REDQ, whose ensemble is replaced by dropout."""


SPEC = AlgorithmSpec(
    name="droq",
    title="DroQ",
    config=DroQConfig,
    algorithm=DroQAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Hiraoka et al. 2022, Dropout Q-Functions for Doubly Efficient Reinforcement Learning, arXiv:2110.02034",
)
