"""A policy for images: a shared encoder, and one bottleneck each for the actor and the critics."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rl_training.contracts.batches import Observation
from rl_training.contracts.plugins import ENCODERS
from rl_training.contracts.settings import SameAs, choices, documented, setting
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import DeterministicPolicy, OffPolicyNetworkConfig
from rl_training.policies.encoders import Encoder, make_encoder
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.layers import EnsembleLinear
from rl_training.policies.networks import orthogonal_


@documented
@dataclass
class PixelNetworkConfig(OffPolicyNetworkConfig):
    """Networks of an actor and its critics for image observations."""

    actor_sizes: tuple[int, ...] = setting(
        (1024, 1024),
        "Widths of the actor's hidden layers.",
        ge=1,
        le=16_384,
        search=choices((256, 256), (512, 512), (1024, 1024)),
    )
    critic_sizes: tuple[int, ...] = setting(
        (1024, 1024), "Widths of each critic's hidden layers.", ge=1, le=16_384, search=SameAs("network.actor_sizes")
    )
    encoder: str = setting(
        "drq_cnn",
        "Image encoder, by name; 'auto' chooses by the observation space. With a Dict, it encodes the images in it.",
        registry=ENCODERS,
    )
    feature_size: int = setting(
        50,
        "Size to which actor and critics each project the encoder's features.",
        ge=1,
        le=16_384,
        search=choices(50, 100),
    )


class Bottleneck(Encoder):
    """Reduces features to a few bounded ones: linear, layer norm, tanh."""

    def __init__(self, num_inputs: int, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.layers = nn.Sequential(nn.Linear(num_inputs, num_features), nn.LayerNorm(num_features), nn.Tanh())

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`; `obs` are the features of another encoder."""
        features: Tensor = self.layers(obs)
        return features


class PixelPolicy(DeterministicPolicy):
    """A deterministic actor plus action noise. Actor and critics take the features of `encoder`, not observations."""

    def __init__(self, spec: EnvSpec, network: PixelNetworkConfig, num_critics: int, noise: NoiseConfig) -> None:
        encoder = make_encoder(network.encoder, spec.observation_space, network.encoder_kwargs)
        bottleneck = functools.partial(Bottleneck, encoder.num_features, network.feature_size)
        super().__init__(spec, network, num_critics, noise, bottleneck)
        self.encoder = encoder
        # as in the published code of Yarats et al. 2021
        orthogonal_(self.encoder)
        orthogonal_(self.actor, gain=1.0)
        orthogonal_(self.critic, gain=1.0)
        for layer in self.critic.modules():
            if isinstance(layer, EnsembleLinear):
                layer.orthogonal_()

    def mode(self, obs: Observation) -> Tensor:
        """See `ContinuousPolicy.mode`."""
        return super().mode(self.encoder(obs))

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """See `Policy.value`: the minimum over the critics for the deterministic action."""
        features = self.encoder(obs)
        values: Tensor = self.critic(features, self.actor(features))
        return values.amin(0)
