"""Monotonic advantage re-weighted imitation learning (Wang et al. 2018, NeurIPS 31).

Recorded actions are weighted by exp(beta * A / c), with A the recorded return minus V(s), and c the root of a running
average of A squared; with beta 0 it is behaviour cloning. Departures: returns are Monte Carlo returns of the data,
without a bootstrap value where a time limit ended an episode; the running average starts with the first batch, and
moves faster than by 1e-8 per update; weights are clipped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.bases.recorded_actions import ReturnWeightedAlgorithm, ReturnWeightedConfig
from rl_training.contracts.batches import Progress, TransitionBatch, UpdateResult
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import AlgorithmSpec, EnvSpec, Regime
from rl_training.functional.regression import exponential_weight, running_average

SMALLEST_SCALE = 1e-8


@documented
@dataclass
class MARWILConfig(ReturnWeightedConfig):
    """Settings of MARWIL."""

    beta: float = setting(
        1.0,
        "Exponent of the weights exp(beta * A / c); 0 is behaviour cloning.",
        ge=0,
        search=choices(0.0, 0.5, 1.0, 2.0),
    )
    average_rate: float = setting(
        0.01, "Weight of a new batch in the running average of squared advantages, c squared.", gt=0, le=1
    )
    max_weight: float = setting(20.0, "Clip the weights of actions to this value.", gt=0)


class MARWILAlgorithm(ReturnWeightedAlgorithm[MARWILConfig]):
    """Imitates the recorded actions, those with a return above V(s) with more weight."""

    def __init__(self, config: MARWILConfig, spec: EnvSpec, device: torch.device, rng: np.random.Generator) -> None:
        super().__init__(config, spec, device, rng)
        self.mean_square = torch.zeros(2, device=device)
        """The running sum of mean squared advantages, and of its weights; their ratio is c squared."""

    def update(self, batch: TransitionBatch, progress: Progress) -> UpdateResult:
        """Update V(s), the running average and the actor."""
        rates = self.rates(batch, progress)
        found = self.gradient_steps(batch, self.mean_square, **rates)
        self.mean_square.copy_(found.pop("mean_square"))
        return UpdateResult({"train/learning_rate": rates["actor_rate"], **found})

    def gradient_steps(
        self, batch: TransitionBatch, mean_square: Tensor, *, actor_rate: float, value_rate: float
    ) -> dict[str, Tensor]:
        """See `ReturnWeightedAlgorithm.gradient_steps`. Also returns the new `mean_square`."""
        value = self.value_step(value_rate, batch)
        advantage = value["advantage"]
        mean_square = running_average(mean_square, advantage.square().mean(), self.config.average_rate)
        scale = (mean_square[0] / mean_square[1]).sqrt() + SMALLEST_SCALE
        weight = exponential_weight(advantage / scale, self.config.beta, self.config.max_weight)
        actor = self.actor_step(actor_rate, batch, weight)
        return {**self.metrics(value, actor), "mean_square": mean_square}


SPEC = AlgorithmSpec(
    name="marwil",
    title="MARWIL",
    config=MARWILConfig,
    algorithm=MARWILAlgorithm,
    regimes=(Regime.OFFLINE,),
    action_spaces=(spaces.Box, spaces.Discrete),
    paper="Wang et al. 2018, Exponentially Weighted Imitation Learning for Batched Historical Data, NeurIPS 31",
)
