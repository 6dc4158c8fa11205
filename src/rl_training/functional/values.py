"""Action values: targets, choices and errors. B batch, A actions, K outputs per action."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def td_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """The one target of all of temporal-difference learning: reward + discount * next_value.

    Example: the second transition terminated, so its discount is 0:
        >>> td_target(torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0]), torch.tensor([4.0, 4.0])).tolist()
        [3.0, 1.0]
    """
    return torch.addcmul(reward, discount, next_value)


def at_action(values: Tensor, action: Tensor) -> Tensor:
    """What `values` [B, A] or [B, A, K] hold for the actions [B]: [B] or [B, K]."""
    index = action.long().view(-1, *[1] * (values.dim() - 1))
    return torch.take_along_dim(values, index, dim=1).squeeze(1)


def double_q_value(next_q_online: Tensor, next_q_target: Tensor) -> Tensor:
    """Double Q-learning (van Hasselt et al. 2016, eq. 4): one network [B, A] chooses, the other [B, A] judges: [B].

    Example:
        >>> double_q_value(torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 3.0]])).tolist()
        [3.0]
    """
    return at_action(next_q_target, next_q_online.argmax(dim=1))


def huber(error: Tensor, delta: float = 1.0) -> Tensor:
    """Half the square where |error| <= delta, and its tangent beyond: delta * (|error| - delta / 2)."""
    return F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)
