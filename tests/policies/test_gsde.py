"""State-dependent exploration (gSDE): its maths by hand, its noise matrices, and the policies that use it."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.accelerate import using
from rl_training.algorithms.registry import get_spec
from rl_training.contracts.errors import DataError, SpaceError
from rl_training.contracts.spec import EnvSpec
from rl_training.functional.policies import expln, squashed_log_prob, state_dependent_log_std
from rl_training.policies.actor_critic import ActorCriticPolicy
from rl_training.policies.actors import SquashedGaussianPolicy, StochasticNetworkConfig
from rl_training.policies.distributions import StateDependentGaussian, frozen, kl_divergence
from rl_training.policies.exploration import NoiseConfig, StateDependentNoise
from rl_training.policies.networks import ActorCriticNetworkConfig

N, ROLLOUT = 3, 6
SPEC = EnvSpec(spaces.Box(-1, 1, (4,)), spaces.Box(-1, 1, (2,)))
DISCRETE = EnvSpec(spaces.Box(-1, 1, (4,)), spaces.Discrete(3))


def rng(seed=0):
    return np.random.default_rng(seed)


def observations(rows=N):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))


def on_policy(**settings):
    torch.manual_seed(0)
    network = ActorCriticNetworkConfig((8,), (8,), exploration="gsde", log_std_init=-0.5, **settings)
    policy = ActorCriticPolicy(SPEC, network)
    policy.rollout_steps = ROLLOUT
    return policy


def off_policy(noise="none", **settings):
    torch.manual_seed(0)
    network = StochasticNetworkConfig((8,), (8,), exploration="gsde", log_std_init=-0.5, **settings)
    policy = SquashedGaussianPolicy(SPEC, network, 2, NoiseConfig(noise))
    policy.rollout_steps = ROLLOUT
    return policy


each_policy = pytest.mark.parametrize("make", [on_policy, off_policy])


class TestDistribution:
    # variance 1^2 * 0.5^2 + 2^2 * 0.25^2 = 0.25 + 0.25 = 0.5
    mean, features, std = torch.tensor([[0.3]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5], [0.25]])

    def test_log_prob_and_entropy_by_hand(self):
        dist = StateDependentGaussian(self.mean, self.features, self.std)
        # -(1 - 0.3)^2 / (2 * 0.5) - ln(0.5) / 2 - ln(2 pi) / 2 = -0.49 + 0.346574 - 0.918939
        assert dist.log_prob(torch.tensor([[1.0]])).item() == pytest.approx(-1.062365, abs=5e-6)
        # 1 / 2 + ln(2 pi) / 2 + ln(0.5) / 2 = 0.5 + 0.918939 - 0.346574
        assert dist.entropy().item() == pytest.approx(1.072365, abs=5e-6)

    def test_sample_is_the_mean_plus_features_times_a_matrix_per_row(self):
        features = torch.tensor([[1.0, 2.0], [0.0, -1.0]])
        dist = StateDependentGaussian(torch.tensor([[0.5, 0.0], [0.0, 1.0]]), features, torch.ones(2, 2))
        matrices = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
        # rows: (1 + 6, 2 + 8) and (-7, -8)
        assert dist.sample(matrices).tolist() == [[7.5, 10.0], [-7.0, -7.0]]
        assert dist.mode().tolist() == [[0.5, 0.0], [0.0, 1.0]]

    def test_samples_have_the_variance_of_the_log_prob(self):
        matrices = torch.from_numpy(rng().standard_normal((40_000, 2, 1), dtype=np.float32)) * self.std
        rows = len(matrices)
        dist = StateDependentGaussian(self.mean.expand(rows, 1), self.features.expand(rows, 2), self.std)
        samples = dist.sample(matrices)
        assert samples.mean().item() == pytest.approx(0.3, abs=0.015)
        assert samples.var().item() == pytest.approx(0.5, rel=0.02)

    def test_features_of_zero_leave_a_finite_log_prob(self):
        dist = StateDependentGaussian(self.mean, torch.zeros(1, 2), self.std)
        assert dist.log_prob(self.mean).item() == pytest.approx(
            3 * math.log(10) - 0.5 * math.log(2 * math.pi), rel=1e-4
        )

    def test_squashed_log_prob_by_hand(self):
        # tanh(0.3 + 0.4): the normal's -0.4^2 / (2 * 0.5) - ln(0.5) / 2 - ln(2 pi) / 2 = -0.732365,
        # minus ln(1 - tanh(0.7)^2) = ln(1 - 0.604368^2) = -0.454540
        log_std = state_dependent_log_std(self.features, self.std)
        unsquashed = torch.tensor([[0.7]])
        noise = (unsquashed - self.mean) / log_std.exp()
        assert squashed_log_prob(unsquashed, noise, log_std).item() == pytest.approx(-0.732365 + 0.454540, abs=5e-6)

    def test_expln(self):
        # exp up to 0; ln(1 + 1) + 1 and ln(1 + 3) + 1 above
        found = expln(torch.tensor([-1.0, 0.0, 1.0, 3.0]))
        torch.testing.assert_close(found, torch.tensor([0.367879, 1.0, 1.693147, 2.386294]))

    def test_expln_has_finite_gradients(self):
        x = torch.tensor([-100.0, 0.0, 200.0], requires_grad=True)
        expln(x).sum().backward()
        torch.testing.assert_close(x.grad, torch.tensor([0.0, 1.0, 1 / 201]))

    def test_kl_and_frozen(self):
        p = StateDependentGaussian(self.mean, self.features, self.std)
        q = StateDependentGaussian(self.mean + 1.0, self.features, self.std)
        # equal deviations: shift^2 / (2 * variance) = 1
        assert kl_divergence(frozen(p), q).item() == pytest.approx(1.0, abs=1e-5)


class TestNoiseMatrices:
    def noise(self, num_actions=2, **settings):
        return StateDependentNoise(4, num_actions, ActorCriticNetworkConfig(exploration="gsde", **settings))

    def steps_with_new_matrices(self, num_steps=14, **settings):
        noise, stream, state, found = self.noise(**settings), rng(), None, []
        for step in range(num_steps):
            after = noise.advance(state, N, ROLLOUT, stream)
            if state is None or not torch.equal(after["matrices"], state["matrices"]):
                found.append(step)
            state = after
        return found

    def test_once_per_rollout(self):
        assert self.steps_with_new_matrices() == [0, 6, 12]

    def test_every_few_steps_and_at_each_rollout(self):
        assert self.steps_with_new_matrices(sde_sample_freq=4) == [0, 4, 6, 10, 12]
        assert self.steps_with_new_matrices(sde_sample_freq=1) == list(range(14))

    def test_one_matrix_per_environment_scaled_by_its_deviations(self):
        noise = self.noise()
        noise.log_std.data = torch.arange(8.0).reshape(4, 2).log()
        matrices = noise.advance(None, N, ROLLOUT, rng())["matrices"]
        expected = rng().standard_normal((N, 4, 2), dtype=np.float32) * np.arange(8, dtype=np.float32).reshape(4, 2)
        np.testing.assert_allclose(matrices.numpy(), expected, rtol=1e-6)
        assert not torch.equal(matrices[0], matrices[1])
        assert not matrices.requires_grad

    def test_one_deviation_per_feature(self):
        noise = self.noise(full_std=False, log_std_init=-1.0)
        assert noise.log_std.shape == (4, 1)
        torch.testing.assert_close(noise.std(), torch.full((4, 2), 0.367879))

    def test_expln_instead_of_exp(self):
        torch.testing.assert_close(self.noise(use_expln=True, log_std_init=1.0).std(), torch.full((4, 2), 1.693147))

    def test_a_state_of_other_environments_is_refused(self):
        noise = self.noise()
        state = noise.advance(None, N, ROLLOUT, rng())
        with pytest.raises(DataError, match=r"\(3, 4, 2\), expected \(5, 4, 2\)"):
            noise.advance(state, 5, ROLLOUT, rng())


class TestPolicies:
    @each_policy
    def test_equal_observations_get_equal_actions_while_the_matrices_are_kept(self, make):
        policy, stream = make(), rng()
        first = policy.act(observations(), rng=stream)
        second = policy.act(observations(), state=first.state, rng=stream)
        assert torch.equal(first.action, second.action)
        assert second.state["step"] == 2
        assert not torch.equal(first.action, policy.act(observations(), rng=stream).action)  # no state: new matrices

    @each_policy
    def test_environments_have_their_own_noise(self, make):
        action = make().act(observations(1).expand(2, 4), rng=rng()).action
        assert not torch.equal(action[0], action[1])

    @each_policy
    def test_deterministic_actions_have_no_noise(self, make):
        policy = make()
        found = policy.act(observations(), deterministic=True).action
        torch.testing.assert_close(found, policy.mode(observations()))
        assert policy.act_on_arrays(observations().numpy(), rng()) is None  # only `act` has a state

    @each_policy
    def test_accelerated_actions_are_those_of_plain_torch(self, make):
        found = []
        for mode in ("off", "auto", "recorded"):
            with using(mode):
                policy, stream, state, actions = make(sde_sample_freq=2), rng(), None, []
            for step in range(12):
                out = policy.act(observations() * (step + 1), state=state, rng=stream)
                state = out.state
                actions.append(out.action.clone())
            found.append(torch.stack(actions))
        torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)
        torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-6)

    def test_on_policy_by_hand(self):
        policy = on_policy()
        out = policy.act(observations(), rng=rng())
        features = policy.actor(observations())
        mean = policy.head.linear(features)
        noise = torch.stack([features[i] @ out.state["matrices"][i] for i in range(N)])
        torch.testing.assert_close(out.action, mean + noise)
        deviation = (features.square() @ policy.head.sde.log_std.exp().square() + 1e-6).sqrt()
        expected = torch.distributions.Normal(mean, deviation).log_prob(out.action).sum(-1)
        torch.testing.assert_close(out.extras["logprobs"], expected.detach())
        torch.testing.assert_close(policy.score(observations(), out.action)[0], expected.detach())

    def test_on_policy_noise_does_not_train_the_hidden_layers(self):
        policy = on_policy()
        log_prob, entropy, _ = policy.evaluate_actions(observations(), torch.zeros(N, 2))
        (gradient,) = torch.autograd.grad(entropy.sum(), policy.actor.parameters().__next__(), allow_unused=True)
        assert gradient is None
        log_prob.sum().backward()
        assert policy.head.sde.log_std.grad.abs().sum() > 0

    def test_off_policy_by_hand(self):
        policy = off_policy()
        out = policy.act(observations(), rng=rng())
        features = policy.actor.trunk.features(observations())
        mean = policy.actor.trunk.head(features)
        noise = torch.stack([features[i] @ out.state["matrices"][i] for i in range(N)])
        torch.testing.assert_close(out.action, torch.tanh(mean + noise))
        found_mean, log_std = policy.actor(observations())
        torch.testing.assert_close(found_mean, mean)
        torch.testing.assert_close(
            log_std.exp().square(), features.square() @ policy.actor.sde.std().square(), rtol=1e-4, atol=2e-6
        )

    def test_off_policy_noise_trains_the_hidden_layers(self):
        policy = off_policy()
        policy.actor(observations())[1].sum().backward()
        assert policy.actor.trunk.hidden[0].weight.grad.abs().sum() > 0

    def test_off_policy_means_are_clipped(self):
        policy = off_policy()
        policy.actor.trunk.head.bias.data = torch.tensor([9.0, -9.0])
        expected = torch.tensor([[0.964028, -0.964028]]).expand(N, 2)  # tanh(2)
        torch.testing.assert_close(policy.act(observations(), deterministic=True).action, expected)
        torch.testing.assert_close(policy.mode(observations()), expected)

    def test_action_noise_may_be_added(self):
        policy, stream = off_policy("gaussian"), rng()
        first = policy.act(observations(), rng=stream)
        second = policy.act(observations(), state=first.state, rng=stream)
        assert torch.equal(first.state["matrices"], second.state["matrices"])
        assert not torch.equal(first.action, second.action)


class TestSettings:
    def test_discrete_actions_are_refused(self):
        with pytest.raises(
            SpaceError, match=r"exploration: 'gsde' is noise for continuous actions \(Box\), got Discrete"
        ):
            ActorCriticPolicy(DISCRETE, ActorCriticNetworkConfig(exploration="gsde"))

    def test_settings_of_gsde_need_gsde(self):
        config = ActorCriticNetworkConfig(sde_sample_freq=4, full_std=False, use_expln=True, log_std_init=-1.0)
        assert [problem.partition(":")[0] for problem in config.problems()] == [
            "sde_sample_freq",
            "full_std",
            "use_expln",
        ]
        (problem,) = StochasticNetworkConfig(log_std_init=-2.0).problems()
        assert problem == "log_std_init: is for exploration 'gsde', got 'gaussian'"

    def test_no_steps_between_matrices(self):
        (problem,) = ActorCriticNetworkConfig(exploration="gsde", sde_sample_freq=0).problems()
        assert problem == "sde_sample_freq: must be -1 or at least 1, got 0"

    def test_a_registered_actor_has_no_features(self):
        assert "exploration: 'gsde'" in StochasticNetworkConfig(exploration="gsde", actor="mine").problems()[0]

    def test_correlated_action_noise_is_refused(self):
        config = get_spec("sac").config
        network = StochasticNetworkConfig(exploration="gsde")
        (problem,) = config(network=network, noise=NoiseConfig("ou")).problems()
        assert problem == "noise > kind: must be none or gaussian with network.exploration 'gsde', got 'ou'"
        assert config(network=network).problems() == []

    def test_only_stochastic_actors_have_it(self):
        for name, has_it in (("ppo", True), ("a2c", True), ("sac", True), ("td3", False), ("ddpg", False)):
            assert hasattr(get_spec(name).config().network, "exploration") == has_it

    def test_recurrent_ppo_refuses_it(self):
        config = get_spec("recurrent_ppo").config(network=ActorCriticNetworkConfig(exploration="gsde"))
        assert config.problems() == [
            "network > exploration: must be 'gaussian'; 'gsde' is not supported after a memory"
        ]
