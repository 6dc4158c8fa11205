"""Generalised advantage estimation: tables computed by hand, and a naive double loop."""

import pytest
import torch

from rl_training.functional.returns import gae


def column(*numbers):
    """One environment: [T, 1]."""
    return torch.tensor(numbers, dtype=torch.float32).reshape(-1, 1)


def flags(*bits):
    return torch.tensor(bits, dtype=torch.bool).reshape(-1, 1)


def naive(rewards, values, next_values, terminated, ended, gamma, lam):
    """Equation 16 as it stands: for every step, the sum of later deltas up to the end of the episode."""
    T, N = len(rewards), len(rewards[0])
    advantages = [[0.0] * N for _ in range(T)]
    for n in range(N):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                bootstrap = 0.0 if terminated[k][n] else gamma * next_values[k][n]
                advantages[t][n] += weight * (rewards[k][n] + bootstrap - values[k][n])
                weight *= gamma * lam
                if ended[k][n]:
                    break
    return advantages


# gamma 0.5, lambda 0.5, so every step back is worth a quarter. Rewards 1 2 3, values 1 1 1, value after the rollout 2.
REWARDS, VALUES, NEXT_VALUES = column(1, 2, 3), column(1, 1, 1), column(1, 1, 2)
NEVER = flags(0, 0, 0)
HALVES = {"gamma": 0.5, "gae_lambda": 0.5}


def test_nothing_ends():
    # deltas: 1 + 0.5*1 - 1 = 0.5;  2 + 0.5*1 - 1 = 1.5;  3 + 0.5*2 - 1 = 3
    # A2 = 3;  A1 = 1.5 + 3/4 = 2.25;  A0 = 0.5 + 2.25/4 = 1.0625;  returns are one more each
    advantages, returns = gae(REWARDS, VALUES, NEXT_VALUES, NEVER, NEVER, **HALVES)
    assert advantages.flatten().tolist() == [1.0625, 2.25, 3.0]
    assert returns.flatten().tolist() == [2.0625, 3.25, 4.0]


def test_termination_cuts_the_bootstrap_and_the_sum():
    # the episode ends at t=1: delta1 = 2 - 1 = 1, A1 = 1;  A0 = 0.5 + 1/4 = 0.75;  A2 = 3 belongs to the next episode
    ended = flags(0, 1, 0)
    advantages, returns = gae(REWARDS, VALUES, NEXT_VALUES, ended, ended, **HALVES)
    assert advantages.flatten().tolist() == [0.75, 1.0, 3.0]
    assert returns.flatten().tolist() == [1.75, 2.0, 4.0]


def test_termination_ignores_the_next_value():
    ended = flags(0, 1, 0)
    absurd = column(1, 1e6, 2)
    advantages, _ = gae(REWARDS, VALUES, absurd, ended, ended, **HALVES)
    assert advantages.flatten().tolist() == [0.75, 1.0, 3.0]


def test_truncation_bootstraps_from_the_final_observation_but_cuts_the_sum():
    # truncated at t=1, and the episode's last observation is worth 4 (not 1, the value of the next row):
    # delta1 = 2 + 0.5*4 - 1 = 3, A1 = 3 (nothing of A2);  A0 = 0.5 + 3/4 = 1.25;  A2 = 3
    advantages, returns = gae(REWARDS, VALUES, column(1, 4, 2), NEVER, flags(0, 1, 0), **HALVES)
    assert advantages.flatten().tolist() == [1.25, 3.0, 3.0]
    assert returns.flatten().tolist() == [2.25, 4.0, 4.0]


def test_truncation_and_termination_in_one_rollout():
    # rewards 1, values 0; t=1 truncated (final value 8), t=3 terminated, t=4 goes on with value 4
    # A4 = 1 + 0.5*4 = 3;  A3 = 1;  A2 = (1 + 0.5*0) + 1/4 = 1.25;  A1 = 1 + 0.5*8 = 5;  A0 = 1 + 5/4 = 2.25
    advantages, _ = gae(
        column(1, 1, 1, 1, 1),
        column(0, 0, 0, 0, 0),
        column(0, 8, 0, 7, 4),
        flags(0, 0, 0, 1, 0),
        flags(0, 1, 0, 1, 0),
        **HALVES,
    )
    assert advantages.flatten().tolist() == [2.25, 5.0, 1.25, 1.0, 3.0]


def test_environments_do_not_mix():
    # the three tables above, side by side
    rewards, values = REWARDS.expand(3, 3), VALUES.expand(3, 3)
    next_values = torch.cat([NEXT_VALUES, NEXT_VALUES, column(1, 4, 2)], dim=1)
    terminated = torch.cat([NEVER, flags(0, 1, 0), NEVER], dim=1)
    ended = torch.cat([NEVER, flags(0, 1, 0), flags(0, 1, 0)], dim=1)
    advantages, _ = gae(rewards, values, next_values, terminated, ended, **HALVES)
    assert advantages.T.tolist() == [[1.0625, 2.25, 3.0], [0.75, 1.0, 3.0], [1.25, 3.0, 3.0]]


def test_lambda_zero_is_the_one_step_error():
    # the deltas of the first table
    advantages, returns = gae(REWARDS, VALUES, NEXT_VALUES, NEVER, NEVER, gamma=0.5, gae_lambda=0.0)
    assert advantages.flatten().tolist() == [0.5, 1.5, 3.0]
    assert returns.flatten().tolist() == [1.5, 2.5, 4.0]  # r + gamma V(next)


def test_lambda_one_is_the_discounted_return():
    # G2 = 3 + 0.5*2 = 4;  G1 = 2 + 0.5*4 = 4;  G0 = 1 + 0.5*4 = 3, whatever the values in between
    for values in (VALUES, column(1, -5, 9)):
        next_values = torch.cat([values[1:], column(2)])
        advantages, returns = gae(REWARDS, values, next_values, NEVER, NEVER, gamma=0.5, gae_lambda=1.0)
        assert returns.flatten().tolist() == [3.0, 4.0, 4.0]
        assert advantages.flatten().tolist() == (column(3, 4, 4) - values).flatten().tolist()


def test_gamma_and_lambda_one_add_up_rewards():
    # 3 + 2 = 5;  2 + 5 = 7;  1 + 7 = 8
    _, returns = gae(REWARDS, VALUES, NEXT_VALUES, NEVER, NEVER, gamma=1.0, gae_lambda=1.0)
    assert returns.flatten().tolist() == [8.0, 7.0, 5.0]


def test_gamma_zero_is_the_reward():
    advantages, returns = gae(REWARDS, VALUES, NEXT_VALUES, NEVER, NEVER, gamma=0.0, gae_lambda=0.95)
    assert returns.flatten().tolist() == [1.0, 2.0, 3.0]
    assert advantages.flatten().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(0.99, 0.95), (1.0, 1.0), (0.9, 0.0), (1.0, 0.5), (0.5, 1.0)])
def test_random_data_against_the_double_loop(gamma, gae_lambda):
    generator = torch.Generator().manual_seed(3)
    T, N = 40, 5
    rewards, values, next_values = torch.randn(3, T, N, generator=generator, dtype=torch.float64)
    terminated = torch.rand(T, N, generator=generator) < 0.1
    ended = terminated | (torch.rand(T, N, generator=generator) < 0.1)
    assert (ended & ~terminated).any()  # there are truncations in the data
    inputs = (rewards, values, next_values, terminated, ended)
    expected = torch.tensor(naive(*(x.tolist() for x in inputs), gamma, gae_lambda), dtype=torch.float64)

    # float64 in, float64 out, at its precision; float32 at its own
    advantages, returns = gae(*inputs, gamma=gamma, gae_lambda=gae_lambda)
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, expected + values, rtol=0, atol=1e-12)
    single = gae(*(x.float() for x in inputs[:3]), terminated, ended, gamma=gamma, gae_lambda=gae_lambda)[0]
    assert single.dtype == torch.float32
    torch.testing.assert_close(single, expected.float(), rtol=1e-5, atol=1e-4)


def test_inputs_are_left_as_they_are():
    inputs = [REWARDS.clone(), VALUES.clone(), NEXT_VALUES.clone(), NEVER.clone(), NEVER.clone()]
    gae(*inputs, gamma=0.5, gae_lambda=0.5)
    for before, after in zip((REWARDS, VALUES, NEXT_VALUES, NEVER, NEVER), inputs, strict=True):
        assert torch.equal(before, after)
