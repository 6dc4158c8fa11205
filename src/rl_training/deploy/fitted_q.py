"""Fitted Q evaluation: learns the Q-function of a given policy from recorded transitions (Le et al. 2019).

It is not an algorithm of the registry: it learns about a policy and makes none. It takes the same batches, networks and
gradient steps as the algorithms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.contracts.batches import Metrics, Observation, Progress, TransitionBatch
from rl_training.contracts.errors import SpaceError
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import EnvSpec
from rl_training.contracts.state import Stateful
from rl_training.data.samplers import TransitionSource
from rl_training.functional.off_policy_evaluation import fqe_loss, fqe_target
from rl_training.policies.encoders import make_encoder
from rl_training.policies.ensemble import EnsembleMLP
from rl_training.policies.networks import Activation, seeded_weights
from rl_training.policies.optimizers import OptimizerConfig
from rl_training.policies.parameters import GradientStep, ParameterStore
from rl_training.policies.targets import Target
from rl_training.runtime.guards import check_update

CHECK_EVERY = 100
"""Gradient steps between checks for numbers that are not finite."""


def _adam() -> OptimizerConfig:
    return OptimizerConfig(eps=1e-8)


@documented
@dataclass
class FQEConfig:
    """Settings of fitted Q evaluation."""

    num_updates: int = setting(10_000, "Gradient steps.", ge=1)
    batch_size: int = setting(256, "Transitions per gradient step.", ge=1)
    learning_rate: float = setting(3e-4, "Learning rate.", gt=0)
    num_critics: int = setting(3, "Number of Q-functions, learned independently; their spread shows uncertainty.", ge=1)
    target_update_every: int = setting(100, "Gradient steps between copies to the target network.", ge=1)
    sizes: tuple[int, ...] = setting((256, 256), "Widths of the hidden layers; empty for linear functions.", ge=1)
    activation: Activation = setting("relu", "Activation between layers.")
    encoder: str = setting("auto", "Encoder of observations, by name; 'auto' chooses by the observation space.")
    optimizer: OptimizerConfig = setting(factory=_adam, help="Optimizer.")


class QFunctions(nn.Module):
    """E Q-functions with a shared encoder: of Discrete actions, one output each; of Box actions, one more input."""

    def __init__(self, spec: EnvSpec, config: FQEConfig) -> None:
        super().__init__()
        space = spec.action_space
        if not isinstance(space, (spaces.Box, spaces.Discrete)):
            raise SpaceError(f"fitted Q evaluation takes Box and Discrete actions, got {space}; use a method by ratios")
        self.encoder = make_encoder(config.encoder, spec.observation_space)
        self.is_discrete = isinstance(space, spaces.Discrete)
        features, outputs = self.encoder.num_features, 1
        if isinstance(space, spaces.Discrete):
            outputs = int(space.n)
        else:
            features += int(np.prod(space.shape))
        self.members = EnsembleMLP(config.num_critics, features, config.sizes, outputs, config.activation)

    def forward(self, obs: Observation, action: Tensor) -> Tensor:
        """Q-values [E, B] of actions: integers [B], or reals [B, ...]."""
        features = self.encoder(obs)
        if not self.is_discrete:
            features = torch.cat((features, action.reshape(features.shape[0], -1)), dim=1)
        values: Tensor = self.members(features)
        index = action.long().expand(values.shape[0], -1) if self.is_discrete else action.new_zeros(values.shape[:2])
        return values.gather(2, index.long().unsqueeze(2)).squeeze(2)


NextActions = Callable[[Observation], Tensor]
"""The evaluated policy's actions for a batch of observations, in the units of `TransitionBatch.action`."""


class FittedQ(Stateful):
    """Learns the Q-function of the policy behind `actions` by regression on its own targets.

    Example:
        >>> fitted = FittedQ(FQEConfig(), spec, torch.device("cpu"), rng, policy_actions)  # doctest: +SKIP
        >>> fitted.fit(sampler, 10_000)  # doctest: +SKIP
        >>> fitted.values(first_obs, policy_actions(first_obs)).mean(1)  # of each critic # doctest: +SKIP
    """

    transient: ClassVar[tuple[str, ...]] = ("actions",)

    def __init__(
        self, config: FQEConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator, actions: NextActions
    ) -> None:
        self.config, self.actions = config, actions
        self.progress = Progress()
        with seeded_weights(rng):
            self.critics = QFunctions(spec, config).to(device)
        self.store = ParameterStore(self.critics, config.optimizer)
        self.target: Target[QFunctions] = Target(self.critics, self.store)
        self.step = GradientStep(self.store, self.losses, module=self.critics, max_grad_norm=None)

    def losses(self, batch: TransitionBatch, next_action: Tensor) -> dict[str, Tensor]:
        """The regression's `loss`. A function of tensors only."""
        with torch.no_grad():
            q_target = fqe_target(batch.reward, batch.discount, self.target.module(batch.next_obs, next_action))
        q_pred = self.critics(batch.obs, batch.action)
        return {"loss": fqe_loss(q_pred, q_target), "q_mean": q_pred.detach().mean()}

    def update(self, batch: TransitionBatch) -> Metrics:
        """One gradient step; the target network is copied every `target_update_every` steps."""
        found = self.step(self.config.learning_rate, batch, self.actions(batch.next_obs))
        self.progress.updates += 1
        if self.progress.updates % self.config.target_update_every == 0:
            self.target.update()
        return {"loss/critic": found["loss"], "value/q_mean": found["q_mean"]}

    def fit(self, source: TransitionSource, num_updates: int) -> Metrics:
        """Make gradient steps on batches of a source. Returns the metrics of the last one."""
        metrics: Metrics = {}
        for _ in range(num_updates):
            metrics = self.update(source.sample(self.config.batch_size, self.progress))
            if self.progress.updates % CHECK_EVERY == 0:
                check_update(metrics, f"{self.progress.updates} gradient steps of fitted Q evaluation")
        return metrics

    @torch.no_grad()
    def values(self, obs: Observation, action: Tensor) -> Tensor:
        """Q-values [E, B]."""
        values: Tensor = self.critics(obs, action)
        return values
