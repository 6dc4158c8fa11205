"""Returns and advantages over time. Time is the first dimension, T; N environments the second."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16), all inputs [T, N].

    `next_values[t]` is the value of the true next observation of step t: at a truncated step, the episode's last
    observation, not the next episode's first. Termination cuts the bootstrap; any end of an episode (`ended`,
    terminated or truncated) cuts the sum. Returns advantages and the lambda-returns (advantages + values).

    Example: one environment, gamma 0.5, lambda 1, rewards 1, values 0, nothing ends, next_values 0:
        >>> one = torch.ones(2, 1)
        >>> gae(one, 0 * one, 0 * one, one < 0, one < 0, gamma=0.5, gae_lambda=1.0)[0].flatten().tolist()
        [1.5, 1.0]
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    decay = (gamma * gae_lambda) * (~ended).to(deltas)  # a bool times a float is float32 whatever the inputs are
    advantage = torch.zeros_like(deltas[0])
    backwards = []
    for delta, keep in zip(reversed(deltas.unbind()), reversed(decay.unbind()), strict=True):
        advantage = torch.addcmul(delta, keep, advantage)
        backwards.append(advantage)
    advantages = torch.stack(backwards[::-1])
    return advantages, advantages + values
