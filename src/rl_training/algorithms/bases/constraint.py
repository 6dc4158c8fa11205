"""Lagrange multipliers of constraints, learned by gradient steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LOG_WEIGHT_RANGE = (-5.0, 10.0)
"""Bounds of the log of a constraint's weight."""


class ConstraintWeight(nn.Module):
    """The learned weight of a constraint, exp(log_weight)."""

    def __init__(self) -> None:
        super().__init__()
        self.log_weight = nn.Parameter(torch.zeros(()))

    def forward(self) -> Tensor:
        """The weight."""
        return self.log_weight.exp()

    @torch.no_grad()
    def clip(self) -> None:
        """Keep the weight within its bounds."""
        self.log_weight.clamp_(*LOG_WEIGHT_RANGE)
