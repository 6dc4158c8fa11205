"""Soft actor-critic for discrete actions (Christodoulou 2019, arXiv:1910.07207): all expectations in closed form.

The temperature keeps the entropy at a share of its maximum, log A. With the paper's share of 0.98 the policy stays
nearly uniform, and the temperature rises without bound where good actions need less entropy than that; the docs page
shows it. The default is lower, and Q-values of targets and of the actor come from the minimum of the critics.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.off_policy_actor_critic import (
    OffPolicyActorCriticAlgorithm,
    OffPolicyActorCriticConfig,
)
from rl_training.algorithms.sac import Temperature
from rl_training.contracts.batches import Observation, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.settings import documented, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.policies import entropy_shortfall_loss, expected_sac_actor_loss
from rl_training.functional.values import td_target
from rl_training.policies.discrete import DiscreteActorCriticPolicy, DiscreteCritic
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.masks import mask_of
from rl_training.policies.parameters import GradientStep, ParameterStore
from rl_training.policies.targets import Target


def _no_noise() -> NoiseConfig:
    return NoiseConfig(kind="none")


@documented
@dataclass
class DiscreteSACConfig(OffPolicyActorCriticConfig):
    """Settings of discrete SAC."""

    temperature: float | None = setting(None, "Fixed temperature (entropy coefficient); none to learn it.", ge=0)
    initial_temperature: float = setting(1.0, "Initial value of a learned temperature.", gt=0)
    target_entropy_share: float = setting(
        0.3,
        "Target entropy of a learned temperature, as a share of the entropy of uniformly random valid actions.",
        ge=0,
        le=1,
        search=uniform(0.05, 0.9),
    )
    policy_delay: int = setting(
        1, "Gradient steps of the critics per gradient step of the actor and the temperature.", ge=1
    )
    noise: NoiseConfig = setting(
        factory=_no_noise, help="Has no effect on discrete actions: leave it at none.", search={"std": None}
    )

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.noise.kind != "none":
            found.append(f"noise > kind: discrete actions have no noise, so it must be none, got '{self.noise.kind}'")
        return found


class DiscreteSACAlgorithm(OffPolicyActorCriticAlgorithm[DiscreteSACConfig]):
    """A categorical actor that maximises the minimum of the critics plus its entropy, weighted by the temperature."""

    policy: DiscreteActorCriticPolicy  # type: ignore[assignment]
    critic_target: Target[DiscreteCritic]  # type: ignore[assignment]

    def __init__(
        self, config: DiscreteSACConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        self.temperature = Temperature(config.initial_temperature).to(device)
        self.temperature_store = ParameterStore(self.temperature, config.optimizer)
        self.temperature_step = GradientStep(
            self.temperature_store, self.temperature_losses, module=self.temperature, max_grad_norm=None
        )

    def make_policy(self) -> DiscreteActorCriticPolicy:  # type: ignore[override]
        """See `OffPolicyActorCriticAlgorithm.make_policy`."""
        return DiscreteActorCriticPolicy(self.spec, self.config.network, self.config.num_critics)

    def explore(self, progress: Progress) -> DiscreteActorCriticPolicy:  # type: ignore[override]
        """See `Algorithm.explore`: the policy samples its actions."""
        return self.policy

    def alpha(self) -> Tensor:
        """The current temperature, without gradient."""
        fixed = self.config.temperature
        return self.temperature.log_alpha.detach().exp() if fixed is None else torch.tensor(fixed, device=self.device)

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update the critics; every `policy_delay` updates also the actor and the temperature; then the targets."""
        rates = self.start_update(batch, progress)
        update_actor = (progress.updates + 1) % self.config.policy_delay == 0
        return self.result(self.gradient_steps(batch, update_actor=update_actor, **rates), rates)

    def gradient_steps(
        self, batch: TransitionBatch, *, update_actor: bool, actor_rate: float, critic_rate: float
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`."""
        alpha = self.alpha()
        found = {**self.critic_metrics(self.critic_step(critic_rate, batch, alpha=alpha)), "train/temperature": alpha}
        if update_actor:
            actor = self.actor_step(actor_rate, batch, alpha=alpha)
            found |= {"loss/policy": actor["loss"], "policy/entropy": actor["entropy"].mean()}
            if self.config.temperature is None:
                target = self.config.target_entropy_share * self.largest_entropy(batch.obs)
                found["loss/temperature"] = self.temperature_step(actor_rate, actor["entropy"], target)["loss"]
        self.update_targets(self.config.tau)
        return found

    def largest_entropy(self, obs: Observation) -> Tensor:
        """The entropy of uniformly random valid actions, [B] with masks, else a single number."""
        if not self.spec.action_masks:
            return torch.tensor(math.log(self.policy.num_actions), device=self.device)
        return mask_of(obs).sum(dim=1).clamp(min=1).log()

    def q_target(self, batch: TransitionBatch, *, alpha: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: the expectation over all next actions (eq. 10)."""
        log_probs = self.policy.actor.distribution(batch.next_obs).log_probs
        next_q = self.critic_target.module.q_values(batch.next_obs).amin(0)
        return td_target(batch.reward, batch.discount, -expected_sac_actor_loss(log_probs, next_q, alpha))

    def actor_losses(self, batch: TransitionBatch, *, alpha: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: eq. 12."""
        distribution = self.policy.actor.distribution(batch.obs)
        q = self.policy.critic.q_values(batch.obs).amin(0)
        loss = expected_sac_actor_loss(distribution.log_probs, q, alpha).mean()
        return {"loss": loss, "entropy": distribution.entropy()}

    def temperature_losses(self, entropy: Tensor, target_entropy: Tensor) -> dict[str, Tensor]:
        """The temperature loss (eq. 11), given entropies [B] and their target."""
        return {"loss": entropy_shortfall_loss(self.temperature.log_alpha, entropy, target_entropy)}


SPEC = AlgorithmSpec(
    name="discrete_sac",
    title="DiscreteSAC",
    config=DiscreteSACConfig,
    algorithm=DiscreteSACAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Discrete,),
    paper="Christodoulou 2019, Soft Actor-Critic for Discrete Action Settings, arXiv:1910.07207",
)
