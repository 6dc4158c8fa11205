"""Targets and losses of ensembles of critics, and SAC's losses: numbers computed by hand."""

import math

import pytest
import torch
from torch.distributions import Normal

from rl_training.functional.ensembles import ensemble_td_loss, pessimistic_target, soft_target
from rl_training.functional.policies import sac_actor_loss, smoothed_action, squashed_log_prob, temperature_loss


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


def test_td3_target_takes_the_smallest():
    # 1 + 0.9 * 2, 2 + 0.9 * -1, and a terminated row: its reward alone
    next_q = torch.tensor([[2.0, 5.0, 9.0], [3.0, -1.0, 9.0]])
    target = pessimistic_target(tensor(1, 2, 3), tensor(0.9, 0.9, 0), next_q)
    assert target.tolist() == pytest.approx([2.8, 1.1, 3.0])


def test_sac_target():
    # 1 + 0.9 * (2 - 0.5 * -3) = 1 + 0.9 * 3.5;  2 + 0.5 * (-1 - 0.5 * 4) = 2 - 1.5;  terminated
    next_q = torch.tensor([[2.0, 5.0, 9.0], [3.0, -1.0, 9.0]])
    target = soft_target(tensor(1, 2, 3), tensor(0.9, 0.5, 0), next_q, tensor(-3, 4, 7), 0.5)
    assert target.tolist() == pytest.approx([4.15, 0.5, 3.0])


def test_sac_target_without_entropy_is_td3s():
    q, reward, discount = torch.randn(5, 4), torch.randn(4), torch.rand(4)
    assert torch.equal(soft_target(reward, discount, q, torch.randn(4), 0.0), pessimistic_target(reward, discount, q))


def test_td_loss():
    # errors 1, -2 and 0, 3; weights 1, 0.5: (1 + 2) / 2 / 2 + (0 + 4.5) / 2 / 2
    q_pred = torch.tensor([[1.0, 0.0], [0.0, 5.0]], requires_grad=True)
    loss = ensemble_td_loss(q_pred, tensor(0, 2), tensor(1, 0.5))
    assert loss.item() == pytest.approx(0.75 + 1.125)
    loss.backward()  # weight * error / B
    assert q_pred.grad.tolist() == [[0.5, -0.5], [0.0, 0.75]]


def test_td_loss_is_a_sum_over_critics():
    # so that the learning rate of one critic does not depend on how many others there are
    q_pred, q_target, weight = torch.randn(3, 6), torch.randn(6), torch.rand(6)
    alone = sum(ensemble_td_loss(q_pred[i : i + 1], q_target, weight) for i in range(3))
    assert ensemble_td_loss(q_pred, q_target, weight).item() == pytest.approx(alone.item())


def test_actor_loss():
    # 0.5 * -1 - 2 and 0.5 * 3 - (-4): (-2.5 + 5.5) / 2
    q = torch.tensor([[2.0, 1.0], [6.0, -4.0]], requires_grad=True)
    log_prob = tensor(-1, 3).requires_grad_()
    loss = sac_actor_loss(log_prob, q, 0.5)
    assert loss.item() == pytest.approx(1.5)
    loss.backward()
    assert q.grad.tolist() == [[-0.5, 0.0], [0.0, -0.5]]  # only the smallest is climbed
    assert log_prob.grad.tolist() == [0.25, 0.25]


def test_temperature_loss():
    # alpha = 2, target -1.5: the mean of -2 * (1 - 1.5) and -2 * (-2 - 1.5) = (1 + 7) / 2
    log_alpha = torch.tensor(math.log(2.0), requires_grad=True)
    log_prob = tensor(1, -2).requires_grad_()
    loss = temperature_loss(log_alpha, log_prob, -1.5)
    assert loss.item() == pytest.approx(4.0)
    loss.backward()
    assert log_alpha.grad.item() == pytest.approx(4.0)  # entropy 0.5 is above its target -1.5: alpha has to shrink
    assert log_prob.grad is None


@pytest.mark.parametrize(("log_prob", "grows"), [(3.0, True), (1.0, False)])
def test_temperature_grows_while_entropy_is_too_low(log_prob, grows):
    log_alpha = torch.zeros((), requires_grad=True)
    temperature_loss(log_alpha, tensor(log_prob), -2.0).backward()
    assert (log_alpha.grad.item() < 0) == grows


def test_squashed_log_prob():
    # at u = 0 the squashing has slope 1: the density is the normal one
    zero = torch.zeros(1, 2)
    assert squashed_log_prob(zero, zero, zero).item() == pytest.approx(-math.log(2 * math.pi))
    # one dimension, u = 0.5 + 2 * 0.25 = 1: log N(1; 0.5, 2) - log(1 - tanh(1)^2)
    expected = Normal(0.5, 2.0).log_prob(torch.tensor(1.0)).item() - math.log(1 - math.tanh(1) ** 2)
    log_prob = squashed_log_prob(torch.ones(1, 1), torch.full((1, 1), 0.25), torch.full((1, 1), math.log(2)))
    assert log_prob.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("u", [-40.0, -15.0, 15.0, 40.0])
def test_squashed_log_prob_far_out(u):
    # log(1 - tanh(u)^2) is nearly 2 log 2 - 2 |u|
    log_prob = squashed_log_prob(torch.full((1, 1), u), torch.zeros(1, 1), torch.zeros(1, 1))
    assert log_prob.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - 2 * math.log(2) + 2 * abs(u), rel=1e-6)


def test_smoothed_action():
    # noise held at 0.5, then the action at 1
    smoothed = smoothed_action(tensor(0, 0, 0.9, -0.9), tensor(0.3, -2, 0.4, -0.7), 0.5)
    assert smoothed.tolist() == pytest.approx([0.3, -0.5, 1.0, -1.0])
