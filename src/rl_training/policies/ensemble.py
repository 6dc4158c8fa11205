"""Ensembles: E networks of the same shape, evaluated with one batched matrix product per layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.contracts.batches import Observation
from rl_training.contracts.spec import EnvSpec
from rl_training.policies.activations import ACTIVATIONS
from rl_training.policies.encoders import Encoder, make_encoder
from rl_training.policies.networks import OwnNetwork

if TYPE_CHECKING:
    from rl_training.policies.actors import OffPolicyNetworkConfig


Members = slice | Tensor
"""A selection of networks of an ensemble: a slice, or a tensor [M] of indices."""


def _count(members: Members, num_members: int) -> int:
    return len(members) if isinstance(members, Tensor) else len(range(num_members)[members])


class EnsembleLinear(nn.Module):
    """E linear layers with stacked weights, each initialised as `nn.Linear`."""

    def __init__(self, num_members: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(num_inputs)
        self.weight = nn.Parameter(torch.empty(num_members, num_inputs, num_outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(num_members, 1, num_outputs).uniform_(-bound, bound))

    def orthogonal_(self, gain: float = 1.0) -> None:
        """Initialise each member with orthogonal weights and zero biases."""
        for weight in self.weight.data:
            nn.init.orthogonal_(weight, gain)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, members: Members | None = None) -> Tensor:
        """From [E, B, inputs] to [E, B, outputs]; with `members`, E is the number of selected members."""
        weight: Tensor = self.weight
        bias: Tensor = self.bias
        if members is not None:
            weight, bias = weight[members], bias[members]
        if weight.shape[-1] == 1:  # a batched product with a single column is several times slower on CPUs
            return (x * weight.mT).sum(-1, keepdim=True) + bias
        return torch.baddbmm(bias, x, weight)


class EnsembleMLP(nn.Module):
    """E fully connected networks with the same input and `num_outputs` outputs each."""

    def __init__(
        self, num_members: int, num_inputs: int, sizes: Sequence[int], num_outputs: int, activation: str
    ) -> None:
        super().__init__()
        self.num_members = num_members
        widths = [num_inputs, *sizes, num_outputs]
        self.layers = nn.ModuleList(
            EnsembleLinear(num_members, inputs, outputs) for inputs, outputs in itertools.pairwise(widths)
        )
        self.activation = ACTIVATIONS[activation]()

    def forward(self, x: Tensor, members: Members | None = None) -> Tensor:
        """From [B, inputs] to [E, B, outputs]; `members` selects networks."""
        num_members = self.num_members if members is None else _count(members, self.num_members)
        x = x.expand(num_members, *x.shape)
        for index, layer in enumerate(self.layers):
            x = layer(self.activation(x) if index else x, members)
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

    def forward(self, x: Tensor, members: slice | None = None) -> Tensor:
        """See `EnsembleMLP.forward`."""
        chosen = self.networks if members is None else self.networks[members]
        return torch.stack([network(x) for network in chosen])


class EnsembleCritic(nn.Module):
    """E Q-functions Q(s, a) of observations and continuous actions, with one shared encoder.

    `network` names the encoder, unless `encoder` is given.
    """

    def __init__(
        self, spec: EnvSpec, network: OffPolicyNetworkConfig, num_critics: int, encoder: Encoder | None = None
    ) -> None:
        super().__init__()
        if encoder is None:
            encoder = make_encoder(network.encoder, spec.observation_space, network.encoder_kwargs)
        self.encoder = encoder
        num_inputs = encoder.num_features + int(np.prod(spec.action_space.shape or ()))
        self.members: nn.Module
        if network.critic == "mlp":
            self.members = EnsembleMLP(num_critics, num_inputs, network.critic_sizes, 1, network.activation)
        else:
            self.members = OwnEnsemble(num_critics, num_inputs, 1, network.critic, network.critic_kwargs)

    def forward(self, obs: Observation, action: Tensor, members: Members | None = None) -> Tensor:
        """Q-values [E, B] of actions [B, ...]; `members` selects critics."""
        features = self.encoder(obs)
        inputs = torch.cat((features, action.reshape(features.shape[0], -1)), dim=1)
        values: Tensor = self.members(inputs, members)
        return values.squeeze(-1)
