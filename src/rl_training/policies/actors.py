"""Actors for bounded continuous actions, and the policies that explore with them.

Actions are in [-1, 1]; `envs.actions` rescales them to an environment's bounds. In this module they are flat, [B, A]; a
policy's `act` reshapes them to the action space.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.accelerate import Accelerated, ArrayNetwork
from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Observation, as_arrays, num_rows
from rl_training.contracts.errors import SpaceError
from rl_training.contracts.schedule import value_of
from rl_training.contracts.settings import SameAs, choices, documented, setting
from rl_training.contracts.spec import BoxActions, EnvSpec
from rl_training.functional.policies import squashed_log_prob, state_dependent_log_std, state_dependent_noise
from rl_training.policies.distributions import DiagGaussian, normal_noise
from rl_training.policies.encoders import Encoder, make_encoder
from rl_training.policies.ensemble import EnsembleCritic, StateValue
from rl_training.policies.exploration import NoiseConfig, StateDependentNoise, gaussian_noise, ou_noise
from rl_training.policies.networks import (
    Activation,
    ActorAndCriticConfig,
    OwnNetwork,
    StochasticActorConfig,
    make_mlp,
)

LOG_STD_RANGE = (-20.0, 2.0)
"""Bounds of a squashed Gaussian's log standard deviation (Haarnoja et al. 2018, their published code)."""
SDE_MEAN_RANGE = (-2.0, 2.0)
"""Bounds of the mean before squashing with gSDE: beyond them tanh is flat, and the noise would have no effect."""


GAUSSIAN_LOG_STD_RANGE = (-5.0, 2.0)
"""Bounds of the log standard deviation of `GaussianActor` (as in IQL's published code)."""
LARGEST_ACTION = 1.0 - 1e-6
"""Recorded actions are at most this far from 0 before atanh."""


@documented
@dataclass
class OffPolicyNetworkConfig(ActorAndCriticConfig):
    """Networks of an actor and its critics."""

    actor_sizes: tuple[int, ...] = setting(
        (256, 256),
        "Widths of the actor's hidden layers.",
        ge=1,
        le=16_384,
        search=choices((64, 64), (128, 128), (256, 256), (400, 300)),
    )
    critic_sizes: tuple[int, ...] = setting(
        (256, 256), "Widths of each critic's hidden layers.", ge=1, le=16_384, search=SameAs("network.actor_sizes")
    )
    activation: Activation = setting("relu", "Activation between layers.", search=choices("tanh", "relu"))


@documented
@dataclass(kw_only=True)
class StochasticNetworkConfig(OffPolicyNetworkConfig, StochasticActorConfig):
    """Networks of a stochastic actor and its critics."""

    log_std_init: float = setting(-3.0, "gsde: initial log standard deviation of the noise matrices.", added_later=True)
    only_sde: ClassVar[tuple[str, ...]] = (*StochasticActorConfig.only_sde, "log_std_init")


def num_actions(spec: EnvSpec) -> int:
    """The number A of action dimensions of a Box action space."""
    if not isinstance(spec.action_space, spaces.Box):
        raise SpaceError(f"actors for real-valued actions need a Box action space, got {spec.action_space}")
    return int(np.prod(spec.action_space.shape))


class Trunk(nn.Module):
    """Encoder, hidden layers and a linear output layer: the raw outputs of an actor.

    `network` names the encoder, unless `encoder` is given.
    """

    def __init__(
        self, spec: EnvSpec, network: OffPolicyNetworkConfig, num_outputs: int, encoder: Encoder | None = None
    ) -> None:
        super().__init__()
        if encoder is None:
            encoder = make_encoder(network.encoder, spec.observation_space, network.encoder_kwargs)
        self.encoder = encoder
        self.hidden: nn.Module
        self.head: nn.Module
        self.width = num_outputs
        """The number of features H."""
        if network.actor == "mlp":
            self.hidden, self.width = make_mlp(
                encoder.num_features, network.actor_sizes, network.activation, network.actor_options()
            )
            self.head = nn.Linear(self.width, num_outputs)
        else:
            self.hidden = OwnNetwork(network.actor, encoder.num_features, num_outputs, network.actor_kwargs, "actor")
            self.head = nn.Identity()

    def features(self, obs: Observation) -> Tensor:
        """The inputs [B, H] of the output layer."""
        features: Tensor = self.hidden(self.encoder(obs))
        return features

    def forward(self, obs: Observation) -> Tensor:
        """Outputs [B, num_outputs]."""
        outputs: Tensor = self.head(self.features(obs))
        return outputs


class DeterministicActor(nn.Module):
    """A deterministic actor: tanh of the trunk's outputs."""

    def __init__(self, spec: EnvSpec, network: OffPolicyNetworkConfig, encoder: Encoder | None = None) -> None:
        super().__init__()
        self.trunk = Trunk(spec, network, num_actions(spec), encoder)

    def forward(self, obs: Observation) -> Tensor:
        """Actions [B, A] in [-1, 1]."""
        outputs: Tensor = self.trunk(obs)
        return outputs.tanh()


class SquashedGaussianActor(nn.Module):
    """A diagonal Gaussian, squashed to [-1, 1] by tanh.

    Its standard deviations are outputs of the network; with gSDE they are those of features times a noise matrix.
    """

    def __init__(self, spec: EnvSpec, network: OffPolicyNetworkConfig, encoder: Encoder | None = None) -> None:
        super().__init__()
        size = num_actions(spec)
        self.sde: StateDependentNoise | None = None
        if isinstance(network, StochasticNetworkConfig) and network.exploration == "gsde":
            self.trunk = Trunk(spec, network, size, encoder)
            self.sde = StateDependentNoise(self.trunk.width, size, network)
        else:
            self.trunk = Trunk(spec, network, 2 * size, encoder)  # mean and log std in one layer

    def forward(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation [B, A] before squashing."""
        if self.sde is None:
            mean, log_std = self.trunk(obs).chunk(2, dim=-1)
            return mean, log_std.clamp(*LOG_STD_RANGE)
        features = self.trunk.features(obs)
        return self._clipped_mean(features), state_dependent_log_std(features, self.sde.std())

    def _clipped_mean(self, features: Tensor) -> Tensor:
        mean: Tensor = self.trunk.head(features)
        return mean.clamp(*SDE_MEAN_RANGE)

    def sample_with(self, obs: Observation, matrices: Tensor) -> Tensor:
        """Actions [B, A] in [-1, 1] of gSDE, with a noise matrix per row [B, H, A]."""
        features = self.trunk.features(obs)
        return (self._clipped_mean(features) + state_dependent_noise(features, matrices)).tanh()

    def sample(self, obs: Observation, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, A] in [-1, 1] from standard normal noise [B, A], and their log-probabilities [B]."""
        mean, log_std = self(obs)
        unsquashed = torch.addcmul(mean, log_std.exp(), noise)
        return unsquashed.tanh(), squashed_log_prob(unsquashed, noise, log_std)

    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """Log-probabilities [B] of actions [B, ...] in [-1, 1]; actions at the bounds are moved slightly inwards."""
        mean, log_std = self(obs)
        unsquashed = torch.atanh(action.flatten(1).clamp(-LARGEST_ACTION, LARGEST_ACTION))
        return squashed_log_prob(unsquashed, (unsquashed - mean) * torch.exp(-log_std), log_std)

    def mode(self, obs: Observation) -> Tensor:
        """The squashed mean [B, A]."""
        mean: Tensor = self(obs)[0]
        return mean.tanh()


class GaussianActor(nn.Module):
    """A diagonal Gaussian around tanh of the trunk's outputs; its standard deviations do not depend on the state.

    For learning from recorded actions: unlike a squashed Gaussian, it has finite log-probabilities of actions at the
    bounds. Samples are clipped to [-1, 1].
    """

    def __init__(self, spec: EnvSpec, network: OffPolicyNetworkConfig, encoder: Encoder | None = None) -> None:
        super().__init__()
        size = num_actions(spec)
        self.trunk = Trunk(spec, network, size, encoder)
        self.log_std = nn.Parameter(torch.zeros(size))

    def distribution(self, obs: Observation) -> DiagGaussian:
        """The distribution of actions before clipping."""
        return DiagGaussian(self.mode(obs), self.log_std.clamp(*GAUSSIAN_LOG_STD_RANGE))

    def forward(self, obs: Observation) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation [B, A]."""
        distribution = self.distribution(obs)
        return distribution.mean, distribution.log_std.expand_as(distribution.mean)

    def sample(self, obs: Observation, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Actions [B, A] from standard normal noise [B, A], and their log-probabilities [B] before clipping."""
        distribution = self.distribution(obs)
        action = distribution.sample(noise)
        return action.clamp(-1.0, 1.0), distribution.log_prob(action)

    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """Log-probabilities [B] of actions [B, ...]."""
        return self.distribution(obs).log_prob(action.flatten(1))

    def mode(self, obs: Observation) -> Tensor:
        """The mean [B, A]."""
        outputs: Tensor = self.trunk(obs)
        return outputs.tanh()


class ContinuousPolicy(nn.Module):
    """An actor, its critics, and action noise for exploration. Base class of the policies below.

    With `num_critics=0` it has none; with `state_value` it also has a network of state values. Critics have
    `num_outputs` outputs each. `own_encoder` makes the encoders of these networks, to replace the one that `network`
    names. The state that `act` returns is the noise [N, A] if that is correlated over time, with gSDE that of
    `StateDependentNoise`, else None.
    """

    actor: nn.Module
    actor_class: ClassVar[type[nn.Module]]
    noise_std: Tensor
    box_actions: BoxActions = "rescale"
    rollout_steps: int = 1
    """Steps of each environment between updates: state-dependent noise may be kept for as long."""

    def __init__(
        self,
        spec: EnvSpec,
        network: OffPolicyNetworkConfig,
        num_critics: int,
        noise: NoiseConfig,
        own_encoder: Callable[[], Encoder | None] = lambda: None,
        num_outputs: int = 1,
        *,
        state_value: bool = False,
    ) -> None:
        super().__init__()
        self.action_shape = tuple(spec.action_space.shape or ())
        self.num_actions = num_actions(spec)
        self.noise = noise
        self.register_buffer("noise_std", torch.tensor(value_of(noise.std, 0.0), dtype=torch.float32))
        self.actor = self.actor_class(spec, network, own_encoder())
        self.num_critics = num_critics
        if num_critics:
            self.critic = EnsembleCritic(spec, network, num_critics, own_encoder(), num_outputs)
        self.state_value = StateValue(spec, network, own_encoder()) if state_value else None
        self._outputs = ArrayNetwork(self._acting_layers)
        self._mode = Accelerated(self.mode, self)
        self._sample = Accelerated(self.sample, self)

    def _acting_layers(self) -> list[nn.Module]:
        """The layers that compute the actor's raw outputs; empty if they are not a chain."""
        trunk = getattr(self.actor, "trunk", None)
        return [trunk.encoder, trunk.hidden, trunk.head] if type(trunk) is Trunk else []

    @property
    def has_state(self) -> bool:
        """Whether exploration carries a state from step to step."""
        return self.noise.kind == "ou"

    def choose(self, outputs: AnyArray, rng: np.random.Generator | None) -> AnyArray:
        """Actions [N, A] from the actor's raw outputs, in numpy: as `sample`, or as `mode` without rng."""
        raise NotImplementedError

    def act_on_arrays(self, obs: ArrayObservation, rng: np.random.Generator) -> AnyArray | None:
        """See `ArrayPolicy.act_on_arrays`. Returns None if exploration has a state: only `act` has one."""
        outputs = None if self.has_state else self._outputs(obs)
        if outputs is None:
            return None
        action = self.choose(outputs, rng)
        if self.noise.kind == "gaussian":
            noise = self.noise_std.numpy() * normal_noise(rng, action.shape)
            action = np.minimum(np.maximum(action + noise, -1.0), 1.0)
        return action.reshape(len(action), *self.action_shape)

    def mode(self, obs: Observation) -> Tensor:
        """Deterministic actions [B, A]."""
        raise NotImplementedError

    def sample(self, obs: Observation, draws: Tensor) -> Tensor:
        """Sampled actions [B, A] from random numbers of `draws`, before action noise is added."""
        return self.mode(obs)

    def draws(self, obs: Observation, state: Any, rng: np.random.Generator) -> tuple[Tensor | None, Any]:
        """The random numbers that `sample` takes, None if `sample` equals `mode`; and the policy's next state."""
        return None, state

    @torch.no_grad()
    def act(
        self,
        obs: Observation,
        *,
        deterministic: bool = False,
        action_mask: Tensor | None = None,
        state: Any = None,
        episode_start: Tensor | None = None,
        rng: np.random.Generator | None = None,
    ) -> ActOutput:
        """See `Policy.act`. Actions are in [-1, 1]; no noise is added if `deterministic`."""
        if action_mask is not None:
            raise NotImplementedError("this policy does not take action masks")
        if deterministic:
            outputs = self._outputs(as_arrays(obs))
            action = self._mode(obs) if outputs is None else torch.from_numpy(self.choose(outputs, None))
        else:
            assert rng is not None, "exploration needs a random generator: pass rng"
            quick = self.act_on_arrays(as_arrays(obs), rng)
            if quick is not None:
                return ActOutput(torch.from_numpy(quick), {})
            draws, state = self.draws(obs, state, rng)
            action = self._mode(obs) if draws is None else self._sample(obs, draws)
            if self.noise.kind != "none":
                noise = self._draw_noise(action, state, episode_start, rng)
                action = (action + noise).clamp(-1.0, 1.0)
                state = noise if self.noise.kind == "ou" else state
        return ActOutput(action.reshape(action.shape[0], *self.action_shape), {}, state)

    def draw_noise(self, rng: np.random.Generator, *leading: int) -> Tensor:
        """The noise [..., A] that `actor.sample` takes: standard normal."""
        return torch.from_numpy(normal_noise(rng, (*leading, self.num_actions)))

    def _draw_noise(
        self, action: Tensor, state: Tensor | None, episode_start: Tensor | None, rng: np.random.Generator
    ) -> Tensor:
        normal = torch.from_numpy(normal_noise(rng, tuple(action.shape))).to(action.device)
        if self.noise.kind == "gaussian":
            return gaussian_noise(self.noise_std, normal)
        return ou_noise(state, episode_start, self.noise_std, normal, theta=self.noise.theta, dt=self.noise.dt)

    def q_values(self, obs: Observation, action: Tensor) -> Tensor:
        """Q-values [E, B] of actions; the smallest is what the policy should maximise."""
        values: Tensor = self.critic(obs, action)
        return values

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """See `Policy.value`: of the state-value network, or the minimum over the critics for the deterministic action.

        NaN without both.
        """
        if self.state_value is not None:
            return self.state_value(obs)  # type: ignore[no-any-return]
        if not self.num_critics:
            return torch.full((num_rows(obs),), torch.nan)
        return self.q_values(obs, self.mode(obs)).amin(0)


class DeterministicPolicy(ContinuousPolicy):
    """A deterministic actor plus action noise (DDPG, TD3)."""

    actor: DeterministicActor
    actor_class = DeterministicActor

    def mode(self, obs: Observation) -> Tensor:
        """See `ContinuousPolicy.mode`."""
        action: Tensor = self.actor(obs)
        return action

    def choose(self, outputs: AnyArray, rng: np.random.Generator | None) -> AnyArray:
        """See `ContinuousPolicy.choose`."""
        return np.tanh(outputs)


class SquashedGaussianPolicy(ContinuousPolicy):
    """Samples from the actor's distribution (SAC); action noise may be added."""

    actor: SquashedGaussianActor
    actor_class = SquashedGaussianActor

    def mode(self, obs: Observation) -> Tensor:
        """See `ContinuousPolicy.mode`."""
        return self.actor.mode(obs)

    @property
    def has_state(self) -> bool:
        """See `ContinuousPolicy.has_state`."""
        return super().has_state or self.actor.sde is not None

    def draws(self, obs: Observation, state: Any, rng: np.random.Generator) -> tuple[Tensor, Any]:
        """See `ContinuousPolicy.draws`: standard normal samples [N, A], or the noise matrices of gSDE [N, H, A]."""
        if self.actor.sde is not None:
            state = self.actor.sde.advance(state, num_rows(obs), self.rollout_steps, rng)
            return state["matrices"], state
        normal = normal_noise(rng, (num_rows(obs), self.num_actions))
        return torch.from_numpy(normal).to(self.noise_std.device), state

    def sample(self, obs: Observation, draws: Tensor) -> Tensor:
        """See `ContinuousPolicy.sample`."""
        if self.actor.sde is not None:
            return self.actor.sample_with(obs, draws)
        mean, log_std = self.actor(obs)
        return torch.addcmul(mean, log_std.exp(), draws).tanh()

    @torch.no_grad()
    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """See `StochasticPolicy.log_prob`; of the actor's distribution, without action noise."""
        return self.actor.log_prob(obs, action)

    def choose(self, outputs: AnyArray, rng: np.random.Generator | None) -> AnyArray:
        """See `ContinuousPolicy.choose`."""
        mean, log_std = outputs[:, : self.num_actions], outputs[:, self.num_actions :]
        if self.actor.sde is not None:
            mean = np.minimum(np.maximum(mean, SDE_MEAN_RANGE[0]), SDE_MEAN_RANGE[1])
        if rng is None:
            return np.tanh(mean)
        std = np.exp(np.minimum(np.maximum(log_std, LOG_STD_RANGE[0]), LOG_STD_RANGE[1]))
        return np.tanh(mean + std * normal_noise(rng, mean.shape))


class GaussianPolicy(ContinuousPolicy):
    """Samples from a Gaussian actor, clipped to the bounds (IQL, AWAC, CRR and others that weight recorded actions)."""

    actor: GaussianActor
    actor_class = GaussianActor

    def mode(self, obs: Observation) -> Tensor:
        """See `ContinuousPolicy.mode`."""
        return self.actor.mode(obs)

    def draws(self, obs: Observation, state: Any, rng: np.random.Generator) -> tuple[Tensor, Any]:
        """See `ContinuousPolicy.draws`: standard normal samples [N, A]."""
        return self.draw_noise(rng, num_rows(obs)).to(self.noise_std.device), state

    def sample(self, obs: Observation, draws: Tensor) -> Tensor:
        """See `ContinuousPolicy.sample`."""
        return self.actor.sample(obs, draws)[0]

    @torch.no_grad()
    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """See `StochasticPolicy.log_prob`; before actions are clipped."""
        return self.actor.log_prob(obs, action)

    def choose(self, outputs: AnyArray, rng: np.random.Generator | None) -> AnyArray:
        """See `ContinuousPolicy.choose`."""
        mean = np.tanh(outputs)
        if rng is None:
            return mean
        std = np.exp(self.actor.log_std.detach().clamp(*GAUSSIAN_LOG_STD_RANGE).numpy())
        action: AnyArray = np.minimum(np.maximum(mean + std * normal_noise(rng, mean.shape), -1.0), 1.0)
        return action


class MeanCriticPolicy(SquashedGaussianPolicy):
    """A policy that maximises the mean over its critics, and over their quantiles, instead of the minimum."""

    def q_values(self, obs: Observation, action: Tensor) -> Tensor:
        """See `ContinuousPolicy.q_values`: the mean, [1, B]."""
        values: Tensor = self.critic(obs, action)
        return values.mean((0, 2) if values.dim() == 3 else 0).unsqueeze(0)
