"""Learning from recorded actions: weights of actions by their advantage, and the losses of actors and values.

All tensors have shape [B].
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_likelihood_loss(log_prob: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Minus the mean log-probability of the recorded actions, weighted; weights are constants.

    Example: the second action counts three times as much:
        >>> log_likelihood_loss(torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 3.0])).item()
        3.5
    """
    return -(weight * log_prob).mean()


def exponential_weight(advantage: Tensor, beta: float, max_weight: float) -> Tensor:
    """exp(beta * A), at most `max_weight` (AWR, MARWIL, IQL, CRR; beta is the inverse of a temperature)."""
    return (beta * advantage).exp().clamp(max=max_weight)


def binary_weight(advantage: Tensor) -> Tensor:
    """1 where the advantage is positive, otherwise 0 (Wang et al. 2020, eq. 3)."""
    return (advantage > 0.0).to(advantage.dtype)


def softmax_weight(advantage: Tensor, beta: float) -> Tensor:
    """exp(beta * A) divided by its mean over the batch (AWAC): large advantages cannot overflow.

    Example:
        >>> softmax_weight(torch.tensor([0.0, 1000.0]), 1.0).tolist()
        [0.0, 2.0]
    """
    return torch.softmax(beta * advantage, dim=0) * advantage.shape[0]


def expectile_loss(error: Tensor, expectile: float, weight: Tensor | float = 1.0) -> Tensor:
    """Asymmetric squared loss of error = target - prediction (Kostrikov et al. 2022, eq. 5); 0.5 is symmetric.

    Predictions that are too low cost `expectile` times the square, those that are too high 1 - `expectile` times.

    Example:
        >>> expectile_loss(torch.tensor([2.0, -2.0]), 0.75).item()  # (0.75 * 4 + 0.25 * 4) / 2
        2.0
    """
    side = torch.where(error < 0.0, 1.0 - expectile, expectile)
    return (weight * side * error.square()).mean()


def gumbel_loss(error: Tensor, temperature: float, clip: float, weight: Tensor | float = 1.0) -> Tensor:
    """Gumbel regression of error = target - prediction (Garg et al. 2023, eq. 11): mean of exp(z) - z - 1.

    z = error / temperature, at most `clip`. Its minimum is temperature * log mean exp(target / temperature), a soft
    maximum. The loss is divided by exp(max z), max z at least -1, so that no gradient is exponentially large (their
    published code).
    """
    z = (error / temperature).clamp(max=clip)
    largest = z.detach().amax().clamp(min=-1.0)
    return (weight * ((z - largest).exp() - (z + 1.0) * (-largest).exp())).mean()


def running_average(average: Tensor, value: Tensor, rate: float) -> Tensor:
    """An exponentially weighted average that starts with its first value: a sum and the weights in it, [2].

    Example:
        >>> average = running_average(torch.zeros(2), torch.tensor(4.0), 0.5)
        >>> average = running_average(average, torch.tensor(1.0), 0.5)
        >>> (average[0] / average[1]).item()  # (0.25 * 4 + 0.5 * 1) / 0.75
        2.0
    """
    return (1.0 - rate) * average + rate * torch.stack([value, torch.ones_like(value)])
