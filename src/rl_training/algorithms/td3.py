"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv:1802.09477)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.off_policy_actor_critic import (
    OffPolicyActorCriticAlgorithm,
    OffPolicyActorCriticConfig,
)
from rl_training.contracts.batches import Progress, TransitionBatch, UpdateResult
from rl_training.contracts.settings import choices, documented, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.ensembles import pessimistic_target
from rl_training.functional.policies import smoothed_action
from rl_training.policies.actors import DeterministicActor, DeterministicPolicy
from rl_training.policies.targets import Target


@documented
@dataclass
class TD3Config(OffPolicyActorCriticConfig):
    """Settings of TD3. Learning rates, sizes and noise are those of the authors' published code."""

    policy_delay: int = setting(
        2,
        "Gradient steps of the critics per update of the actor and the target networks.",
        ge=1,
        search=choices(1, 2, 4),
    )
    target_noise: float = setting(
        0.2, "Standard deviation of target policy smoothing noise.", ge=0, search=uniform(0.0, 0.5)
    )
    target_noise_clip: float = setting(0.5, "Clip range of target policy smoothing noise.", ge=0)


TD3ConfigT = TypeVar("TD3ConfigT", bound=TD3Config)


class TD3Algorithm(OffPolicyActorCriticAlgorithm[TD3ConfigT], Generic[TD3ConfigT]):
    """A deterministic actor, with three measures against overestimated Q-values.

    TD targets take the minimum of two critics, noise smooths the target actions, and the actor is updated less often.
    """

    policy: DeterministicPolicy
    policy_class = DeterministicPolicy

    def __init__(self, config: TD3ConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.actor_target: Target[DeterministicActor] = Target(self.policy, self.actor_store, part="actor")

    def targets(self) -> list[Target[Any]]:
        """See `OffPolicyActorCriticAlgorithm.targets`."""
        return [self.actor_target, self.critic_target]

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update the critics; every `policy_delay` updates also the actor and then the targets."""
        rates = self.start_update(batch, progress)
        update_actor = (progress.updates + 1) % self.config.policy_delay == 0
        noise = self.draw_noise(batch) if self.config.target_noise > 0 else None
        return self.result(self.gradient_steps(batch, noise=noise, update_actor=update_actor, **rates), rates)

    def gradient_steps(
        self, batch: TransitionBatch, *, noise: Tensor | None, update_actor: bool, actor_rate: float, critic_rate: float
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`."""
        found = self.critic_metrics(self.critic_step(critic_rate, batch, noise=noise))
        if update_actor:
            found["loss/policy"] = self.actor_step(actor_rate, batch)["loss"]
            self.update_targets(self.config.tau)
        return found

    def q_target(self, batch: TransitionBatch, *, noise: Tensor | None) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: for the next action with clipped noise."""
        next_action: Tensor = self.actor_target.module(batch.next_obs)
        if noise is not None:
            next_action = smoothed_action(next_action, self.config.target_noise * noise, self.config.target_noise_clip)
        return pessimistic_target(batch.reward, batch.discount, self.critic_target.module(batch.next_obs, next_action))

    def actor_losses(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: minus the mean Q-value of the first critic."""
        return {"loss": -self.policy.critic(batch.obs, self.policy.actor(batch.obs), slice(1)).mean()}


SPEC = AlgorithmSpec(
    name="td3",
    title="TD3",
    config=TD3Config,
    algorithm=TD3Algorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Fujimoto et al. 2018, Addressing Function Approximation Error in Actor-Critic Methods, arXiv:1802.09477",
)
