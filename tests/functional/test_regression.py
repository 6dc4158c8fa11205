"""Weights of recorded actions, and the losses of actors and values, against numbers computed by hand."""

import math

import pytest
import torch

from rl_training.functional.regression import (
    binary_weight,
    expectile_loss,
    exponential_weight,
    gumbel_loss,
    log_likelihood_loss,
    running_average,
    softmax_weight,
)


def test_log_likelihood_loss():
    log_prob = torch.tensor([-1.0, -2.0, 0.5], requires_grad=True)
    loss = log_likelihood_loss(log_prob, torch.tensor([2.0, 0.0, 1.0]))
    assert loss.item() == pytest.approx((2.0 - 0.5) / 3)
    loss.backward()
    assert log_prob.grad.tolist() == pytest.approx([-2 / 3, 0.0, -1 / 3])
    assert log_likelihood_loss(log_prob).item() == pytest.approx(2.5 / 3)


def test_exponential_weights_are_clipped_and_never_infinite():
    weight = exponential_weight(torch.tensor([0.0, math.log(2.0), -math.log(2.0), 5.0, 1e6]), 2.0, 100.0)
    assert weight.tolist() == pytest.approx([1.0, 4.0, 0.25, 100.0, 100.0])
    assert exponential_weight(torch.tensor([-3.0, 7.0]), 0.0, 20.0).tolist() == [1.0, 1.0]


def test_binary_weights():
    assert binary_weight(torch.tensor([-1.0, 0.0, 1e-6])).tolist() == [0.0, 0.0, 1.0]


def test_softmax_weights_have_mean_one():
    advantage = torch.tensor([0.0, math.log(3.0)])
    assert softmax_weight(advantage, 1.0).tolist() == pytest.approx([0.5, 1.5])
    assert softmax_weight(advantage + 1e4, 1.0).tolist() == pytest.approx([0.5, 1.5], rel=1e-3)
    assert softmax_weight(advantage, 2.0).tolist() == pytest.approx([0.2, 1.8])


def test_expectile_loss():
    error = torch.tensor([2.0, -1.0, 0.0])
    assert expectile_loss(error, 0.7).item() == pytest.approx((0.7 * 4 + 0.3 * 1) / 3)
    assert expectile_loss(error, 0.7, torch.tensor([0.0, 2.0, 1.0])).item() == pytest.approx(2 * 0.3 / 3)
    assert expectile_loss(error, 0.5).item() == pytest.approx(0.5 * error.square().mean().item())


def minimum_of(loss_of, start=0.0):
    """The constant prediction that minimises a loss, by Newton's method."""
    value = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    for _ in range(200):
        (first,) = torch.autograd.grad(loss_of(value), value, create_graph=True)
        (second,) = torch.autograd.grad(first, value)
        with torch.no_grad():
            value -= first / second
    return value.item()


def test_the_expectile_of_two_numbers():
    # 0.9 (1 - v) = 0.1 (v - 0)
    target = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert minimum_of(lambda v: expectile_loss(target - v, 0.9)) == pytest.approx(0.9)
    assert minimum_of(lambda v: expectile_loss(target - v, 0.5)) == pytest.approx(0.5)


def test_gumbel_loss():
    # largest z is 1: (exp(0) - 2 exp(-1) + exp(-3) - (-2 + 1) exp(-1)) / 2
    error = torch.tensor([2.0, -4.0])
    expected = (1.0 - 2.0 * math.exp(-1) + math.exp(-3) + math.exp(-1)) / 2
    assert gumbel_loss(error, 2.0, 7.0).item() == pytest.approx(expected)
    plain = ((error / 2.0).exp() - error / 2.0 - 1.0).mean().item()
    assert gumbel_loss(error, 2.0, 7.0).item() == pytest.approx(plain / math.e)


def test_gumbel_loss_divides_by_no_less_than_exp_of_minus_one():
    error = torch.tensor([-3.0, -5.0])
    plain = (error.exp() - error - 1.0).mean().item()
    assert gumbel_loss(error, 1.0, 7.0).item() == pytest.approx(plain * math.e, rel=1e-6)


def test_the_minimum_of_the_gumbel_loss_is_the_soft_maximum():
    target = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
    soft_maximum = 2.0 * (target / 2.0).exp().mean().log().item()
    assert minimum_of(lambda v: gumbel_loss(target - v, 2.0, 7.0), start=1.0) == pytest.approx(soft_maximum)


def test_gumbel_loss_is_clipped():
    error = torch.tensor([1e4, 0.0], requires_grad=True)
    loss = gumbel_loss(error, 1.0, 7.0)
    assert math.isfinite(loss.item())
    loss.backward()
    assert error.grad[0].item() == 0.0  # beyond the clip
    assert math.isfinite(error.grad[1].item())


def test_the_running_average_starts_with_its_first_value():
    average = torch.zeros(2)
    seen = []
    for value in (8.0, 2.0, 2.0):
        average = running_average(average, torch.tensor(value), 0.5)
        seen.append((average[0] / average[1]).item())
    assert seen == pytest.approx([8.0, (0.25 * 8 + 0.5 * 2) / 0.75, (0.125 * 8 + 0.25 * 2 + 0.5 * 2) / 0.875])
