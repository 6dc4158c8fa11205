"""Deep deterministic policy gradient (Lillicrap et al. 2016, arXiv:1509.02971)."""

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
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.ensembles import pessimistic_target
from rl_training.policies.actors import DeterministicPolicy
from rl_training.policies.targets import Target


@documented
@dataclass
class DDPGConfig(OffPolicyActorCriticConfig):
    """Settings of DDPG. Exploration is with Gaussian noise; the paper's is `noise.kind: ou`, `noise.std: 0.2`."""

    num_critics: int = setting(1, "Critics in the ensemble; targets take the smallest, the actor the first.", ge=1)


class DDPGAlgorithm(OffPolicyActorCriticAlgorithm[DDPGConfig]):
    """A deterministic actor climbs the values that its critic learns from replay."""

    policy: DeterministicPolicy
    policy_class = DeterministicPolicy

    def __init__(self, config: DDPGConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.actor_target = Target(self.policy.actor, self.actor_store)

    def targets(self) -> list[Target[Any]]:
        """See `OffPolicyActorCriticAlgorithm.targets`."""
        return [self.actor_target, self.critic_target]

    def q_target(self, batch: TransitionBatch, *draws: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`."""
        next_action = self.actor_target.module(batch.next_obs)
        return pessimistic_target(batch.reward, batch.discount, self.critic_target.module(batch.next_obs, next_action))

    def actor_losses(self, obs: Observation, *draws: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: up the first critic's values."""
        return {"loss": -self.policy.critic(obs, self.policy.actor(obs), slice(1)).mean()}

    def learn(
        self, batch: TransitionBatch, actor_rate: float, critic_rate: float, learns_to_act: bool, *draws: Tensor
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.learn`: the actor learns in every step."""
        critic = self.critic_step(critic_rate, batch)
        actor = self.actor_step(actor_rate, batch.obs)
        self.update_targets(self.config.tau)
        return {**critic_report(critic), "loss/policy": actor["loss"]}

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """One gradient step of the critic, one of the actor."""
        return self.learn_from(batch, progress)


SPEC = AlgorithmSpec(
    name="ddpg",
    title="DDPG",
    config=DDPGConfig,
    algorithm=DDPGAlgorithm,
    regimes=(Regime.OFF_POLICY,),
    action_spaces=(spaces.Box,),
    paper="Lillicrap et al. 2016, Continuous Control with Deep Reinforcement Learning, arXiv:1509.02971",
)
