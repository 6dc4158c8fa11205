"""Action distributions, lean and with noise passed in.

Own ones instead of `torch.distributions` because sampling there takes no generator (so random streams could not be
owned and saved) and because they cost half the time of acting on small networks. Each class turns the raw outputs of a
network [B, num_params] into a distribution over actions; `sample(noise)` is a pure function of noise that
`draw_noise` drew from a named stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.contracts.arrays import FloatArray

LOG_2PI = math.log(2.0 * math.pi)
SMALLEST_DRAW = np.float32(1e-8)


class Categorical:
    """One choice out of A. Actions [B] int64; samples by the Gumbel-max trick."""

    def __init__(self, logits: Tensor) -> None:
        self.log_probs = F.log_softmax(logits, dim=-1)

    def sample(self, noise: Tensor) -> Tensor:
        """`noise` [B, A] standard Gumbel."""
        return (self.log_probs + noise).argmax(dim=-1)

    def mode(self) -> Tensor:
        """The likeliest action."""
        return self.log_probs.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability [B]."""
        return self.log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy [B] in nats; impossible actions (log-probability -inf) add nothing."""
        return -(self.log_probs.exp() * self.log_probs.clamp(min=torch.finfo(self.log_probs.dtype).min)).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """KL(self || other) [B]."""
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)


class MultiCategorical:
    """Several independent choices. Actions [B, D]; noise and logits are the D blocks side by side."""

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.parts = [Categorical(part) for part in logits.split(self.sizes, dim=-1)]

    def sample(self, noise: Tensor) -> Tensor:
        """`noise` [B, sum of sizes] standard Gumbel."""
        blocks = noise.split(self.sizes, dim=-1)
        return torch.stack([part.sample(block) for part, block in zip(self.parts, blocks, strict=True)], dim=-1)

    def mode(self) -> Tensor:
        """The likeliest action of each choice."""
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Sum over the choices, [B]."""
        return torch.stack([part.log_prob(action[:, i]) for i, part in enumerate(self.parts)]).sum(0)

    def entropy(self) -> Tensor:
        """Sum over the choices, [B]."""
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: MultiCategorical) -> Tensor:
        """KL(self || other) [B]."""
        return torch.stack([mine.kl(its) for mine, its in zip(self.parts, other.parts, strict=True)]).sum(0)


class Bernoulli:
    """D independent bits. Actions [B, D] int64; samples where logistic noise lies below the logit."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def sample(self, noise: Tensor) -> Tensor:
        """`noise` [B, D] standard logistic."""
        return (noise < self.logits).long()

    def mode(self) -> Tensor:
        """The likelier value of each bit."""
        return (self.logits > 0).long()

    def log_prob(self, action: Tensor) -> Tensor:
        """Sum over the bits, [B]."""
        return -F.binary_cross_entropy_with_logits(self.logits, action.to(self.logits.dtype), reduction="none").sum(-1)

    def entropy(self) -> Tensor:
        """Sum over the bits, [B]."""
        return F.binary_cross_entropy_with_logits(self.logits, self.logits.sigmoid(), reduction="none").sum(-1)

    def kl(self, other: Bernoulli) -> Tensor:
        """KL(self || other) [B]."""
        probs = self.logits.sigmoid()
        crossed = F.binary_cross_entropy_with_logits(other.logits, probs, reduction="none").sum(-1)
        return crossed - self.entropy()


class DiagGaussian:
    """Independent normals. Actions [B, D] float32, unbounded; `envs.actions` brings them within bounds."""

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = mean
        self.log_std = log_std

    def sample(self, noise: Tensor) -> Tensor:
        """`noise` [B, D] standard normal."""
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """The mean."""
        return self.mean

    def log_prob(self, action: Tensor) -> Tensor:
        """Sum over dimensions, [B]."""
        z = (action - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * z.square() - self.log_std - 0.5 * LOG_2PI).sum(-1)

    def entropy(self) -> Tensor:
        """Sum over dimensions, [B]."""
        return (0.5 + 0.5 * LOG_2PI + self.log_std).expand_as(self.mean).sum(-1)

    def kl(self, other: DiagGaussian) -> Tensor:
        """KL(self || other) [B]."""
        spread = self.log_std - other.log_std
        shift = (self.mean - other.mean) * torch.exp(-other.log_std)
        return (0.5 * (torch.exp(2.0 * spread) + shift.square() - 1.0) - spread).sum(-1)


Distribution = Categorical | MultiCategorical | Bernoulli | DiagGaussian


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """KL(p || q) [B] of two distributions of one kind."""
    assert type(p) is type(q)
    return p.kl(q)  # type: ignore[arg-type]


def frozen(p: Distribution) -> Distribution:
    """The same distribution, made without gradients, that stays as it is when the network learns on.

    Only a Gaussian holds a parameter of the network itself; the others hold what was computed.
    """
    return DiagGaussian(p.mean, p.log_std.detach().clone()) if isinstance(p, DiagGaussian) else p


def gumbel_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Standard Gumbel noise, as minus the log of a standard exponential (about twice as fast as `rng.gumbel`)."""
    draws = rng.standard_exponential(shape, dtype=np.float32)
    # One float32 draw in 2**23 is exactly zero. Its noise would be infinite, and so beat an impossible action's -inf:
    # the sum is NaN, which argmax takes for the largest.
    return -np.log(np.maximum(draws, SMALLEST_DRAW, out=draws))


def logistic_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Standard logistic noise."""
    return rng.logistic(size=shape).astype(np.float32)


def normal_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Standard normal noise."""
    return rng.standard_normal(shape, dtype=np.float32)
