"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv:1812.05905)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.algorithms.bases.off_policy_actor_critic import (
    OffPolicyActorCriticAlgorithm,
    OffPolicyActorCriticConfig,
)
from rl_training.contracts.batches import Observation, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.ensembles import soft_target
from rl_training.functional.policies import sac_actor_loss, temperature_loss
from rl_training.policies.actors import SquashedGaussianPolicy, StochasticNetworkConfig
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.parameters import GradientStep, ParameterStore


def _no_noise() -> NoiseConfig:
    return NoiseConfig(kind="none")


@documented
@dataclass
class SACConfig(OffPolicyActorCriticConfig):
    """Settings of SAC."""

    temperature: float | None = setting(None, "Fixed temperature (entropy coefficient); none to learn it.", ge=0)
    initial_temperature: float = setting(1.0, "Initial value of a learned temperature.", gt=0)
    target_entropy: float | None = setting(
        None, "Target entropy of a learned temperature; none for minus the number of action dimensions."
    )
    policy_delay: int = setting(
        1, "Gradient steps of the critics per gradient step of the actor and the temperature.", ge=1
    )
    noise: NoiseConfig = setting(
        factory=_no_noise, help="Exploration noise added to sampled actions.", search={"std": None}
    )
    network: StochasticNetworkConfig = setting(factory=StochasticNetworkConfig, help="Networks.")

    def problems(self) -> list[str]:
        """See `AlgorithmConfig.problems`."""
        found = super().problems()
        if self.network.exploration == "gsde" and self.noise.kind == "ou":
            found.append("noise > kind: must be none or gaussian with network.exploration 'gsde', got 'ou'")
        return found


SACConfigT = TypeVar("SACConfigT", bound=SACConfig)


class Temperature(nn.Module):
    """The learned temperature, alpha = exp(log_alpha)."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor(math.log(initial)))


class SACAlgorithm(OffPolicyActorCriticAlgorithm[SACConfigT], Generic[SACConfigT]):
    """A stochastic actor that maximises Q-values plus its entropy, weighted by the temperature."""

    policy: SquashedGaussianPolicy
    policy_class: ClassVar[type[SquashedGaussianPolicy]] = SquashedGaussianPolicy

    def __init__(self, config: SACConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        default_entropy = -float(self.policy.num_actions)
        self.target_entropy = default_entropy if config.target_entropy is None else config.target_entropy
        self.temperature = Temperature(config.initial_temperature).to(device)
        self.temperature_store = ParameterStore(self.temperature, config.optimizer)
        self.temperature_step = GradientStep(
            self.temperature_store, self.temperature_losses, module=self.temperature, max_grad_norm=None
        )

    def alpha(self) -> Tensor:
        """The current temperature, without gradient."""
        fixed = self.config.temperature
        return self.temperature.log_alpha.detach().exp() if fixed is None else torch.tensor(fixed, device=self.device)

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update the critics; every `policy_delay` updates also the actor and the temperature; then the targets."""
        rates = self.start_update(batch, progress)
        update_actor = (progress.updates + 1) % self.config.policy_delay == 0
        draws = self.target_draws(batch)
        noise = self.draw_noise(batch) if update_actor else None
        return self.result(self.gradient_steps(batch, draws=draws, noise=noise, **rates), rates)

    def target_draws(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """The random numbers that `q_target` takes, by name."""
        return {"noise": self.draw_noise(batch)}

    def gradient_steps(
        self,
        batch: TransitionBatch,
        *,
        draws: dict[str, Tensor],
        noise: Tensor | None,
        actor_rate: float,
        critic_rate: float,
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`. Actor and temperature are updated only with `noise`."""
        alpha = self.alpha()
        critic = self.critic_step(critic_rate, batch, alpha=alpha, **draws)
        found = {**self.critic_metrics(critic), "train/temperature": alpha}
        if noise is not None:
            actor = self.actor_step(actor_rate, batch.obs, noise=noise, alpha=alpha)
            found |= {"loss/policy": actor["loss"], "policy/entropy": -actor["log_prob"].mean()}
            if self.config.temperature is None:
                found["loss/temperature"] = self.temperature_step(actor_rate, actor["log_prob"])["loss"]
        self.update_targets(self.config.tau)
        return found

    def q_target(self, batch: TransitionBatch, *, noise: Tensor, alpha: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: the soft target, with the entropy of the next action."""
        next_action, next_log_prob = self.policy.actor.sample(batch.next_obs, noise)
        next_q = self.critic_target.module(batch.next_obs, next_action)
        return soft_target(batch.reward, batch.discount, next_q, next_log_prob, alpha)

    def actor_losses(self, obs: Observation, *, noise: Tensor, alpha: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: for newly sampled actions."""
        action, log_prob = self.policy.actor.sample(obs, noise)
        return {"loss": sac_actor_loss(log_prob, self.policy.q_values(obs, action), alpha), "log_prob": log_prob}

    def temperature_losses(self, log_prob: Tensor) -> dict[str, Tensor]:
        """The temperature loss, given log-probabilities [B] of newly sampled actions."""
        return {"loss": temperature_loss(self.temperature.log_alpha, log_prob, self.target_entropy)}


SPEC = AlgorithmSpec(
    name="sac",
    title="SAC",
    config=SACConfig,
    algorithm=SACAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Haarnoja et al. 2018, Soft Actor-Critic Algorithms and Applications, arXiv:1812.05905",
)
