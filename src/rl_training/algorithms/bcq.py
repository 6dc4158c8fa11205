"""Batch-constrained Q-learning, for continuous actions (Fujimoto et al. 2019, arXiv:1812.02900) and discrete ones.

The discrete form is "Benchmarking Batch Deep RL Algorithms" (Fujimoto et al. 2019, arXiv:1910.01708).
Departures: the candidates of deterministic actions come from noise that is drawn once, so that equal observations get
equal actions; the discrete form trains a separate network for the behaviour, without the penalty on its logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.behaviour_constrained import BehaviourConstrainedAlgorithm, BehaviourConstrainedConfig
from rl_training.algorithms.bases.discrete_critic import DiscreteCriticAlgorithm
from rl_training.contracts.batches import Progress, TransitionBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import documented, log_uniform, setting, uniform
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.policies.behaviour import BatchConstrainedPolicy, PerturbationActor
from rl_training.policies.discrete import ConstrainedGreedyPolicy
from rl_training.policies.parameters import GradientStep, ParameterStore
from rl_training.policies.targets import Target


@documented
@dataclass
class BCQConfig(BehaviourConstrainedConfig):
    """Settings of BCQ. The defaults are the paper's."""

    learning_rate: ScheduleOrFloat = setting(
        1e-3, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    perturbation: float = setting(
        0.05, "Continuous actions: largest change of a decoded action by the actor.", ge=0, search=uniform(0.0, 0.2)
    )
    threshold: float = setting(
        0.3,
        "Discrete actions: lowest probability under the behaviour, relative to the most probable action.",
        ge=0,
        le=1,
        search=uniform(0.0, 0.9),
    )
    epsilon: ScheduleOrFloat = setting(
        0.05, "Discrete actions: probability of a random action when exploring, a number or a schedule.", ge=0, le=1
    )


class BCQAlgorithm(BehaviourConstrainedAlgorithm[BCQConfig]):
    """Takes the best of several actions that a VAE decodes and the actor moves slightly."""

    policy: BatchConstrainedPolicy

    def __init__(self, config: BCQConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.actor_target: Target[PerturbationActor] = Target(self.policy, self.actor_store, part="actor")

    def make_policy(self) -> BatchConstrainedPolicy:
        """See `OffPolicyActorCriticAlgorithm.make_policy`."""
        config = self.config
        return BatchConstrainedPolicy(
            self.spec,
            config.network,
            config.num_critics,
            config.noise,
            limit=config.perturbation,
            num_candidates=config.num_candidates,
        )

    def targets(self) -> list[Target[Any]]:
        """See `OffPolicyActorCriticAlgorithm.targets`."""
        return [self.actor_target, self.critic_target]

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update the behaviour model, the critics, the actor and then the targets."""
        rates = self.start_update(batch, progress)
        rows, size = batch.reward.shape[0], self.policy.noise_size
        draws: dict[str, Any] = {
            "latent_noise": self.draw(rows, size),
            "next_latents": self.draw(rows, self.config.num_target_actions, size),
            "latents": self.draw(rows, 1, size),
        }
        return self.result(self.gradient_steps(batch, **{**draws, **rates}), rates)

    def gradient_steps(
        self,
        batch: TransitionBatch,
        *,
        latent_noise: Tensor,
        next_latents: Tensor,
        latents: Tensor,
        actor_rate: float,
        critic_rate: float,
        behaviour_rate: float,
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`."""
        behaviour = self.behaviour_step(behaviour_rate, batch, latent_noise)
        critic = self.critic_step(critic_rate, batch, latents=next_latents)
        actor = self.actor_step(actor_rate, batch, latents=latents)
        self.update_targets(self.config.tau)
        return {**self.critic_metrics(critic), "loss/policy": actor["loss"], "loss/behaviour": behaviour["loss"]}

    def q_target(self, batch: TransitionBatch, *, latents: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: algorithm 1 of the paper."""
        imitated = self.policy.imitate(batch.next_obs, latents)
        return self.best_target(batch, self.policy.moved(batch.next_obs, imitated, self.actor_target.module))

    def actor_losses(self, batch: TransitionBatch, *, latents: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: minus the first critic's value of moved actions."""
        moved = self.policy.moved(batch.obs, self.policy.imitate(batch.obs, latents).detach(), self.policy.actor)
        return {"loss": -self.policy.critic(batch.obs, moved.squeeze(1), slice(1)).mean()}


class DiscreteBCQAlgorithm(DiscreteCriticAlgorithm[BCQConfig]):
    """Double Q-learning over the actions that the recorded behaviour takes often enough."""

    policy: ConstrainedGreedyPolicy

    def __init__(self, config: BCQConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.behaviour_store = ParameterStore(self.policy, config.optimizer, parts=["behaviour"])
        self.behaviour_step = GradientStep(
            self.behaviour_store, self.behaviour_losses, module=self.policy, max_grad_norm=config.max_grad_norm
        )

    def make_policy(self) -> ConstrainedGreedyPolicy:
        """See `DiscreteCriticAlgorithm.make_policy`."""
        config = self.config
        return ConstrainedGreedyPolicy(self.spec, config.network, config.num_critics, config.threshold)

    def learning_rates(self, progress: Progress) -> dict[str, float]:
        """See `DiscreteCriticAlgorithm.learning_rates`. Also that of the behaviour model."""
        own = self.config.behaviour_learning_rate
        rate = self.config.learning_rate if own is None else own
        return {**super().learning_rates(progress), "behaviour_rate": value_of(rate, progress.fraction)}

    def further_steps(  # type: ignore[override]  # `gradient_steps` passes what `learning_rates` returns
        self, batch: TransitionBatch, behaviour_rate: float
    ) -> dict[str, Tensor]:
        """See `DiscreteCriticAlgorithm.further_steps`: behaviour cloning."""
        return {"loss/behaviour": self.behaviour_step(behaviour_rate, batch)["loss"]}

    def behaviour_losses(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """The negative log-likelihood of the recorded actions."""
        return {"loss": -self.policy.behaviour.log_prob(batch.obs, batch.action).mean()}


SPEC = AlgorithmSpec(
    name="bcq",
    title="BCQ",
    config=BCQConfig,
    algorithm=BCQAlgorithm,
    discrete=DiscreteBCQAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Fujimoto et al. 2019, Off-Policy Deep Reinforcement Learning without Exploration, arXiv:1812.02900",
)
