"""Implicit quantile networks (Dabney et al. 2018, arXiv:1806.06923)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.q_learning import QLearningAlgorithm, QLearningConfig, RowLosses
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.distributional import quantile_huber_loss
from rl_training.functional.values import at_action, td_target
from rl_training.policies.q_networks import ImplicitQuantileQNetwork


@documented
@dataclass
class IQNConfig(QLearningConfig):
    """Settings of IQN."""

    num_fractions: int = setting(
        64, "Quantile fractions sampled for the prediction.", ge=1, le=100_000, search=choices(8, 16, 32, 64)
    )
    num_target_fractions: int = setting(
        64, "Quantile fractions sampled for the target.", ge=1, le=100_000, search=choices(8, 16, 32, 64)
    )
    num_greedy_fractions: int = setting(
        32, "Quantile fractions averaged to an action value when acting.", ge=1, le=100_000
    )
    embedding_size: int = setting(64, "Number of cosines in the embedding of a quantile fraction.", ge=1, le=16_384)
    kappa: float = setting(1.0, "Threshold of the quantile Huber loss: quadratic below, linear above.", gt=0)


class IQNAlgorithm(QLearningAlgorithm[IQNConfig, ImplicitQuantileQNetwork]):
    """Quantiles of the return at fractions sampled for each transition, learned by quantile regression."""

    def make_network(self) -> ImplicitQuantileQNetwork:
        """See `QLearningAlgorithm.make_network`."""
        config = self.config
        return ImplicitQuantileQNetwork(
            self.spec, config.network, dueling=config.dueling, noisy=config.noisy,
            embedding_size=config.embedding_size, num_greedy_fractions=config.num_greedy_fractions,
        )  # fmt: skip

    def draws(self, batch: TransitionBatch) -> tuple[Tensor, Tensor]:
        """See `QLearningAlgorithm.draws`: the fractions for predictions and for targets."""
        rows, config = len(batch.reward), self.config
        return self.draw_fractions(rows, config.num_fractions), self.draw_fractions(rows, config.num_target_fractions)

    def losses(self, batch: TransitionBatch, *draws: Tensor) -> RowLosses:
        """See `QLearningAlgorithm.losses`. The priority is the loss."""
        config, network, target = self.config, self.policy.network, self.target.module
        fractions, next_fractions = draws
        with torch.no_grad():
            next_action = (network if config.double else target).q_values(batch.next_obs).argmax(dim=1)
            next_value = at_action(target(batch.next_obs, next_fractions), next_action)
            q_target = td_target(batch.reward.unsqueeze(1), batch.discount.unsqueeze(1), next_value)
        q_pred = at_action(network(batch.obs, fractions), batch.action)
        loss = quantile_huber_loss(q_pred, q_target, fractions, config.kappa)
        return RowLosses(loss, loss.detach(), q_pred.detach().mean(dim=1))

    def draw_fractions(self, rows: int, count: int) -> Tensor:
        """Uniform fractions [rows, count] from the algorithm's random generator."""
        return torch.from_numpy(self.rng.random((rows, count), dtype=np.float32)).to(self.device)


SPEC = AlgorithmSpec(
    name="iqn",
    title="IQN",
    config=IQNConfig,
    algorithm=IQNAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Discrete,),
    paper="Dabney et al. 2018, Implicit Quantile Networks for Distributional Reinforcement Learning, arXiv:1806.06923",
)
