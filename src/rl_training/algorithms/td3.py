"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.off_policy_actor_critic import (
    OffPolicyActorCriticAlgorithm,
    OffPolicyActorCriticConfig,
    critic_report,
)
from rl_training.contracts.batches import Observation, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.settings import choices, documented, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.ensembles import pessimistic_target
from rl_training.functional.policies import smoothed_action
from rl_training.policies.actors import DeterministicPolicy
from rl_training.policies.targets import Target


@documented
@dataclass
class TD3Config(OffPolicyActorCriticConfig):
    """Settings of TD3. Rates, sizes and noise are those of the authors' published code."""

    policy_delay: int = setting(
        2, "Steps of the critics per step of the actor and of the targets.", ge=1, search=choices(1, 2, 4)
    )
    target_noise: float = setting(
        0.2, "Standard deviation of the noise on target actions.", ge=0, search=uniform(0.0, 0.5)
    )
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

    def q_target(self, batch: TransitionBatch, *draws: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: of the next action with clipped noise."""
        (noise,) = draws
        next_action = smoothed_action(
            self.actor_target.module(batch.next_obs), self.config.target_noise * noise, self.config.target_noise_clip
        )
        return pessimistic_target(batch.reward, batch.discount, self.critic_target.module(batch.next_obs, next_action))

    def actor_losses(self, obs: Observation, *draws: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: up the first critic's values."""
        return {"loss": -self.policy.critic(obs, self.policy.actor(obs), slice(1)).mean()}

    def learn(
        self, batch: TransitionBatch, actor_rate: float, critic_rate: float, learns_to_act: bool, *draws: Tensor
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.learn`: the targets follow when the actor learns."""
        found = critic_report(self.critic_step(critic_rate, batch, *draws))
        if learns_to_act:
            found["loss/policy"] = self.actor_step(actor_rate, batch.obs)["loss"]
            self.update_targets(self.config.tau)
        return found

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """One gradient step of the critics; every `policy_delay` steps one of the actor, and the targets follow."""
        learns_to_act = (progress.updates + 1) % self.config.policy_delay == 0
        return self.learn_from(batch, progress, self.draw_noise(batch), learns_to_act=learns_to_act)


SPEC = AlgorithmSpec(
    name="td3",
    title="TD3",
    config=TD3Config,
    algorithm=TD3Algorithm,
    regimes=(Regime.OFF_POLICY,),
    action_spaces=(spaces.Box,),
    paper="Fujimoto et al. 2018, Addressing Function Approximation Error in Actor-Critic Methods, arXiv:1802.09477",
)
