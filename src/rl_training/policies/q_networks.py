"""Q-networks, expected and distributional, and the policy that acts on them.

Dimensions: B batch, A actions, K outputs per action (one value, atoms or quantiles), F fractions, N environments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.accelerate import Accelerated, ArrayNetwork
from rl_training.contracts.algorithm import ActOutput
from rl_training.contracts.arrays import AnyArray, ArrayObservation, FloatArray
from rl_training.contracts.batches import Observation, as_arrays
from rl_training.contracts.errors import ConfigError, SpaceError
from rl_training.contracts.plugins import ENCODERS, NETWORKS
from rl_training.contracts.settings import choices, documented, setting
from rl_training.contracts.spec import BoxActions, EnvSpec
from rl_training.functional.distributional import midpoints
from rl_training.policies.exploration import random_actions
from rl_training.policies.layers import LayerOptions, Norm
from rl_training.policies.masks import MASKED, apply_mask, make_policy_encoder, mask_array, mask_of, put_mask
from rl_training.policies.networks import Activation, OwnNetwork, make_mlp, registered_problems
from rl_training.policies.noisy import NoisyLinear, remove_noise, reset_noise


@documented
@dataclass
class QNetworkConfig:
    """The Q-network."""

    sizes: tuple[int, ...] = setting(
        (64, 64),
        "Widths of the hidden layers.",
        ge=1,
        le=16_384,
        search=choices((64, 64), (128, 128), (256, 256), (512,)),
    )
    activation: Activation = setting("relu", "Activation between layers.", search=choices("tanh", "relu"))
    encoder: str = setting(
        "auto", "Encoder of observations, by name; 'auto' chooses by the observation space.", registry=ENCODERS
    )
    encoder_kwargs: dict[str, Any] = setting(factory=dict, help="Keyword arguments of the encoder.", added_later=True)
    critic: str = setting(
        "mlp",
        "Q-network after the encoder, by name: 'mlp' (sized by sizes) or a registered one.",
        registry=NETWORKS,
        added_later=True,
    )
    critic_kwargs: dict[str, Any] = setting(
        factory=dict, help="Keyword arguments of a registered Q-network.", added_later=True
    )

    norm: Norm = setting("none", "Normalisation in the hidden layers.", added_later=True)
    dropout: float = setting(0.0, "Dropout rate in the hidden layers, during updates.", ge=0, le=0.99, added_later=True)
    spectral_norm: bool = setting(
        False, "Divide the weights of the hidden layers by their largest singular value.", added_later=True
    )

    def options(self) -> LayerOptions:
        """Normalisation and dropout."""
        return LayerOptions(self.norm, self.dropout, self.spectral_norm)

    def problems(self) -> list[str]:
        """Combinations that cannot work."""
        return registered_problems(self, "critic")


class QNetwork(nn.Module):
    """From observations to [B, A, K]: encoder, hidden layers, linear head. K is 1 here; see `expected` of subclasses.

    `dueling` splits the head into the state value and the advantages (Wang et al. 2016, eq. 9); both are in one layer,
    the value in the first row. `noisy` makes all linear layers after the encoder noisy.
    """

    def __init__(
        self,
        spec: EnvSpec,
        network: QNetworkConfig,
        *,
        dueling: bool = False,
        noisy: bool = False,
        num_outputs: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(spec.action_space, spaces.Discrete):
            raise SpaceError(f"action values need a Discrete action space, got {spec.action_space}")
        linear = NoisyLinear if noisy else nn.Linear
        encoder = make_policy_encoder(network.encoder, spec, network.encoder_kwargs)
        if noisy and network.spectral_norm:
            raise ConfigError("network > spectral_norm: the weights of noisy layers are random; set noisy to false")
        sizes = network.sizes if network.critic == "mlp" else ()
        layers, self.num_features = make_mlp(encoder.num_features, sizes, network.activation, network.options(), linear)
        self.num_actions = int(spec.action_space.n)
        self.num_outputs = num_outputs
        self.dueling = dueling
        self.noisy = noisy
        self.masked = spec.action_masks
        self.hidden = nn.Sequential(encoder, *layers)
        width = (self.num_actions + dueling) * num_outputs
        self.head: nn.Module
        if network.critic == "mlp":
            self.head = linear(self.num_features, width)
        elif noisy:
            raise ConfigError(f"network > critic: '{network.critic}' has no noisy layers; set noisy to false")
        else:
            self.head = OwnNetwork(network.critic, self.num_features, width, network.critic_kwargs, "critic")

    def forward(self, obs: Observation) -> Tensor:
        """Outputs [B, A, K]."""
        outputs: Tensor = self.head(self.hidden(obs))
        return self.duel(outputs.view(outputs.shape[0], -1, self.num_outputs))

    def acting_layers(self) -> list[nn.Module]:
        """The layers that compute the head's outputs; empty if they are not a chain."""
        return [self.hidden, self.head]

    def duel(self, outputs: Tensor) -> Tensor:
        """Combine the head's rows: value + advantage - mean advantage if the network is dueling, else unchanged."""
        if not self.dueling:
            return outputs
        value, advantage = outputs[:, :1], outputs[:, 1:]
        return value + (advantage - advantage.mean(dim=1, keepdim=True))

    def expected(self, outputs: Tensor) -> Tensor:
        """Q-values [B, A]: the means of the return distributions that the outputs [B, A, K] describe."""
        return outputs.squeeze(2)

    def q_values(self, obs: Observation) -> Tensor:
        """Q-values [B, A]; those of invalid actions are masked."""
        return self.masked_values(self.expected(self(obs)), obs)

    def masked_values(self, values: Tensor, obs: Observation) -> Tensor:
        """Q-values [B, A] with invalid actions masked, so that they are never the largest.

        Rows without any valid action are left unchanged: a target may still evaluate the final observation of an
        episode.
        """
        if not self.masked:
            return values
        mask = mask_of(obs)
        return apply_mask(values, mask | ~mask.any(dim=1, keepdim=True))


class CategoricalQNetwork(QNetwork):
    """Outputs are the logits of K evenly spaced atoms between `v_min` and `v_max` (Bellemare et al. 2017)."""

    support: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        network: QNetworkConfig,
        *,
        num_outputs: int,
        v_min: float,
        v_max: float,
        dueling: bool = False,
        noisy: bool = False,
    ) -> None:
        super().__init__(spec, network, dueling=dueling, noisy=noisy, num_outputs=num_outputs)
        self.register_buffer("support", torch.linspace(v_min, v_max, num_outputs), persistent=False)

    def expected(self, outputs: Tensor) -> Tensor:
        """See `QNetwork.expected`."""
        return outputs.softmax(dim=2) @ self.support


class QuantileQNetwork(QNetwork):
    """Outputs are the K quantiles at the midpoints of K equal fractions (Dabney et al. 2018, arXiv:1710.10044)."""

    fractions: Tensor

    def __init__(
        self, spec: EnvSpec, network: QNetworkConfig, *, num_outputs: int, dueling: bool = False, noisy: bool = False
    ) -> None:
        super().__init__(spec, network, dueling=dueling, noisy=noisy, num_outputs=num_outputs)
        self.register_buffer("fractions", midpoints(num_outputs), persistent=False)

    def expected(self, outputs: Tensor) -> Tensor:
        """See `QNetwork.expected`."""
        return outputs.mean(dim=2)


class ImplicitQuantileQNetwork(QNetwork):
    """Quantiles at given fractions (Dabney et al. 2018, arXiv:1806.06923).

    The hidden features are multiplied by an embedding of each fraction, relu(linear(cos(pi * i * fraction))) for i from
    0 to `embedding_size` - 1, before the head. Q-values are means over `num_greedy_fractions` midpoints of equal
    fractions. The paper samples them instead, but then deterministic acting would need random numbers.
    """

    frequencies: Tensor
    greedy_fractions: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        network: QNetworkConfig,
        *,
        embedding_size: int,
        num_greedy_fractions: int,
        dueling: bool = False,
        noisy: bool = False,
    ) -> None:
        super().__init__(spec, network, dueling=dueling, noisy=noisy)
        self.embedding = nn.Linear(embedding_size, self.num_features)
        self.register_buffer("frequencies", math.pi * torch.arange(embedding_size), persistent=False)
        self.register_buffer("greedy_fractions", midpoints(num_greedy_fractions).unsqueeze(0), persistent=False)

    def acting_layers(self) -> list[nn.Module]:
        """See `QNetwork.acting_layers`: empty, because the fraction embedding is in between."""
        return []

    def forward(self, obs: Observation, fractions: Tensor | None = None) -> Tensor:
        """Quantiles [B, A, F] at fractions [B, F] or [1, F]; by default at the midpoints used for Q-values."""
        fractions = self.greedy_fractions if fractions is None else fractions
        waves = torch.cos(fractions.unsqueeze(2) * self.frequencies)
        features = self.hidden(obs).unsqueeze(1) * torch.relu(self.embedding(waves))
        return self.duel(self.head(features).transpose(1, 2))

    def expected(self, outputs: Tensor) -> Tensor:
        """See `QNetwork.expected`."""
        return outputs.mean(dim=2)


NetworkT = TypeVar("NetworkT", bound=QNetwork)


class QPolicy(nn.Module, Generic[NetworkT]):
    """Greedy on Q-values; explores by random actions with probability `epsilon` and, if noisy, by weight noise."""

    box_actions: BoxActions = "clip"
    epsilon: Tensor
    rates: FloatArray | None = None
    """Exploration rate of each training environment, if they differ; batches of another size use `epsilon`."""

    def __init__(self, network: NetworkT, epsilon: float = 0.0) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("epsilon", torch.tensor(float(epsilon)))
        self._outputs = ArrayNetwork(self._acting_layers)
        self._best = Accelerated(self._best_actions, network)

    def _acting_layers(self) -> list[nn.Module]:
        return self.network.acting_layers()

    def mode(self, obs: Observation) -> Tensor:
        """Greedy actions [N]."""
        return self.network.q_values(obs).argmax(dim=1)

    def _quick(self, obs: Any) -> AnyArray | None:
        """`mode` in numpy; None if torch has to compute it."""
        outputs = self._outputs(obs)
        if outputs is None:
            return None
        network = self.network
        if network.num_outputs > 1 or network.dueling:
            with torch.no_grad():
                rows = torch.from_numpy(outputs).view(len(outputs), -1, network.num_outputs)
                outputs = network.expected(network.duel(rows)).numpy()
        if network.masked:
            mask = mask_array(obs)
            outputs = np.where(mask | ~mask.any(axis=1, keepdims=True), outputs.reshape(mask.shape), np.float32(MASKED))
        best: AnyArray = outputs.argmax(axis=1)
        return best

    @torch.no_grad()
    def _best_actions(self, obs: Observation, with_noise: bool) -> Tensor:
        """See `mode`. `with_noise` is an argument so that there is one recording with noise and one without."""
        return self.mode(obs)

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
        """See `Policy.act`. All N environments share one sample of the weight noise."""
        if action_mask is not None:
            obs = put_mask(obs, action_mask, self.network.masked)
        network = self.network
        if not deterministic:
            assert rng is not None, "exploration needs a random generator: pass rng"
            if network.noisy:
                reset_noise(network, rng)
        quick = self._quick(as_arrays(obs))
        greedy = self._best(obs, network.noisy and not deterministic) if quick is None else torch.from_numpy(quick)
        if deterministic:
            return ActOutput(greedy, {})
        if network.noisy:
            remove_noise(network)
        explored = self._explore(greedy.cpu().numpy(), mask_of(obs) if network.masked else None, rng)
        return ActOutput(torch.from_numpy(explored).to(greedy.device), {})

    def act_on_arrays(self, obs: ArrayObservation, rng: np.random.Generator) -> AnyArray | None:
        """See `ArrayPolicy.act_on_arrays`."""
        greedy = self._quick(obs)
        if greedy is None:
            return None
        return self._explore(greedy, torch.from_numpy(mask_array(obs)) if self.network.masked else None, rng)

    def _explore(self, greedy: AnyArray, mask: Tensor | None, rng: Any) -> AnyArray:
        """Epsilon-greedy: replace each action by a random one with probability epsilon."""
        # always draw both for all rows, so that the generator's state does not depend on the outcome
        has_rates = self.rates is not None and len(self.rates) == len(greedy)
        explore = rng.random(len(greedy)) < (self.rates if has_rates else self.epsilon.item())
        anything = random_actions(rng, len(greedy), self.network.num_actions, mask)
        return np.where(explore, anything, greedy)

    @torch.no_grad()
    def log_prob(self, obs: Observation, action: Tensor) -> Tensor:
        """See `StochasticPolicy.log_prob`: of epsilon-greedy actions, without weight noise."""
        best, network = self.mode(obs), self.network
        ones = torch.ones(len(best), network.num_actions, device=best.device)
        valid = mask_of(obs).to(ones) if network.masked else ones
        uniform = valid.gather(1, action.long().unsqueeze(1)).squeeze(1) / valid.sum(1)
        return torch.log((1.0 - self.epsilon) * (best == action) + self.epsilon * uniform)

    @torch.no_grad()
    def value(self, obs: Observation) -> Tensor:
        """See `Policy.value`: the largest Q-value."""
        return self.network.q_values(obs).amax(dim=1)
