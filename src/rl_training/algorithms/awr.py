"""Advantage-weighted regression (Peng et al. 2019, arXiv:1910.00177), on recorded data.

The paper alternates between collecting and fitting; here there is one fixed dataset, as in its section on offline
learning. Departures: V(s) learns Monte Carlo returns of the data (lambda 1, without a bootstrap value where a time
limit ended an episode) in place of TD(lambda) returns, and V(s) and the actor take turns in single steps of Adam.
Advantages are standardised in each batch, as in the authors' published code.
"""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.recorded_actions import ReturnWeightedAlgorithm, ReturnWeightedConfig
from rl_training.contracts.batches import Progress, TransitionBatch, UpdateResult
from rl_training.contracts.settings import documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.policies import normalize
from rl_training.functional.regression import exponential_weight


@documented
@dataclass
class AWRConfig(ReturnWeightedConfig):
    """Settings of AWR."""

    temperature: float = setting(1.0, "Beta of the weights exp(A / beta).", gt=0, search=log_uniform(0.1, 10.0))
    normalize_advantage: bool = setting(True, "Standardise the advantages of each batch.")
    max_weight: float = setting(20.0, "Clip the weights of actions to this value.", gt=0)


class AWRAlgorithm(ReturnWeightedAlgorithm[AWRConfig]):
    """Imitates the recorded actions, those with a return above V(s) with more weight."""

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update V(s) and the actor."""
        rates = self.rates(batch, progress)
        return UpdateResult({"train/learning_rate": rates["actor_rate"], **self.gradient_steps(batch, **rates)})

    def gradient_steps(self, batch: TransitionBatch, *, actor_rate: float, value_rate: float) -> dict[str, Tensor]:
        """See `ReturnWeightedAlgorithm.gradient_steps`."""
        value = self.value_step(value_rate, batch)
        return self.metrics(value, self.actor_step(actor_rate, batch, self.weights(value["advantage"])))

    def weights(self, advantage: Tensor) -> Tensor:
        """The weights [B] of recorded actions with these advantages [B]: exponential (eq. 10)."""
        config = self.config
        if config.normalize_advantage:
            advantage = normalize(advantage)
        return exponential_weight(advantage, 1.0 / config.temperature, config.max_weight)


SPEC = AlgorithmSpec(
    name="awr",
    title="AWR",
    config=AWRConfig,
    algorithm=AWRAlgorithm,
    regimes=(Regime.OFFLINE,),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Peng et al. 2019, Advantage-Weighted Regression, arXiv:1910.00177",
)
