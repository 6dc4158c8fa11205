"""Losses and diagnostics of policies and their value functions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_VARIANCE = 1e-6
"""Added to the variance of state-dependent noise."""


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
    """PPO's pessimistic surrogate as a loss (Schulman et al. 2017, eq. 7): the mean of -min(r A, clip(r) A)."""
    return -_PessimisticGain.apply(ratio, advantages, clip_coef).mean()  # type: ignore[no-untyped-call, no-any-return]


class _PessimisticGain(torch.autograd.Function):
    """min(r A, clip(r) A), whose derivative is A where r A is the smaller term, and 0 where the clipped term is.

    Autograd through clamp and minimum gives the same, with twenty small operators.
    """

    @staticmethod
    def forward(ctx: Any, ratio: Tensor, advantages: Tensor, clip_coef: float | Tensor) -> Tensor:
        clipped = torch.clamp(ratio, 1.0 - clip_coef, 1.0 + clip_coef) * advantages  # type: ignore[arg-type]
        gain = ratio * advantages
        ctx.save_for_backward(gain <= clipped, advantages)
        return torch.minimum(gain, clipped)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        free, advantages = ctx.saved_tensors
        return torch.where(free, gradient * advantages, 0.0), None, None


def target_ratio(logprobs: Tensor, target_logprobs: Tensor, acting_logprobs: Tensor, clip_target: float) -> Tensor:
    """IMPACT's probability ratio [B] to a target policy (Luo et al. 2020): r(acting) * min(acting / target, clip).

    It is the ratio to the target policy, except where the acting policy was much more likely to act so.

    Example: probabilities 0.3 now, 0.2 of the target, 0.6 when acting: 0.5 * min(3, 2) = 1.
        >>> now, target, acting = torch.tensor([0.3, 0.2, 0.6]).log()
        >>> round(target_ratio(now, target, acting, clip_target=2.0).item(), 4)
        1.0
    """
    return (logprobs - acting_logprobs).exp() * (acting_logprobs - target_logprobs).exp().clamp(max=clip_target)


def value_loss(new_values: Tensor, returns: Tensor) -> Tensor:
    """Half the mean squared error."""
    return 0.5 * (new_values - returns).square().mean()


def clipped_value_loss(new_values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float) -> Tensor:
    """Half the mean of the larger squared error: of the new value, or of it clipped to `clip_coef` of the old value."""
    kept = old_values + (new_values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.maximum((new_values - returns).square(), (kept - returns).square()).mean()


def approx_kl(log_ratio: Tensor) -> Tensor:
    """Low-variance estimate of KL(old || new), the mean of (r - 1) - log r (Schulman 2020, estimator k3)."""
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


def explained_variance(predicted: Tensor, target: Tensor) -> Tensor:
    """1 - Var(target - predicted) / Var(target): 1 is perfect, 0 no better than the mean; NaN for a constant target."""
    # compare the numbers, because the computed variance of equal numbers is not always exactly zero
    varied = (target != target.flatten()[:1]).any()
    return torch.where(varied, 1.0 - (target - predicted).var(correction=0) / target.var(correction=0), torch.nan)


def normalize(x: Tensor) -> Tensor:
    """Normalise to zero mean and unit standard deviation; a single row is returned unchanged."""
    if x.numel() < 2:
        return x
    centred = x - x.mean()
    return centred / ((centred.square().sum() / (x.numel() - 1)).sqrt() + 1e-8)


def squashed_log_prob(unsquashed: Tensor, noise: Tensor, log_std: Tensor) -> Tensor:
    """Log-probability [B] of tanh(u) with u = mean + exp(log_std) * noise, all [B, A] (Haarnoja et al. 2018, app. C).

    The change of variables subtracts log(1 - tanh(u)**2), written as 2 (log 2 - u - softplus(-2 u)): the direct form
    loses all precision where tanh(u) is near 1.
    """
    gaussian = -0.5 * noise.square() - log_std
    correction = 2.0 * (unsquashed + F.softplus(-2.0 * unsquashed))
    constant = noise.shape[-1] * (0.5 * math.log(2.0 * math.pi) + 2.0 * math.log(2.0))
    return (gaussian + correction).sum(-1) - constant


def expln(x: Tensor) -> Tensor:
    """exp(x) up to 0, and log(1 + x) + 1 above, which grows slowly (Raffin et al. 2021, section 3)."""
    return torch.where(x > 0.0, x.clamp(min=0.0).log1p() + 1.0, x.clamp(max=0.0).exp())


def state_dependent_log_std(features: Tensor, std: Tensor) -> Tensor:
    """Log standard deviation [B, A] of features [B, H] times a matrix of independent N(0, std**2), std [H, A] (gSDE).

    A sum of independent normals has the sum of their variances (Raffin et al. 2021, eq. 8). The small constant keeps
    the logarithm finite where all features are 0.
    """
    return 0.5 * (features.square() @ std.square() + SMALLEST_VARIANCE).log()


def state_dependent_noise(features: Tensor, matrices: Tensor) -> Tensor:
    """The noise [B, A] of gSDE: features [B, H] of each row times its noise matrix, [B, H, A]."""
    return torch.bmm(features.unsqueeze(1), matrices).squeeze(1)


def sac_actor_loss(log_prob: Tensor, q: Tensor, temperature: Tensor | float) -> Tensor:
    """The mean of alpha log pi(a|s) - min Q(s, a) (Haarnoja et al. 2018b, eq. 7); log_prob [B], q [E, B]."""
    return (temperature * log_prob - q.amin(0)).mean()


def expected_sac_actor_loss(log_probs: Tensor, q: Tensor, temperature: Tensor | float) -> Tensor:
    """The expectation [B] of alpha log pi(a|s) - Q(s, a) over discrete actions (Christodoulou 2019, eq. 10, 12).

    `log_probs` and `q` are [B, A].

    Example: two equally probable actions with values 1 and 3: -log 2 - 2
        >>> log_probs, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 3.0]])
        >>> round(expected_sac_actor_loss(log_probs, q, 1.0).item(), 4)
        -2.6931
    """
    return (log_probs.exp() * (temperature * log_probs - q)).sum(dim=1)


def entropy_shortfall_loss(log_alpha: Tensor, entropy: Tensor, target_entropy: Tensor) -> Tensor:
    """The mean of alpha (entropy - target entropy): alpha grows while entropies [B] are below their target."""
    return log_alpha.exp() * (entropy.detach() - target_entropy).mean()


def temperature_loss(log_alpha: Tensor, log_prob: Tensor, target_entropy: float) -> Tensor:
    """The mean of -alpha (log pi(a|s) + target entropy) (Haarnoja et al. 2018b, eq. 18); log_prob [B] is a constant.

    alpha = exp(log_alpha) grows while the policy's entropy is below its target.
    """
    return -log_alpha.exp() * (log_prob.detach().mean() + target_entropy)


def smoothed_action(action: Tensor, noise: Tensor, noise_clip: float) -> Tensor:
    """TD3's target policy smoothing: add clipped noise, clip to [-1, 1] (Fujimoto et al. 2018, section 5.3)."""
    return (action + noise.clamp(-noise_clip, noise_clip)).clamp(-1.0, 1.0)
