"""Ensembles: E networks of the same shape, evaluated with one batched matrix product per layer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.contracts.batches import Observation
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.activations import ACTIVATIONS
from rl_training.policies.encoders import Encoder, make_encoder
from rl_training.policies.layers import PLAIN, Dropout, EnsembleLinear, LayerOptions, Members, make_norm
from rl_training.policies.masks import make_policy_encoder
from rl_training.policies.networks import OwnNetwork

if TYPE_CHECKING:
    from rl_training.policies.actors import OffPolicyNetworkConfig


def _count(members: Members, num_members: int) -> int:
    return len(members) if isinstance(members, Tensor) else len(range(num_members)[members])


class EnsembleMLP(nn.Module):
    """E fully connected networks with the same input and `num_outputs` outputs each.

    A hidden layer is: linear, dropout, layer norm, activation, batch norm; each of them only if `options` has it. Batch
    norm also normalises the inputs, as in CrossQ.
    """

    def __init__(
        self,
        num_members: int,
        num_inputs: int,
        sizes: Sequence[int],
        num_outputs: int,
        activation: str,
        options: LayerOptions = PLAIN,
    ) -> None:
        super().__init__()
        self.num_members = num_members
        widths = [num_inputs, *sizes, num_outputs]
        self.layers = nn.ModuleList(
            EnsembleLinear(num_members, inputs, outputs, options.spectral_norm)
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.activation = ACTIVATIONS[activation]()
        self.is_batch_norm = options.norm in ("batch", "batch_renorm")
        dropouts = [Dropout(options.dropout, size, num_members) for size in sizes] if options.dropout else []
        self.dropouts = nn.ModuleList(dropouts)
        normalized = ([num_inputs] if self.is_batch_norm else []) + list(sizes)
        norms = [make_norm(options.norm, size, num_members) for size in normalized] if options.norm != "none" else []
        self.norms = nn.ModuleList(norms)

    def forward(self, x: Tensor, members: Members | None = None) -> Tensor:
        """From [B, inputs] to [E, B, outputs]; `members` selects networks."""
        num_members = self.num_members if members is None else _count(members, self.num_members)
        x = x.expand(num_members, *x.shape)
        if self.is_batch_norm:
            x = self.norms[0](x, members)
        for index, layer in enumerate(self.layers):
            x = layer(self._hidden(index - 1, x, members) if index else x, members)
        return x

    def _hidden(self, index: int, x: Tensor, members: Members | None) -> Tensor:
        """What follows the linear part of a hidden layer."""
        if self.dropouts:
            x = self.dropouts[index](x, members)
        if self.norms and not self.is_batch_norm:
            x = self.norms[index](x, members)
        x = self.activation(x)
        if self.is_batch_norm:
            x = self.norms[index + 1](x, members)
        return x


class OwnEnsemble(nn.Module):
    """E registered networks with the same input and `num_outputs` outputs each, evaluated one after another."""

    def __init__(
        self, num_members: int, num_inputs: int, num_outputs: int, name: str, kwargs: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.networks = nn.ModuleList(
            OwnNetwork(name, num_inputs, num_outputs, kwargs, "critic") for _ in range(num_members)
        )

    def forward(self, x: Tensor, members: Members | None = None) -> Tensor:
        """See `EnsembleMLP.forward`."""
        if isinstance(members, Tensor):
            return torch.stack([self.networks[index](x) for index in members.tolist()])
        return torch.stack([network(x) for network in (self.networks if members is None else self.networks[members])])


def make_members(num_members: int, num_inputs: int, num_outputs: int, network: OffPolicyNetworkConfig) -> nn.Module:
    """E critic networks from [B, inputs] to [E, B, outputs]: of the settings' sizes, or registered ones."""
    if network.critic != "mlp":
        return OwnEnsemble(num_members, num_inputs, num_outputs, network.critic, network.critic_kwargs)
    sizes, activation, options = network.critic_sizes, network.activation, network.critic_options()
    return EnsembleMLP(num_members, num_inputs, sizes, num_outputs, activation, options)


class EnsembleCritic(nn.Module):
    """E Q-functions Q(s, a) of observations and continuous actions, with one shared encoder.

    `num_outputs` is the number of outputs of each: one value, or quantiles.
    `network` names the encoder, unless `encoder` is given.
    """

    def __init__(
        self,
        spec: EnvSpec,
        network: OffPolicyNetworkConfig,
        num_critics: int,
        encoder: Encoder | None = None,
        num_outputs: int = 1,
    ) -> None:
        super().__init__()
        self.num_outputs = num_outputs
        if encoder is None:
            encoder = make_encoder(network.encoder, spec.observation_space, network.encoder_kwargs)
        self.encoder = encoder
        num_inputs = encoder.num_features + int(np.prod(spec.action_space.shape or ()))
        self.members = make_members(num_critics, num_inputs, num_outputs, network)

    def forward(self, obs: Observation, action: Tensor, members: Members | None = None) -> Tensor:
        """Q-values [E, B] of actions [B, ...], or [E, B, K] with several outputs; `members` selects critics."""
        features = self.encoder(obs)
        inputs = torch.cat((features, action.reshape(features.shape[0], -1)), dim=1)
        values: Tensor = self.members(inputs, members)
        return values.squeeze(-1) if self.num_outputs == 1 else values

    def of_several(self, obs: Observation, actions: Tensor) -> Tensor:
        """Q-values [E, M, B] of M actions for each observation, [M, B, ...]; for critics with one output."""
        features, count = self.encoder(obs), actions.shape[0]
        inputs = torch.cat((features.expand(count, *features.shape), actions.flatten(2)), dim=2)
        values: Tensor = self.members(inputs.flatten(0, 1)).squeeze(-1)
        return values.reshape(values.shape[0], count, -1)


class StateValue(nn.Module):
    """A network of state values V(s), with the settings of the critics.

    `network` names the encoder, unless `encoder` is given. An action mask in the observation is not read.
    """

    def __init__(self, spec: EnvSpec, network: OffPolicyNetworkConfig, encoder: Encoder | None = None) -> None:
        super().__init__()
        if encoder is None:
            encoder = make_policy_encoder(network.encoder, spec, network.encoder_kwargs)
        self.encoder = encoder
        self.members = make_members(1, encoder.num_features, 1, network)

    def forward(self, obs: Observation) -> Tensor:
        """Values [B]."""
        values: Tensor = self.members(self.encoder(obs))
        return values.reshape(-1)
