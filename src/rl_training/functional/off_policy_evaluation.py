"""The value of a policy from episodes of another one. N episodes, T steps, E critics, B transitions.

Shorter episodes are padded at the end: a padded step has log-ratio, reward and TD error 0. Log-ratios are
log pi(a|s) - log mu(a|s), of the evaluated policy pi and the behaviour policy mu; minus infinity if pi never takes a.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """An estimated value and its standard error over episodes."""

    value: Tensor
    standard_error: Tensor


def _discounts(gamma: float, like: Tensor) -> Tensor:
    return torch.full_like(like[0], gamma).pow(torch.arange(like.shape[1], device=like.device))


def _mean(samples: Tensor) -> Estimate:
    return Estimate(samples.mean(), samples.std(correction=0) / samples.shape[0] ** 0.5)


def importance_sampling(log_ratio: Tensor, reward: Tensor, gamma: float) -> Estimate:
    """Ordinary importance sampling, inputs [N, T]: returns weighted by the product of an episode's ratios. Unbiased.

    Precup et al. 2000, Eligibility Traces for Off-Policy Policy Evaluation, section 2.

    Example: the evaluated policy takes the recorded action twice as often, in one of two episodes:
        >>> log_ratio = torch.tensor([[2.0], [0.0]]).log()
        >>> importance_sampling(log_ratio, torch.tensor([[3.0], [4.0]]), 1.0).value
        tensor(3.)
    """
    weight = log_ratio.sum(1).exp()
    return _mean(weight * (reward @ _discounts(gamma, reward)))


def weighted_importance_sampling(log_ratio: Tensor, reward: Tensor, gamma: float) -> Estimate:
    """Weighted importance sampling, inputs [N, T]: divides by the sum of the weights instead of by N.

    Biased for few episodes, but with much less variance. NaN if all weights are 0: the data says nothing about the
    policy. The standard error is that of a ratio of means, to first order.
    """
    weight, returns = log_ratio.sum(1).exp(), reward @ _discounts(gamma, reward)
    value = (weight * returns).sum() / weight.sum()
    return Estimate(value, (weight * (returns - value)).norm() / weight.sum())


def per_decision_importance_sampling(log_ratio: Tensor, reward: Tensor, gamma: float) -> Estimate:
    """Per-decision importance sampling, inputs [N, T]: each reward is weighted by the ratios up to its step. Unbiased.

    Precup et al. 2000, section 3.
    """
    return _mean((log_ratio.cumsum(1).exp() * reward) @ _discounts(gamma, reward))


def doubly_robust(log_ratio: Tensor, td_error: Tensor, first_value: Tensor, gamma: float) -> Estimate:
    """The doubly robust estimate: a model's value, corrected by importance-weighted TD errors of the model.

    Jiang and Li 2016, Doubly Robust Off-policy Value Evaluation for Reinforcement Learning, eq. 10, written as a sum.
    `td_error` [N, T] is r + discount v(s') - q(s, a), where v is the mean of q under the evaluated policy and discount
    is 0 after a termination; `first_value` [N] is v of the first states. Unbiased for any q; without variance if q and
    the environment are exact and deterministic.
    """
    return _mean(first_value + (log_ratio.cumsum(1).exp() * td_error) @ _discounts(gamma, td_error))


def effective_episodes(log_ratio: Tensor) -> Tensor:
    """How many equally weighted episodes carry as much information (Kish): (sum w)^2 / sum w^2; 0 if all w are 0.

    Example:
        >>> effective_episodes(torch.tensor([[1.0], [3.0]]).log())  # 16 / 10
        tensor(1.6000)
    """
    weight = (log_ratio.sum(1) - log_ratio.sum(1).amax().nan_to_num(neginf=0.0)).exp()
    return torch.nan_to_num(weight.sum().square() / weight.square().sum())


def fqe_target(reward: Tensor, discount: Tensor, next_q: Tensor) -> Tensor:
    """Targets [E, B] of fitted Q evaluation: each critic learns from its own target network, next_q [E, B].

    Le et al. 2019, Batch Policy Learning under Constraints, algorithm 3. `next_q` is for the action of the evaluated
    policy. No minimum over critics: an evaluation must not be pessimistic, and their spread shows how sure it is.
    """
    return reward + discount * next_q


def fqe_loss(q_pred: Tensor, q_target: Tensor) -> Tensor:
    """The sum over critics of half the mean squared error; both [E, B]."""
    return 0.5 * (q_pred - q_target).square().mean(1).sum()
