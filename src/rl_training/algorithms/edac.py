"""EDAC (An et al. 2021, arXiv:2110.01548): SAC with many critics whose gradients are kept diverse.

With `diversity_weight: 0` it is SAC-N: the minimum over many critics makes the values of unknown actions low.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.sac import SACAlgorithm, SACConfig
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.settings import SameAs, choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.conservative import gradient_similarity
from rl_training.policies.actors import StochasticNetworkConfig


@documented
@dataclass(kw_only=True)
class EDACNetworkConfig(StochasticNetworkConfig):
    """Networks of a stochastic actor and its critics, with three hidden layers."""

    actor_sizes: tuple[int, ...] = setting(
        (256, 256, 256),
        "Widths of the actor's hidden layers.",
        ge=1,
        search=choices((256, 256), (256, 256, 256), (400, 300)),
    )
    critic_sizes: tuple[int, ...] = setting(
        (256, 256, 256), "Widths of each critic's hidden layers.", ge=1, search=SameAs("network.actor_sizes")
    )


@documented
@dataclass
class EDACConfig(SACConfig):
    """Settings of EDAC. The defaults are the paper's for halfcheetah-medium."""

    num_critics: int = setting(10, "Number of critics; targets use their minimum.", ge=2, search=choices(10, 20, 50))
    diversity_weight: float = setting(
        1.0,
        "Weight of the similarity of the critics' gradients in their loss (eta in the paper); 0 is SAC-N.",
        ge=0,
        search=log_uniform(0.1, 1000.0),
    )
    network: EDACNetworkConfig = setting(factory=EDACNetworkConfig, help="Networks.")


class EDACAlgorithm(SACAlgorithm[EDACConfig]):
    """SAC with an ensemble that disagrees about actions that were not recorded."""

    def critic_losses(self, batch: TransitionBatch, **inputs: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.critic_losses`: algorithm 1 of the paper."""
        weight = self.config.diversity_weight
        if weight == 0.0:
            return super().critic_losses(batch, **inputs)
        with torch.no_grad():
            q_target = self.q_target(batch, **inputs)
        # each critic has its own copy of the actions, so that one backward pass gives the gradients of all critics
        actions = batch.action.flatten(1).repeat(self.config.num_critics, 1, 1).requires_grad_()
        q_pred = self.policy.critic.of_own_actions(batch.obs, actions)
        found = self.td_losses(batch, q_pred, q_target)
        (gradients,) = torch.autograd.grad(q_pred.sum(), actions, create_graph=True)
        similarity = gradient_similarity(gradients)
        # the loss of a critic is half the squared error here, and the whole in the paper
        return {**found, "loss": found["loss"] + 0.5 * weight * similarity, "similarity": similarity.detach()}

    def critic_metrics(self, critic: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.critic_metrics`."""
        found = super().critic_metrics(critic)
        return {**found, "train/gradient_similarity": critic["similarity"]} if "similarity" in critic else found


SPEC = AlgorithmSpec(
    name="edac",
    title="EDAC",
    config=EDACConfig,
    algorithm=EDACAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="An et al. 2021, Uncertainty-Based Offline RL with Diversified Q-Ensemble, arXiv:2110.01548",
)
