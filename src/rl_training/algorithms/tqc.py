"""Truncated quantile critics (Kuznetsov et al. 2020, arXiv:2005.04269): SAC whose critics learn return distributions.

Each critic predicts quantiles of the return. The target pools the quantiles of all critics and drops the largest, which
corrects overestimation in small steps; SAC's minimum is one large step.
"""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.sac import SACAlgorithm, SACConfig
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import AlgorithmSpec, Regime
from rl_training.functional.distributional import ensemble_quantile_loss, soft_quantile_target, truncated_mixture
from rl_training.policies.actors import MeanCriticPolicy


@documented
@dataclass
class TQCConfig(SACConfig):
    """Settings of TQC. Numbers of critics and quantiles are the paper's."""

    num_critics: int = setting(5, "Number of critics; targets pool their quantiles.", ge=1)
    num_quantiles: int = setting(25, "Number of quantiles per critic.", ge=2, search=choices(15, 25, 50))
    num_dropped: int = setting(
        2,
        "Quantiles dropped from targets per critic: the largest of all pooled ones. More is more pessimistic.",
        ge=0,
        search=choices(0, 1, 2, 3, 5),
    )
    kappa: float = setting(1.0, "Threshold of the quantile Huber loss: quadratic below, linear above.", gt=0)

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.num_dropped >= self.num_quantiles:
            found.append(f"num_dropped: must be less than num_quantiles ({self.num_quantiles}), got {self.num_dropped}")
        return found


class TQCAlgorithm(SACAlgorithm[TQCConfig]):
    """SAC with critics that predict quantiles, and targets without the largest of them."""

    policy_class = MeanCriticPolicy

    def make_policy(self) -> MeanCriticPolicy:
        """See `OffPolicyActorCriticAlgorithm.make_policy`: its critics have one output per quantile."""
        config = self.config
        return MeanCriticPolicy(
            self.spec, config.network, config.num_critics, config.noise, num_outputs=config.num_quantiles
        )

    def q_target(self, batch: TransitionBatch, *, noise: Tensor, alpha: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: quantiles [B, M] of the truncated mixture of all critics."""
        next_action, next_log_prob = self.policy.actor.sample(batch.next_obs, noise)
        next_quantiles = self.critic_target.module(batch.next_obs, next_action)
        kept = truncated_mixture(next_quantiles, self.config.num_dropped * self.config.num_critics)
        return soft_quantile_target(batch.reward, batch.discount, kept, next_log_prob, alpha)

    def td_losses(self, batch: TransitionBatch, q_pred: Tensor, q_target: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.td_losses`: for quantiles [E, B, K] and [B, M].

        The priority is the loss per critic.
        """
        errors = ensemble_quantile_loss(q_pred, q_target, self.config.kappa)
        return {
            "loss": (batch.weight * errors).mean(),
            "q_mean": q_pred.detach().mean(),
            "priorities": errors.detach() / self.config.num_critics,
        }


SPEC = AlgorithmSpec(
    name="tqc",
    title="TQC",
    config=TQCConfig,
    algorithm=TQCAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Kuznetsov et al. 2020, Controlling Overestimation Bias with Truncated Mixture of Continuous Distributional "
    "Quantile Critics, arXiv:2005.04269",
)
