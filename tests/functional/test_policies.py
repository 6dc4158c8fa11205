"""Losses of policies and values: numbers computed by hand."""

import math

import pytest
import torch

from rl_training.functional.policies import (
    approx_kl,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    normalize,
    value_loss,
)


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),  # inside the range: the ratio itself
        (1.5, 2.0, -2.4),  # better and already far: held at 1.2
        (0.5, 2.0, -1.0),  # better but made less likely: the unclipped 0.5 * 2 is the smaller
        (0.5, -2.0, 1.6),  # worse and already far: held at 0.8
        (1.5, -2.0, 3.0),  # worse but made likelier: the unclipped 1.5 * -2 is the smaller
    ],
)
def test_clipped_surrogate_of_one_row(ratio, advantage, expected):
    assert clipped_surrogate(tensor(ratio), tensor(advantage), 0.2).item() == pytest.approx(expected)


def test_clipped_surrogate_is_the_mean():
    # the four corners above: (-2.4 - 1.0 + 1.6 + 3.0) / 4 = 0.3
    loss = clipped_surrogate(tensor(1.5, 0.5, 0.5, 1.5), tensor(2, 2, -2, -2), 0.2)
    assert loss.item() == pytest.approx(0.3)


def test_clipped_surrogate_gradient():
    # d/dr of the mean over 4 rows: zero where clipping holds, -A/4 elsewhere
    ratio = tensor(1.5, 0.5, 0.5, 1.5).requires_grad_()
    clipped_surrogate(ratio, tensor(2, 2, -2, -2), 0.2).backward()
    assert ratio.grad.tolist() == [0.0, -0.5, 0.0, 0.5]


def test_value_loss_is_half_the_mean_squared_error():
    # errors 1, -2, 3: (1 + 4 + 9) / 3 / 2
    assert value_loss(tensor(1, 0, 3), tensor(0, 2, 0)).item() == pytest.approx(14 / 6)


def test_clipped_value_loss():
    # old values 0, coefficient 0.5
    # 1. new 2, return 3: kept 0.5 -> errors 1 and 6.25, the larger is 6.25
    # 2. new 0.3, return 1: not clipped -> 0.49 twice
    # 3. new 2, return 0: kept 0.5 -> 4 and 0.25, the larger is 4
    # 4. new -1, return -2: kept -0.5 -> 1 and 2.25, the larger is 2.25
    loss = clipped_value_loss(tensor(2, 0.3, 2, -1), torch.zeros(4), tensor(3, 1, 0, -2), 0.5)
    assert loss.item() == pytest.approx(0.5 * (6.25 + 0.49 + 4 + 2.25) / 4)


def test_clipped_value_loss_is_about_the_old_value():
    # old 10, new 12, return 13, coefficient 0.5: kept 10.5, error 2.5 squared against 1 squared
    assert clipped_value_loss(tensor(12), tensor(10), tensor(13), 0.5).item() == pytest.approx(0.5 * 6.25)


def test_clipped_value_loss_with_room_is_the_plain_one():
    new, old, returns = tensor(1, 2, 3), tensor(1.5, 1.5, 1.5), tensor(0, 4, 1)
    assert clipped_value_loss(new, old, returns, 100.0).item() == pytest.approx(value_loss(new, returns).item())


def test_clipped_value_loss_has_no_gradient_where_the_kept_value_is_worse():
    # row 1 is held (kept error larger, and it does not depend on the new value); row 2 is free: (0.3 - 1) / 2 rows
    new = tensor(2, 0.3).requires_grad_()
    clipped_value_loss(new, torch.zeros(2), tensor(3, 1), 0.5).backward()
    assert new.grad.tolist() == pytest.approx([0.0, -0.35])


def test_approx_kl():
    # ratios 2 and 1/2: (2 - 1 - ln 2 + 0.5 - 1 + ln 2) / 2 = 0.25
    assert approx_kl(tensor(2, 0.5).log()).item() == pytest.approx(0.25)
    assert approx_kl(torch.zeros(5)).item() == 0.0
    # one row, ratio e: e - 1 - 1
    assert approx_kl(tensor(1)).item() == pytest.approx(math.e - 2)


def test_approx_kl_estimates_the_kl():
    # samples of p: with the exact frequencies, the estimator is the exact KL(p || q) since the mean of r - 1 is zero
    p, q = tensor(0.5, 0.25, 0.25), tensor(0.25, 0.25, 0.5)
    rows = torch.tensor([0, 0, 1, 2])  # frequencies of p
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert approx_kl((q / p).log()[rows]).item() == pytest.approx(expected)


def test_explained_variance():
    target = tensor(1, 2, 3, 4)  # mean 2.5, variance 1.25
    assert explained_variance(target, target).item() == 1.0
    assert explained_variance(torch.full((4,), 7.0), target).item() == 0.0  # a constant explains nothing
    assert explained_variance(target + 10, target).item() == pytest.approx(1.0)  # and a bias takes nothing away
    # differences 0, 0, 0, 1: variance 1/4 - 1/16 = 0.1875; 1 - 0.1875 / 1.25 = 0.85
    assert explained_variance(tensor(1, 2, 3, 3), target).item() == pytest.approx(0.85)
    # the wrong way round: difference 2 * target, four times the variance
    assert explained_variance(-target, target).item() == pytest.approx(-3.0)


# 0.1 and its like have a mean that is not exactly 0.1 in float32
@pytest.mark.parametrize("constant", [0.0, 0.1, 0.3, -1e6 / 3])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 1000])
def test_explained_variance_of_a_constant_target_is_nan(constant, rows):
    predicted = torch.arange(rows, dtype=torch.float32)
    assert math.isnan(explained_variance(predicted, torch.full((rows,), constant)).item())


def test_normalize():
    # mean 2, sample deviation 1
    assert normalize(tensor(1, 2, 3)).tolist() == pytest.approx([-1.0, 0.0, 1.0])
    # mean 4, sample variance ((-3)^2 + (-1)^2 + 4^2) / 2 = 13
    root = math.sqrt(13)
    assert normalize(tensor(1, 3, 8)).tolist() == pytest.approx([-3 / root, -1 / root, 4 / root])


def test_normalize_of_one_row_is_the_row():
    assert normalize(tensor(5)).tolist() == [5.0]


def test_normalize_of_equal_rows_is_zero():
    assert normalize(torch.full((3,), 2.0)).tolist() == [0.0, 0.0, 0.0]
