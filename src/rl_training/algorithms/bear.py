"""BEAR (Kumar et al. 2019, arXiv:1906.00949): maximise Q-values within the support of the recorded behaviour.

As in the authors' published code, the discrepancy is that of actions before tanh, and the actor only matches the
behaviour during the first `warmup_updates`. Departure: deterministic actions are the best of candidates from noise that
is drawn once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.behaviour_constrained import BehaviourConstrainedAlgorithm, BehaviourConstrainedConfig
from rl_training.algorithms.bases.constraint import ConstraintWeight
from rl_training.contracts.batches import Progress, TransitionBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.conservative import maximum_mean_discrepancy
from rl_training.policies.behaviour import SupportedPolicy
from rl_training.policies.parameters import GradientStep, ParameterStore


@documented
@dataclass
class BEARConfig(BehaviourConstrainedConfig):
    """Settings of BEAR."""

    learning_rate: ScheduleOrFloat = setting(
        1e-4, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    critic_learning_rate: ScheduleOrFloat | None = setting(
        3e-4, "Learning rate of the critics, a number or a schedule; none for the value of learning_rate.", ge=0
    )
    behaviour_learning_rate: ScheduleOrFloat | None = setting(
        3e-4, "Learning rate of the behaviour model, a number or a schedule; none for the value of learning_rate.", ge=0
    )
    kernel: Literal["laplacian", "gaussian"] = setting("laplacian", "Kernel of the discrepancy.")
    kernel_sigma: float = setting(20.0, "Width of the kernel.", gt=0, search=choices(5.0, 10.0, 20.0, 50.0))
    num_constraint_actions: int = setting(10, "Actions of the actor and of the behaviour that are compared.", ge=1)
    max_discrepancy: float = setting(
        0.05, "Limit of the discrepancy between the actor and the behaviour.", ge=0, search=log_uniform(0.01, 0.5)
    )
    constraint_learning_rate: float = setting(1e-3, "Learning rate of the constraint's weight.", ge=0)
    warmup_updates: int = setting(
        40_000, "Gradient steps at the start in which the actor only matches the behaviour.", ge=0
    )


class BEARAlgorithm(BehaviourConstrainedAlgorithm[BEARConfig]):
    """An actor that maximises Q-values while its samples resemble those of a behaviour model."""

    policy: SupportedPolicy

    def __init__(self, config: BEARConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.constraint = ConstraintWeight().to(device)
        self.constraint_store = ParameterStore(self.constraint, config.optimizer)
        self.constraint_step = GradientStep(
            self.constraint_store, self.constraint_losses, module=self.constraint, max_grad_norm=None
        )

    def make_policy(self) -> SupportedPolicy:
        """See `OffPolicyActorCriticAlgorithm.make_policy`."""
        config = self.config
        return SupportedPolicy(
            self.spec, config.network, config.num_critics, config.noise, num_candidates=config.num_candidates
        )

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update the behaviour model, the critics, the actor, the constraint's weight and then the targets."""
        rates = self.start_update(batch, progress)
        config, rows, size = self.config, batch.reward.shape[0], self.policy.num_actions
        count, num_latents = config.num_constraint_actions, self.policy.behaviour.num_latents
        draws: dict[str, Any] = {
            "latent_noise": self.draw(rows, num_latents),
            "next_noise": self.draw(rows, config.num_target_actions, size),
            "noise": self.draw(rows, count, size),
            "latents": self.draw(rows, count, num_latents),
        }
        is_warm = progress.updates >= config.warmup_updates
        return self.result(self.gradient_steps(batch, is_warm=is_warm, **{**draws, **rates}), rates)

    def gradient_steps(
        self,
        batch: TransitionBatch,
        *,
        is_warm: bool,
        latent_noise: Tensor,
        next_noise: Tensor,
        noise: Tensor,
        latents: Tensor,
        actor_rate: float,
        critic_rate: float,
        behaviour_rate: float,
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`."""
        config = self.config
        behaviour = self.behaviour_step(behaviour_rate, batch, latent_noise)
        critic = self.critic_step(critic_rate, batch, noise=next_noise)
        weight = self.constraint().detach()
        actor = self.actor_step(actor_rate, batch, is_warm=is_warm, noise=noise, latents=latents, weight=weight)
        self.constraint_step(config.constraint_learning_rate, actor["discrepancy"])
        self.constraint.clip()
        self.update_targets(config.tau)
        return {
            **self.critic_metrics(critic),
            "loss/policy": actor["loss"],
            "loss/behaviour": behaviour["loss"],
            "policy/discrepancy": actor["discrepancy"],
            "train/constraint_weight": weight,
        }

    def q_target(self, batch: TransitionBatch, *, noise: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: for the best of several sampled actions."""
        return self.best_target(batch, self.policy.candidates(batch.next_obs, noise))

    def actor_losses(
        self, batch: TransitionBatch, *, is_warm: bool, noise: Tensor, latents: Tensor, weight: Tensor
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: eq. 3 of the paper with a Lagrange multiplier."""
        config = self.config
        sampled = self.policy.unsquashed(batch.obs, noise)
        imitated = self.policy.behaviour.decode(batch.obs, latents.clamp(-0.5, 0.5)).detach()
        distance = maximum_mean_discrepancy(sampled, imitated, config.kernel_sigma, config.kernel).mean()
        loss = weight * distance
        if is_warm:
            loss = loss - self.policy.critic(batch.obs, sampled[:, 0].tanh()).amin(0).mean()
        return {"loss": loss, "discrepancy": distance}

    def constraint_losses(self, discrepancy: Tensor) -> dict[str, Tensor]:
        """The loss of the constraint's weight, which grows while the discrepancy exceeds its limit."""
        return {"loss": -self.constraint() * (discrepancy - self.config.max_discrepancy)}


SPEC = AlgorithmSpec(
    name="bear",
    title="BEAR",
    config=BEARConfig,
    algorithm=BEARAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Kumar et al. 2019, Stabilizing Off-Policy Q-Learning via Bootstrapping Error Reduction, arXiv:1906.00949",
)
