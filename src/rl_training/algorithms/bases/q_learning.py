"""The base of the DQN family: a Q-network, its target network, and one gradient step per batch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_training.contracts.algorithm import Algorithm
from rl_training.contracts.batches import Metrics, Observation, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.schedule import Linear, ScheduleOrFloat, value_of
from rl_training.contracts.settings import choices, documented, integers, log_uniform, setting, uniform
from rl_training.contracts.spec import EnvSpec
from rl_training.data.settings import OffPolicyConfig
from rl_training.functional.values import at_action, q_statistics, td_target
from rl_training.policies.layers import draw_dropout
from rl_training.policies.networks import seeded_weights
from rl_training.policies.noisy import remove_noise, reset_noise
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore
from rl_training.policies.q_networks import NetworkT, QNetworkConfig, QPolicy
from rl_training.policies.targets import Target


def _adam() -> OptimizerConfig:
    return OptimizerConfig(eps=1e-8)


@documented
@dataclass
class QLearningConfig(OffPolicyConfig):
    """Settings shared by the DQN family: Q-learning with discrete actions."""

    batch_size: int = setting(
        32, "Transitions per gradient step.", ge=1, le=1_000_000, search=choices(32, 64, 128, 256)
    )
    num_steps: int = setting(
        4,
        "Steps of each environment between updates (one update may be several gradient steps).",
        ge=1,
        le=1_000_000,
        search=choices(1, 4, 16, 64, 256),
    )
    updates_per_step: float = setting(
        0.25,
        "Gradient steps per environment step, counted over all environments (0.25, 1, 20).",
        ge=0,
        search=choices(0.125, 0.25, 0.5, 1.0),
    )
    learning_rate: ScheduleOrFloat = setting(
        1e-4, "Learning rate, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    epsilon: ScheduleOrFloat = setting(
        Linear(1.0, 0.05, until=0.1),
        "Exploration rate: probability of a random action, a number or a schedule.",
        ge=0,
        le=1,
        search={"end": uniform(0.0, 0.2), "until": uniform(0.02, 0.5)},
    )
    double: bool = setting(
        False, "Double Q-learning: the online network chooses the next action, the target network evaluates it."
    )
    dueling: bool = setting(False, "Dueling network: state value plus advantages of the actions.")
    noisy: bool = setting(
        False, "Noisy networks: explore with learned noise on the weights (use an epsilon of 0 with it)."
    )
    tau: float = setting(1.0, "Soft update coefficient of the target network; 1 copies the online network.", gt=0, le=1)
    target_update_every: int = setting(
        2500,
        "Gradient steps between updates of the target network.",
        ge=1,
        search=integers(10, 10_000, log=True),
    )
    max_grad_norm: float | None = setting(10.0, "Clip the gradient to this global norm; none to not clip.", gt=0)
    network: QNetworkConfig = setting(factory=QNetworkConfig, help="Network.")
    optimizer: OptimizerConfig = setting(factory=_adam, help="Optimizer.")


class RowLosses(NamedTuple):
    """The loss, the replay priority and the predicted Q-value of each transition, all [B]."""

    loss: Tensor
    priority: Tensor
    q_pred: Tensor


QConfigT = TypeVar("QConfigT", bound=QLearningConfig)


class QLearningAlgorithm(Algorithm[QConfigT], Generic[QConfigT, NetworkT]):
    """Base class of the DQN family. A subclass defines the network and the loss per transition."""

    policy: QPolicy[NetworkT]

    def __init__(self, config: QConfigT, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        with seeded_weights(rng):
            self.policy = QPolicy(self.make_network(), value_of(config.epsilon, 0.0)).to(device)
        self.store = ParameterStore(self.policy, config.optimizer, parts=["network"])
        self.target: Target[NetworkT] = Target(self.policy, self.store, part="network")
        self.step = GradientStep(self.store, self._weighted, module=self.policy, max_grad_norm=config.max_grad_norm)

    @abstractmethod
    def make_network(self) -> NetworkT:
        """Build the Q-network from the settings."""

    @abstractmethod
    def losses(self, batch: TransitionBatch, *draws: Tensor) -> RowLosses:
        """The loss of each transition, with gradients of the online network. A function of tensors only."""

    def draws(self, batch: TransitionBatch) -> tuple[Tensor, ...]:
        """Random numbers that `losses` takes in addition to the batch, from the algorithm's random generator."""
        return ()

    def _weighted(self, batch: TransitionBatch, *draws: Tensor) -> dict[str, Tensor]:
        """The weighted mean of the transitions' losses, the priorities, and the mean Q-value."""
        rows = self.losses(batch, *draws)
        loss = (batch.weight * rows.loss).mean()
        return {"loss": loss, "priorities": rows.priority, "q_mean": rows.q_pred.detach().mean()}

    @torch.no_grad()
    def validate(self, batch: TransitionBatch) -> Metrics:
        """See `Algorithm.validate`: the error against one-step targets of the target network, and Q-values."""
        network = self.policy.network
        next_q = at_action(self.target.module.q_values(batch.next_obs), self.policy.mode(batch.next_obs))
        values = network.q_values(batch.obs)
        data_q = at_action(values, batch.action)
        error = data_q - td_target(batch.reward, batch.discount, next_q)
        return {"td_error": error.square().mean().sqrt(), **q_statistics(data_q, values.amax(1))}

    def explore(self, progress: Progress) -> QPolicy[NetworkT]:
        """See `Algorithm.explore`: sets the scheduled epsilon."""
        self.policy.epsilon.fill_(value_of(self.config.epsilon, progress.fraction))
        return self.policy

    def start_from(self, weights: dict[str, Any]) -> None:
        """See `Algorithm.start_from`. The target network gets the same weights."""
        super().start_from(weights)
        self.target.update(tau=1.0)

    def next_action(self, next_obs: Observation, next_outputs: Tensor) -> Tensor:
        """Greedy actions [B]: of the online network if `double`, else of the target network's outputs [B, A, K]."""
        network = self.policy.network
        if self.config.double:
            return network.q_values(next_obs).argmax(dim=1)
        return network.masked_values(network.expected(next_outputs), next_obs).argmax(dim=1)

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """One gradient step on the weighted mean loss; updates the target network every `target_update_every` steps."""
        config, networks = self.config, (self.policy.network, self.target.module)
        learning_rate = value_of(config.learning_rate, progress.fraction)
        if config.noisy:
            for network in networks:
                reset_noise(network, self.rng)
        if config.network.dropout:
            draw_dropout(networks, batch.reward.shape[0], self.rng, self.device)
        found = self.step(learning_rate, batch, *self.draws(batch))
        if (progress.updates + 1) % config.target_update_every == 0:
            self.target.update(config.tau)
        if config.noisy:
            for network in networks:
                remove_noise(network)
        return UpdateResult(
            metrics={
                "loss/critic": found["loss"],
                "value/q_mean": found["q_mean"],
                "policy/epsilon": value_of(config.epsilon, progress.fraction),
                "train/learning_rate": learning_rate,
                "train/gradient_norm": found["gradient_norm"],
            },
            priorities=found["priorities"],
        )
