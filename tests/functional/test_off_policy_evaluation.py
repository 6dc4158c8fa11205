"""Off-policy estimates against the true value of a small MDP, computed with fractions.

Two states and two actions, at most two steps. In state 0, action 0 pays 1 and terminates; action 1 pays 0 and goes to
state 1. There, action 0 pays 2 and action 1 pays 6, and both terminate. The behaviour policy mu takes action 1 with
probability 1/2 in state 0 and 1/3 in state 1; the evaluated policy pi with 3/4 and 2/3. Discount factor 1/2.
"""

import math
from fractions import Fraction

import pytest
import torch

from rl_training.functional.off_policy_evaluation import (
    doubly_robust,
    effective_episodes,
    fqe_loss,
    fqe_target,
    importance_sampling,
    per_decision_importance_sampling,
    weighted_importance_sampling,
)

F = Fraction
GAMMA = F(1, 2)
MU = {0: (F(1, 2), F(1, 2)), 1: (F(2, 3), F(1, 3))}
PI = {0: (F(1, 4), F(3, 4)), 1: (F(1, 3), F(2, 3))}
REWARD = {(0, 0): F(1), (0, 1): F(0), (1, 0): F(2), (1, 1): F(6)}
V1 = PI[1][0] * 2 + PI[1][1] * 6  # 14/3
TRUE = PI[0][0] * 1 + PI[0][1] * GAMMA * V1  # 1/4 + 3/8 * 14/3 = 2
EPISODES = (((0, 0),), ((0, 1), (1, 0)), ((0, 1), (1, 1)))
"""All that can happen, as (state, action); the counts below are their probabilities under mu, times 6."""
COUNTS = (3, 2, 1)


def columns(values):
    """A value of each step [N, T], padded with 0, with episodes as often as mu makes them."""
    rows = [
        [*(float(values(*step)) for step in episode), *[0.0] * (2 - len(episode))]
        for episode, count in zip(EPISODES, COUNTS, strict=True)
        for _ in range(count)
    ]
    return torch.tensor(rows, dtype=torch.float64)


LOG_RATIO = columns(lambda s, a: math.log(PI[s][a] / MU[s][a]))
REWARDS = columns(lambda s, a: REWARD[s, a])


def test_the_mdp_is_what_its_description_says():
    assert TRUE == 2
    for episode, count in zip(EPISODES, COUNTS, strict=True):
        assert math.prod(MU[s][a] for s, a in episode) == F(count, 6)


def test_importance_sampling_is_exact_on_the_whole_distribution():
    """Weights 1/2, 3/4 and 3, returns 1, 1 and 3: (3 * 1/2 + 2 * 3/4 + 9) / 6 = 12/6."""
    found = importance_sampling(LOG_RATIO, REWARDS, float(GAMMA))
    assert found.value.item() == pytest.approx(2)
    # squares of the samples: (3 * 1/4 + 2 * 9/16 + 81) / 6 = 663/48; variance 663/48 - 4
    assert found.standard_error.item() == pytest.approx(math.sqrt((F(663, 48) - 4) / 6))


def test_per_decision_has_the_same_mean_and_less_variance():
    """An episode's samples: 1/2 * 1, 3/2 * 0 + 3/4 * 1/2 * 2, and 3 * 1/2 * 6; as rewards come last, equal here."""
    assert per_decision_importance_sampling(LOG_RATIO, REWARDS, float(GAMMA)).value.item() == pytest.approx(2)
    early = REWARDS + torch.tensor([1.0, 0.0])  # a reward that the second action has no part in
    per_decision = per_decision_importance_sampling(LOG_RATIO, early, 0.5)
    ordinary = importance_sampling(LOG_RATIO, early, 0.5)
    assert per_decision.value.item() == pytest.approx(3)
    assert ordinary.value.item() == pytest.approx(3)
    assert per_decision.standard_error < ordinary.standard_error


def test_weighted_importance_sampling():
    """Of one episode of each kind: (1/2 * 1 + 3/4 * 1 + 3 * 3) / (1/2 + 3/4 + 3) = 41/17."""
    rows = torch.tensor([0, 3, 5])
    found = weighted_importance_sampling(LOG_RATIO[rows], REWARDS[rows], 0.5)
    assert found.value.item() == pytest.approx(41 / 17)
    # residuals 1/2 * -24/17, 3/4 * -24/17, 3 * 10/17, over 17/4
    errors = (-12 / 17, -18 / 17, 30 / 17)
    assert found.standard_error.item() == pytest.approx(math.hypot(*errors) / 4.25)
    assert weighted_importance_sampling(LOG_RATIO, REWARDS, 0.5).value.item() == pytest.approx(2)


def td_errors(q):
    """r + discount v(s') - q(s, a), with v the mean of q under pi."""
    v1 = PI[1][0] * q[1, 0] + PI[1][1] * q[1, 1]
    return columns(lambda s, a: REWARD[s, a] + (GAMMA * v1 if (s, a) == (0, 1) else 0) - q[s, a])


def first_values(q):
    return torch.full((6,), float(PI[0][0] * q[0, 0] + PI[0][1] * q[0, 1]), dtype=torch.float64)


def test_doubly_robust_is_unbiased_for_a_wrong_model():
    q = {(0, 0): F(-3), (0, 1): F(7), (1, 0): F(1), (1, 1): F(1, 5)}
    assert doubly_robust(LOG_RATIO, td_errors(q), first_values(q), 0.5).value.item() == pytest.approx(2)


def test_doubly_robust_has_no_variance_with_the_right_model():
    q = {(0, 0): F(1), (0, 1): GAMMA * V1, (1, 0): F(2), (1, 1): F(6)}
    found = doubly_robust(LOG_RATIO, td_errors(q), first_values(q), 0.5)
    assert found.value.item() == pytest.approx(2)
    assert found.standard_error.item() == pytest.approx(0, abs=1e-12)


def test_doubly_robust_without_a_model_is_per_decision_importance_sampling():
    zero = dict.fromkeys(REWARD, F(0))
    found = doubly_robust(LOG_RATIO, td_errors(zero), first_values(zero), 0.5)
    expected = per_decision_importance_sampling(LOG_RATIO, REWARDS, 0.5)
    assert torch.allclose(torch.stack(found), torch.stack(expected))


def test_actions_that_the_policy_never_takes():
    log_ratio = torch.tensor([[-math.inf, 0.0], [math.log(2.0), 0.0]])
    reward = torch.tensor([[5.0, 5.0], [3.0, 0.0]])
    assert importance_sampling(log_ratio, reward, 1.0).value.item() == 3.0
    assert per_decision_importance_sampling(log_ratio, reward, 1.0).value.item() == 3.0
    assert weighted_importance_sampling(log_ratio, reward, 1.0).value.item() == 3.0
    assert effective_episodes(log_ratio).item() == 1.0
    assert weighted_importance_sampling(log_ratio[:1], reward[:1], 1.0).value.isnan()
    assert effective_episodes(log_ratio[:1]).item() == 0.0


def test_effective_episodes():
    """Weights 1/2 (3 times), 3/4 (twice) and 3: their sum is 6, that of their squares 3/4 + 9/8 + 9 = 87/8."""
    assert effective_episodes(LOG_RATIO).item() == pytest.approx(36 / (87 / 8))
    assert effective_episodes(LOG_RATIO + 500.0).item() == pytest.approx(36 / (87 / 8))  # only ratios of weights matter


def test_fitted_q_targets_of_the_mdp():
    """Iterating the target from 0 on all four state-action pairs reaches Q in two steps: 1, 7/3, 2, 6."""
    reward = torch.tensor([1.0, 0.0, 2.0, 6.0])
    discount = torch.tensor([0.0, 0.5, 0.0, 0.0])
    q = torch.zeros(2, 4)
    for _ in range(2):
        next_q = torch.zeros(2, 4)
        next_q[:, 1] = q[:, 2] / 3 + q[:, 3] * 2 / 3
        q = fqe_target(reward, discount, next_q)
    assert torch.allclose(q, torch.tensor([1.0, 7 / 3, 2.0, 6.0]).expand(2, 4))


def test_each_critic_has_its_own_target():
    target = fqe_target(torch.ones(2), torch.tensor([0.5, 0.0]), torch.tensor([[2.0, 2.0], [-4.0, 2.0]]))
    assert target.tolist() == [[2.0, 1.0], [-1.0, 1.0]]


def test_fqe_loss_is_a_sum_over_critics():
    """Errors 1, -2 and 0, 3: (1 + 4) / 2 / 2 + 9 / 2 / 2."""
    q_pred = torch.tensor([[1.0, 0.0], [0.0, 5.0]], requires_grad=True)
    loss = fqe_loss(q_pred, torch.tensor([[0.0, 2.0], [0.0, 2.0]]))
    assert loss.item() == pytest.approx(3.5)
    loss.backward()
    assert q_pred.grad.tolist() == [[0.5, -1.0], [0.0, 1.5]]
