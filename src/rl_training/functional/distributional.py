"""Return distributions: categorical on fixed atoms, or given by quantiles. B batch, K atoms or quantiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PAIRS_AT_ONCE = 2**19
"""Pairs of quantiles compared at a time: about what fits into the CPU cache. Larger chunks are slower."""


def categorical_projection(probs: Tensor, reward: Tensor, discount: Tensor, support: Tensor) -> Tensor:
    """The distribution of reward + discount * Z, projected onto the atoms of Z (Bellemare et al. 2017, eq. 7).

    `probs` [B, K] are the probabilities of the evenly spaced atoms `support` [K]. Each shifted atom splits its mass
    between its two neighbours by distance; mass beyond the support goes to its end. Mass is conserved.

    Example: atoms 0, 1, 2; all mass on 2, reward 0.25, discount 0.5, so the new atom is at 1.25:
        >>> probs, one = torch.tensor([[0.0, 0.0, 1.0]]), torch.ones(1)
        >>> categorical_projection(probs, 0.25 * one, 0.5 * one, torch.tensor([0.0, 1.0, 2.0])).tolist()
        [[0.0, 0.75, 0.25]]
    """
    last = support.shape[0] - 1
    moved = torch.addcmul(reward.unsqueeze(1), discount.unsqueeze(1), support)
    spacing = (support[-1] - support[0]) / last
    position = ((moved - support[0]) / spacing).clamp_(0, last)  # in units of atoms
    below = position.floor()
    to_above = probs * (position - below)  # 0 if it lands on an atom
    below = below.long()
    projected = torch.zeros_like(probs).scatter_add_(1, below, probs - to_above)
    return projected.scatter_add_(1, (below + 1).clamp_(max=last), to_above)


def kl_divergence(target_probs: Tensor, log_probs: Tensor) -> Tensor:
    """KL(target || predicted) [B] of distributions [B, K]; its gradient is that of the cross-entropy."""
    return F.kl_div(log_probs, target_probs, reduction="none").sum(dim=1)


def quantile_huber_loss(pred: Tensor, target: Tensor, fractions: Tensor, kappa: float = 1.0) -> Tensor:
    """Quantile Huber loss [B] (Dabney et al. 2018, arXiv:1710.10044 eq. 10, arXiv:1806.06923 eq. 3).

    `pred` [B, Kp] are the quantiles at `fractions` [B, Kp] or [Kp], `target` [B, Kt] samples or quantiles of the target
    distribution. With u = target - pred, each pair costs |fraction - (u < 0)| * huber(u, kappa) / kappa, averaged over
    targets and summed over predictions. Targets get no gradient.

    Example: the median 0 of the samples -3 and 3, which cost 0.5 * (3 - 0.5) each:
        >>> quantile_huber_loss(torch.zeros(1, 1), torch.tensor([[-3.0, 3.0]]), torch.tensor([0.5])).tolist()
        [1.25]
    """
    rows = max(1, PAIRS_AT_ONCE // (pred.shape[1] * target.shape[1]))
    parts = zip(pred.split(rows), target.split(rows), fractions.expand_as(pred).split(rows), strict=True)
    return torch.cat([_quantile_huber_rows(*part, kappa) for part in parts])


def _quantile_huber_rows(pred: Tensor, target: Tensor, fractions: Tensor, kappa: float) -> Tensor:
    """The loss with an explicit gradient.

    With h = clip(u), the derivative of the Huber loss, that loss is h * (u - h / 2), and |fraction - (u < 0)| is
    1/2 + (fraction - 1/2) * sign(u). The gradient consists of the same sums; autograd over a graph of all pairs takes
    several times as long. For the same reason, operations on all pairs are in-place.
    """
    scale, tilt = 1.0 / (kappa * target.shape[1]), fractions - 0.5
    with torch.no_grad():
        error = target.unsqueeze(1) - pred.unsqueeze(2)
        slope = error.clamp(-kappa, kappa)
        cost = error.sub_(slope, alpha=0.5).mul_(slope)
        loss = 0.5 * cost.sum(dim=2) + tilt * cost.copysign_(slope).sum(dim=2)
        gradient = 0.5 * slope.sum(dim=2) + tilt * slope.abs_().sum(dim=2)
    # the second term is zero and only carries the gradient
    return scale * (loss + gradient * (pred.detach() - pred)).sum(dim=1)
