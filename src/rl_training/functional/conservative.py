"""Losses for learning from recorded data: conservative Q-values, constraints on the policy, diverse critics.

E critics, B batch, N sampled actions per row, A action dimensions.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kernel = Literal["laplacian", "gaussian"]


def conservative_penalty(q_sampled: Tensor, log_density: Tensor, q_data: Tensor) -> Tensor:
    """How much larger the Q-values of sampled actions are than those of recorded ones, [E] (Kumar et al. 2020, eq. 4).

    The soft maximum over all actions, log sum exp Q, is estimated from `q_sampled` [E, N, B], Q-values of actions that
    were drawn with `log_density` [N, B] (importance sampling, appendix F). `q_data` [E, B] is for recorded actions.

    Example: two samples of density 1/2 with Q-values 0, and 0 for the recorded action: log(2 + 2)
        >>> zero = torch.zeros(1, 2, 1)
        >>> conservative_penalty(zero, zero[0] - torch.tensor(2.0).log(), zero[:, 0]).exp()
        tensor([4.])
    """
    return (torch.logsumexp(q_sampled - log_density, dim=1) - q_data).mean(dim=1)


def soft_clipped_value(q: Tensor, min_weight: float) -> Tensor:
    """A weighted mean of the smallest and the largest of E values (Fujimoto et al. 2019, eq. 13); q is [E, ...].

    Example:
        >>> soft_clipped_value(torch.tensor([[0.0], [4.0]]), 0.75)
        tensor([1.])
    """
    return min_weight * q.amin(0) + (1.0 - min_weight) * q.amax(0)


def vae_loss(decoded: Tensor, action: Tensor, mean: Tensor, log_std: Tensor, kl_coef: float) -> Tensor:
    """Mean squared error of decoded actions plus the KL of the latent distribution from a standard normal.

    Both are means over all dimensions: decoded and action are [B, A], mean and log_std of the latent [B, Z].
    """
    kl = 0.5 * (mean.square() + (2.0 * log_std).exp() - 1.0) - log_std
    return (decoded - action).square().mean() + kl_coef * kl.mean()


def maximum_mean_discrepancy(x: Tensor, y: Tensor, sigma: float, kernel: Kernel = "laplacian") -> Tensor:
    """The distance [B] of two samples of actions, x [B, N, A] and y [B, M, A] (Kumar et al. 2019, eq. 5).

    The kernel of two actions is exp(-d / (2 sigma)), where d is the sum of absolute differences (laplacian) or of
    squared ones (gaussian).

    Example: one action each, with d = 2 sigma: the square of the distance is 1 - 2 / e + 1
        >>> x, y = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)
        >>> round(maximum_mean_discrepancy(x, y, sigma=0.5).item() ** 2, 4)
        1.2642
    """

    def similarity(one: Tensor, other: Tensor) -> Tensor:
        difference = one.unsqueeze(2) - other.unsqueeze(1)
        distance = difference.abs() if kernel == "laplacian" else difference.square()
        return (-distance.sum(-1) / (2.0 * sigma)).exp().mean(dim=(1, 2))

    squared = similarity(x, x) - 2.0 * similarity(x, y) + similarity(y, y)
    return (squared.clamp(min=0.0) + 1e-6).sqrt()


def gradient_similarity(gradients: Tensor) -> Tensor:
    """How similar the critics' gradients with respect to the action are (An et al. 2021, eq. 6); gradients [E, B, A].

    The mean over rows of the sum of cosine similarities of all pairs of critics, divided by E - 1.

    Example: three critics, two with the same gradient and one at right angles: 2 of 6 ordered pairs have similarity 1
        >>> gradients = torch.tensor([[[1.0, 0.0]], [[2.0, 0.0]], [[0.0, 3.0]]])
        >>> round(gradient_similarity(gradients).item(), 4)
        1.0
    """
    direction = gradients / (gradients.norm(dim=-1, keepdim=True) + 1e-10)
    total, own = direction.sum(0).square().sum(-1), direction.square().sum(-1).sum(0)
    similarity: Tensor = (total - own).mean() / (gradients.shape[0] - 1)
    return similarity
