"""What DDPG, TD3, SAC and their kin share: an actor, an ensemble of critics with targets, and the critics' step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.batches import Progress, TransitionBatch
from rl_training.contracts.schedule import ScheduleOrFloat, value_of
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import EnvSpec, OffPolicyConfig
from rl_training.functional.ensembles import ensemble_td_loss
from rl_training.policies.actors import ContinuousPolicy, OffPolicyNetworkConfig
from rl_training.policies.distributions import normal_noise
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.parameters import OptimizerConfig, ParameterStore
from rl_training.policies.targets import Target


def _adam() -> OptimizerConfig:
    return OptimizerConfig(eps=1e-8)


@documented
@dataclass
class OffPolicyActorCriticConfig(OffPolicyConfig):
    """Settings shared by off-policy actor-critics. The defaults are those of Stable-Baselines3's SAC."""

    learning_rate: ScheduleOrFloat = setting(3e-4, "Learning rate of the actor, a number or a schedule.", ge=0)
    critic_learning_rate: ScheduleOrFloat | None = setting(
        None, "Learning rate of the critics, a number or a schedule; none for learning_rate.", ge=0
    )
    tau: float = setting(0.005, "Share of the new weights in each update of the target networks.", ge=0, le=1)
    num_critics: int = setting(2, "Critics in the ensemble; targets take the smallest.", ge=1)
    max_grad_norm: float | None = setting(None, "Largest norm of each network's gradient; none to not clip.", gt=0)
    network: OffPolicyNetworkConfig = setting(factory=OffPolicyNetworkConfig, help="Networks.")
    optimizer: OptimizerConfig = setting(factory=_adam, help="Optimizer.")
    noise: NoiseConfig = setting(factory=NoiseConfig, help="Noise added to actions while exploring.")


OffPolicyActorCriticConfigT = TypeVar("OffPolicyActorCriticConfigT", bound=OffPolicyActorCriticConfig)


class CriticStep(NamedTuple):
    """What a step of the critics leaves behind, all detached."""

    loss: Tensor
    q_mean: Tensor
    gradient_norm: Tensor
    priorities: Tensor
    """The mean absolute error [B] over the critics, before the step."""


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
        self.policy.eval()  # training mode lasts only as long as an update
        self.actor_store = ParameterStore(self.policy.actor, config.optimizer)
        self.critic_store = ParameterStore(self.critic_parts(), config.optimizer)
        self.critic_target = Target(self.policy.critic, self.critic_store)

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

    def critic_step(self, batch: TransitionBatch, q_target: Tensor, learning_rate: float) -> CriticStep:
        """One gradient step of all critics towards the targets [B]."""
        q_pred: Tensor = self.policy.critic(batch.obs, batch.action)
        loss = ensemble_td_loss(q_pred, q_target, batch.weight)
        norm = self.critic_store.step(loss, learning_rate=learning_rate, max_grad_norm=self.config.max_grad_norm)
        q_pred = q_pred.detach()
        return CriticStep(loss.detach(), q_pred.mean(), norm, (q_pred - q_target).abs().mean(0))
