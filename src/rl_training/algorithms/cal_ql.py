"""Calibrated Q-learning (Nakamoto et al. 2023, arXiv:2303.05479): CQL whose Q-values stay on the scale of returns.

The penalty does not push the Q-values of the policy's actions below the returns of the recorded behaviour. So they do
not have to rise again when training goes on online.
"""

from __future__ import annotations

from dataclasses import dataclass

from gymnasium import spaces
from torch import Tensor

from rl_training.algorithms.cql import CQLAlgorithm, CQLConfig
from rl_training.contracts.batches import TransitionBatch
from rl_training.contracts.settings import documented
from rl_training.contracts.spec import AlgorithmSpec, Regime


@documented
@dataclass
class CalQLConfig(CQLConfig):
    """Settings of Cal-QL."""


class CalQLAlgorithm(CQLAlgorithm[CalQLConfig]):
    """CQL with Q-values of the policy's actions bounded from below by the return of the recorded episode."""

    columns = ("return_to_go",)

    def bounded(self, batch: TransitionBatch, values: Tensor) -> Tensor:
        """See `CQLAlgorithm.bounded`: eq. 5.1 of the paper. Unfinished episodes have a bound of minus infinity."""
        return values.maximum(batch.extras["return_to_go"][:, None])


SPEC = AlgorithmSpec(
    name="cal_ql",
    title="CalQL",
    config=CalQLConfig,
    algorithm=CalQLAlgorithm,
    regimes=(Regime.OFF_POLICY, Regime.OFFLINE),
    action_spaces=(spaces.Box,),
    paper="Nakamoto et al. 2023, Cal-QL: Calibrated Offline RL Pre-Training, arXiv:2303.05479",
)
