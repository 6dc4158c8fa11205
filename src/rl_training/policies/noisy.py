"""Noisy layers: exploration by learned noise on the weights (Fortunato et al. 2018, arXiv:1706.10295).

Noise is set and removed explicitly, not by train or eval mode: policies act in eval mode whether they explore or not.
The caller passes the random generator. Noise is not saved in checkpoints: a noisy network has noise only while it acts
or is updated.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class NoisyLinear(nn.Linear):
    """A linear layer with normally distributed weights and biases; their means and standard deviations are learned.

    The noise is factorised: the noise of a weight is the product of one value per input and one per output. Means are
    initialised as in `nn.Linear`, as in the paper; standard deviations start at `sigma / sqrt(in_features)`.
    """

    weight_noise: Tensor
    bias_noise: Tensor

    def __init__(self, in_features: int, out_features: int, sigma: float = 0.5) -> None:
        super().__init__(in_features, out_features)
        start = sigma / math.sqrt(in_features)
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), start))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), start))
        self.register_buffer("weight_noise", torch.zeros(out_features, in_features), persistent=False)
        self.register_buffer("bias_noise", torch.zeros(out_features), persistent=False)
        self.noise_on = False

    def set_noise(self, noise_in: Tensor, noise_out: Tensor) -> None:
        """Use this noise, already scaled as in the paper, until it is set again or removed."""
        torch.outer(noise_out, noise_in, out=self.weight_noise)
        self.bias_noise.copy_(noise_out)
        self.noise_on = True

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Linear`; without noise, only the means are used."""
        if not self.noise_on:
            return super().forward(x)
        weight = torch.addcmul(self.weight, self.weight_sigma, self.weight_noise)
        return F.linear(x, weight, torch.addcmul(self.bias, self.bias_sigma, self.bias_noise))


def noisy_layers(module: nn.Module) -> list[NoisyLinear]:
    """All noisy layers of a module."""
    return [layer for layer in module.modules() if isinstance(layer, NoisyLinear)]


def reset_noise(module: nn.Module, rng: np.random.Generator) -> None:
    """Draw new noise for all noisy layers of a module; all rows of a batch share it."""
    layers = noisy_layers(module)
    sizes = [size for layer in layers for size in (layer.in_features, layer.out_features)]
    draws = rng.standard_normal(sum(sizes), dtype=np.float32)
    scaled = torch.from_numpy(np.copysign(np.sqrt(np.abs(draws)), draws))
    parts = iter(scaled.to(layers[0].weight.device).split(sizes) if layers else ())
    for layer in layers:
        layer.set_noise(next(parts), next(parts))


def remove_noise(module: nn.Module) -> None:
    """Remove the noise of all noisy layers of a module: they use their means."""
    for layer in noisy_layers(module):
        layer.noise_on = False
