"""Critic-regularised regression (Wang et al. 2020, arXiv:2006.15134).

Departures: the critics are two ordinary ones whose minimum is used, not one distributional critic; all target networks
follow slowly instead of being copied every 100 steps; the policy acts as it is, without resampling its actions by their
Q-values ("CWP" in the paper). The further defaults are those of the paper and d3rlpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.algorithms.bases.recorded_actions import SampledAdvantageAlgorithm, SampledAdvantageConfig
from rl_training.contracts.settings import choices, documented, log_uniform, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.regression import binary_weight, exponential_weight
from rl_training.policies.targets import Target


@documented
@dataclass
class CRRConfig(SampledAdvantageConfig):
    """Settings of CRR."""

    weighting: Literal["exponential", "binary"] = setting(
        "exponential",
        "Weights of recorded actions: exp(A / beta), or 1 if A is positive and 0 otherwise.",
        search=choices("exponential", "binary"),
    )
    advantage: Literal["mean", "max"] = setting(
        "mean",
        "What the Q-value of a recorded action is compared with: the mean or the maximum over sampled actions.",
        search=choices("mean", "max"),
    )
    temperature: float = setting(1.0, "Beta of exponential weights.", gt=0, search=log_uniform(0.1, 10.0))
    max_weight: float = setting(20.0, "Clip exponential weights to this value.", gt=0)
    num_action_samples: int = setting(4, "Actions sampled for the advantage.", ge=1, search=choices(1, 4, 10))

    def unused(self) -> set[str]:
        """See `AlgorithmConfig.unused`."""
        return super().unused() | ({"temperature", "max_weight"} if self.weighting == "binary" else set())


class CRRAlgorithm(SampledAdvantageAlgorithm[CRRConfig]):
    """Critics of the current policy; the actor learns the recorded actions that the critics prefer to its own."""

    def __init__(self, config: CRRConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.actor_target: Target[nn.Module] = Target(self.policy, self.actor_store, part="actor")

    def targets(self) -> list[Target[Any]]:
        """See `OffPolicyActorCriticAlgorithm.targets`."""
        return [self.actor_target, self.critic_target]

    @property
    def next_actor(self) -> Any:
        """See `SampledAdvantageAlgorithm.next_actor`: the target network."""
        return self.actor_target.module

    def weights(self, advantage: Tensor) -> Tensor:
        """See `RecordedActorCriticAlgorithm.weights`: eq. 3 or 4."""
        config = self.config
        if config.weighting == "binary":
            return binary_weight(advantage)
        return exponential_weight(advantage, 1.0 / config.temperature, config.max_weight)

    def baseline(self, q: Tensor) -> Tensor:
        """See `SampledAdvantageAlgorithm.baseline`."""
        return q.mean(0) if self.config.advantage == "mean" else q.amax(0)


SPEC = AlgorithmSpec(
    name="crr",
    title="CRR",
    config=CRRConfig,
    algorithm=CRRAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Wang et al. 2020, Critic Regularized Regression, arXiv:2006.15134",
)
