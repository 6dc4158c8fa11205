"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.off_policy_actor_critic import OffPolicyActorCriticAlgorithm, OffPolicyActorCriticConfig
from rl_training.contracts.batches import Metrics, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.ensembles import pessimistic_target
from rl_training.functional.policies import smoothed_action
from rl_training.policies.actors import DeterministicPolicy
from rl_training.policies.targets import Target


@documented
@dataclass
class TD3Config(OffPolicyActorCriticConfig):
    """Settings of TD3. Rates, sizes and noise are those of the authors' published code."""

    policy_delay: int = setting(2, "Steps of the critics per step of the actor and of the targets.", ge=1)
    target_noise: float = setting(0.2, "Standard deviation of the noise on target actions.", ge=0)
    target_noise_clip: float = setting(0.5, "Largest noise on a target action.", ge=0)


class TD3Algorithm(OffPolicyActorCriticAlgorithm[TD3Config]):
    """DDPG with the smaller of two critics in its targets, smoothed target actions, and a slower actor."""

    policy: DeterministicPolicy
    policy_class = DeterministicPolicy

    def __init__(self, config: TD3Config, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.actor_target = Target(self.policy.actor, self.actor_store)

    def targets(self) -> list[Target[Any]]:
        """See `OffPolicyActorCriticAlgorithm.targets`."""
        return [self.actor_target, self.critic_target]

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """One gradient step of the critics; every `policy_delay` steps one of the actor, and the targets follow."""
        config = self.config
        actor_rate, critic_rate = self.learning_rates(progress)
        self.policy.train()

        with torch.no_grad():
            noise = config.target_noise * self.draw_noise(batch)
            next_action = smoothed_action(self.actor_target.module(batch.next_obs), noise, config.target_noise_clip)
            next_q = self.critic_target.module(batch.next_obs, next_action)
            q_target = pessimistic_target(batch.reward, batch.discount, next_q)
        critic = self.critic_step(batch, q_target, critic_rate)
        metrics: Metrics = {
            "loss/critic": critic.loss,
            "value/q_mean": critic.q_mean,
            "train/learning_rate": actor_rate,
            "train/gradient_norm": critic.gradient_norm,
        }
        if (progress.updates + 1) % config.policy_delay == 0:
            metrics["loss/policy"] = self._actor_step(batch, actor_rate)
            self.update_targets(config.tau)
        self.policy.eval()
        return UpdateResult(metrics, priorities=critic.priorities)

    def _actor_step(self, batch: TransitionBatch, learning_rate: float) -> Tensor:
        """One step up the first critic's values."""
        q = self.policy.critic(batch.obs, self.policy.actor(batch.obs), slice(1))
        policy_loss: Tensor = -q.mean()
        self.actor_store.step(policy_loss, learning_rate=learning_rate, max_grad_norm=self.config.max_grad_norm)
        return policy_loss.detach()


SPEC = AlgorithmSpec(
    name="td3",
    title="TD3",
    config=TD3Config,
    algorithm=TD3Algorithm,
    regimes=(Regime.OFF_POLICY,),
    action_spaces=(spaces.Box,),
    paper="Fujimoto et al. 2018, Addressing Function Approximation Error in Actor-Critic Methods, arXiv:1802.09477",
)
