"""Behaviour cloning: supervised learning of the recorded actions (Pomerleau 1991, doi:10.1162/neco.1991.3.1.88).

The stochastic actor maximises the log-likelihood of the actions, the deterministic one minimises the squared error of
its actions, as BC of d3rlpy does. Discrete actions have a categorical actor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.recorded_actions import (
    RecordedPolicy,
    RegressionAlgorithm,
    RegressionConfig,
    no_noise,
)
from rl_training.contracts.batches import Metrics, Progress, TransitionBatch, UpdateResult
from rl_training.contracts.errors import ConfigError
from rl_training.contracts.schedule import ScheduleOrFloat
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.regression import log_likelihood_loss
from rl_training.policies.actors import ContinuousPolicy, DeterministicPolicy


@documented
@dataclass
class BCConfig(RegressionConfig):
    """Settings of BC."""

    learning_rate: ScheduleOrFloat = setting(
        1e-3, "Learning rate of the actor, a number or a schedule.", ge=0, search=log_uniform(1e-5, 1e-2)
    )
    deterministic: bool = setting(
        False,
        "Learn a deterministic actor by the squared error of its actions, instead of a distribution (Box actions).",
        search=choices(False),
    )


class BCAlgorithm(RegressionAlgorithm[BCConfig]):
    """Imitates the recorded actions."""

    policy: RecordedPolicy | DeterministicPolicy

    def __init__(self, config: BCConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        if config.deterministic and not isinstance(spec.action_space, spaces.Box):
            raise ConfigError(f"algorithm > deterministic: is for Box actions, got {spec.action_space}; leave it off")
        super().__init__(config, spec, device, rng)

    def make_policy(self) -> RecordedPolicy | ContinuousPolicy:
        """See `RegressionAlgorithm.make_policy`."""
        if self.config.deterministic:
            return DeterministicPolicy(self.spec, self.config.network, 0, no_noise())
        return super().make_policy()

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """One gradient step of the actor."""
        learning_rate = self.start_update(batch, progress)
        found = self.actor_step(learning_rate, batch)
        metrics = {"loss/policy": found["loss"], "train/gradient_norm": found["gradient_norm"]}
        return UpdateResult({"train/learning_rate": learning_rate, **metrics})

    def actor_losses(self, batch: TransitionBatch) -> dict[str, Tensor]:
        """See `RegressionAlgorithm.actor_losses`: the mean squared error, or minus the mean log-probability."""
        actor: Any = self.policy.actor
        if self.config.deterministic:
            return {"loss": (actor(batch.obs) - batch.action.flatten(1)).square().mean()}
        return {"loss": log_likelihood_loss(actor.log_prob(batch.obs, batch.action))}

    @torch.no_grad()
    def validate(self, batch: TransitionBatch) -> Metrics:
        """See `Algorithm.validate`: the loss."""
        return {"policy_loss": self.actor_losses(batch)["loss"]}


SPEC = AlgorithmSpec(
    name="bc",
    title="BC",
    config=BCConfig,
    algorithm=BCAlgorithm,
    regimes=(Regime.OFFLINE,),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Pomerleau 1991, Efficient Training of Artificial Neural Networks for Autonomous Navigation, "
    "doi:10.1162/neco.1991.3.1.88",
)
