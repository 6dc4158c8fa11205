"""The base of DDPG, TD3, SAC, DrQ-v2 and SAC's relatives: an actor, critics, target networks, and the critic update."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_training.accelerate import Accelerated
from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.batches import Metrics, Observation, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import documented, log_uniform, setting
from rl_training.contracts.spec import EnvSpec
from rl_training.data.settings import OffPolicyConfig
from rl_training.functional.ensembles import ensemble_td_loss, pessimistic_target
from rl_training.functional.values import q_statistics
from rl_training.policies.actors import ContinuousPolicy, OffPolicyNetworkConfig
from rl_training.policies.ensemble import EnsembleCritic
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.layers import draw_dropout
from rl_training.policies.networks import seeded_weights
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore
from rl_training.policies.targets import Target


def _adam() -> OptimizerConfig:
    return OptimizerConfig(eps=1e-8)


@documented
@dataclass
class OffPolicyActorCriticConfig(OffPolicyConfig):
    """Settings shared by off-policy actor-critics. The defaults are those of Stable-Baselines3's SAC."""

    learning_rate: ScheduleOrFloat = setting(
        3e-4, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    critic_learning_rate: ScheduleOrFloat | None = setting(
        None, "Learning rate of the critics, a number or a schedule; none for the value of learning_rate.", ge=0
    )
    tau: float = setting(
        0.005,
        "Soft update coefficient of the target networks.",
        ge=0,
        le=1,
        search=log_uniform(1e-3, 0.1),
    )
    num_critics: int = setting(2, "Number of critics; targets use their minimum.", ge=1, le=1_000)
    max_grad_norm: float | None = setting(
        None, "Clip the gradient of each network to this norm; none to not clip.", gt=0
    )
    network: OffPolicyNetworkConfig = setting(factory=OffPolicyNetworkConfig, help="Networks.")
    optimizer: OptimizerConfig = setting(factory=_adam, help="Optimizer.")
    noise: NoiseConfig = setting(factory=NoiseConfig, help="Exploration noise added to actions.")


OffPolicyActorCriticConfigT = TypeVar("OffPolicyActorCriticConfigT", bound=OffPolicyActorCriticConfig)


class OffPolicyActorCriticAlgorithm(Algorithm[OffPolicyActorCriticConfigT], Generic[OffPolicyActorCriticConfigT]):
    """Base class of off-policy actor-critics: builds the policy, its optimizers and the critics' target network.

    A subclass defines `update`, which draws random numbers and calls `gradient_steps`, and `gradient_steps`, a function
    of tensors only, which is accelerated as a whole.
    """

    policy: ContinuousPolicy
    policy_class: ClassVar[type[ContinuousPolicy]]
    critic_parts: ClassVar[tuple[str, ...]] = ("critic",)
    """Parts of the policy that the critics' loss trains."""
    has_critic_target: ClassVar[bool] = True
    """Whether the critics have a target network."""
    drops_in_target: ClassVar[bool] = False
    """Whether dropout stays active in the critics' target network."""
    trains_one_network: ClassVar[bool] = False
    """Whether a gradient step evaluates the network that it does not train in evaluation mode."""

    def __init__(
        self, config: OffPolicyActorCriticConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        with seeded_weights(rng):
            self.policy = self.make_policy().to(device)
        self.policy.rollout_steps = config.num_steps
        self.actor_store = ParameterStore(self.policy, config.optimizer, parts=["actor"])
        self.critic_store = ParameterStore(self.policy, config.optimizer, parts=self.critic_parts)
        if self.has_critic_target:
            self.critic_target: Target[EnsembleCritic] = Target(
                self.policy, self.critic_store, part="critic", training=self.drops_in_target
            )
        self.critic_step = self._gradient_step(self.critic_store, self.critic_losses, "critic")
        self.actor_step = self._gradient_step(self.actor_store, self.actor_losses, "actor")
        self.gradient_steps = Accelerated(  # type: ignore[method-assign]
            self.gradient_steps, self.policy, why_plain=self.actor_store.why_plain
        )

    def _gradient_step(
        self, store: ParameterStore, losses: Callable[..., dict[str, Tensor]], part: str
    ) -> GradientStep:
        training = part if self.trains_one_network else ""
        norm = self.config.max_grad_norm
        return GradientStep(store, losses, module=self.policy, max_grad_norm=norm, training=training)

    def make_policy(self) -> ContinuousPolicy:
        """A new policy."""
        config = self.config
        return self.policy_class(self.spec, config.network, config.num_critics, config.noise)

    @abstractmethod
    def gradient_steps(self, batch: TransitionBatch, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        """Update the critics, the actor if it is due, and then the targets. A function of tensors only.

        Returns metrics by name, and `priorities` [B].
        """

    @abstractmethod
    def q_target(self, batch: TransitionBatch, *args: Any, **inputs: Any) -> Tensor:
        """The TD targets [B] of the critics. A function of tensors only."""

    @abstractmethod
    def actor_losses(self, batch: TransitionBatch, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        """The `loss` that a step of the actor minimises. A function of tensors only."""

    def critic_losses(self, batch: TransitionBatch, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        """The critics' `loss`; `priorities` [B] are absolute TD errors, averaged over the critics.

        `inputs` are the arguments of `q_target` after the batch.
        """
        with torch.no_grad():
            q_target = self.q_target(batch, *args, **inputs)
        return self.td_losses(batch, self.policy.critic(batch.obs, batch.action), q_target)

    def td_losses(self, batch: TransitionBatch, q_pred: Tensor, q_target: Tensor) -> dict[str, Tensor]:
        """The results of `critic_losses` for predictions [E, B] and targets [B]."""
        errors = (q_pred.detach() - q_target).abs().mean(0)
        loss = ensemble_td_loss(q_pred, q_target, batch.weight)
        return {"loss": loss, "q_mean": q_pred.detach().mean(), "priorities": errors}

    def critic_metrics(self, critic: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of the results of `gradient_steps` that comes from the critic update."""
        return {
            "loss/critic": critic["loss"],
            "value/q_mean": critic["q_mean"],
            "train/gradient_norm": critic["gradient_norm"],
            "priorities": critic["priorities"],
        }

    @torch.no_grad()
    def validate(self, batch: TransitionBatch) -> Metrics:
        """See `Algorithm.validate`: the critics' error against one-step targets, and statistics of Q-values.

        Targets take the policy's deterministic next action and the minimum of the target critics.
        """
        target = self.critic_target.module if self.has_critic_target else self.policy.critic
        next_q = self.q_values(target, batch.next_obs, self.policy.mode(batch.next_obs))
        q_target = pessimistic_target(batch.reward, batch.discount, next_q)
        data_q = self.q_values(self.policy.critic, batch.obs, batch.action)
        policy_q = self.q_values(self.policy.critic, batch.obs, self.policy.mode(batch.obs))
        return {"td_error": (data_q - q_target).square().mean().sqrt(), **q_statistics(data_q, policy_q)}

    def q_values(self, critic: EnsembleCritic, obs: Observation, action: Tensor) -> Tensor:
        """Q-values [E, B] of observations, means of quantiles; overridden where the critic takes encoded features."""
        values: Tensor = critic(obs, action)
        return values.mean(2) if values.dim() == 3 else values

    def targets(self) -> list[Target[Any]]:
        """All target networks."""
        return [self.critic_target] if self.has_critic_target else []

    def explore(self, progress: Progress) -> ContinuousPolicy:
        """See `Algorithm.explore`: sets the scheduled standard deviation of the noise."""
        self.policy.noise_std.fill_(value_of(self.config.noise.std, progress.fraction))
        return self.policy

    def start_from(self, weights: dict[str, Any]) -> None:
        """See `Algorithm.start_from`. The target networks get the same weights."""
        super().start_from(weights)
        self.update_targets(tau=1.0)

    def update_targets(self, tau: float) -> None:
        """Polyak update of all target networks."""
        for target in self.targets():
            target.update(tau)

    def start_update(self, batch: TransitionBatch, progress: Progress) -> dict[str, float]:
        """Draw dropout masks. Returns the scheduled learning rates, as keyword arguments of `gradient_steps`."""
        if self.config.network.has_dropout:
            networks = (self.policy, *(target.module for target in self.targets()))
            draw_dropout(networks, batch.reward.shape[0], self.rng, self.device)
        return self.learning_rates(progress)

    def learning_rates(self, progress: Progress) -> dict[str, float]:
        """The scheduled learning rates, as keyword arguments of `gradient_steps`."""
        actor, critic = self.config.learning_rate, self.config.critic_learning_rate
        return {
            "actor_rate": value_of(actor, progress.fraction),
            "critic_rate": value_of(actor if critic is None else critic, progress.fraction),
        }

    def result(self, found: dict[str, Tensor], rates: dict[str, float]) -> UpdateResult:
        """The result of `update`, from the results of `gradient_steps`."""
        priorities = found.pop("priorities")
        return UpdateResult({"train/learning_rate": rates["actor_rate"], **found}, priorities=priorities)

    def draw_noise(self, batch: TransitionBatch) -> Tensor:
        """Standard normal noise [B, A] from the algorithm's random generator."""
        return self.policy.draw_noise(self.rng, batch.reward.shape[0]).to(self.device)
