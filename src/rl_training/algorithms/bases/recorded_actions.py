"""The bases of algorithms whose actor learns recorded actions by (weighted) regression: BC, MARWIL, AWR, AWAC, ...

Their maths needs only `actor.log_prob`, `actor.sample`, `critic(obs, action)` and V(s), so it is the same for Box and
Discrete actions; `make_recorded_policy` chooses the networks.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.accelerate import Accelerated
from rl_training.algorithms.bases.off_policy_actor_critic import (
    OffPolicyActorCriticAlgorithm,
    OffPolicyActorCriticConfig,
)
from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.arrays import map_observation
from rl_training.contracts.batches import Metrics, Observation, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import EnvSpec
from rl_training.data.settings import BatchConfig
from rl_training.functional.ensembles import pessimistic_target
from rl_training.functional.regression import log_likelihood_loss
from rl_training.policies.actors import ContinuousPolicy, GaussianPolicy, OffPolicyNetworkConfig
from rl_training.policies.discrete import DiscreteActorCriticPolicy
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.layers import draw_dropout
from rl_training.policies.networks import seeded_weights
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore

RecordedPolicy = GaussianPolicy | DiscreteActorCriticPolicy


def _adam() -> OptimizerConfig:
    return OptimizerConfig(eps=1e-8)


def no_noise() -> NoiseConfig:
    """The default: exploration samples from the actor, without further noise."""
    return NoiseConfig(kind="none")


def make_recorded_policy(
    spec: EnvSpec, network: OffPolicyNetworkConfig, noise: NoiseConfig, *, num_critics: int, state_value: bool
) -> RecordedPolicy:
    """A categorical actor for Discrete actions, a Gaussian one for Box; with critics and V(s) as asked for."""
    if isinstance(spec.action_space, spaces.Discrete):
        return DiscreteActorCriticPolicy(spec, network, num_critics, state_value=state_value)
    return GaussianPolicy(spec, network, num_critics, noise, state_value=state_value)


# Without Q-functions: actors, and V(s) that predicts recorded returns


@documented
@dataclass
class RegressionConfig(BatchConfig):
    """Settings shared by algorithms that learn actors, and perhaps state values, from recorded data only."""

    learning_rate: ScheduleOrFloat = setting(
        3e-4, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    max_grad_norm: float | None = setting(
        None, "Clip the gradient of each network to this norm; none to not clip.", gt=0
    )
    network: OffPolicyNetworkConfig = setting(factory=OffPolicyNetworkConfig, help="Networks.")
    optimizer: OptimizerConfig = setting(factory=_adam, help="Optimizer.")


RegressionConfigT = TypeVar("RegressionConfigT", bound=RegressionConfig)


class RegressionAlgorithm(Algorithm[RegressionConfigT], Generic[RegressionConfigT]):
    """Base class of algorithms without Q-functions. A subclass defines `losses` of the actor."""

    policy: RecordedPolicy | ContinuousPolicy

    def __init__(
        self, config: RegressionConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        with seeded_weights(rng):
            self.policy = self.make_policy().to(device)
        self.actor_store = ParameterStore(self.policy, config.optimizer, parts=["actor"])
        self.actor_step = self.step_of(self.actor_store, self.actor_losses)

    def step_of(self, store: ParameterStore, losses: Any) -> GradientStep:
        """A gradient step of one network."""
        return GradientStep(store, losses, module=self.policy, max_grad_norm=self.config.max_grad_norm)

    def make_policy(self) -> RecordedPolicy | ContinuousPolicy:
        """Build the policy from the settings."""
        return make_recorded_policy(self.spec, self.config.network, no_noise(), num_critics=0, state_value=False)

    @abstractmethod
    def actor_losses(self, batch: TransitionBatch, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        """The `loss` that a step of the actor minimises. A function of tensors only."""

    def start_update(self, batch: TransitionBatch, progress: Progress) -> float:
        """Draw dropout masks. Returns the scheduled learning rate of the actor."""
        if self.config.network.has_dropout:
            draw_dropout((self.policy,), batch.reward.shape[0], self.rng, self.device)
        return value_of(self.config.learning_rate, progress.fraction)


@documented
@dataclass
class ReturnWeightedConfig(RegressionConfig):
    """Settings shared by MARWIL and AWR."""

    value_learning_rate: ScheduleOrFloat | None = setting(
        None, "Learning rate of V(s), a number or a schedule; none for the value of learning_rate.", ge=0
    )


ReturnWeightedConfigT = TypeVar("ReturnWeightedConfigT", bound=ReturnWeightedConfig)


class ReturnWeightedAlgorithm(RegressionAlgorithm[ReturnWeightedConfigT], Generic[ReturnWeightedConfigT]):
    """Base class of algorithms that weight recorded actions by return minus V(s): MARWIL, AWR.

    V(s) learns the recorded returns. A subclass defines `gradient_steps`, with its weights.
    """

    policy: RecordedPolicy
    columns = ("return_to_go",)

    def __init__(
        self, config: ReturnWeightedConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        self.value_store = ParameterStore(self.policy, config.optimizer, parts=["state_value"])
        self.value_step = self.step_of(self.value_store, self.value_losses)
        self.gradient_steps = Accelerated(  # type: ignore[method-assign]
            self.gradient_steps, self.policy, why_plain=self.actor_store.why_plain
        )

    def make_policy(self) -> RecordedPolicy:
        """See `RegressionAlgorithm.make_policy`."""
        return make_recorded_policy(self.spec, self.config.network, no_noise(), num_critics=0, state_value=True)

    @abstractmethod
    def gradient_steps(self, batch: TransitionBatch, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        """Update V(s), then the actor. A function of tensors only; returns metrics by name."""

    def metrics(self, value: dict[str, Tensor], actor: dict[str, Tensor]) -> dict[str, Tensor]:
        """Metrics of both steps by name."""
        return {
            "loss/value": value["loss"],
            "value/v_mean": value["v_mean"],
            "train/gradient_norm": value["gradient_norm"],
            "loss/policy": actor["loss"],
            "policy/weight_mean": actor["weight_mean"],
        }

    def value_losses(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """Half the squared error of V(s) for the recorded returns; and the advantages [B] from before the step."""
        value = self.policy.state_value(batch.obs)  # type: ignore[misc]
        advantage = batch.extras["return_to_go"] - value
        loss = 0.5 * (batch.weight * advantage.square()).mean()
        return {"loss": loss, "v_mean": value.detach().mean(), "advantage": advantage.detach()}

    def actor_losses(self, batch: TransitionBatch, weight: Tensor) -> dict[str, Tensor]:
        """See `RegressionAlgorithm.actor_losses`: minus the log-probability of recorded actions, times weights [B]."""
        log_prob = self.policy.actor.log_prob(batch.obs, batch.action)
        return {"loss": log_likelihood_loss(log_prob, weight), "weight_mean": weight.mean()}

    def rates(self, batch: TransitionBatch, progress: Progress) -> dict[str, float]:
        """The scheduled learning rates, as keyword arguments of `gradient_steps`; draws dropout masks."""
        actor_rate, own = self.start_update(batch, progress), self.config.value_learning_rate
        return {
            "actor_rate": actor_rate, "value_rate": actor_rate if own is None else value_of(own, progress.fraction)
        }  # fmt: skip

    @torch.no_grad()
    def validate(self, batch: TransitionBatch) -> Metrics:
        """See `Algorithm.validate`: the error of V(s), and how likely the recorded actions are."""
        value = self.value_losses(batch)
        log_prob = self.policy.actor.log_prob(batch.obs, batch.action)
        return {"value_loss": value["loss"], "v_mean": value["v_mean"], "log_prob": log_prob.mean()}


# With Q-functions


@documented
@dataclass
class RecordedActorCriticConfig(OffPolicyActorCriticConfig):
    """Settings shared by actor-critics whose actor learns recorded actions."""

    noise: NoiseConfig = setting(
        factory=no_noise,
        help="Exploration noise added to sampled Box actions online.",
        search={"std": None},
    )


RecordedActorCriticConfigT = TypeVar("RecordedActorCriticConfigT", bound=RecordedActorCriticConfig)


class RecordedActorCriticAlgorithm(
    OffPolicyActorCriticAlgorithm[RecordedActorCriticConfigT], Generic[RecordedActorCriticConfigT]
):
    """Base class of actor-critics whose actor learns the recorded actions, weighted by their advantage."""

    policy: RecordedPolicy  # type: ignore[assignment]
    has_state_value: ClassVar[bool] = False
    """Whether there is a network V(s) beside the critics."""

    def make_policy(self) -> RecordedPolicy:  # type: ignore[override]
        """See `OffPolicyActorCriticAlgorithm.make_policy`."""
        config = self.config
        return make_recorded_policy(
            self.spec, config.network, config.noise, num_critics=config.num_critics, state_value=self.has_state_value
        )

    @abstractmethod
    def weights(self, advantage: Tensor) -> Tensor:
        """The weights [B] of recorded actions with these advantages [B]. A function of tensors only."""

    @abstractmethod
    def advantages(self, batch: TransitionBatch, *args: Any, **inputs: Any) -> Tensor:
        """The advantages [B] of recorded actions. A function of tensors only."""

    def actor_losses(self, batch: TransitionBatch, *args: Any, **inputs: Any) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.actor_losses`: minus the weighted log-probability of recorded actions.

        Further arguments are those of `advantages`.
        """
        with torch.no_grad():
            weight = self.weights(self.advantages(batch, *args, **inputs))
        log_prob = self.policy.actor.log_prob(batch.obs, batch.action)
        return {"loss": log_likelihood_loss(log_prob, weight), "weight_mean": weight.mean()}

    def explore(self, progress: Progress) -> Any:
        """See `Algorithm.explore`; Discrete actions have no noise that could be scheduled."""
        return super().explore(progress) if isinstance(self.policy, ContinuousPolicy) else self.policy

    @torch.no_grad()
    def validate(self, batch: TransitionBatch) -> Metrics:
        """See `OffPolicyActorCriticAlgorithm.validate`; also, how likely the recorded actions are."""
        log_prob = self.policy.actor.log_prob(batch.obs, batch.action)
        return {**super().validate(batch), "log_prob": log_prob.mean()}


class InSampleAlgorithm(RecordedActorCriticAlgorithm[RecordedActorCriticConfigT], Generic[RecordedActorCriticConfigT]):
    """Base class of IQL and XQL: V(s) is an upper statistic of Q(s, a) over recorded actions.

    So no Q-value of another action is ever needed. A subclass defines `value_loss`.
    """

    has_state_value = True

    def __init__(
        self, config: RecordedActorCriticConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        self.value_store = ParameterStore(self.policy, config.optimizer, parts=["state_value"])
        self.value_step = GradientStep(
            self.value_store, self.value_losses, module=self.policy, max_grad_norm=config.max_grad_norm
        )

    @abstractmethod
    def value_loss(self, error: Tensor, weight: Tensor) -> Tensor:
        """The loss of V(s), given Q(s, a) - V(s) [B]. A function of tensors only."""

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update V(s), the actor, the critics and the target network."""
        rates = self.start_update(batch, progress)
        return self.result(self.gradient_steps(batch, **rates), rates)

    def gradient_steps(self, batch: TransitionBatch, *, actor_rate: float, critic_rate: float) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`; in the order of the authors' published code of IQL."""
        value = self.value_step(critic_rate, batch)
        actor = self.actor_step(actor_rate, batch)
        critic = self.critic_step(critic_rate, batch)
        self.update_targets(self.config.tau)
        return {
            **self.critic_metrics(critic),
            "loss/value": value["loss"],
            "value/v_mean": value["v_mean"],
            "loss/policy": actor["loss"],
            "policy/weight_mean": actor["weight_mean"],
        }

    def state_values(self, obs: Observation) -> Tensor:
        """V(s) [B]."""
        values: Tensor = self.policy.state_value(obs)  # type: ignore[misc]
        return values

    def recorded_q(self, batch: TransitionBatch) -> Tensor:
        """The minimum [B] over the target critics of Q(s, a) of the recorded actions."""
        values: Tensor = self.critic_target.module(batch.obs, batch.action)
        return values.amin(0)

    def value_losses(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """The `loss` that a step of V(s) minimises."""
        with torch.no_grad():
            q = self.recorded_q(batch)
        value = self.state_values(batch.obs)
        return {"loss": self.value_loss(q - value, batch.weight), "v_mean": value.detach().mean()}

    def q_target(self, batch: TransitionBatch) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: the reward plus the discounted V(s')."""
        return batch.reward + batch.discount * self.state_values(batch.next_obs)

    def advantages(self, batch: TransitionBatch) -> Tensor:
        """See `RecordedActorCriticAlgorithm.advantages`: Q(s, a) - V(s)."""
        return self.recorded_q(batch) - self.state_values(batch.obs)

    @torch.no_grad()
    def validate(self, batch: TransitionBatch) -> Metrics:
        """See `RecordedActorCriticAlgorithm.validate`; also the loss and the mean of V(s)."""
        value = self.value_losses(batch)
        return {**super().validate(batch), "value_loss": value["loss"], "v_mean": value["v_mean"]}


@documented
@dataclass
class SampledAdvantageConfig(RecordedActorCriticConfig):
    """Settings shared by AWAC and CRR."""

    num_action_samples: int = setting(
        1, "Actions of the policy that a recorded action is compared with.", ge=1, search=choices(1, 4, 10)
    )


SampledAdvantageConfigT = TypeVar("SampledAdvantageConfigT", bound=SampledAdvantageConfig)


class SampledAdvantageAlgorithm(
    RecordedActorCriticAlgorithm[SampledAdvantageConfigT], Generic[SampledAdvantageConfigT]
):
    """Base class of AWAC and CRR: Q(s, a) of the current policy, and V(s) from sampled actions.

    A subclass defines `weights` and `baseline`.
    """

    @abstractmethod
    def baseline(self, q: Tensor) -> Tensor:
        """V(s) [B] from Q-values [M, B] of M sampled actions. A function of tensors only."""

    @property
    def next_actor(self) -> Any:
        """The actor whose actions TD targets take."""
        return self.policy.actor

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update the critics, the actor and the target networks."""
        rates, rows = self.start_update(batch, progress), batch.reward.shape[0]
        next_noise = self.draw_noise(batch)
        noise = self.policy.draw_noise(self.rng, self.config.num_action_samples, rows).to(self.device)
        return self.result(self.gradient_steps(batch, next_noise=next_noise, noise=noise, **rates), rates)

    def gradient_steps(
        self, batch: TransitionBatch, *, next_noise: Tensor, noise: Tensor, actor_rate: float, critic_rate: float
    ) -> dict[str, Tensor]:
        """See `OffPolicyActorCriticAlgorithm.gradient_steps`."""
        critic = self.critic_step(critic_rate, batch, noise=next_noise)
        actor = self.actor_step(actor_rate, batch, noise=noise)
        self.update_targets(self.config.tau)
        return {
            **self.critic_metrics(critic),
            "loss/policy": actor["loss"],
            "policy/weight_mean": actor["weight_mean"],
        }

    def q_target(self, batch: TransitionBatch, *, noise: Tensor) -> Tensor:
        """See `OffPolicyActorCriticAlgorithm.q_target`: for a sampled next action."""
        next_action = self.next_actor.sample(batch.next_obs, noise)[0]
        return pessimistic_target(batch.reward, batch.discount, self.critic_target.module(batch.next_obs, next_action))

    def advantages(self, batch: TransitionBatch, *, noise: Tensor) -> Tensor:
        """See `RecordedActorCriticAlgorithm.advantages`; `noise` [M, B, A] is that of sampled actions."""
        count = noise.shape[0]
        obs = map_observation(lambda x: x.repeat(count, *[1] * (x.dim() - 1)), batch.obs)
        sampled = self.policy.actor.sample(obs, noise.flatten(0, 1))[0].view(count, *batch.action.shape)
        actions = torch.cat((batch.action.unsqueeze(0), sampled))
        q = self.policy.critic.of_several(batch.obs, actions).amin(0)
        return q[0] - self.baseline(q[1:])
