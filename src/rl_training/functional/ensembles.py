"""Targets and losses of critic ensembles; values have shape [E, B] for E critics."""

from __future__ import annotations

from torch import Tensor


def pessimistic_target(reward: Tensor, discount: Tensor, next_q: Tensor) -> Tensor:
    """Targets [B] with the minimum of E values [E, B] (clipped double Q-learning, Fujimoto et al. 2018, eq. 10)."""
    return reward + discount * next_q.amin(0)


def soft_target(
    reward: Tensor, discount: Tensor, next_q: Tensor, next_log_prob: Tensor, temperature: Tensor | float
) -> Tensor:
    """Targets [B] with the minimum of E values [E, B] and the next action's entropy (Haarnoja et al. 2018, eq. 2, 3).

    Example:
        >>> import torch
        >>> one = torch.ones(1)
        >>> soft_target(one, 0.5 * one, torch.tensor([[4.0], [6.0]]), -one, 2.0)  # 1 + 0.5 * (4 + 2)
        tensor([4.])
    """
    return reward + discount * (next_q.amin(0) - temperature * next_log_prob)


def ensemble_td_loss(q_pred: Tensor, q_target: Tensor, weight: Tensor) -> Tensor:
    """The sum over critics of half the weighted mean squared error; q_pred [E, B], q_target and weight [B]."""
    return 0.5 * (weight * (q_pred - q_target).square()).sum() / q_target.shape[0]
