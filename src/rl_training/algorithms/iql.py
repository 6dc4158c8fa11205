"""Implicit Q-learning (Kostrikov et al. 2022, arXiv:2110.06169), after the authors' published code.

The actor is a Gaussian with state-independent standard deviations around a tanh mean, as there. Two departures: samples
are clipped to the bounds, and actors for Discrete actions are categorical (the paper has Box only).
"""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.recorded_actions import InSampleAlgorithm, RecordedActorCriticConfig
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.regression import expectile_loss, exponential_weight


@documented
@dataclass
class IQLConfig(RecordedActorCriticConfig):
    """Settings of IQL. The defaults are those of the paper for locomotion."""

    expectile: float = setting(
        0.7, "Expectile of Q(s, a) that V(s) learns; 0.5 is the mean.", gt=0, lt=1, search=choices(0.5, 0.7, 0.8, 0.9)
    )
    inverse_temperature: float = setting(
        3.0, "Beta of the weights exp(beta * A); 0 is behaviour cloning.", ge=0, search=log_uniform(0.1, 30.0)
    )
    max_weight: float = setting(100.0, "Clip the weights of actions to this value.", gt=0)


class IQLAlgorithm(InSampleAlgorithm[IQLConfig]):
    """V(s) is an expectile of Q(s, a) over recorded actions."""

    def value_loss(self, error: Tensor, weight: Tensor) -> Tensor:
        """See `InSampleAlgorithm.value_loss`: expectile regression (eq. 5)."""
        return expectile_loss(error, self.config.expectile, weight)

    def weights(self, advantage: Tensor) -> Tensor:
        """See `RecordedActorCriticAlgorithm.weights`: exponential (eq. 7)."""
        return exponential_weight(advantage, self.config.inverse_temperature, self.config.max_weight)


SPEC = AlgorithmSpec(
    name="iql",
    title="IQL",
    config=IQLConfig,
    algorithm=IQLAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Kostrikov et al. 2022, Offline Reinforcement Learning with Implicit Q-Learning, arXiv:2110.06169",
)
