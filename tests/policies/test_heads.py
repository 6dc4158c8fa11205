"""Action heads, and the actor-critic policy around them, on every action space."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rl_training.contracts.errors import SpaceError
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actor_critic import ActorCriticPolicy
from rl_training.policies.heads import ActionHead
from rl_training.policies.networks import ActorCriticNetworkConfig, make_mlp, orthogonal_

B = 32
OBS_SPACE = spaces.Box(-1, 1, (3,))
SPACES = {
    # name: (space, outputs of the network, dtype of actions)
    "discrete": (spaces.Discrete(4), 4, torch.int64),
    "discrete-start": (spaces.Discrete(3, start=5), 3, torch.int64),
    "multi-discrete": (spaces.MultiDiscrete([3, 2]), 5, torch.int64),
    "multi-discrete-2d": (spaces.MultiDiscrete(np.array([[2, 3], [4, 2]])), 11, torch.int64),
    "multi-binary": (spaces.MultiBinary(3), 3, torch.int64),
    "multi-binary-2d": (spaces.MultiBinary((2, 2)), 4, torch.int64),
    "box": (spaces.Box(-1, 1, (2,)), 2, torch.float32),
    "box-2d": (spaces.Box(-1, 1, (2, 3)), 6, torch.float32),
    "box-scalar": (spaces.Box(-1, 1, ()), 1, torch.float32),
}
each_space = pytest.mark.parametrize(("space", "num_outputs", "dtype"), SPACES.values(), ids=SPACES)


def observations(rows=B):
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))


def make_policy(space, seed=0, **network):
    torch.manual_seed(seed)
    # weights of torch's size instead of gain 0.01, so that probabilities differ between rows
    config = ActorCriticNetworkConfig(
        **{"actor_sizes": (8,), "critic_sizes": (8,), "orthogonal_init": False, **network}
    )
    return ActorCriticPolicy(EnvSpec(OBS_SPACE, space), config)


@each_space
class TestEverySpace:
    def test_head_shapes(self, space, num_outputs, dtype):
        head = ActionHead(space, num_features=7)
        assert head.linear.weight.shape == (num_outputs, 7)
        assert head.draw_noise(np.random.default_rng(0), B, torch.device("cpu")).shape == (B, num_outputs)
        dist = head(torch.randn(B, 7))
        assert dist.entropy().shape == (B,)
        assert dist.log_prob(dist.mode()).shape == (B,)

    def test_act_shapes(self, space, num_outputs, dtype):
        policy = make_policy(space)
        out = policy.act(observations(), rng=np.random.default_rng(0))
        assert out.action.shape == (B, *space.shape)
        assert out.action.dtype == dtype
        logprobs, values = policy.score(observations(), out.action)
        assert torch.equal(out.extras["logprobs"], logprobs)
        assert torch.equal(out.extras["values"], values)
        assert logprobs.shape == values.shape == (B,)
        assert out.state is None
        assert not out.action.requires_grad
        assert not logprobs.requires_grad
        assert not values.requires_grad

    def test_numpy_acts_as_torch_does(self, space, num_outputs, dtype):
        policy, obs = make_policy(space), observations()
        for deterministic in (False, True):
            out = policy.act(obs, deterministic=deterministic, rng=np.random.default_rng(0))
            noise = None if deterministic else policy.head.draw_noise(np.random.default_rng(0), B, obs.device)
            action, extras = policy._decision(obs, noise)
            torch.testing.assert_close(out.action, policy.head.unflatten(action), rtol=0, atol=1e-6)
            logprobs, values = policy.score(obs, out.action)
            torch.testing.assert_close(logprobs, extras["logprobs"], rtol=0, atol=1e-5)
            torch.testing.assert_close(values, extras["values"], rtol=0, atol=1e-6)

    def test_evaluate_actions_agrees_with_score(self, space, num_outputs, dtype):
        policy, obs = make_policy(space), observations()
        for deterministic in (False, True):
            out = policy.act(obs, deterministic=deterministic, rng=np.random.default_rng(0))
            logprobs, entropy, values = policy.evaluate_actions(obs, out.action)
            scores = policy.score(obs, out.action)
            torch.testing.assert_close(logprobs, scores[0], rtol=1e-6, atol=1e-5)
            torch.testing.assert_close(values, scores[1], rtol=0, atol=1e-6)
            assert logprobs.shape == entropy.shape == values.shape == (B,)
            assert logprobs.requires_grad
            assert entropy.requires_grad
            assert values.requires_grad

    def test_flatten_inverts_unflatten(self, space, num_outputs, dtype):
        head = ActionHead(space, num_features=7)
        flat = head(torch.randn(B, 7)).mode()
        assert torch.equal(head.flatten(head.unflatten(flat)), flat)

    def test_deterministic_needs_no_stream(self, space, num_outputs, dtype):
        policy, obs = make_policy(space), observations()
        first, second = policy.act(obs, deterministic=True), policy.act(obs, deterministic=True)
        assert torch.equal(first.action, second.action)

    def test_deterministic_is_the_likeliest(self, space, num_outputs, dtype):
        policy, obs = make_policy(space), observations()
        best, _ = policy.score(obs, policy.act(obs, deterministic=True).action)
        rng = np.random.default_rng(0)
        for _ in range(20):
            assert (policy.score(obs, policy.act(obs, rng=rng).action)[0] <= best + 1e-6).all()

    def test_actions_follow_from_the_stream(self, space, num_outputs, dtype):
        policy, obs = make_policy(space), observations()
        one, two = np.random.default_rng(3), np.random.default_rng(3)
        first = policy.act(obs, rng=one).action
        torch.manual_seed(99)  # the global stream has no part in it
        assert torch.equal(first, policy.act(obs, rng=two).action)
        assert not torch.equal(first, policy.act(obs, rng=one).action)

    def test_value_agrees_with_score(self, space, num_outputs, dtype):
        policy, obs = make_policy(space), observations()
        scores = policy.score(obs, policy.act(obs, deterministic=True).action)
        torch.testing.assert_close(policy.value(obs), scores[1])


def test_log_prob_of_discrete_actions_adds_up():
    policy, obs = make_policy(spaces.Discrete(4)), observations()
    logprobs = [policy.evaluate_actions(obs, torch.full((B,), a))[0] for a in range(4)]
    torch.testing.assert_close(torch.stack(logprobs).exp().sum(0), torch.ones(B))


def test_log_prob_of_a_gaussian_by_hand():
    # zero weights: mean 0, and log_std_init ln 2; action 2 is one deviation away
    policy = make_policy(spaces.Box(-1, 1, ()), log_std_init=math.log(2))
    nn.init.zeros_(policy.head.linear.weight)
    nn.init.zeros_(policy.head.linear.bias)
    logprobs, entropy, _ = policy.evaluate_actions(observations(2), torch.tensor([2.0, 0.0]))
    constant = -math.log(2) - 0.5 * math.log(2 * math.pi)
    assert logprobs.tolist() == pytest.approx([constant - 0.5, constant])
    assert entropy.tolist() == pytest.approx([0.5 - constant] * 2)


def test_a_flat_box_and_a_matrix_have_the_same_density():
    flat, matrix = make_policy(spaces.Box(-1, 1, (6,))), make_policy(spaces.Box(-1, 1, (2, 3)))
    matrix.load_state_dict(flat.state_dict())
    action = torch.randn(B, 6)
    expected = flat.evaluate_actions(observations(), action)[0]
    assert torch.equal(matrix.evaluate_actions(observations(), action.reshape(B, 2, 3))[0], expected)


@pytest.mark.parametrize("space", [spaces.Text(4), spaces.Tuple([spaces.Discrete(2)]), spaces.Dict()])
def test_other_action_spaces_are_refused(space):
    with pytest.raises(SpaceError, match=f"actions of {type(space).__name__} are not supported"):
        ActionHead(space, num_features=4)


class TestNetworks:
    def test_separate_networks_share_nothing(self):
        policy = make_policy(spaces.Discrete(2))
        policy(observations())[1].sum().backward()
        assert all(p.grad is None for p in policy.actor.parameters())
        assert all(p.grad is None for p in policy.head.parameters())
        assert all(p.grad is not None for p in policy.critic.parameters())

    def test_shared_networks_have_one_trunk(self):
        policy = make_policy(spaces.Discrete(2), shared=True)
        assert list(policy.critic.parameters()) == []
        policy(observations())[1].sum().backward()
        assert all(p.grad is not None for p in policy.actor.parameters())

    def test_number_of_parameters(self):
        # trunk 3*8 + 8 = 32, head 8*2 + 2 = 18, value head 8 + 1 = 9
        count = lambda policy: sum(p.numel() for p in policy.parameters())  # noqa: E731
        assert count(make_policy(spaces.Discrete(2))) == 32 + 18 + 32 + 9
        assert count(make_policy(spaces.Discrete(2), shared=True)) == 32 + 18 + 9

    def test_shared_act_agrees_with_evaluate(self):
        policy, obs = make_policy(spaces.Discrete(5), shared=True), observations()
        out = policy.act(obs, rng=np.random.default_rng(0))
        logprobs, _, values = policy.evaluate_actions(obs, out.action)
        scores = policy.score(obs, out.action)
        torch.testing.assert_close(logprobs, scores[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(values, scores[1], rtol=0, atol=1e-6)

    def test_sharing_needs_equal_sizes(self):
        (problem,) = ActorCriticNetworkConfig(shared=True, actor_sizes=(8,), critic_sizes=(4,)).problems()
        assert problem.startswith("shared: needs equal actor_sizes and critic_sizes")
        assert ActorCriticNetworkConfig(shared=True).problems() == []

    def test_no_hidden_layers(self):
        policy = make_policy(spaces.Discrete(2), actor_sizes=(), critic_sizes=())
        assert policy.head.linear.in_features == 3
        assert policy.value(observations()).shape == (B,)

    @pytest.mark.parametrize("name", ["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"])
    def test_activations(self, name):
        layers, width = make_mlp(2, (3, 4), name)
        assert width == 4
        kinds = [type(layer).__name__.lower() for layer in layers]
        assert kinds == ["linear", name.replace("_", ""), "linear", name.replace("_", "")]


def gain_of(weight):
    """The c of W W^T = c^2 I (of W^T W if it is taller than wide), after checking that it is one."""
    weight = weight.detach().double()
    product = weight @ weight.T if weight.shape[0] <= weight.shape[1] else weight.T @ weight
    gain = product[0, 0].sqrt().item()
    torch.testing.assert_close(product, gain**2 * torch.eye(len(product), dtype=torch.float64), rtol=0, atol=1e-5)
    return gain


class TestOrthogonalInitialisation:
    @pytest.mark.parametrize("shared", [False, True])
    def test_gains(self, shared):
        sizes = {"actor_sizes": (16, 8), "critic_sizes": (16, 8)}
        policy = make_policy(spaces.Discrete(4), orthogonal_init=True, shared=shared, **sizes)
        trunks = [policy.actor] if shared else [policy.actor, policy.critic]
        hidden = [layer for trunk in trunks for layer in trunk.modules() if isinstance(layer, nn.Linear)]
        assert len(hidden) == 2 * len(trunks)
        for layer in hidden:
            assert gain_of(layer.weight) == pytest.approx(math.sqrt(2), rel=1e-5)
        assert gain_of(policy.head.linear.weight) == pytest.approx(0.01, rel=1e-5)
        assert gain_of(policy.value_head.weight) == pytest.approx(1.0, rel=1e-5)

    def test_biases_are_zero(self):
        policy = make_policy(spaces.Discrete(4), orthogonal_init=True)
        biases = [value for name, value in policy.named_parameters() if name.endswith("bias")]
        assert len(biases) == 4
        assert all((bias == 0).all() for bias in biases)

    def test_the_first_policy_is_nearly_uniform(self):
        policy = make_policy(spaces.Discrete(4), orthogonal_init=True)
        _, entropy, _ = policy.evaluate_actions(observations(), torch.zeros(B, dtype=torch.int64))
        assert (entropy > math.log(4) - 1e-3).all()

    def test_log_std_is_left_alone(self):
        policy = make_policy(spaces.Box(-1, 1, (2,)), orthogonal_init=True, log_std_init=-0.5)
        assert policy.head.log_std.tolist() == [-0.5, -0.5]

    def test_convolutions_too(self):
        layer = nn.Conv2d(3, 4, 2)
        orthogonal_(layer, gain=0.5)
        assert gain_of(layer.weight.flatten(1)) == pytest.approx(0.5, rel=1e-5)
