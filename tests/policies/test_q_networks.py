"""Q-networks: shapes, dueling, distributions and their means; and how the policy acts on them."""

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rl_training.contracts.errors import SpaceError
from rl_training.contracts.spec import EnvSpec
from rl_training.functional.distributional import midpoints
from rl_training.policies.noisy import NoisyLinear, noisy_layers, reset_noise
from rl_training.policies.q_networks import (
    CategoricalQNetwork,
    ImplicitQuantileQNetwork,
    QNetwork,
    QNetworkConfig,
    QPolicy,
    QuantileQNetwork,
)

A, B = 3, 5
SPEC = EnvSpec(spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(A, start=1))

KINDS = {
    "plain": (QNetwork, {}, 1),
    "categorical": (CategoricalQNetwork, {"num_outputs": 7, "v_min": -3.0, "v_max": 3.0}, 7),
    "quantile": (QuantileQNetwork, {"num_outputs": 6}, 6),
    "implicit": (ImplicitQuantileQNetwork, {"embedding_size": 8, "num_greedy_fractions": 9}, 9),
}
each_kind = pytest.mark.parametrize("kind", KINDS)
each_form = pytest.mark.parametrize(("dueling", "noisy"), [(False, False), (True, False), (False, True), (True, True)])


def make(kind="plain", *, sizes=(16, 8), seed=0, spec=SPEC, **settings):
    cls, own, _ = KINDS[kind]
    torch.manual_seed(seed)
    return cls(spec, QNetworkConfig(sizes), **own, **settings)


def observations(rows=B, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, 4)).astype(np.float32))


class TestConfig:
    def test_defaults(self):
        config = QNetworkConfig()
        assert (config.sizes, config.activation, config.encoder) == ((64, 64), "relu", "auto")
        assert config.problems() == []

    def test_arguments_of_a_network_that_takes_none(self):
        (problem,) = QNetworkConfig(critic_kwargs={"width": 3}).problems()
        assert problem == "critic_kwargs: are for a registered network, and critic is 'mlp'"


class TestNetworks:
    @each_kind
    @each_form
    def test_shapes(self, kind, dueling, noisy):
        network = make(kind, dueling=dueling, noisy=noisy)
        assert network(observations()).shape == (B, A, KINDS[kind][2])
        q_values = network.q_values(observations())
        assert q_values.shape == (B, A)
        assert torch.equal(q_values, network.expected(network(observations())))
        assert q_values.dtype == torch.float32

    @each_kind
    @each_form
    def test_every_parameter_has_a_gradient(self, kind, dueling, noisy):
        network = make(kind, dueling=dueling, noisy=noisy)
        reset_noise(network, np.random.default_rng(0))
        network(observations())[:, 0].square().sum().backward()
        assert [name for name, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []

    def test_the_layers(self):
        network = make(sizes=(16, 8))
        assert [tuple(p.shape) for p in network.parameters()] == [(16, 4), (16,), (8, 16), (8,), (3, 8), (3,)]
        assert not any(isinstance(layer, NoisyLinear) for layer in network.modules())

    def test_no_hidden_layers(self):
        network = make(sizes=())
        assert [tuple(p.shape) for p in network.parameters()] == [(3, 4), (3,)]
        obs = observations()
        assert torch.equal(network.q_values(obs), network.head(obs))

    def test_by_hand(self):
        network = make(sizes=(2,))
        weights, biases = network.hidden[1].weight.detach().numpy(), network.hidden[1].bias.detach().numpy()
        hidden = np.maximum(observations().numpy() @ weights.T + biases, 0)
        expected = hidden @ network.head.weight.detach().numpy().T + network.head.bias.detach().numpy()
        np.testing.assert_allclose(network.q_values(observations()).detach().numpy(), expected, atol=1e-6)

    @each_kind
    def test_noise_is_in_all_linear_layers_after_the_encoder(self, kind):
        network = make(kind, noisy=True)
        assert [(layer.in_features, layer.out_features) for layer in noisy_layers(network)[:2]] == [(4, 16), (16, 8)]
        assert network.head in noisy_layers(network)
        assert len(noisy_layers(network)) == 3
        means = network.q_values(observations())
        reset_noise(network, np.random.default_rng(0))
        assert not torch.equal(network.q_values(observations()), means)

    @each_kind
    def test_constants_are_not_saved(self, kind):
        # they follow from the settings
        network = make(kind)
        assert set(network.state_dict()) == set(dict(network.named_parameters()))

    def test_dict_observations(self):
        space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
        network = make(spec=EnvSpec(space, spaces.Discrete(2)))
        assert network.q_values({"a": torch.zeros(B, 2), "b": torch.zeros(B, dtype=torch.int64)}).shape == (B, 2)

    def test_other_actions_are_refused(self):
        with pytest.raises(SpaceError, match="action values need a Discrete action space, got Box"):
            make(spec=EnvSpec(SPEC.observation_space, spaces.Box(-1, 1, (2,))))


class TestDueling:
    def test_by_hand(self):
        # value 10; advantages 1, 2, 6 with mean 3
        network = make(dueling=True)
        outputs = torch.tensor([[[10.0], [1.0], [2.0], [6.0]]])
        assert network.duel(outputs).flatten().tolist() == [8.0, 9.0, 13.0]

    def test_of_each_output_by_itself(self):
        # two atoms: values 10 and 20, advantages (1, 3) and (0, 4) with means 2 and 2
        network = make("categorical", dueling=True)
        outputs = torch.tensor([[[10.0, 20.0], [1.0, 0.0], [3.0, 4.0]]])
        assert network.duel(outputs)[0].tolist() == [[9.0, 18.0], [11.0, 22.0]]

    def test_the_mean_over_actions_is_the_value(self):
        network = make(dueling=True)
        rows = network.head(network.hidden(observations()))
        torch.testing.assert_close(network.q_values(observations()).mean(1), rows[:, 0])

    def test_without_it_outputs_stay(self):
        outputs = torch.randn(2, 3, 1)
        assert make().duel(outputs) is outputs


class TestCategorical:
    def test_support(self):
        assert make("categorical").support.tolist() == [-3, -2, -1, 0, 1, 2, 3]

    def test_expected_is_the_mean_of_the_distribution(self):
        # equal logits: the middle. All mass on one atom: that atom. Two thirds on 3, a third on -3: 1
        logits = torch.full((1, 3, 7), -1e9)
        logits[0, 0] = 0.0
        logits[0, 1, 5] = 0.0
        logits[0, 2, 0], logits[0, 2, 6] = 0.0, math.log(2.0)
        assert make("categorical").expected(logits)[0].tolist() == pytest.approx([0.0, 2.0, 1.0], abs=1e-6)


class TestQuantile:
    def test_fractions_are_midpoints(self):
        assert make("quantile").fractions.tolist() == pytest.approx([(2 * i + 1) / 12 for i in range(6)])
        assert midpoints(4).tolist() == [0.125, 0.375, 0.625, 0.875]

    def test_expected_is_the_mean(self):
        assert make("quantile").expected(torch.arange(12.0).view(1, 2, 6)).tolist() == [[2.5, 8.5]]


class TestImplicit:
    def test_fractions_of_each_row(self):
        network = make("implicit")
        fractions = torch.rand(B, 4, generator=torch.Generator().manual_seed(0))
        quantiles = network(observations(), fractions)
        assert quantiles.shape == (B, A, 4)
        # each fraction by itself, and each row by itself
        for f in range(4):
            alone = network(observations(), fractions[:, f : f + 1])
            torch.testing.assert_close(quantiles[:, :, f : f + 1], alone)
        torch.testing.assert_close(quantiles[2:3], network(observations()[2:3], fractions[2:3]))

    def test_the_same_fractions_for_all(self):
        network, fractions = make("implicit"), torch.tensor([[0.1, 0.7]])
        torch.testing.assert_close(network(observations(), fractions), network(observations(), fractions.expand(B, 2)))

    @pytest.mark.parametrize("dueling", [False, True])
    def test_by_hand(self, dueling):
        network = make("implicit", dueling=dueling)
        fractions = np.random.default_rng(0).random((B, 4), dtype=np.float32)
        waves = np.cos(np.pi * np.arange(8) * fractions[:, :, None])
        weight, bias = (p.detach().numpy() for p in network.embedding.parameters())
        embedding = np.maximum(waves @ weight.T + bias, 0)
        features = network.hidden(observations()).detach().numpy()[:, None] * embedding
        rows = features @ network.head.weight.detach().numpy().T + network.head.bias.detach().numpy()
        if dueling:
            value, advantage = rows[:, :, :1], rows[:, :, 1:]
            rows = value + advantage - advantage.mean(2, keepdims=True)
        found = network(observations(), torch.from_numpy(fractions)).detach().numpy()
        np.testing.assert_allclose(found, rows.transpose(0, 2, 1), atol=1e-5)

    def test_greedy_values_are_those_at_midpoints(self):
        network = make("implicit")
        expected = network(observations(), midpoints(9).expand(B, 9)).mean(2)
        torch.testing.assert_close(network.q_values(observations()), expected)
        assert torch.equal(network.q_values(observations()), network.q_values(observations()))


class TestPolicy:
    def policy(self, epsilon=0.0, **settings):
        return QPolicy(make(**settings), epsilon).eval()

    @each_kind
    def test_deterministic_actions_and_values(self, kind):
        policy = self.policy(epsilon=1.0, kind=kind)
        out = policy.act(observations(), deterministic=True)
        q_values = policy.network.q_values(observations())
        assert torch.equal(out.action, q_values.argmax(1))
        assert out.action.dtype == torch.int64
        assert out.extras == {}
        assert out.state is None
        assert torch.equal(policy.value(observations()), q_values.amax(1))
        assert not policy.value(observations()).requires_grad
        assert policy.box_actions == "clip"

    def test_epsilon_zero_is_greedy(self):
        policy = self.policy(0.0)
        out = policy.act(observations(200), rng=np.random.default_rng(0))
        assert torch.equal(out.action, policy.act(observations(200), deterministic=True).action)

    def test_epsilon_one_is_uniform(self):
        action = self.policy(1.0).act(observations(30_000), rng=np.random.default_rng(0)).action
        counts = np.bincount(action, minlength=A)
        assert np.sum((counts - 10_000) ** 2 / 10_000) < 13.8  # 0.1 % of right ones exceed it

    def test_epsilon_in_between(self):
        # a quarter of the rows takes any action, and a third of those the greedy one
        policy, obs = self.policy(0.25), observations(30_000)
        greedy = policy.act(obs, deterministic=True).action
        same = (policy.act(obs, rng=np.random.default_rng(0)).action == greedy).float().mean().item()
        assert same == pytest.approx(1 - 0.25 * 2 / 3, abs=0.01)

    @pytest.mark.parametrize("noisy", [False, True])
    def test_the_stream_does_not_depend_on_outcomes(self, noisy):
        states = []
        for epsilon, seed in ((0.0, 0), (0.5, 0), (1.0, 1)):
            rng = np.random.default_rng(3)
            self.policy(epsilon, noisy=noisy).act(observations(7, seed), rng=rng)
            states.append(rng.bit_generator.state)
        assert states[0] == states[1] == states[2]

    def test_equal_streams_equal_actions(self):
        policy = self.policy(0.5, noisy=True)
        one, two, other = (policy.act(observations(50), rng=np.random.default_rng(s)).action for s in (0, 0, 1))
        assert torch.equal(one, two)
        assert not torch.equal(one, other)

    @each_kind
    def test_noise_explores_and_is_gone_afterwards(self, kind):
        policy, rng = self.policy(0.0, kind=kind, noisy=True), np.random.default_rng(0)
        obs = observations(200)
        greedy, values = policy.act(obs, deterministic=True).action, policy.value(obs)
        explored = [policy.act(obs, rng=rng).action for _ in range(5)]
        assert any(not torch.equal(action, greedy) for action in explored)
        assert any(not torch.equal(explored[0], action) for action in explored[1:])  # drawn afresh
        assert torch.equal(policy.act(obs, deterministic=True).action, greedy)
        assert torch.equal(policy.value(obs), values)

    def test_epsilon_is_saved(self):
        policy = self.policy(0.25)
        assert policy.state_dict()["epsilon"].item() == 0.25
        other = self.policy(0.75, seed=1)
        other.load_state_dict(copy.deepcopy(policy.state_dict()))
        assert other.epsilon.item() == 0.25

    def test_exploring_needs_a_stream(self):
        with pytest.raises(AssertionError, match="needs a random generator"):
            self.policy().act(observations())

    def test_action_masks_are_refused(self):
        with pytest.raises(NotImplementedError, match="action masks"):
            self.policy().act(observations(), action_mask=torch.ones(B, A), deterministic=True)
