"""Categorical DQN, C51 (Bellemare et al. 2017, arXiv:1707.06887)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.q_learning import QLearningAlgorithm, QLearningConfig, RowLosses
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.distributional import categorical_projection, kl_divergence
from rl_training.functional.values import at_action
from rl_training.policies.q_networks import CategoricalQNetwork


@documented
@dataclass
class C51Config(QLearningConfig):
    """Settings of C51. Choose `v_min` and `v_max` so that all discounted returns lie between them."""

    num_atoms: int = setting(51, "Number of atoms per action.", ge=2, le=100_000)
    v_min: float = setting(-10.0, "Lowest atom; lower returns are clipped to it.")
    v_max: float = setting(10.0, "Highest atom; higher returns are clipped to it.")

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.v_min >= self.v_max:
            found.append(f"v_min: must be below v_max, got {self.v_min:g} and {self.v_max:g}")
        return found


class C51Algorithm(QLearningAlgorithm[C51Config, CategoricalQNetwork]):
    """A return distribution on fixed atoms per action; the target is that of r + discount * z', projected."""

    def make_network(self) -> CategoricalQNetwork:
        """See `QLearningAlgorithm.make_network`."""
        config = self.config
        return CategoricalQNetwork(
            self.spec, config.network, dueling=config.dueling, noisy=config.noisy,
            num_outputs=config.num_atoms, v_min=config.v_min, v_max=config.v_max,
        )  # fmt: skip

    def losses(self, batch: TransitionBatch, *draws: Tensor) -> RowLosses:
        """See `QLearningAlgorithm.losses`. Loss and priority are the KL divergence from the projected target."""
        network, target = self.policy.network, self.target.module
        with torch.no_grad():
            next_logits = target(batch.next_obs)
            next_action = self.next_action(batch.next_obs, next_logits)
            next_probs = at_action(next_logits, next_action).softmax(dim=1)
            target_probs = categorical_projection(next_probs, batch.reward, batch.discount, network.support)
        log_probs = at_action(network(batch.obs), batch.action).log_softmax(dim=1)
        loss = kl_divergence(target_probs, log_probs)
        q_pred = log_probs.detach().exp() @ network.support
        return RowLosses(loss, loss.detach().clamp(min=0.0), q_pred)  # rounding can make the divergence negative


SPEC = AlgorithmSpec(
    name="c51",
    title="C51",
    config=C51Config,
    algorithm=C51Algorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Discrete,),
    paper="Bellemare et al. 2017, A Distributional Perspective on Reinforcement Learning, arXiv:1707.06887",
)
