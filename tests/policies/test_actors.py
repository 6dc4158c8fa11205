"""Actors for bounded actions against torch's distributions, and the policies that explore with them."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from rl_training.contracts.errors import SpaceError
from rl_training.contracts.schedule import Linear
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import (
    DeterministicActor,
    DeterministicPolicy,
    OffPolicyNetworkConfig,
    SquashedGaussianActor,
    SquashedGaussianPolicy,
)
from rl_training.policies.exploration import NoiseConfig

N = 16
NETWORK = OffPolicyNetworkConfig(actor_sizes=(8,), critic_sizes=(8,))
POLICIES = [DeterministicPolicy, SquashedGaussianPolicy]
each_policy = pytest.mark.parametrize("policy_class", POLICIES)


def make_spec(shape=(2,)):
    return EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Box(-2, 5, shape))


def make_policy(policy_class, kind="none", std=0.1, shape=(2,), num_critics=2):
    torch.manual_seed(0)
    return policy_class(make_spec(shape), NETWORK, num_critics, NoiseConfig(kind, std, theta=0.15, dt=0.01))


def observations(rows=N):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))


def rng(seed=0):
    return np.random.default_rng(seed)


class TestDeterministicActor:
    def test_is_a_tanh_network(self):
        torch.manual_seed(0)
        actor = DeterministicActor(make_spec(), NETWORK)
        hidden = (observations() @ actor.trunk.hidden[0].weight.T + actor.trunk.hidden[0].bias).relu()
        expected = torch.tanh(hidden @ actor.trunk.head.weight.T + actor.trunk.head.bias)
        torch.testing.assert_close(actor(observations()), expected)


class TestSquashedGaussianActor:
    def make(self, scale=1.0):
        torch.manual_seed(0)
        actor = SquashedGaussianActor(make_spec(), NETWORK)
        with torch.no_grad():
            actor.trunk.head.weight.mul_(scale)
        return actor

    def test_log_prob_is_that_of_torchs_distribution(self):
        actor, obs, noise = self.make().double(), observations().double(), torch.randn(N, 2).double()
        actor.trunk.encoder.forward = lambda x: x  # stays in double precision
        mean, log_std = actor(obs)
        squash = TanhTransform(cache_size=1)
        reference = TransformedDistribution(Independent(Normal(mean, log_std.exp()), 1), [squash])
        expected = squash(mean + log_std.exp() * noise)
        expected_log_prob = reference.log_prob(expected)

        action, log_prob = actor.sample(obs, noise)
        torch.testing.assert_close(action, expected)
        torch.testing.assert_close(log_prob, expected_log_prob)
        weight, parameters = torch.randn(N, 2).double(), list(actor.parameters())
        own = torch.autograd.grad(log_prob.sum() + (weight * action).sum(), parameters)
        theirs = torch.autograd.grad(expected_log_prob.sum() + (weight * expected).sum(), parameters)
        for one, two in zip(own, theirs, strict=True):
            torch.testing.assert_close(one, two)

    def test_far_out(self):
        # where tanh(u) is 1 in float32, the density still has a finite logarithm and gradient
        actor = self.make(scale=200.0)
        action, log_prob = actor.sample(observations(), 3.0 * torch.ones(N, 2))
        assert (action.abs() == 1).any()
        assert torch.isfinite(log_prob).all()
        gradients = torch.autograd.grad(log_prob.sum(), list(actor.parameters()))
        assert all(torch.isfinite(gradient).all() for gradient in gradients)

    def test_log_std_is_kept_in_its_range(self):
        _, log_std = self.make(scale=1e4)(observations())
        assert log_std.min().item() == -20
        assert log_std.max().item() == 2

    def test_density_integrates_to_one(self):
        torch.manual_seed(0)
        actor = SquashedGaussianActor(make_spec((1,)), NETWORK)
        noise = torch.linspace(-8, 8, 4001)[:, None]
        action, log_prob = actor.sample(observations(1).expand(4001, 3), noise)
        assert torch.trapezoid(log_prob.exp(), action[:, 0]).item() == pytest.approx(1, abs=1e-3)

    def test_mode(self):
        actor = self.make()
        assert torch.equal(actor.mode(observations()), actor(observations())[0].tanh())


@each_policy
class TestPolicies:
    @pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
    @pytest.mark.parametrize("kind", ["none", "gaussian", "ou"])
    def test_actions(self, policy_class, shape, kind):
        policy = make_policy(policy_class, kind, std=2.0, shape=shape)
        assert policy.box_actions == "rescale"
        for deterministic in (False, True):
            out = policy.act(observations(), deterministic=deterministic, rng=rng())
            assert out.action.shape == (N, *shape)
            assert out.action.dtype == torch.float32
            assert out.action.abs().max() <= 1
            assert not out.action.requires_grad
            assert not out.extras

    def test_deterministic_is_free_of_noise(self, policy_class):
        policy = make_policy(policy_class, "gaussian", std=2.0)
        action = policy.act(observations(), deterministic=True).action  # and needs no stream
        torch.testing.assert_close(action, policy.mode(observations()))
        assert not torch.equal(action, policy.act(observations(), rng=rng()).action)

    def test_randomness_comes_from_the_stream(self, policy_class):
        policy, before = make_policy(policy_class, "gaussian"), torch.get_rng_state()
        draws = [policy.act(observations(), rng=rng(seed)).action for seed in (0, 0, 1)]
        assert torch.equal(draws[0], draws[1])
        assert not torch.equal(draws[0], draws[2])
        assert torch.equal(torch.get_rng_state(), before)

    def test_noise_scale_is_saved(self, policy_class):
        policy = make_policy(policy_class, "gaussian", std=Linear(0.5, 0.1))
        assert policy.state_dict()["noise_std"].item() == 0.5
        policy.noise_std.fill_(0.25)
        assert policy.state_dict()["noise_std"].item() == 0.25

    def test_value_is_the_smallest_critics(self, policy_class):
        policy = make_policy(policy_class, num_critics=5)
        q = policy.critic(observations(), policy.act(observations(), deterministic=True).action)
        value = policy.value(observations())
        torch.testing.assert_close(value, q.min(0).values)
        assert not value.requires_grad

    def test_no_masks(self, policy_class):
        with pytest.raises(NotImplementedError, match="masks"):
            make_policy(policy_class).act(observations(), action_mask=torch.ones(N, 2), rng=rng())

    def test_only_boxes(self, policy_class):
        with pytest.raises(SpaceError, match="Discrete"):
            policy_class(EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Discrete(2)), NETWORK, 2, NoiseConfig())


class TestNoise:
    def test_gaussian_is_added_and_clipped(self):
        policy = make_policy(DeterministicPolicy, "gaussian", std=0.5)
        out = policy.act(observations(), rng=rng())
        normal = torch.from_numpy(rng().standard_normal((N, 2), dtype=np.float32))
        expected = (policy.mode(observations()) + 0.5 * normal).clamp(-1, 1)
        torch.testing.assert_close(out.action, expected)
        assert out.state is None

    def test_gaussian_follows_the_buffer(self):
        policy = make_policy(DeterministicPolicy, "gaussian", std=0.5)
        policy.noise_std.zero_()
        torch.testing.assert_close(policy.act(observations(), rng=rng()).action, policy.mode(observations()))

    def test_squashed_gaussian_samples_its_actor(self):
        policy = make_policy(SquashedGaussianPolicy)
        noise = torch.from_numpy(rng().standard_normal((N, 2), dtype=np.float32))
        expected, _ = policy.actor.sample(observations(), noise)
        torch.testing.assert_close(policy.act(observations(), rng=rng()).action, expected)

    def test_correlated_noise_is_threaded_through(self):
        policy, stream = make_policy(DeterministicPolicy, "ou", std=3.0), rng()
        starts = torch.zeros(3, N, dtype=torch.bool)
        starts[0], starts[2, 4] = True, True
        normal = [torch.from_numpy(draw) for draw in rng().standard_normal((3, N, 2), dtype=np.float32)]
        expected, state = torch.zeros(N, 2), None
        for start, draw in zip(starts, normal, strict=True):
            out = policy.act(observations(), state=state, episode_start=start, rng=stream)
            expected = torch.where(start[:, None], 0, expected)
            expected = expected + 0.15 * (0 - expected) * 0.01 + 3.0 * 0.1 * draw
            torch.testing.assert_close(out.state, expected)
            torch.testing.assert_close(out.action, (policy.mode(observations()) + expected).clamp(-1, 1))
            state = out.state

    def test_deterministic_actions_keep_the_noise(self):
        policy, state = make_policy(DeterministicPolicy, "ou"), torch.ones(N, 2)
        out = policy.act(observations(), deterministic=True, state=state)
        assert out.state is state


def test_network_problems():
    assert OffPolicyNetworkConfig().problems() == []
    (problem,) = OffPolicyNetworkConfig(critic_kwargs={"width": 3}).problems()
    assert problem == "critic_kwargs: are for a registered network, and critic is 'mlp'"
