"""The base of offline Q-learning with discrete actions: an ensemble of critics of all actions, greedy actions."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_training.accelerate import Accelerated
from rl_training.algorithms.bases.off_policy_actor_critic import OffPolicyActorCriticConfig
from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.batches import Metrics, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.schedule import value_of
from rl_training.contracts.spec import EnvSpec
from rl_training.functional.values import huber, q_statistics, td_target
from rl_training.policies.discrete import DiscreteCritic, GreedyPolicy
from rl_training.policies.layers import draw_dropout
from rl_training.policies.networks import seeded_weights
from rl_training.policies.parameters import GradientStep, ParameterStore
from rl_training.policies.targets import Target

ConfigT = TypeVar("ConfigT", bound=OffPolicyActorCriticConfig)


class DiscreteCriticAlgorithm(Algorithm[ConfigT], Generic[ConfigT]):
    """Double Q-learning on the critics' minimum; the subclass says what it adds to the loss or to the policy.

    It has the settings of the algorithm's form for continuous actions; those of actors have no effect.
    """

    policy: GreedyPolicy

    def __init__(self, config: ConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        with seeded_weights(rng):
            self.policy = self.make_policy().to(device)
        self.critic_store = ParameterStore(self.policy, config.optimizer, parts=["critic"])
        self.critic_target: Target[DiscreteCritic] = Target(self.policy, self.critic_store, part="critic")
        self.critic_step = GradientStep(
            self.critic_store, self.critic_losses, module=self.policy, max_grad_norm=config.max_grad_norm
        )
        self.gradient_steps = Accelerated(  # type: ignore[method-assign]
            self.gradient_steps, self.policy, why_plain=self.critic_store.why_plain
        )

    @abstractmethod
    def make_policy(self) -> GreedyPolicy:
        """A new policy."""

    def learning_rates(self, progress: Progress) -> dict[str, float]:
        """The scheduled `learning_rate` of the critics, and further ones that `further_steps` takes."""
        rate = self.config.critic_learning_rate
        return {"learning_rate": value_of(self.config.learning_rate if rate is None else rate, progress.fraction)}

    def further_steps(self, batch: TransitionBatch, **rates: float) -> dict[str, Tensor]:
        """Gradient steps of other networks, made first; returns metrics."""
        return {}

    def penalty(self, batch: TransitionBatch, q_values: Tensor) -> Tensor | float:
        """What is added to the loss, given the Q-values [E, B, A] of all actions."""
        return 0.0

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update the critics and then their target network."""
        config = self.config
        if config.network.has_dropout:
            networks = (self.policy, self.critic_target.module)
            draw_dropout(networks, batch.reward.shape[0], self.rng, self.device)
        rates = self.learning_rates(progress)
        found = self.gradient_steps(batch, **rates)
        priorities = found.pop("priorities")
        return UpdateResult({"train/learning_rate": rates["learning_rate"], **found}, priorities=priorities)

    def gradient_steps(self, batch: TransitionBatch, *, learning_rate: float, **rates: float) -> dict[str, Tensor]:
        """All gradient steps of an update, a function of tensors only. Returns metrics and `priorities` [B]."""
        found = self.further_steps(batch, **rates)
        critic = self.critic_step(learning_rate, batch)
        self.critic_target.update(self.config.tau)
        return {
            **found,
            "loss/critic": critic["loss"],
            "value/q_mean": critic["q_mean"],
            "train/gradient_norm": critic["gradient_norm"],
            "priorities": critic["priorities"],
        }

    def critic_losses(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """The Huber loss of all critics plus the penalty; `priorities` [B] are absolute TD errors."""
        with torch.no_grad():
            q_target = self.q_target(batch)
        q_values = self.policy.critic.q_values(batch.obs)
        index = batch.action.long()[None, :, None].expand(q_values.shape[0], -1, 1)
        q_pred = q_values.gather(2, index).squeeze(2)
        error = q_pred - q_target
        loss = (batch.weight * huber(error)).mean(dim=1).sum() + self.penalty(batch, q_values)
        return {"loss": loss, "q_mean": q_pred.detach().mean(), "priorities": error.detach().abs().mean(0)}

    def q_target(self, batch: TransitionBatch) -> Tensor:
        """Targets [B]: the online critics choose the next action, the target critics evaluate it."""
        next_action = self.policy.mode(batch.next_obs)
        next_q: Tensor = self.critic_target.module(batch.next_obs, next_action)
        return td_target(batch.reward, batch.discount, next_q.amin(0))

    @torch.no_grad()
    def validate(self, batch: TransitionBatch) -> Metrics:
        """See `Algorithm.validate`: the error of all critics against their targets, and statistics of Q-values."""
        data_q: Tensor = self.policy.critic(batch.obs, batch.action)
        policy_q: Tensor = self.policy.critic(batch.obs, self.policy.mode(batch.obs))
        error = data_q - self.q_target(batch)
        return {"td_error": error.square().mean().sqrt(), **q_statistics(data_q, policy_q)}

    def explore(self, progress: Progress) -> GreedyPolicy:
        """See `Algorithm.explore`: sets the scheduled epsilon."""
        self.policy.epsilon.fill_(value_of(getattr(self.config, "epsilon"), progress.fraction))  # noqa: B009
        return self.policy

    def start_from(self, weights: dict[str, Any]) -> None:
        """See `Algorithm.start_from`. The target network gets the same weights."""
        super().start_from(weights)
        self.critic_target.update(tau=1.0)
