"""Action values: targets, action selection and losses. B batch, A actions, K outputs per action."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def td_target(reward: Tensor, discount: Tensor, next_value: Tensor) -> Tensor:
    """The temporal-difference target: reward + discount * next_value.

    Example: the second transition terminated, so its discount is 0:
        >>> td_target(torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.0]), torch.tensor([4.0, 4.0])).tolist()
        [3.0, 1.0]
    """
    return reward + discount * next_value


def at_action(values: Tensor, action: Tensor) -> Tensor:
    """The entries [B] or [B, K] of `values` [B, A] or [B, A, K] at the actions [B]."""
    index = action.long().view(-1, *[1] * (values.dim() - 1)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, index).squeeze(1)


def double_q_value(next_q_online: Tensor, next_q_target: Tensor) -> Tensor:
    """Double Q-learning [B] (van Hasselt et al. 2016, eq. 4): one network [B, A] selects, the other [B, A] evaluates.

    Example:
        >>> double_q_value(torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, 3.0]])).tolist()
        [3.0]
    """
    return at_action(next_q_target, next_q_online.argmax(dim=1))


def q_statistics(data_q: Tensor, policy_q: Tensor) -> dict[str, Tensor]:
    """Mean, standard deviation and largest of Q-values of recorded actions and of the policy's; any shape.

    A policy that exploits errors of its critic has `policy_q` far above `data_q`.

    Example:
        >>> found = q_statistics(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 6.0]))
        >>> found["q_data_mean"].item(), found["q_policy_max"].item()
        (2.0, 6.0)
    """
    found = {}
    for name, values in (("data", data_q), ("policy", policy_q)):
        found[f"q_{name}_mean"] = values.mean()
        found[f"q_{name}_std"] = values.std(correction=0)
        found[f"q_{name}_max"] = values.amax()
    return found


def huber(error: Tensor, delta: float = 1.0) -> Tensor:
    """Huber loss: half the square where |error| <= delta, and linear beyond: delta * (|error| - delta / 2).

    Computed as c (error - c / 2), where c is the error clipped to [-delta, delta]; its derivative is c.
    """
    return _Huber.apply(error, delta)  # type: ignore[no-untyped-call, no-any-return]


class _Huber(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, error: Tensor, delta: float) -> Tensor:
        clipped = error.clamp(-delta, delta)
        ctx.save_for_backward(clipped)
        return clipped * (error - 0.5 * clipped)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (clipped,) = ctx.saved_tensors
        return gradient * clipped, None
