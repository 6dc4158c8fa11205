"""Fully connected networks, their settings and their initialisation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from rl_training.contracts.settings import SameAs, choices, documented, setting
from rl_training.policies.activations import ACTIVATIONS
from rl_training.policies.encoders import encoder_problem

Activation = Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"]


@documented
@dataclass
class ActorCriticNetworkConfig:
    """Networks of an actor-critic policy."""

    actor_sizes: tuple[int, ...] = setting(
        (64, 64),
        "Widths of the actor's hidden layers.",
        ge=1,
        search=choices((32, 32), (64, 64), (128, 128), (256, 256)),
    )
    critic_sizes: tuple[int, ...] = setting(
        (64, 64), "Widths of the critic's hidden layers.", ge=1, search=SameAs("network.actor_sizes")
    )
    activation: Activation = setting("tanh", "Activation between layers.", search=choices("tanh", "relu"))
    shared: bool = setting(False, "Actor and critic share encoder and hidden layers (needs equal sizes).")
    encoder: str = setting("auto", "Encoder of observations, by name; 'auto' chooses by the observation space.")
    orthogonal_init: bool = setting(True, "Orthogonal weights and zero biases instead of torch's initialisation.")
    log_std_init: float = setting(0.0, "Initial log standard deviation of continuous actions.")

    def problems(self) -> list[str]:
        """Combinations that cannot work."""
        found = [f"encoder: {problem}"] if (problem := encoder_problem(self.encoder)) else []
        if self.shared and self.actor_sizes != self.critic_sizes:
            sizes = f"{self.actor_sizes} and {self.critic_sizes}"
            found.append(f"shared: needs equal actor_sizes and critic_sizes, got {sizes}")
        return found


def make_mlp(num_inputs: int, sizes: Sequence[int], activation: str) -> tuple[nn.Sequential, int]:
    """Hidden layers, each followed by the activation, and the width of the last one."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(num_inputs, size), ACTIVATIONS[activation]()]
        num_inputs = size
    return nn.Sequential(*layers), num_inputs


def orthogonal_(module: nn.Module, gain: float = math.sqrt(2)) -> None:
    """Orthogonal weights with that gain and zero biases, in every linear and convolutional layer."""
    for layer in module.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@contextmanager
def seeded_weights(rng: np.random.Generator) -> Iterator[None]:
    """Networks that are made meanwhile get their initial weights from a stream, not from torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        yield


class TrainingMode:
    """While it is entered, a network is in training mode; before and after, in evaluation mode.

    Updates are short and many. This does what `train()` and `eval()` do in a tenth of their time, by going through the
    network's parts only once.

    Example:
        >>> network = nn.Sequential(nn.Dropout())
        >>> training = TrainingMode(network)
        >>> with training:
        ...     network[0].training
        True
        >>> network[0].training
        False
    """

    def __init__(self, network: nn.Module) -> None:
        network.eval()
        self._parts = list(network.modules())

    def __enter__(self) -> None:
        for part in self._parts:
            vars(part)["training"] = True

    def __exit__(self, *error: object) -> None:
        for part in self._parts:
            vars(part)["training"] = False
