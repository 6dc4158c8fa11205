"""Quantile-regression DQN (Dabney et al. 2018, arXiv:1710.10044)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.q_learning import QLearningAlgorithm, QLearningConfig, RowLosses
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.distributional import quantile_huber_loss
from rl_training.functional.values import at_action, td_target
from rl_training.policies.q_networks import QuantileQNetwork


@documented
@dataclass
class QRDQNConfig(QLearningConfig):
    """Settings of QR-DQN."""

    num_quantiles: int = setting(
        200, "Number of quantiles per action.", ge=1, le=100_000, search=choices(25, 50, 100, 200)
    )
    kappa: float = setting(1.0, "Threshold of the quantile Huber loss: quadratic below, linear above.", gt=0)


class QRDQNAlgorithm(QLearningAlgorithm[QRDQNConfig, QuantileQNetwork]):
    """Quantiles of the return at evenly spaced fractions per action, learned by quantile regression."""

    def make_network(self) -> QuantileQNetwork:
        """See `QLearningAlgorithm.make_network`."""
        config = self.config
        return QuantileQNetwork(
            self.spec, config.network, dueling=config.dueling, noisy=config.noisy, num_outputs=config.num_quantiles
        )

    def losses(self, batch: TransitionBatch, *draws: Tensor) -> RowLosses:
        """See `QLearningAlgorithm.losses`. The priority is the loss."""
        network, target = self.policy.network, self.target.module
        with torch.no_grad():
            next_quantiles = target(batch.next_obs)
            next_value = at_action(next_quantiles, self.next_action(batch.next_obs, next_quantiles))
            q_target = td_target(batch.reward.unsqueeze(1), batch.discount.unsqueeze(1), next_value)
        q_pred = at_action(network(batch.obs), batch.action)
        loss = quantile_huber_loss(q_pred, q_target, network.fractions, self.config.kappa)
        return RowLosses(loss, loss.detach(), q_pred.detach().mean(dim=1))


SPEC = AlgorithmSpec(
    name="qrdqn",
    title="QRDQN",
    config=QRDQNConfig,
    algorithm=QRDQNAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Discrete,),
    paper="Dabney et al. 2018, Distributional Reinforcement Learning with Quantile Regression, arXiv:1710.10044",
)
