"""Ensembles compute what as many separate networks would, member by member."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import OffPolicyNetworkConfig
from rl_training.policies.ensemble import EnsembleCritic, EnsembleLinear, EnsembleMLP

B = 7
each_size = pytest.mark.parametrize("num_members", [1, 2, 10, 50])


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_stack(mlp, member, activation):
    """One member of an ensemble as ordinary layers."""
    layers = []
    for layer in mlp.layers:
        linear = nn.Linear(layer.weight.shape[1], layer.weight.shape[2])
        with torch.no_grad():
            linear.weight.copy_(layer.weight[member].T)
            linear.bias.copy_(layer.bias[member, 0])
        layers += [linear, activation()]
    return nn.Sequential(*layers[:-1])


@each_size
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_linear_equals_separate_layers(num_members, num_outputs):
    torch.manual_seed(0)
    layer, x = EnsembleLinear(num_members, 4, num_outputs), randn(num_members, B, 4)
    expected = torch.stack([x[e] @ layer.weight[e] + layer.bias[e] for e in range(num_members)])
    assert layer(x).shape == (num_members, B, num_outputs)
    torch.testing.assert_close(layer(x), expected)


@each_size
@pytest.mark.parametrize("num_outputs", [1, 3])
def test_mlp_equals_separate_networks(num_members, num_outputs):
    torch.manual_seed(0)
    mlp, x = EnsembleMLP(num_members, 5, (8, 6), num_outputs, "relu"), randn(B, 5).requires_grad_()
    stacks = [as_stack(mlp, e, nn.ReLU) for e in range(num_members)]
    out, expected = mlp(x), torch.stack([stack(x) for stack in stacks])
    torch.testing.assert_close(out, expected)

    cotangent = randn(*out.shape, seed=1)
    (gradient,) = torch.autograd.grad((expected * cotangent).sum(), [x], retain_graph=True)
    (expected * cotangent).sum().backward(inputs=[p for stack in stacks for p in stack.parameters()])
    (out * cotangent).sum().backward()
    torch.testing.assert_close(x.grad, gradient)
    for index, layer in enumerate(mlp.layers):
        linears = [stack[2 * index] for stack in stacks]
        torch.testing.assert_close(layer.weight.grad, torch.stack([linear.weight.grad.T for linear in linears]))
        torch.testing.assert_close(layer.bias.grad, torch.stack([linear.bias.grad[None] for linear in linears]))


def test_no_hidden_layers():
    assert EnsembleMLP(3, 5, (), 2, "tanh")(randn(B, 5)).shape == (3, B, 2)


def test_members_are_chosen():
    torch.manual_seed(0)
    mlp, x = EnsembleMLP(5, 4, (8,), 1, "tanh"), randn(B, 4)
    for members in (slice(1), slice(2), slice(1, 4), slice(None, None, 2)):
        torch.testing.assert_close(mlp(x, members), mlp(x)[members])


def test_initial_weights_are_those_of_linear_layers():
    torch.manual_seed(0)
    layer = EnsembleLinear(20, 64, 100)
    bound = 1 / 8
    for values in (layer.weight, layer.bias):
        assert values.abs().max() <= bound
        assert values.mean().item() == pytest.approx(0, abs=0.01)
        assert values.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)  # of the uniform distribution
    assert not torch.equal(layer.weight[0], layer.weight[1])


class TestCritic:
    @each_size
    def test_shape(self, num_members):
        critic = EnsembleCritic(
            EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,))), OffPolicyNetworkConfig(), num_members
        )
        assert critic(randn(B, 3), randn(B, 2)).shape == (num_members, B)
        assert critic(randn(B, 3), randn(B, 2), slice(1)).shape == (1, B)

    def test_sees_observation_and_action_in_this_order(self):
        torch.manual_seed(0)
        critic = EnsembleCritic(
            EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,))), OffPolicyNetworkConfig(critic_sizes=(8,)), 2
        )
        obs, action = randn(B, 3), randn(B, 2, seed=1)
        expected = critic.members(torch.cat([obs, action], dim=1)).squeeze(-1)
        assert torch.equal(critic(obs, action), expected)

    @pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
    def test_action_shapes(self, shape):
        critic = EnsembleCritic(
            EnvSpec(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, shape)), OffPolicyNetworkConfig(critic_sizes=(8,)), 2
        )
        action = randn(B, *shape, seed=1)
        assert torch.equal(critic(randn(B, 3), action), critic(randn(B, 3), action.reshape(B, -1)))

    def test_dict_observations(self):
        space = spaces.Dict({"a": spaces.Box(-1, 1, (2,)), "b": spaces.Discrete(3)})
        network = OffPolicyNetworkConfig(critic_sizes=(8,))
        critic = EnsembleCritic(EnvSpec(space, spaces.Box(-1, 1, (2,))), network, 2)
        obs = {"a": randn(B, 2), "b": torch.from_numpy(np.arange(B) % 3)}
        assert critic(obs, randn(B, 2)).shape == (2, B)
        assert critic.members.layers[0].weight.shape == (2, 2 + 3 + 2, 8)
