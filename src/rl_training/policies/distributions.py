"""Action distributions whose sampling noise is passed in.

They replace `torch.distributions`, whose `sample` takes no generator (so its random state could not be saved), and
which costs half the time of acting on small networks. Each class turns the raw outputs of a network [B, num_params]
into a distribution over actions. `sample(noise)` is a pure function; `ActionHead.draw_noise` draws the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.contracts.arrays import FloatArray
from rl_training.functional.policies import state_dependent_log_std, state_dependent_noise

LOG_2PI = math.log(2.0 * math.pi)
SMALLEST_DRAW = np.float32(1e-8)


class Categorical:
    """One of A discrete actions. Actions are [B] int64; sampling uses the Gumbel-max trick."""

    def __init__(self, logits: Tensor) -> None:
        self.log_probs = F.log_softmax(logits, dim=-1)

    def sample(self, noise: Tensor) -> Tensor:
        """`noise` [B, A] standard Gumbel."""
        return (self.log_probs + noise).argmax(dim=-1)

    def mode(self) -> Tensor:
        """The action with the highest probability."""
        return self.log_probs.argmax(dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability [B]."""
        return self.log_probs.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy [B] in nats; actions with log-probability -inf contribute 0."""
        return -(self.log_probs.exp() * self.log_probs.clamp(min=torch.finfo(self.log_probs.dtype).min)).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """KL(self || other) [B]."""
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)


class MultiCategorical:
    """D independent categoricals. Actions are [B, D]; logits and noise are concatenated over the D parts."""

    def __init__(self, logits: Tensor, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.parts = [Categorical(part) for part in logits.split(self.sizes, dim=-1)]

    def sample(self, noise: Tensor) -> Tensor:
        """`noise` [B, sum of sizes] standard Gumbel."""
        blocks = noise.split(self.sizes, dim=-1)
        return torch.stack([part.sample(block) for part, block in zip(self.parts, blocks, strict=True)], dim=-1)

    def mode(self) -> Tensor:
        """The action with the highest probability of each categorical."""
        return torch.stack([part.mode() for part in self.parts], dim=-1)

    def log_prob(self, action: Tensor) -> Tensor:
        """Sum over the categoricals, [B]."""
        return torch.stack([part.log_prob(action[:, i]) for i, part in enumerate(self.parts)]).sum(0)

    def entropy(self) -> Tensor:
        """Sum over the categoricals, [B]."""
        return torch.stack([part.entropy() for part in self.parts]).sum(0)

    def kl(self, other: MultiCategorical) -> Tensor:
        """KL(self || other) [B]."""
        return torch.stack([mine.kl(its) for mine, its in zip(self.parts, other.parts, strict=True)]).sum(0)


class Bernoulli:
    """D independent bits. Actions are [B, D] int64; a sample is 1 where logistic noise is below the logit."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def sample(self, noise: Tensor) -> Tensor:
        """`noise` [B, D] standard logistic."""
        return (noise < self.logits).long()

    def mode(self) -> Tensor:
        """The value of each bit with the higher probability."""
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
    """Independent normals. Actions are [B, D] float32 and unbounded; `envs.actions` maps them to the bounds."""

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


class StateDependentGaussian(DiagGaussian):
    """Normals whose noise is features [B, H] times a matrix of independent N(0, std**2), std [H, A] (gSDE).

    From "Smooth Exploration for Robotic Reinforcement Learning" (Raffin et al. 2021, arXiv:2005.05719). Actions sampled
    with the same matrix depend on the state without jumps. Log-probabilities and entropies are those of one action,
    whose matrix is unknown.
    """

    def __init__(self, mean: Tensor, features: Tensor, std: Tensor) -> None:
        super().__init__(mean, state_dependent_log_std(features, std))
        self.features = features

    def sample(self, noise: Tensor) -> Tensor:
        """`noise` [B, H, A]: a noise matrix per row, already scaled by std."""
        return self.mean + state_dependent_noise(self.features, noise)


Distribution = Categorical | MultiCategorical | Bernoulli | DiagGaussian


def kl_divergence(p: Distribution, q: Distribution) -> Tensor:
    """KL(p || q) [B] of two distributions of the same class."""
    assert type(p) is type(q)
    return p.kl(q)  # type: ignore[arg-type]


def frozen(p: Distribution) -> Distribution:
    """A copy of a distribution computed without gradients, which later updates of the network do not change.

    Only `DiagGaussian` holds a parameter of the network (`log_std`), so only that is cloned.
    """
    return DiagGaussian(p.mean, p.log_std.detach().clone()) if type(p) is DiagGaussian else p


def gumbel_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Standard Gumbel noise: minus the log of a standard exponential (about twice as fast as `rng.gumbel`)."""
    draws = rng.standard_exponential(shape, dtype=np.float32)
    # One float32 draw in 2**23 is exactly zero, which would give infinite noise. Added to the -inf of an invalid action
    # that is NaN, and argmax treats NaN as the largest value.
    return -np.log(np.maximum(draws, SMALLEST_DRAW, out=draws))


def logistic_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Standard logistic noise."""
    return rng.logistic(size=shape).astype(np.float32)


def normal_noise(rng: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    """Standard normal noise."""
    return rng.standard_normal(shape, dtype=np.float32)
