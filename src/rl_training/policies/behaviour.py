"""Models of recorded behaviour, and policies that choose the best of several candidate actions (BCQ, BEAR)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.contracts.arrays import AnyArray, ArrayObservation, map_observation
from rl_training.contracts.batches import Observation, num_rows
from rl_training.contracts.settings import documented, setting
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.actors import (
    ContinuousPolicy,
    OffPolicyNetworkConfig,
    SquashedGaussianActor,
    num_actions,
)
from rl_training.policies.distributions import normal_noise
from rl_training.policies.encoders import Encoder, make_encoder
from rl_training.policies.ensemble import EnsembleCritic
from rl_training.policies.exploration import NoiseConfig
from rl_training.policies.networks import make_mlp

LATENT_CLIP = 0.5
"""Latents of actions to choose from are clipped to this range, so that they decode to likely actions."""
LOG_STD_RANGE = (-4.0, 15.0)
"""Bounds of the latent's log standard deviation (Fujimoto et al. 2019, published code)."""


@documented
@dataclass
class BehaviourNetworkConfig(OffPolicyNetworkConfig):
    """Networks of an actor, its critics and a model of the recorded behaviour."""

    behaviour_sizes: tuple[int, ...] = setting(
        (750, 750), "Widths of the hidden layers of the behaviour model (encoder and decoder each).", ge=1
    )


def repeat_rows(obs: Observation, count: int) -> Observation:
    """Each observation `count` times, [B * count, ...]: copies of a row follow each other."""
    return map_observation(lambda x: x.repeat_interleave(count, dim=0), obs)


class ConditionalVAE(nn.Module):
    """A variational autoencoder of actions given observations: its samples look like recorded actions."""

    def __init__(self, spec: EnvSpec, network: BehaviourNetworkConfig) -> None:
        super().__init__()
        size, sizes = num_actions(spec), network.behaviour_sizes
        self.num_latents = 2 * size
        self.encoder = make_encoder(network.encoder, spec.observation_space, network.encoder_kwargs)
        width = self.encoder.num_features
        self.inwards, last = make_mlp(width + size, sizes, network.activation)
        self.latent = nn.Linear(last, 2 * self.num_latents)
        self.outwards, last = make_mlp(width + self.num_latents, sizes, network.activation)
        self.head = nn.Linear(last, size)

    def forward(self, obs: Observation, action: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Decoded actions [B, A] in [-1, 1], and the latents' means and log standard deviations [B, Z]."""
        features = self.encoder(obs)
        mean, log_std = self.latent(self.inwards(torch.cat((features, action), dim=1))).chunk(2, dim=1)
        log_std = log_std.clamp(*LOG_STD_RANGE)
        return self._decode(features, torch.addcmul(mean, log_std.exp(), noise)).tanh(), mean, log_std

    def _decode(self, features: Tensor, latents: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.outwards(torch.cat((features, latents), dim=1)))
        return outputs

    def decode(self, obs: Observation, latents: Tensor) -> Tensor:
        """Actions [B, N, A] before tanh, of N latents of each row, [B, N, Z], or of all rows, [1, N, Z]."""
        features, count = self.encoder(obs), latents.shape[1]
        latents = latents.expand(features.shape[0], -1, -1)
        decoded: Tensor = self._decode(features.repeat_interleave(count, dim=0), latents.flatten(0, 1))
        decoded = decoded.unflatten(0, (-1, count))
        return decoded


class PerturbationActor(nn.Module):
    """Moves an action in the direction of larger Q-values."""

    def __init__(self, spec: EnvSpec, network: OffPolicyNetworkConfig, encoder: Encoder | None = None) -> None:
        super().__init__()
        self.encoder = encoder or make_encoder(network.encoder, spec.observation_space, network.encoder_kwargs)
        size = num_actions(spec)
        self.hidden, width = make_mlp(
            self.encoder.num_features + size, network.actor_sizes, network.activation, network.actor_options()
        )
        self.head = nn.Linear(width, size)

    def forward(self, obs: Observation, action: Tensor) -> Tensor:
        """Directions [B, N, A] in [-1, 1], for actions [B, N, A]."""
        count = action.shape[1]
        features = self.encoder(obs).repeat_interleave(count, dim=0)
        outputs: Tensor = self.head(self.hidden(torch.cat((features, action.flatten(0, 1)), dim=1)))
        return outputs.tanh().view_as(action)


class BestOfPolicy(ContinuousPolicy):
    """Proposes candidate actions and takes the one with the highest Q-value of the first critic.

    Candidates come from random numbers. Those of deterministic actions are drawn once, when the policy is created.
    """

    candidate_noise: Tensor
    num_candidates: int

    @property
    @abstractmethod
    def noise_size(self) -> int:
        """How many random numbers a candidate takes."""

    @abstractmethod
    def candidates(self, obs: Observation, noise: Tensor) -> Tensor:
        """Candidate actions [B, N, A] from standard normal noise, [B, N, Z] or [1, N, Z]."""

    def add_candidate_noise(self, num_candidates: int) -> None:
        """Draw the noise of deterministic actions; called at the end of the constructor."""
        self.num_candidates = num_candidates
        self.register_buffer("candidate_noise", torch.randn(num_candidates, self.noise_size))

    def candidate_values(self, critic: EnsembleCritic, obs: Observation, action: Tensor, members: Any = None) -> Tensor:
        """Q-values [E, B, N] of actions [B, N, A]."""
        count = action.shape[1]
        values: Tensor = critic(repeat_rows(obs, count), action.flatten(0, 1), members).unflatten(1, (-1, count))
        return values

    def best(self, obs: Observation, noise: Tensor) -> Tensor:
        """The best candidates [B, A]."""
        candidates = self.candidates(obs, noise)
        index = self.candidate_values(self.critic, obs, candidates, slice(1))[0].argmax(dim=1)
        return candidates.gather(1, index[:, None, None].expand(-1, 1, candidates.shape[2])).squeeze(1)

    def mode(self, obs: Observation) -> Tensor:
        """See `ContinuousPolicy.mode`."""
        return self.best(obs, self.candidate_noise.unsqueeze(0))

    def sample(self, obs: Observation, draws: Tensor) -> Tensor:
        """See `ContinuousPolicy.sample`."""
        return self.best(obs, draws)

    def draws(self, obs: Observation, state: Any, rng: np.random.Generator) -> tuple[Tensor, Any]:
        """See `ContinuousPolicy.draws`."""
        noise = normal_noise(rng, (num_rows(obs), self.num_candidates, self.noise_size))
        return torch.from_numpy(noise).to(self.noise_std.device), state

    def _acting_layers(self) -> list[nn.Module]:
        return []  # candidates need the critic as well

    def act_on_arrays(self, obs: ArrayObservation, rng: np.random.Generator) -> AnyArray | None:
        """See `ArrayPolicy.act_on_arrays`: torch has to act."""
        return None


class BatchConstrainedPolicy(BestOfPolicy):
    """BCQ: candidates are decoded by a VAE and slightly moved by the actor."""

    actor: PerturbationActor
    actor_class = PerturbationActor

    def __init__(
        self,
        spec: EnvSpec,
        network: BehaviourNetworkConfig,
        num_critics: int,
        noise: NoiseConfig,
        *,
        limit: float,
        num_candidates: int,
    ) -> None:
        super().__init__(spec, network, num_critics, noise)
        self.limit = limit
        self.behaviour = ConditionalVAE(spec, network)
        self.add_candidate_noise(num_candidates)

    @property
    def noise_size(self) -> int:
        """See `BestOfPolicy.noise_size`."""
        return self.behaviour.num_latents

    def imitate(self, obs: Observation, noise: Tensor) -> Tensor:
        """Actions [B, N, A] like the recorded ones, from noise [B, N, Z] or [1, N, Z]."""
        decoded: Tensor = self.behaviour.decode(obs, noise.clamp(-LATENT_CLIP, LATENT_CLIP)).tanh()
        return decoded

    def moved(self, obs: Observation, action: Tensor, actor: PerturbationActor) -> Tensor:
        """Actions [B, N, A] moved by at most `limit`, with this actor or its target network."""
        moved: Tensor = (action + self.limit * actor(obs, action)).clamp(-1.0, 1.0)
        return moved

    def candidates(self, obs: Observation, noise: Tensor) -> Tensor:
        """See `BestOfPolicy.candidates`."""
        return self.moved(obs, self.imitate(obs, noise), self.actor)


class SupportedPolicy(BestOfPolicy):
    """BEAR: candidates are samples of a squashed Gaussian; a VAE models the recorded behaviour."""

    actor: SquashedGaussianActor
    actor_class = SquashedGaussianActor

    def __init__(
        self,
        spec: EnvSpec,
        network: BehaviourNetworkConfig,
        num_critics: int,
        noise: NoiseConfig,
        *,
        num_candidates: int,
    ) -> None:
        super().__init__(spec, network, num_critics, noise)
        self.behaviour = ConditionalVAE(spec, network)
        self.add_candidate_noise(num_candidates)

    @property
    def noise_size(self) -> int:
        """See `BestOfPolicy.noise_size`."""
        return self.num_actions

    def unsquashed(self, obs: Observation, noise: Tensor) -> Tensor:
        """Samples [B, N, A] of the actor before tanh, from noise [B, N, A]."""
        mean, log_std = self.actor(obs)
        samples: Tensor = mean.unsqueeze(1) + log_std.exp().unsqueeze(1) * noise
        return samples

    def candidates(self, obs: Observation, noise: Tensor) -> Tensor:
        """See `BestOfPolicy.candidates`."""
        return self.unsquashed(obs, noise).tanh()
