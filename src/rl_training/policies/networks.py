"""Fully connected networks, their settings and their initialisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from rl_training.contracts.errors import ConfigError
from rl_training.contracts.plugins import ENCODERS, NETWORKS, FactoryT
from rl_training.contracts.settings import SameAs, choices, documented, setting
from rl_training.policies.activations import ACTIVATIONS
from rl_training.policies.layers import PLAIN, Dropout, LayerOptions, Norm, SpectralLinear, make_norm

Activation = Literal["tanh", "relu", "elu", "gelu", "silu", "leaky_relu"]
Exploration = Literal["gaussian", "gsde"]


@documented
@dataclass(kw_only=True)
class ActorAndCriticConfig:
    """Settings that the networks of all actor-critics have; subclasses add sizes and activation."""

    encoder: str = setting(
        "auto", "Encoder of observations, by name; 'auto' chooses by the observation space.", registry=ENCODERS
    )
    encoder_kwargs: dict[str, Any] = setting(factory=dict, help="Keyword arguments of the encoder.", added_later=True)
    actor: str = setting(
        "mlp",
        "Actor network after the encoder, by name: 'mlp' (sized by actor_sizes) or a registered one.",
        registry=NETWORKS,
        added_later=True,
    )
    actor_kwargs: dict[str, Any] = setting(
        factory=dict, help="Keyword arguments of a registered actor.", added_later=True
    )
    critic: str = setting(
        "mlp",
        "Critic network after the encoder, by name: 'mlp' (sized by critic_sizes) or a registered one.",
        registry=NETWORKS,
        added_later=True,
    )
    critic_kwargs: dict[str, Any] = setting(
        factory=dict, help="Keyword arguments of a registered critic.", added_later=True
    )
    actor_norm: Norm = setting("none", "Normalisation in the actor's hidden layers.", added_later=True)
    critic_norm: Norm = setting("none", "Normalisation in the critic's hidden layers.", added_later=True)
    actor_dropout: float = setting(
        0.0, "Dropout rate in the actor's hidden layers, during updates.", ge=0, le=0.99, added_later=True
    )
    critic_dropout: float = setting(
        0.0, "Dropout rate in the critic's hidden layers, during updates.", ge=0, le=0.99, added_later=True
    )
    actor_spectral_norm: bool = setting(
        False, "Divide the weights of the actor's hidden layers by their largest singular value.", added_later=True
    )
    critic_spectral_norm: bool = setting(
        False, "Divide the weights of the critic's layers by their largest singular value.", added_later=True
    )

    @property
    def has_dropout(self) -> bool:
        """Whether updates need dropout masks."""
        return bool(self.actor_dropout or self.critic_dropout)

    def actor_options(self) -> LayerOptions:
        """Normalisation and dropout of the actor."""
        return LayerOptions(self.actor_norm, self.actor_dropout, self.actor_spectral_norm)

    def critic_options(self) -> LayerOptions:
        """Normalisation and dropout of the critic."""
        return LayerOptions(self.critic_norm, self.critic_dropout, self.critic_spectral_norm)

    def problems(self) -> list[str]:
        """Combinations that cannot work."""
        return registered_problems(self, "actor", "actor_") + registered_problems(self, "critic", "critic_")


@documented
@dataclass(kw_only=True)
class StochasticActorConfig(ActorAndCriticConfig):
    """Settings of actors that sample continuous actions: how they explore."""

    exploration: Exploration = setting(
        "gaussian",
        "Noise of continuous actions: independent in each step (gaussian), or a function of the state that is kept for "
        "several steps (gsde: generalised state-dependent exploration).",
        added_later=True,
    )
    sde_sample_freq: int = setting(
        -1, "gsde: steps between new noise matrices; -1 for once per rollout of num_steps.", ge=-1, added_later=True
    )
    full_std: bool = setting(
        True, "gsde: learn a standard deviation per feature and action, instead of one per feature.", added_later=True
    )
    use_expln: bool = setting(
        False, "gsde: standard deviations grow with the log of the parameter above 0, not with exp.", added_later=True
    )
    log_std_init: float = setting(
        0.0, "Initial log standard deviation of continuous actions (gsde: of the noise matrices)."
    )
    only_sde: ClassVar[tuple[str, ...]] = ("sde_sample_freq", "full_std", "use_expln")
    """Settings that have an effect only with gSDE."""

    def problems(self) -> list[str]:
        """Combinations that cannot work."""
        found = super().problems()
        if self.exploration != "gsde":
            given = [f.name for f in fields(self) if f.name in self.only_sde and getattr(self, f.name) != f.default]
            return found + [f"{name}: is for exploration 'gsde', got '{self.exploration}'" for name in given]
        if self.actor != "mlp":
            found.append(
                f"exploration: 'gsde' uses the last hidden layer of the actor 'mlp', and actor is '{self.actor}'; "
                "use 'gaussian'"
            )
        if self.sde_sample_freq == 0:
            found.append("sde_sample_freq: must be -1 or at least 1, got 0")
        return found


@documented
@dataclass
class ActorCriticNetworkConfig(StochasticActorConfig):
    """Networks of an actor-critic policy."""

    actor_sizes: tuple[int, ...] = setting(
        (64, 64),
        "Widths of the actor's hidden layers.",
        ge=1,
        le=16_384,
        search=choices((32, 32), (64, 64), (128, 128), (256, 256)),
    )
    critic_sizes: tuple[int, ...] = setting(
        (64, 64), "Widths of the critic's hidden layers.", ge=1, le=16_384, search=SameAs("network.actor_sizes")
    )
    activation: Activation = setting("tanh", "Activation between layers.", search=choices("tanh", "relu"))
    shared: bool = setting(False, "Share the encoder and hidden layers between actor and critic (needs equal sizes).")
    orthogonal_init: bool = setting(True, "Orthogonal initialisation with zero biases, instead of torch's default.")

    def problems(self) -> list[str]:
        """Combinations that cannot work."""
        found = super().problems()
        for name in ("actor", "critic"):
            options = self.actor_options() if name == "actor" else self.critic_options()
            if options.norm in ("batch", "batch_renorm"):
                found.append(
                    f"{name}_norm: on-policy updates compare the policy with the one that acted, so its "
                    f"outputs must not depend on the minibatch: use 'layer', got '{options.norm}'"
                )
            if options.dropout:
                found.append(
                    f"{name}_dropout: on-policy updates compare the policy with the one that acted, so "
                    f"dropout must be 0, got {options.dropout}"
                )
        if self.shared and (self.actor, self.critic) != ("mlp", "mlp"):
            found.append(f"shared: needs actor and critic to be 'mlp', got '{self.actor}' and '{self.critic}'")
        if self.shared and self.actor_sizes != self.critic_sizes:
            sizes = f"{self.actor_sizes} and {self.critic_sizes}"
            found.append(f"shared: needs equal actor_sizes and critic_sizes, got {sizes}")
        if self.shared and self.actor_options() != self.critic_options():
            found.append("shared: needs equal normalisation of actor and critic")
        return found


def registered_problems(config: Any, name: str, prefix: str = "") -> list[str]:
    """Problems: keyword arguments given for 'mlp', which takes none, or settings of 'mlp' for a registered network."""
    kind = getattr(config, name)
    if kind == "mlp":
        is_given = bool(getattr(config, f"{name}_kwargs"))
        return [f"{name}_kwargs: are for a registered network, and {name} is 'mlp'"] if is_given else []
    given = [f"{prefix}{part}" for part in ("norm", "dropout", "spectral_norm")]
    defaults = {field.name: field.default for field in fields(config)}
    return [
        f"{option}: is for 'mlp', and {name} is the registered network '{kind}'; put it into that network"
        for option in given
        if getattr(config, option) not in ("none", 0.0, False, defaults[option])
    ]


def register_network(name: str) -> Callable[[FactoryT], FactoryT]:
    """Make a network available under a name, for the actor, the critic or the Q-network of the built-in algorithms.

    The class or function is called with `num_inputs` and `num_outputs` and with the keyword arguments from the settings
    (`network.actor_kwargs`, ...). It returns a module from [B, num_inputs] to [B, num_outputs], including the output
    layer. The inputs are the encoder's features; critics of continuous actions append the action.

    Example:
        >>> @register_network("wide")
        ... def make(num_inputs, num_outputs, width=512):
        ...     return nn.Sequential(nn.Linear(num_inputs, width), nn.ReLU(), nn.Linear(width, num_outputs))
    """
    return NETWORKS.register(name)


class OwnNetwork(nn.Module):
    """A registered network, checked with a trial batch when it is built. It keeps its factory's initial weights.

    Inputs may have several leading dimensions; the network itself always gets [B, num_inputs].
    """

    def __init__(self, name: str, num_inputs: int, num_outputs: int, kwargs: Mapping[str, Any], where: str) -> None:
        super().__init__()
        made = NETWORKS.make(name, (num_inputs, num_outputs), kwargs, f"network > {where}_kwargs")
        if not isinstance(made, nn.Module):
            raise ConfigError(f"network > {where}: '{name}' must return a torch.nn.Module, got {made!r:.80}")
        self.module = made
        modes = {part: part.training for part in made.modules()}
        made.eval()  # so that the trial batch does not change running statistics
        try:
            with torch.no_grad():
                found = made(torch.zeros(2, num_inputs))
        except Exception as error:
            raise ConfigError(
                f"network > {where}: '{name}' fails on a batch of shape (2, {num_inputs}): "
                f"{type(error).__name__}: {error}"
            ) from error
        for part, training in modes.items():
            part.training = training
        if not isinstance(found, Tensor) or found.shape != (2, num_outputs) or not found.is_floating_point():
            got = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"{found!r:.80}"
            raise ConfigError(
                f"network > {where}: '{name}' was asked for {num_outputs} outputs, so inputs of shape "
                f"(2, {num_inputs}) should give floats of shape (2, {num_outputs}); they gave {got}"
            )

    def forward(self, x: Tensor) -> Tensor:
        """From [..., num_inputs] to [..., num_outputs]."""
        outputs: Tensor = self.module(x if x.dim() == 2 else x.flatten(0, -2))
        return outputs if x.dim() == 2 else outputs.unflatten(0, x.shape[:-1])


def make_mlp(
    num_inputs: int,
    sizes: Sequence[int],
    activation: str,
    options: LayerOptions = PLAIN,
    linear: Callable[[int, int], nn.Module] = nn.Linear,
) -> tuple[nn.Sequential, int]:
    """Hidden layers, and the width of the last one.

    A hidden layer is: linear, dropout, layer norm, activation, batch norm; each of them only if `options` has it. Batch
    norm also normalises the inputs, as in CrossQ.
    """
    is_batch_norm = options.norm in ("batch", "batch_renorm")
    if options.spectral_norm:
        linear = SpectralLinear
    layers: list[nn.Module] = [make_norm(options.norm, num_inputs)] if is_batch_norm else []
    for size in sizes:
        layers.append(linear(num_inputs, size))
        if options.dropout:
            layers.append(Dropout(options.dropout, size))
        if options.norm == "layer":
            layers.append(make_norm(options.norm, size))
        layers.append(ACTIVATIONS[activation]())
        if is_batch_norm:
            layers.append(make_norm(options.norm, size))
        num_inputs = size
    return nn.Sequential(*layers), num_inputs


def orthogonal_(module: nn.Module, gain: float = math.sqrt(2)) -> None:
    """Initialise linear and convolutional layers with orthogonal weights and zero biases; skips any `OwnNetwork`."""
    others = {part for own in module.modules() if isinstance(own, OwnNetwork) for part in own.modules()}
    for layer in module.modules():
        if layer not in others and isinstance(layer, (nn.Linear, nn.Conv2d)):
            nn.init.orthogonal_(layer.weight, gain)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@contextmanager
def seeded_weights(rng: np.random.Generator) -> Iterator[None]:
    """Networks built inside get their initial weights from `rng`; torch's global generator is left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        yield


class TrainingMode:
    """Context manager: the network is in training mode inside, and in evaluation mode before and after.

    Takes a tenth of the time of `train()` and `eval()`, because it lists the network's submodules only once.

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
