"""Extreme Q-learning (Garg et al. 2023, arXiv:2301.02328), the offline form, after the authors' published code.

It is IQL with another loss of V(s): Gumbel regression, whose minimum is the soft maximum of Q(s, a) over the recorded
actions. As in their code the exponent is clipped and the loss divided by its largest term. Two departures: the critics
use the squared error only (their code can use a Huber loss), and samples of the actor are clipped to the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.recorded_actions import InSampleAlgorithm, RecordedActorCriticConfig
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.regression import exponential_weight, gumbel_loss


@documented
@dataclass
class XQLConfig(RecordedActorCriticConfig):
    """Settings of XQL."""

    loss_temperature: float = setting(
        2.0,
        "Temperature of the soft maximum that V(s) learns: small is near the maximum of Q(s, a), large near its mean.",
        gt=0,
        search=choices(1.0, 2.0, 5.0, 10.0),
    )
    loss_clip: float = setting(7.0, "Clip the exponent of the loss of V(s) to this value.", gt=0)
    inverse_temperature: float = setting(
        3.0, "Beta of the weights exp(beta * A); 0 is behaviour cloning.", ge=0, search=log_uniform(0.1, 30.0)
    )
    max_weight: float = setting(100.0, "Clip the weights of actions to this value.", gt=0)


class XQLAlgorithm(InSampleAlgorithm[XQLConfig]):
    """V(s) is a soft maximum of Q(s, a) over recorded actions."""

    def value_loss(self, error: Tensor, weight: Tensor) -> Tensor:
        """See `InSampleAlgorithm.value_loss`: Gumbel regression (eq. 11)."""
        return gumbel_loss(error, self.config.loss_temperature, self.config.loss_clip, weight)

    def weights(self, advantage: Tensor) -> Tensor:
        """See `RecordedActorCriticAlgorithm.weights`: exponential."""
        return exponential_weight(advantage, self.config.inverse_temperature, self.config.max_weight)


SPEC = AlgorithmSpec(
    name="xql",
    title="XQL",
    config=XQLConfig,
    algorithm=XQLAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Garg et al. 2023, Extreme Q-Learning: MaxEnt RL without Entropy, arXiv:2301.02328",
)
