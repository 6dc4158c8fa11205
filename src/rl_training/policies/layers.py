"""Parts of hidden layers: normalisation, dropout and spectral normalisation, for single networks and ensembles.

The last dimension of inputs is the features, the one before it the batch. With `num_members`, inputs are [E, B, F] and
every network of the ensemble has its own parameters and statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

Members = slice | Tensor
"""A selection of networks of an ensemble: a slice, or a tensor [M] of indices."""

Norm = Literal["none", "layer", "batch", "batch_renorm"]


@dataclass(frozen=True)
class LayerOptions:
    """What the hidden layers of a network have besides linear layers and activations."""

    norm: Norm = "none"
    dropout: float = 0.0
    spectral_norm: bool = False


PLAIN = LayerOptions()
"""Linear layers and activations only."""


def normalized(vector: Tensor) -> Tensor:
    """Vectors [..., F] of length 1; zero vectors stay zero."""
    return vector / vector.square().sum(dim=-1, keepdim=True).sqrt().clamp(min=1e-12)


class SpectralScale(nn.Module):
    """Divides weights [..., inputs, outputs] by their largest singular value (Miyato et al. 2018, arXiv:1802.05957).

    The singular value is estimated by one power iteration per call in training mode.

    Example:
        >>> weight = torch.diag(torch.tensor([4.0, 1.0]))
        >>> scale = SpectralScale(weight)
        >>> for _ in range(20):
        ...     scaled = scale(weight)
        >>> torch.allclose(scaled, torch.diag(torch.tensor([1.0, 0.25])))
        True
    """

    u: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        start = torch.randn(*weight.shape[:-2], weight.shape[-1])
        self.register_buffer("u", normalized(start).to(weight))

    def forward(self, weight: Tensor, members: Members | None = None) -> Tensor:
        """The weights with a largest singular value of about 1; `members` are the networks that `weight` is of."""
        u = self.u if members is None else self.u[members]
        with torch.no_grad():
            v = normalized((weight @ u.unsqueeze(-1)).squeeze(-1))
            if self.training and members is None:
                u = normalized((weight.mT @ v.unsqueeze(-1)).squeeze(-1))
                self.u.copy_(u)
        sigma = v.unsqueeze(-2) @ weight @ u.unsqueeze(-1)
        return weight / sigma


class SpectralLinear(nn.Linear):
    """A linear layer whose weights are divided by their largest singular value."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.scale = SpectralScale(self.weight.detach().mT)

    def forward(self, x: Tensor) -> Tensor:
        """See `nn.Linear`."""
        scaled: Tensor = self.scale(self.weight.mT)
        return x @ scaled + self.bias


class Dropout(nn.Module):
    """Dropout with masks from a random generator that the algorithm owns, so that a resumed run repeats them.

    `draw_dropout` draws the masks before an update. A batch that repeats each of its rows several times (actions
    sampled per state) repeats the masks. In evaluation mode nothing is dropped.
    """

    def __init__(self, rate: float, num_features: int, num_members: int | None = None) -> None:
        super().__init__()
        self.rate = rate
        self.leading = () if num_members is None else (num_members,)
        self.num_features = num_features
        self.num_rows = 0

    def draw(self, num_rows: int, rng: np.random.Generator, device: torch.device) -> None:
        """Draw the masks for batches of `num_rows` rows. Each size has its own memory, which recordings refer to."""
        name = f"mask_{num_rows}"
        shape = (*self.leading, num_rows, self.num_features)
        if name not in self._buffers:
            self.register_buffer(name, torch.zeros(shape, device=device), persistent=False)
        kept = rng.integers(0, 2**16, size=shape, dtype=np.uint16) >= round(self.rate * 2**16)
        self.get_buffer(name).copy_(torch.from_numpy(kept))
        self.get_buffer(name).div_(1.0 - self.rate)
        self.num_rows = num_rows

    def forward(self, x: Tensor, members: Members | None = None) -> Tensor:
        """Inputs times the masks, in training mode; `members` are the networks that `x` is of."""
        if not self.training:
            return x
        assert self.num_rows, "draw_dropout has to be called before an update"
        mask = self.get_buffer(f"mask_{self.num_rows}")
        if members is not None:
            mask = mask[members]
        if x.shape[-2] != self.num_rows:
            mask = mask.repeat_interleave(x.shape[-2] // self.num_rows, dim=-2)
        return x * mask


def draw_dropout(modules: Iterable[nn.Module], num_rows: int, rng: np.random.Generator, device: torch.device) -> None:
    """Draw new masks for the dropout layers of some networks; a layer that several of them share gets one."""
    for layer in dict.fromkeys(part for module in modules for part in module.modules() if isinstance(part, Dropout)):
        layer.draw(num_rows, rng, device)


class LayerNorm(nn.Module):
    """Layer normalisation of an ensemble: each network has its own scale and shift."""

    def __init__(self, num_features: int, num_members: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_members, 1, num_features))
        self.bias = nn.Parameter(torch.zeros(num_members, 1, num_features))

    def forward(self, x: Tensor, members: Members | None = None) -> Tensor:
        """Inputs with mean 0 and standard deviation 1 over the features, scaled and shifted."""
        weight, bias = (self.weight, self.bias) if members is None else (self.weight[members], self.bias[members])
        return torch.addcmul(bias, nn.functional.layer_norm(x, x.shape[-1:]), weight)


class BatchNorm(nn.Module):
    """Batch normalisation, or batch renormalisation (Ioffe 2017, arXiv:1702.03275), as CrossQ uses it.

    In training mode, inputs are normalised with the batch's mean and variance, and the running statistics follow them.
    With `renorm`, after `WARMUP` batches the result is corrected towards the running statistics, by bounded factors
    without a gradient. In evaluation mode the running statistics are used.
    """

    MOMENTUM = 0.99
    EPS = 1e-3
    WARMUP = 100_000
    MAX_SCALE, MAX_SHIFT = 3.0, 5.0

    mean: Tensor
    variance: Tensor
    num_batches: Tensor

    def __init__(self, num_features: int, num_members: int | None = None, renorm: bool = False) -> None:
        super().__init__()
        shape = (num_features,) if num_members is None else (num_members, 1, num_features)
        self.renorm = renorm
        self.weight = nn.Parameter(torch.ones(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("variance", torch.ones(shape))
        self.register_buffer("num_batches", torch.zeros(()))

    def forward(self, x: Tensor, members: Members | None = None) -> Tensor:
        """Normalised inputs. With `members`, the running statistics are used but not updated."""
        tensors = (self.weight, self.bias, self.mean, self.variance)
        weight, bias, mean, variance = tensors if members is None else tuple(t[members] for t in tensors)
        running_std = (variance + self.EPS).sqrt()
        if not self.training:
            return torch.addcmul(bias, (x - mean) / running_std, weight)
        batch_mean = x.mean(dim=-2, keepdim=weight.dim() == 3)
        centred = x - batch_mean
        batch_variance = centred.square().mean(dim=-2, keepdim=weight.dim() == 3)
        std = (batch_variance + self.EPS).sqrt()
        result = centred / std
        if self.renorm:
            with torch.no_grad():
                is_warm = self.num_batches >= self.WARMUP
                scale = (std / running_std).clamp(1.0 / self.MAX_SCALE, self.MAX_SCALE)
                shift = ((batch_mean - mean) / running_std).clamp(-self.MAX_SHIFT, self.MAX_SHIFT)
                scale = torch.where(is_warm, scale, torch.ones_like(scale))
                shift = torch.where(is_warm, shift, torch.zeros_like(shift))
            result = result * scale + shift
        if members is None:
            with torch.no_grad():
                self.mean.lerp_(batch_mean, 1.0 - self.MOMENTUM)
                self.variance.lerp_(batch_variance, 1.0 - self.MOMENTUM)
                self.num_batches.add_(1.0)
        return torch.addcmul(bias, result, weight)


def make_norm(norm: Norm, num_features: int, num_members: int | None = None) -> nn.Module:
    """The normalisation layer of that name."""
    if norm == "layer":
        return nn.LayerNorm(num_features) if num_members is None else LayerNorm(num_features, num_members)
    assert norm != "none"
    return BatchNorm(num_features, num_members, renorm=norm == "batch_renorm")


class EnsembleLinear(nn.Module):
    """E linear layers with stacked weights, each initialised as `nn.Linear`."""

    def __init__(self, num_members: int, num_inputs: int, num_outputs: int, spectral_norm: bool = False) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(num_inputs)
        self.weight = nn.Parameter(torch.empty(num_members, num_inputs, num_outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_members, 1, num_outputs).uniform_(-bound, bound))
        self.scale = SpectralScale(self.weight.detach()) if spectral_norm else None

    def orthogonal_(self, gain: float = 1.0) -> None:
        """Initialise each member with orthogonal weights and zero biases."""
        for weight in self.weight.data:
            nn.init.orthogonal_(weight, gain)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, members: Members | None = None) -> Tensor:
        """From [E, B, inputs] to [E, B, outputs]; with `members`, E is the number of selected members."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if members is not None:
            weight, bias = weight[members], bias[members]
        if self.scale is not None:
            weight = self.scale(weight, members)
        if weight.shape[-1] == 1:  # a batched product with a single column is several times slower on CPUs
            return (x * weight.mT).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)
