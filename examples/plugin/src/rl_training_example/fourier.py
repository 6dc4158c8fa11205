"""An encoder of vectors: the numbers themselves, and their sines and cosines at a few frequencies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rl_training.policies.encoders import Encoder


class FourierEncoder(Encoder):
    """Features x, sin(2^k x), cos(2^k x) for k below `num_frequencies`."""

    def __init__(self, space: spaces.Space[Any], num_frequencies: int = 4) -> None:
        super().__init__()
        if not isinstance(space, spaces.Box):
            raise ValueError(f"needs a Box of observations, got {space}")
        self.register_buffer("frequencies", 2.0 ** torch.arange(num_frequencies), persistent=False)
        self.num_features = int(np.prod(space.shape)) * (1 + 2 * num_frequencies)

    def forward(self, obs: Tensor) -> Tensor:
        """From [B, ...] to [B, num_features]."""
        x = obs.flatten(1).float()
        waves = (x.unsqueeze(2) * self.frequencies).flatten(1)
        return torch.cat([x, waves.sin(), waves.cos()], dim=1)
