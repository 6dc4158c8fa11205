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


def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    ended: Tensor,
    *,
    gamma: float,
    decay: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al. 2018, eq. 1 and section 4.2), all inputs [T, N]; returns advantages and value targets.

    `log_ratios` are log-probabilities of the actions under the policy that learns minus those under the policy that
    acted. `next_values`, `terminated` and `ended` are as for `gae`: a truncated step bootstraps from its episode's true
    last observation, and no target reaches over the end of an episode. `decay` is the lambda of remark 2.

    Example: with equal policies and nothing ending, the targets are the discounted returns:
        >>> one = torch.ones(2, 1)
        >>> vtrace(0 * one, one, 0 * one, 0 * one, one < 0, one < 0, gamma=0.5)[1].flatten().tolist()
        [1.5, 1.0]
    """
    ratios = log_ratios.exp()
    rho, c = ratios.clamp(max=clip_rho), ratios.clamp(max=clip_c)
    discount = gamma * (~terminated).to(values)
    deltas = rho * (rewards + discount * next_values - values)
    carried = (gamma * decay) * (~ended).to(values) * c
    correction = torch.zeros_like(deltas[0])
    backwards = []
    for delta, keep in zip(reversed(deltas.unbind()), reversed(carried.unbind()), strict=True):
        correction = torch.addcmul(delta, keep, correction)
        backwards.append(correction)
    targets = values + torch.stack(backwards[::-1])
    following = torch.cat([targets[1:], next_values[-1:]])
    advantages = rho * (rewards + discount * torch.where(ended, next_values, following) - values)
    return advantages, targets
