"""The policy for images: one encoder, a bottleneck each for actor and critics, and orthogonal weights."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.encoders import DictEncoder, DrQCNN, ImpalaCNN
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.pixels import Bottleneck, PixelNetworkConfig, PixelPolicy

CAMERA = spaces.Box(0, 255, (16, 16, 3), np.uint8)
BOTH = spaces.Dict({"camera": CAMERA, "speed": spaces.Box(-1, 1, (2,))})


def make(space=CAMERA, **settings):
    torch.manual_seed(0)
    network = PixelNetworkConfig(**{"actor_sizes": (8,), "critic_sizes": (8,), **settings})
    return PixelPolicy(EnvSpec(space, spaces.Box(-1, 1, (2,))), network, 2, NoiseConfig()).eval()


def test_bottleneck_by_hand():
    bottleneck = Bottleneck(3, 2)
    with torch.no_grad():
        bottleneck.layers[0].weight.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]))
        bottleneck.layers[0].bias.zero_()
    # 1 and 5 have the mean 3 and the deviation 2
    features = bottleneck(torch.tensor([[1.0, 2.0, 3.0]]))
    torch.testing.assert_close(features, torch.tensor([[-1.0, 1.0]]).tanh(), rtol=1e-4, atol=1e-5)
    assert bottleneck.num_features == 2


def test_one_encoder_and_two_bottlenecks():
    policy = make(feature_size=7)
    assert isinstance(policy.encoder, DrQCNN)
    convolutions = [module for module in policy.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 4
    for part in (policy.actor.trunk, policy.critic):
        assert isinstance(part.encoder, Bottleneck)
        assert part.encoder.layers[0].weight.shape == (7, 32)
    assert policy.critic.members.layers[0].weight.shape == (2, 7 + 2, 8)


def test_acting_and_values():
    policy, obs = make(), torch.randint(0, 256, (4, 16, 16, 3), dtype=torch.uint8)
    action = policy.act(obs, deterministic=True).action
    assert action.shape == (4, 2)
    torch.testing.assert_close(action, policy.actor(policy.encoder(obs)).detach())
    with torch.no_grad():
        torch.testing.assert_close(policy.value(obs), policy.critic(policy.encoder(obs), action).amin(0))


@pytest.mark.parametrize(("name", "expected"), [("drq_cnn", DrQCNN), ("impala_cnn", ImpalaCNN), ("auto", ImpalaCNN)])
def test_encoders_by_name_also_inside_of_a_dict(name, expected):
    assert isinstance(make(encoder=name).encoder, expected)
    encoder = make(BOTH, encoder=name).encoder
    assert isinstance(encoder, DictEncoder)
    assert isinstance(encoder.parts[0], expected)
    obs = {"camera": torch.zeros(3, 16, 16, 3, dtype=torch.uint8), "speed": torch.zeros(3, 2)}
    assert make(BOTH, encoder=name).act(obs, deterministic=True).action.shape == (3, 2)


def test_unknown_encoders_are_refused():
    with pytest.raises(ConfigError, match=r"unknown encoder 'drq'\. Did you mean 'drq_cnn'"):
        make(encoder="drq")


def test_weights_begin_orthogonal():
    policy = make(actor_sizes=(8, 8), critic_sizes=(8, 8))

    def gram(weight):
        matrix = weight.detach().flatten(1)
        return matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix

    linear = [module.weight for module in policy.modules() if isinstance(module, nn.Linear)]
    members = [weight for layer in policy.critic.members.layers for weight in layer.weight]
    for weight in [*linear, *members]:
        torch.testing.assert_close(gram(weight), torch.eye(min(weight.shape)), rtol=0, atol=1e-5)
    for weight in (module.weight for module in policy.modules() if isinstance(module, nn.Conv2d)):
        torch.testing.assert_close(gram(weight), 2 * torch.eye(len(gram(weight))), rtol=0, atol=1e-5)
    assert not torch.equal(members[0], members[1])
    assert all((value == 0).all() for name, value in policy.named_parameters() if name.endswith("bias"))
