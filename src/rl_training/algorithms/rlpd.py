"""RLPD (Ball et al. 2023, arXiv:2302.02948): off-policy learning online, with half of each batch from recorded data.

An ensemble of critics with layer norm and many updates per step, as in REDQ; the data is given as `dataset`, and
`prior_ratio` is its share of each batch. An offline phase may come first. Departure: the ratio of 20
updates per step is made of separate batches, not of parts of one large batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces

from rl_training.algorithms.redq import REDQAlgorithm, REDQConfig
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.policies.actors import StochasticNetworkConfig
from rl_training.policies.layers import Norm


@documented
@dataclass(kw_only=True)
class RLPDNetworkConfig(StochasticNetworkConfig):
    """Networks of a stochastic actor and its critics, which have layer norm."""

    critic_norm: Norm = setting("layer", "Normalisation in the critic's hidden layers.", added_later=True)


@documented
@dataclass
class RLPDConfig(REDQConfig):
    """Settings of RLPD. The defaults are the paper's for dense rewards."""

    network: RLPDNetworkConfig = setting(factory=RLPDNetworkConfig, help="Networks.")


class RLPDAlgorithm(REDQAlgorithm[RLPDConfig]):
    """REDQ with layer norm, on batches that mix new and recorded transitions."""


SPEC = AlgorithmSpec(
    name="rlpd",
    title="RLPD",
    config=RLPDConfig,
    algorithm=RLPDAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Ball et al. 2023, Efficient Online Reinforcement Learning with Offline Data, arXiv:2302.02948",
)
