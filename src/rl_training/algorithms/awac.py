"""Advantage-weighted actor-critic (Nair et al. 2020, arXiv:2006.09359).

The weights exp(A / lambda) are divided by their mean over the batch, as in the authors' published code and d3rlpy; V(s)
is the mean Q-value of sampled actions. The defaults are those of d3rlpy, except for the networks (two layers of 256
units) and the weight decay of the actor (none).
"""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.recorded_actions import SampledAdvantageAlgorithm, SampledAdvantageConfig
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.regression import softmax_weight


@documented
@dataclass
class AWACConfig(SampledAdvantageConfig):
    """Settings of AWAC."""

    batch_size: int = setting(1024, "Transitions per gradient step.", ge=1, search=choices(256, 512, 1024))
    temperature: float = setting(1.0, "Lambda of the weights exp(A / lambda).", gt=0, search=log_uniform(0.1, 10.0))
    num_action_samples: int = setting(1, "Actions sampled to estimate V(s).", ge=1, search=choices(1, 4, 10))


class AWACAlgorithm(SampledAdvantageAlgorithm[AWACConfig]):
    """Critics of the current policy; the actor learns recorded actions, those above its average with more weight."""

    def weights(self, advantage: Tensor) -> Tensor:
        """See `RecordedActorCriticAlgorithm.weights`: a softmax over the batch."""
        return softmax_weight(advantage, 1.0 / self.config.temperature)

    def baseline(self, q: Tensor) -> Tensor:
        """See `SampledAdvantageAlgorithm.baseline`: the mean."""
        return q.mean(0)


SPEC = AlgorithmSpec(
    name="awac",
    title="AWAC",
    config=AWACConfig,
    algorithm=AWACAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Nair et al. 2020, AWAC: Accelerating Online Reinforcement Learning with Offline Datasets, arXiv:2006.09359",
)
