"""What DDPG, TD3, SAC and their kin share: an actor, an ensemble of critics with targets, and the critics' step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.batches import Observation, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import documented, log_uniform, setting
from rl_training.contracts.spec import EnvSpec, OffPolicyConfig
from rl_training.functional.ensembles import ensemble_td_loss
from rl_training.policies.actors import ContinuousPolicy, OffPolicyNetworkConfig
from rl_training.policies.distributions import normal_noise
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.parameters import GradientStep, OptimizerConfig, ParameterStore
from rl_training.policies.recording import Recorded
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
        None, "Learning rate of the critics, a number or a schedule; none for learning_rate.", ge=0
    )
    tau: float = setting(
        0.005,
        "Share of the new weights in each update of the target networks.",
        ge=0,
        le=1,
        search=log_uniform(1e-3, 0.1),
    )
    num_critics: int = setting(2, "Critics in the ensemble; targets take the smallest.", ge=1)
    max_grad_norm: float | None = setting(None, "Largest norm of each network's gradient; none to not clip.", gt=0)
    network: OffPolicyNetworkConfig = setting(factory=OffPolicyNetworkConfig, help="Networks.")
    optimizer: OptimizerConfig = setting(factory=_adam, help="Optimizer.")
    noise: NoiseConfig = setting(factory=NoiseConfig, help="Noise added to actions while exploring.")


OffPolicyActorCriticConfigT = TypeVar("OffPolicyActorCriticConfigT", bound=OffPolicyActorCriticConfig)


def critic_report(critic: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `learn` returns of the critics' step."""
    return {
        "loss/critic": critic["loss"],
        "value/q_mean": critic["q_mean"],
        "train/gradient_norm": critic["gradient_norm"],
        "priorities": critic["priorities"],
    }


class OffPolicyActorCriticAlgorithm(Algorithm[OffPolicyActorCriticConfigT], Generic[OffPolicyActorCriticConfigT]):
    """Base of off-policy actor-critics: builds the policy, its optimizers and the critics' target."""

    policy: ContinuousPolicy
    policy_class: ClassVar[type[ContinuousPolicy]]

    def __init__(
        self, config: OffPolicyActorCriticConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator
    ) -> None:
        super().__init__(config, spec, device, rng)
        with torch.random.fork_rng(devices=[]):  # initial weights come from our stream, not from the global one
            torch.default_generator.manual_seed(int(rng.integers(2**63)))
            self.policy = self.policy_class(spec, config.network, config.num_critics, config.noise).to(device)
        self.actor_store = ParameterStore(self.policy.actor, config.optimizer)
        self.critic_store = ParameterStore(self.critic_parts(), config.optimizer)
        self.critic_target = Target(self.policy.critic, self.critic_store)
        norm = config.max_grad_norm
        self.critic_step = GradientStep(self.critic_store, self.critic_losses, module=self.policy, max_grad_norm=norm)
        self.actor_step = GradientStep(self.actor_store, self.actor_losses, module=self.policy, max_grad_norm=norm)
        # only its parts are recorded if the optimizer reads its rate as a number, or a subclass from elsewhere may do
        # between them what a recording would not repeat
        is_own = type(self).__module__.split(".")[0] == __name__.split(".")[0]
        can_be_recorded = is_own and self.actor_store.is_fused
        self._quick_learn: Callable[..., dict[str, Tensor]] = (
            Recorded(self.learn, self.policy) if can_be_recorded else self.learn
        )

    @abstractmethod
    def q_target(self, batch: TransitionBatch, *draws: Tensor) -> Tensor:
        """What the critics are to learn [B]; a function of tensors alone."""

    @abstractmethod
    def actor_losses(self, obs: Observation, *draws: Tensor) -> dict[str, Tensor]:
        """What a step of the actor makes smaller, named `loss`; a function of tensors alone."""

    @abstractmethod
    def learn(
        self, batch: TransitionBatch, actor_rate: float, critic_rate: float, learns_to_act: bool, *draws: Tensor
    ) -> dict[str, Tensor]:
        """One gradient step of the critics, one of the actor if it `learns_to_act`, and what follows of the targets.

        A function of tensors alone. It returns what is reported, by name, and `priorities` [B].
        """

    def learn_from(
        self, batch: TransitionBatch, progress: Progress, *draws: Tensor, learns_to_act: bool = True
    ) -> UpdateResult:
        """`learn` with the rates that are due, recorded as a whole where that can be."""
        rates = self.learning_rates(progress)
        found = self._quick_learn(batch, *rates, learns_to_act, *draws)
        priorities = found.pop("priorities")
        return UpdateResult({"train/learning_rate": rates[0], **found}, priorities=priorities)

    def critic_losses(self, batch: TransitionBatch, *draws: Tensor) -> dict[str, Tensor]:
        """The critics' errors; `priorities` [B] are the mean absolute ones over the critics."""
        with torch.no_grad():
            q_target = self.q_target(batch, *draws)
        q_pred: Tensor = self.policy.critic(batch.obs, batch.action)
        errors = (q_pred.detach() - q_target).abs().mean(0)
        loss = ensemble_td_loss(q_pred, q_target, batch.weight)
        return {"loss": loss, "q_mean": q_pred.detach().mean(), "priorities": errors}

    def critic_parts(self) -> nn.Module:
        """What the critics' loss trains."""
        return self.policy.critic

    def targets(self) -> list[Target[Any]]:
        """All target networks, which follow the learned ones."""
        return [self.critic_target]

    def explore(self, progress: Progress) -> ContinuousPolicy:
        """See `Algorithm.explore`: sets the scheduled noise."""
        self.policy.noise_std.fill_(value_of(self.config.noise.std, progress.fraction))
        return self.policy

    def start_from(self, weights: dict[str, Any]) -> None:
        """See `Algorithm.start_from`. The targets begin as copies of these weights."""
        super().start_from(weights)
        self.update_targets(tau=1.0)

    def update_targets(self, tau: float) -> None:
        """Move every target network towards the learned one."""
        for target in self.targets():
            target.update(tau)

    def learning_rates(self, progress: Progress) -> tuple[float, float]:
        """Of the actor and of the critics."""
        actor, critic = self.config.learning_rate, self.config.critic_learning_rate
        return value_of(actor, progress.fraction), value_of(actor if critic is None else critic, progress.fraction)

    def draw_noise(self, batch: TransitionBatch) -> Tensor:
        """Standard normal noise [B, A] from the algorithm's own stream."""
        shape = (batch.reward.shape[0], self.policy.num_actions)
        return torch.from_numpy(normal_noise(self.rng, shape)).to(self.device)
