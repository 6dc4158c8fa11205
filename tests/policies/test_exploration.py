"""Exploration noise against its definition, and random actions."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.contracts.errors import SpaceError
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import EnvSpec
from rl_training.experiment.schema import build, to_plain
from rl_training.policies.exploration import NoiseConfig, RandomPolicy, gaussian_noise, ou_noise

STD = torch.tensor(0.5)


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float32)


def test_gaussian_noise():
    assert gaussian_noise(STD, tensor([1, -2])).tolist() == [[0.5, -1.0]]


class TestOrnsteinUhlenbeck:
    def step(self, previous, start, normal, theta=0.5, dt=0.25):
        return ou_noise(previous, start, STD, normal, theta=theta, dt=dt)

    def test_by_hand(self):
        # 0.8 + 0.5 * (0 - 0.8) * 0.25 + 0.5 * 0.5 * 2 = 0.8 - 0.1 + 0.5
        assert self.step(tensor([0.8]), None, tensor([2.0])).item() == pytest.approx(1.2)

    def test_begins_at_zero(self):
        assert self.step(None, None, tensor([2.0, -1.0])).tolist() == [[0.5, -0.25]]

    def test_is_zero_again_where_an_episode_starts(self):
        previous, normal = tensor([0.8, 0.8], [0.8, 0.8]), tensor([2, -1], [2, -1])
        noise = self.step(previous, torch.tensor([True, False]), normal)
        torch.testing.assert_close(noise, tensor([0.5, -0.25], [1.2, 0.45]))
        assert previous[0, 0].item() == pytest.approx(0.8)  # what was handed in is not changed

    def test_long_run_deviation(self):
        # the recursion x <- a x + b n has variance b^2 / (1 - a^2)
        theta, dt, rng = 0.15, 0.1, np.random.default_rng(0)
        noise, seen = None, []
        for _ in range(3000):
            normal = torch.from_numpy(rng.standard_normal((64, 1), dtype=np.float32))
            noise = self.step(noise, None, normal, theta=theta, dt=dt)
            seen.append(noise)
        a, b = 1 - theta * dt, 0.5 * math.sqrt(dt)
        late = torch.stack(seen[500:])
        assert late.std().item() == pytest.approx(b / math.sqrt(1 - a * a), rel=0.05)
        # neighbours in time are correlated by a
        assert (late[1:] * late[:-1]).mean().item() / late.square().mean().item() == pytest.approx(a, abs=0.01)


class TestConfig:
    def test_from_a_file(self):
        problems = []
        data = {"kind": "ou", "std": {"schedule": "linear", "start": 0.5, "end": 0.1}, "theta": 0.2}
        config = build(NoiseConfig, data, "noise", problems)
        assert not problems
        assert config == NoiseConfig("ou", Linear(0.5, 0.1), 0.2)
        assert build(NoiseConfig, to_plain(config), "noise", problems) == config

    @pytest.mark.parametrize("data", [{"kind": "white"}, {"std": -1}, {"dt": 0}, {"theta": -0.1}])
    def test_refused(self, data):
        problems = []
        build(NoiseConfig, data, "noise", problems)
        assert len(problems) == 1
        assert problems[0].startswith(f"noise > {next(iter(data))}")


def random_policy(action_space):
    return RandomPolicy(EnvSpec(spaces.Box(-1, 1, (1,)), action_space))


class TestRandomPolicy:
    def test_discrete(self):
        policy = random_policy(spaces.Discrete(3, start=5))
        action = policy.act(torch.zeros(3000, 2), rng=np.random.default_rng(0)).action
        assert action.dtype == torch.int64
        assert action.shape == (3000,)
        counts = torch.bincount(action)  # from 0: the environment's start is added elsewhere
        assert counts.shape == (3,)
        assert (counts - 1000).abs().max() < 150

    @pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
    def test_box(self, shape):
        policy = random_policy(spaces.Box(-5, 100, shape))
        action = policy.act({"a": torch.zeros(3000, 2)}, rng=np.random.default_rng(0)).action
        assert action.dtype == torch.float32
        assert action.shape == (3000, *shape)
        assert -1 <= action.min() < -0.99
        assert 0.99 < action.max() <= 1
        assert action.mean().item() == pytest.approx(0, abs=0.05)
        assert action.std().item() == pytest.approx(1 / math.sqrt(3), abs=0.02)
        assert policy.box_actions == "rescale"

    def test_draws_from_the_stream_it_is_given(self):
        policy, before = random_policy(spaces.Box(-1, 1, (2,))), torch.get_rng_state()
        draws = [policy.act(torch.zeros(4, 1), rng=np.random.default_rng(seed)).action for seed in (0, 0, 1)]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        assert torch.equal(torch.get_rng_state(), before)

    def test_what_it_cannot_do(self):
        policy = random_policy(spaces.Discrete(2))
        with pytest.raises(NotImplementedError, match="no values"):
            policy.value(torch.zeros(1, 1))
        with pytest.raises(NotImplementedError, match="masks"):
            policy.act(torch.zeros(1, 1), action_mask=torch.ones(1, 2), rng=np.random.default_rng(0))
        with pytest.raises(SpaceError, match="Text"):
            random_policy(spaces.Text(2))
