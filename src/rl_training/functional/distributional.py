"""Return distributions: categorical on fixed atoms, or given by quantiles. B batch, K atoms or quantiles, E critics."""

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


def midpoints(count: int) -> Tensor:
    """The midpoints of `count` equal parts of [0, 1].

    Example:
        >>> midpoints(2).tolist()
        [0.25, 0.75]
    """
    return (torch.arange(count) + 0.5) / count


def truncated_mixture(quantiles: Tensor, num_dropped: int) -> Tensor:
    """The pooled and sorted quantiles [B, E K - num_dropped] of E critics, [E, B, K], without the largest.

    Kuznetsov et al. 2020, arXiv:2005.04269, section 3.

    Example:
        >>> truncated_mixture(torch.tensor([[[1.0, 5.0]], [[4.0, 0.0]]]), num_dropped=1).tolist()
        [[0.0, 1.0, 4.0]]
    """
    pooled = quantiles.transpose(0, 1).flatten(1)
    return pooled.sort(dim=1).values[:, : pooled.shape[1] - num_dropped]


def soft_quantile_target(
    reward: Tensor, discount: Tensor, next_quantiles: Tensor, next_log_prob: Tensor, temperature: Tensor | float
) -> Tensor:
    """Quantiles [B, M] of the soft target, from M quantiles [B, M] of the next value and the next action's entropy.

    Kuznetsov et al. 2020, eq. 12.

    Example:
        >>> one = torch.ones(1)
        >>> soft_quantile_target(one, 0.5 * one, torch.tensor([[4.0, 6.0]]), -one, 2.0).tolist()
        [[4.0, 5.0]]
    """
    future = next_quantiles - (temperature * next_log_prob).unsqueeze(1)
    return torch.addcmul(reward.unsqueeze(1), discount.unsqueeze(1), future)


def ensemble_quantile_loss(pred: Tensor, target: Tensor, kappa: float = 1.0) -> Tensor:
    """Quantile Huber losses [B] of E critics, summed over them (Kuznetsov et al. 2020, eq. 10).

    `pred` [E, B, K] are quantiles at the midpoints of K equal fractions, `target` [B, M] those of the target. The loss
    of a critic is the mean over its quantiles and over the target's.

    Example: two critics with one quantile each, the medians 0 and 1, for the samples -3 and 3:
        >>> ensemble_quantile_loss(torch.tensor([[[0.0]], [[1.0]]]), torch.tensor([[-3.0, 3.0]])).tolist()
        [2.5]
    """
    num_members, _, num_quantiles = pred.shape
    fractions = midpoints(num_quantiles).to(pred).repeat(num_members)
    return quantile_huber_loss(pred.transpose(0, 1).flatten(1), target, fractions, kappa) / num_quantiles


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
