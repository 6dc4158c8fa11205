"""Conservative Q-learning (Kumar et al. 2020, arXiv:2006.04779), for continuous and discrete actions.

SAC, or double Q-learning, plus a penalty on the Q-values of actions that were not recorded: CQL(H). As in the authors'
published code, targets have no entropy bonus unless `entropy_in_target` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.constraint import ConstraintWeight
from rl_training.algorithms.bases.discrete_critic import DiscreteCriticAlgorithm
from rl_training.algorithms.sac import SACAlgorithm, SACConfig
from rl_training.contracts.batches import Observation, TransitionBatch
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.conservative import conservative_penalty
from rl_training.functional.values import at_action
from rl_training.policies.behaviour import repeat_rows
from rl_training.policies.discrete import GreedyPolicy
from rl_training.policies.parameters import GradientStep, ParameterStore


@documented
@dataclass
class CQLConfig(SACConfig):
    """Settings of CQL."""

    learning_rate: ScheduleOrFloat = setting(
        1e-4, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    critic_learning_rate: ScheduleOrFloat | None = setting(
        3e-4, "Learning rate of the critics, a number or a schedule; none for the value of learning_rate.", ge=0
    )
    penalty_weight: float = setting(
        5.0, "Weight of the conservative penalty (alpha in the paper).", ge=0, search=log_uniform(0.1, 20.0)
    )
    penalty_limit: float | None = setting(
        None,
        "Continuous actions: limit of the penalty; a Lagrange multiplier on the weight is learned to keep it (tau in "
        "the paper). None for a fixed weight.",
    )
    penalty_learning_rate: float = setting(1e-4, "Learning rate of the Lagrange multiplier.", ge=0)
    num_penalty_actions: int = setting(10, "Continuous actions: sampled actions per row, of each of three kinds.", ge=1)
    entropy_in_target: bool = setting(False, "Continuous actions: add the entropy of the next action to targets.")
    epsilon: ScheduleOrFloat = setting(
        0.05, "Discrete actions: probability of a random action when exploring, a number or a schedule.", ge=0, le=1
    )


CQLConfigT = TypeVar("CQLConfigT", bound=CQLConfig)


class CQLAlgorithm(SACAlgorithm[CQLConfigT], Generic[CQLConfigT]):
    """SAC whose critics' loss lowers the soft maximum of Q-values and raises those of recorded actions."""

    def __init__(self, config: CQLConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.multiplier = ConstraintWeight().to(device)
        self.multiplier_store = ParameterStore(self.multiplier, config.optimizer)
        self.multiplier_step = GradientStep(
            self.multiplier_store, self.multiplier_losses, module=self.multiplier, max_grad_norm=None
        )

    def target_draws(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """See `SACAlgorithm.target_draws`. Also the actions of the penalty: uniform ones, and noise of the policy."""
        rows, count, size = batch.reward.shape[0], self.config.num_penalty_actions, self.policy.num_actions
        uniform = self.rng.random((rows, count, size), dtype=np.float32) * 2.0 - 1.0
        return {
            **super().target_draws(batch),
            "uniform": torch.from_numpy(uniform).to(self.device),
            "current_noise": self.policy.draw_noise(self.rng, rows, count).to(self.device),
            "next_noise": self.policy.draw_noise(self.rng, rows, count).to(self.device),
        }

    def gradient_steps(
        self,
        batch: TransitionBatch,
        *,
        draws: dict[str, Tensor],
        noise: Tensor | None,
        actor_rate: float,
        critic_rate: float,
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`."""
        found = super().gradient_steps(batch, draws=draws, noise=noise, actor_rate=actor_rate, critic_rate=critic_rate)
        if self.config.penalty_limit is not None:
            self.multiplier_step(self.config.penalty_learning_rate, found["loss/conservative"])
            self.multiplier.clip()
            found["train/penalty_multiplier"] = self.multiplier().detach()
        return found

    def critic_metrics(self, critic: dict[str, Tensor]) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.critic_metrics`."""
        return {**super().critic_metrics(critic), "loss/conservative": critic["penalty"]}

    def critic_losses(self, batch: TransitionBatch, **inputs: Tensor) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.critic_losses`: eq. 4 of the paper; `penalty` is without its weight."""
        actions = {name: inputs.pop(name) for name in ("uniform", "current_noise", "next_noise")}
        with torch.no_grad():
            q_target = self.q_target(batch, **inputs)
        q_pred = self.policy.critic(batch.obs, batch.action)
        found = self.td_losses(batch, q_pred, q_target)
        penalty = self.config.penalty_weight * self.penalty(batch, q_pred, **actions)
        limit = self.config.penalty_limit
        if limit is None:
            weighted = penalty.sum()
        else:
            penalty = penalty - limit
            weighted = (self.multiplier().detach() * penalty).sum()
        return {**found, "loss": found["loss"] + 0.5 * weighted, "penalty": penalty.detach().mean()}

    def penalty(
        self, batch: TransitionBatch, q_data: Tensor, *, uniform: Tensor, current_noise: Tensor, next_noise: Tensor
    ) -> Tensor:
        """The conservative penalty of each critic [E], by importance sampling (appendix F of the paper)."""
        count = uniform.shape[1]
        with torch.no_grad():
            current, current_density = self.sampled(batch.obs, current_noise)
            following, next_density = self.sampled(batch.next_obs, next_noise)
            uniform_density = torch.full_like(current_density, -uniform.shape[2] * float(np.log(2.0)))
            actions = torch.cat((uniform.flatten(0, 1), current, following))
            log_density = torch.cat((uniform_density, current_density, next_density)).unflatten(0, (3, -1, count))
        obs = repeat_rows(batch.obs, count)
        values = self.policy.critic(_three_times(obs), actions).unflatten(1, (3, -1, count))  # [E, 3, B, N]
        values = torch.cat((values[:, :1], self.bounded(batch, values[:, 1:])), dim=1)
        sampled, density = values.transpose(2, 3).flatten(1, 2), log_density.transpose(1, 2).flatten(0, 1)
        return conservative_penalty(sampled, density, q_data)

    def sampled(self, obs: Observation, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B * N, A] of the policy and their log-densities, from noise [B, N, A]."""
        return self.policy.actor.sample(repeat_rows(obs, noise.shape[1]), noise.flatten(0, 1))

    def bounded(self, batch: TransitionBatch, values: Tensor) -> Tensor:
        """The Q-values [E, 2, B, N] of the policy's actions in the penalty; Cal-QL bounds them from below."""
        return values

    def q_target(self, batch: TransitionBatch, *, noise: Tensor, alpha: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`."""
        alpha = alpha if self.config.entropy_in_target else torch.zeros_like(alpha)
        return super().q_target(batch, noise=noise, alpha=alpha)

    def multiplier_losses(self, penalty: Tensor) -> dict[str, Tensor]:
        """The loss of the Lagrange multiplier, which grows while the penalty exceeds its limit."""
        return {"loss": -self.multiplier() * penalty}


def _three_times(obs: Observation) -> Observation:
    if isinstance(obs, dict):
        return {key: torch.cat((part, part, part)) for key, part in obs.items()}
    return torch.cat((obs, obs, obs))


class DiscreteCQLAlgorithm(DiscreteCriticAlgorithm[CQLConfig]):
    """Double Q-learning with the exact soft maximum over all actions in the penalty."""

    def make_policy(self) -> GreedyPolicy:
        """See `DiscreteCriticAlgorithm.make_policy`."""
        return GreedyPolicy(self.spec, self.config.network, self.config.num_critics)

    def penalty(self, batch: TransitionBatch, q_values: Tensor) -> Tensor:
        """See `DiscreteCriticAlgorithm.penalty`."""
        q_data = torch.stack([at_action(values, batch.action) for values in q_values])
        return self.config.penalty_weight * (q_values.logsumexp(dim=2) - q_data).mean(dim=1).sum()


SPEC = AlgorithmSpec(
    name="cql",
    title="CQL",
    config=CQLConfig,
    algorithm=CQLAlgorithm,
    discrete=DiscreteCQLAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Kumar et al. 2020, Conservative Q-Learning for Offline Reinforcement Learning, arXiv:2006.04779",
)
