"""The base of BCQ and BEAR: off-policy actor-critics that also learn a model of the recorded behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_training.algorithms.bases.off_policy_actor_critic import (
    OffPolicyActorCriticAlgorithm,
    OffPolicyActorCriticConfig,
)
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import documented, setting, uniform
from rl_training.contracts.spec import EnvSpec
from rl_training.functional.conservative import soft_clipped_value, vae_loss
from rl_training.policies.behaviour import BatchConstrainedPolicy, BehaviourNetworkConfig, SupportedPolicy
from rl_training.policies.distributions import normal_noise
from rl_training.policies.parameters import GradientStep, ParameterStore


@documented
@dataclass
class BehaviourConstrainedConfig(OffPolicyActorCriticConfig):
    """Settings of algorithms that choose among actions like the recorded ones."""

    behaviour_learning_rate: ScheduleOrFloat | None = setting(
        None, "Learning rate of the behaviour model, a number or a schedule; none for the value of learning_rate.", ge=0
    )
    behaviour_kl_coef: float = setting(0.5, "Weight of the KL in the loss of the behaviour model.", ge=0)
    min_weight: float = setting(
        0.75,
        "Weight of the smallest Q-value in targets; the largest has the rest.",
        ge=0,
        le=1,
        search=uniform(0.5, 1.0),
    )
    num_target_actions: int = setting(10, "Actions per next observation, of which targets take the best.", ge=1)
    num_candidates: int = setting(100, "Candidate actions, of which the policy takes the best.", ge=1)
    network: BehaviourNetworkConfig = setting(factory=BehaviourNetworkConfig, help="Networks.")


BehaviourConstrainedConfigT = TypeVar("BehaviourConstrainedConfigT", bound=BehaviourConstrainedConfig)


class BehaviourConstrainedAlgorithm(
    OffPolicyActorCriticAlgorithm[BehaviourConstrainedConfigT], Generic[BehaviourConstrainedConfigT]
):
    """Trains a VAE of the recorded actions beside the critics and the actor."""

    policy: BatchConstrainedPolicy | SupportedPolicy

    def __init__(
        self, config: BehaviourConstrainedConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        self.behaviour_store = ParameterStore(self.policy, config.optimizer, parts=["behaviour"])
        self.behaviour_step = GradientStep(
            self.behaviour_store, self.behaviour_losses, module=self.policy, max_grad_norm=config.max_grad_norm
        )

    def learning_rates(self, progress: Progress) -> dict[str, float]:
        """See `OffPolicyActorCriticAlgorithm.learning_rates`. Also that of the behaviour model."""
        rates = super().learning_rates(progress)
        own = self.config.behaviour_learning_rate
        return {**rates, "behaviour_rate": rates["actor_rate"] if own is None else value_of(own, progress.fraction)}

    def draw(self, *shape: int) -> Tensor:
        """Standard normal numbers from the algorithm's random generator."""
        return torch.from_numpy(normal_noise(self.rng, shape)).to(self.device)

    def behaviour_losses(self, batch: TransitionBatch, latent_noise: Tensor) -> dict[str, Tensor]:
        """The loss of the behaviour model, given noise [B, Z]."""
        action = batch.action.flatten(1)
        return {"loss": vae_loss(*self._decoded(batch, action, latent_noise), kl_coef=self.config.behaviour_kl_coef)}

    def _decoded(self, batch: TransitionBatch, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        decoded, mean, log_std = self.policy.behaviour(batch.obs, action, noise)
        return decoded, action, mean, log_std

    def best_target(self, batch: TransitionBatch, next_actions: Tensor) -> Tensor:
        """Targets [B] with the best of several next actions [B, N, A]."""
        next_q = self.policy.candidate_values(self.critic_target.module, batch.next_obs, next_actions)
        best = soft_clipped_value(next_q, self.config.min_weight).amax(dim=1)
        return batch.reward + batch.discount * best
