"""Targets, choices and errors of action values, by hand."""

import numpy as np
import pytest
import torch

from rl_training.functional.values import at_action, double_q_value, huber, td_target


def test_td_target():
    # 1 + 0.5 * 4;  terminated, so whatever the next value is;  2 + 0.25 * -4 after two steps
    found = td_target(torch.tensor([1.0, 1.0, 2.0]), torch.tensor([0.5, 0.0, 0.25]), torch.tensor([4.0, 1e6, -4.0]))
    assert found.tolist() == [3.0, 1.0, 1.0]


def test_td_target_of_quantiles():
    # [B, 1] against [B, K]
    reward, discount = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5], [0.0]])
    found = td_target(reward, discount, torch.tensor([[0.0, 2.0, 4.0], [5.0, 6.0, 7.0]]))
    assert found.tolist() == [[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]


def test_at_action():
    values = torch.arange(6.0).view(2, 3)
    assert at_action(values, torch.tensor([2, 0])).tolist() == [2.0, 3.0]
    assert at_action(values, torch.tensor([2, 0], dtype=torch.int32)).tolist() == [2.0, 3.0]
    atoms = torch.arange(12.0).view(2, 3, 2)
    assert at_action(atoms, torch.tensor([1, 2])).tolist() == [[2.0, 3.0], [10.0, 11.0]]


def test_at_action_has_a_gradient_for_the_chosen_only():
    values = torch.zeros(2, 3, requires_grad=True)
    at_action(values, torch.tensor([2, 0])).sum().backward()
    assert values.grad.tolist() == [[0, 0, 1], [1, 0, 0]]


DOUBLE = [
    # online chooses, target judges
    pytest.param([1.0, 2.0, 0.0], [5.0, 3.0, 9.0], 3.0, id="neither network's own best value"),
    pytest.param([1.0, 2.0, 0.0], [1.0, 7.0, 0.0], 7.0, id="both agree"),
    pytest.param([-1.0, -2.0, -3.0], [-5.0, 0.0, 1.0], -5.0, id="negative values"),
    pytest.param([2.0, 2.0, 0.0], [4.0, 3.0, 9.0], 4.0, id="the first of equals"),
]


@pytest.mark.parametrize(("online", "target", "expected"), DOUBLE)
def test_double_q_value(online, target, expected):
    assert double_q_value(torch.tensor([online]), torch.tensor([target])).tolist() == [expected]


def test_double_q_value_of_a_batch():
    online, target = (torch.tensor([case.values[i] for case in DOUBLE]) for i in (0, 1))
    assert double_q_value(online, target).tolist() == [case.values[2] for case in DOUBLE]


def test_double_q_value_never_exceeds_the_best():
    rng = np.random.default_rng(0)
    online, target = torch.from_numpy(rng.normal(size=(2, 100, 4)))
    found = double_q_value(online, target)
    assert (found <= target.amax(1)).all()
    assert (found < target.amax(1)).any()
    assert torch.equal(double_q_value(target, target), target.amax(1))


@pytest.mark.parametrize(
    ("error", "delta", "expected"),
    [
        (0.0, 1.0, 0.0),
        (0.5, 1.0, 0.125),  # 0.5 * 0.25
        (-0.5, 1.0, 0.125),
        (1.0, 1.0, 0.5),  # where both forms meet
        (3.0, 1.0, 2.5),  # 1 * (3 - 0.5)
        (-3.0, 1.0, 2.5),
        (1.5, 2.0, 1.125),
        (3.0, 2.0, 4.0),  # 2 * (3 - 1)
    ],
)
def test_huber(error, delta, expected):
    assert huber(torch.tensor([error]), delta).tolist() == [expected]


def test_huber_slope_is_the_clipped_error():
    error = torch.tensor([-3.0, -0.5, 0.0, 0.25, 7.0], requires_grad=True)
    huber(error).sum().backward()
    assert error.grad.tolist() == [-1.0, -0.5, 0.0, 0.25, 1.0]


def test_huber_is_smooth_l1_by_default():
    error = torch.linspace(-3, 3, 50)
    expected = torch.nn.functional.smooth_l1_loss(error, torch.zeros(50), reduction="none")
    torch.testing.assert_close(huber(error), expected)
