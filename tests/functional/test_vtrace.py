"""V-trace: a table in exact fractions, and the sum of the paper as it stands."""

from fractions import Fraction

import pytest
import torch

from rl_training.functional.returns import gae, vtrace

# gamma 1/2, r = (1, 2, -1), V = (1, 0, 2), value after the rollout 4, ratios (2, 1/2, 1)
REWARDS, VALUES, NEXT_VALUES, RATIOS = (1.0, 2.0, -1.0), (1.0, 0.0, 2.0), (0.0, 2.0, 4.0), (2.0, 0.5, 1.0)


def column(numbers):
    return torch.tensor(numbers, dtype=torch.float64).reshape(-1, 1)


def flags(*bits):
    return torch.tensor(bits, dtype=torch.bool).reshape(-1, 1)


def of_example(terminated, ended, next_values=NEXT_VALUES, **clips):
    advantages, targets = vtrace(
        column(RATIOS).log(), *map(column, (REWARDS, VALUES, next_values)), terminated, ended, gamma=0.5, **clips
    )
    return advantages.flatten().tolist(), targets.flatten().tolist()


def test_example_with_a_terminal_step():
    # rho = (1, 1/2, 1); deltas: 1 + 0 - 1 = 0, 1/2 (2 - 0) = 1, -1 + 2 - 2 = -1
    # targets: 1 + 0 + 1/2 * 1 * (1 - 0) = 3/2; 0 + 1 = 1, the end cuts; 2 - 1 = 1
    # advantages: 1 + 1/2 * 1 - 1 = 1/2; 1/2 (2 - 0) = 1; -1 + 1/2 * 4 - 2 = -1
    end = flags(0, 1, 0)
    advantages, targets = of_example(end, end)
    assert targets == pytest.approx([1.5, 1.0, 1.0])
    assert advantages == pytest.approx([0.5, 1.0, -1.0])


def test_a_truncated_step_bootstraps_from_its_own_last_observation():
    # as above, but step 1 is cut where the value is 6: delta1 = 1/2 (2 + 3 - 0) = 5/2, target1 = 5/2, and
    # target0 = 1 + 0 + 1/2 * 5/2 = 9/4; advantages: 1 + 1/2 * 5/2 - 1 = 5/4 and 1/2 (2 + 3) = 5/2
    advantages, targets = of_example(flags(0, 0, 0), flags(0, 1, 0), next_values=(0.0, 6.0, 4.0))
    assert targets == pytest.approx([2.25, 2.5, 1.0])
    assert advantages == pytest.approx([1.25, 2.5, -1.0])


def test_the_sum_of_the_paper_in_fractions():
    """Equation 1: v_s = V_s + sum over t of gamma^(t-s) (product of c_s .. c_(t-1)) rho_t delta_t."""
    gamma, clip_rho, clip_c = Fraction(1, 2), Fraction(3, 2), Fraction(3, 4)
    reward, value, ratio = ([Fraction(x) for x in part] for part in (REWARDS, VALUES, RATIOS))
    following = [*value[1:], Fraction(4)]
    expected = []
    for s in range(3):
        total, weight = value[s], Fraction(1)
        for t in range(s, 3):
            total += weight * min(clip_rho, ratio[t]) * (reward[t] + gamma * following[t] - value[t])
            weight *= gamma * min(clip_c, ratio[t])
        expected.append(total)
    never = flags(0, 0, 0)
    _, targets = of_example(never, never, next_values=[float(x) for x in following], clip_rho=1.5, clip_c=0.75)
    assert targets == pytest.approx([float(x) for x in expected])


def test_it_is_the_n_step_return_when_nothing_is_off_policy():
    generator = torch.Generator().manual_seed(0)
    rewards, values, next_values = torch.randn(3, 7, 4, dtype=torch.float64, generator=generator)
    terminated, cut = torch.rand(2, 7, 4, generator=generator) < 0.2
    ended = terminated | cut
    next_values[:-1] = torch.where(ended[:-1], next_values[:-1], values[1:])
    shared = (rewards, values, next_values, terminated, ended)
    _, targets = vtrace(torch.zeros_like(values), *shared, gamma=0.9)
    assert torch.allclose(targets, gae(*shared, gamma=0.9, gae_lambda=1.0)[1])
