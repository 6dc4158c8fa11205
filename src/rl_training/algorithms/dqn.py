"""Deep Q-network (Mnih et al. 2015), optionally double (van Hasselt et al. 2016), dueling (Wang et al. 2016), noisy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.q_learning import QLearningAlgorithm, QLearningConfig, RowLosses
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.values import at_action, double_q_value, huber, td_target
from rl_training.policies.q_networks import QNetwork


@documented
@dataclass
class DQNConfig(QLearningConfig):
    """Settings of DQN. The defaults are those of Stable-Baselines3."""

    loss: Literal["huber", "mse"] = setting(
        "huber", "Loss of the TD error: Huber (quadratic up to 1, then linear) or mean squared error."
    )


class DQNAlgorithm(QLearningAlgorithm[DQNConfig, QNetwork]):
    """One Q-value per action; the TD target uses the target network's largest next Q-value, or double Q-learning."""

    def make_network(self) -> QNetwork:
        """See `QLearningAlgorithm.make_network`."""
        config = self.config
        return QNetwork(self.spec, config.network, dueling=config.dueling, noisy=config.noisy)

    def losses(self, batch: TransitionBatch, *draws: Tensor) -> RowLosses:
        """See `QLearningAlgorithm.losses`. The priority is the absolute TD error."""
        network, target = self.policy.network, self.target.module
        with torch.no_grad():
            next_q = target.q_values(batch.next_obs)
            if self.config.double:
                next_value = double_q_value(network.q_values(batch.next_obs), next_q)
            else:
                next_value = next_q.amax(dim=1)
            q_target = td_target(batch.reward, batch.discount, next_value)
        q_pred = at_action(network.q_values(batch.obs), batch.action)
        error = q_pred - q_target
        loss = huber(error) if self.config.loss == "huber" else error.square()
        return RowLosses(loss, error.detach().abs(), q_pred)


SPEC = AlgorithmSpec(
    name="dqn",
    title="DQN",
    config=DQNConfig,
    algorithm=DQNAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Discrete,),
    paper="Mnih et al. 2015, Human-level control through deep reinforcement learning, Nature 518",
)
