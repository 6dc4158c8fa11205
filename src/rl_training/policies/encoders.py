"""Encoders: from an observation of any supported space to a flat feature tensor [B, F].

The trainer, the buffers and the algorithms never look inside an observation; this is the only place that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.contracts.batches import Observation
from rl_training.contracts.errors import SpaceError


class Encoder(nn.Module):
    """Base of all encoders; `num_features` is the width of what `forward` returns."""

    num_features: int

    def forward(self, obs: Observation) -> Tensor:
        """Features [B, F] of a batch of observations."""
        raise NotImplementedError


EncoderFactory = Callable[[spaces.Space[Any]], Encoder]
_ENCODERS: dict[str, EncoderFactory] = {}


def register_encoder(name: str) -> Callable[[EncoderFactory], EncoderFactory]:
    """Make an encoder available under a name in the `network.encoder` setting.

    Example:
        >>> @register_encoder("my_encoder")
        ... def make(space):
        ...     return FlatEncoder(space)
    """

    def register(factory: EncoderFactory) -> EncoderFactory:
        _ENCODERS[name] = factory
        return factory

    return register


def encoder_names() -> list[str]:
    """Names that `make_encoder` knows."""
    return sorted(_ENCODERS)


def make_encoder(name: str, space: spaces.Space[Any]) -> Encoder:
    """The encoder with that name; `auto` chooses by the observation space."""
    if name == "auto":
        name = "dict" if isinstance(space, spaces.Dict) else "flat"
        refuse_images(space)
    if problem := encoder_problem(name):
        raise SpaceError(problem)
    return _ENCODERS[name](space)


def encoder_problem(name: str) -> str | None:
    """Why an encoder's name is not accepted, or None."""
    if name == "auto" or name in _ENCODERS:
        return None
    return f"unknown encoder '{name}'; known: auto, {', '.join(encoder_names())}"


def refuse_images(space: spaces.Space[Any]) -> None:
    """Images need a convolutional encoder: flattening one is never what its owner meant."""
    parts = space.spaces.values() if isinstance(space, spaces.Dict) else [space]
    for part in parts:
        if isinstance(part, spaces.Box) and len(part.shape) == 3 and part.dtype == np.uint8:
            raise SpaceError(
                f"{part} looks like an image, and there is no convolutional encoder yet. "
                "Register one with rl_training.policies.encoders.register_encoder and name it in network.encoder."
            )


@register_encoder("flat")
class FlatEncoder(Encoder):
    """Box and MultiBinary flattened to floats; Discrete and MultiDiscrete as one-hot vectors."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.starts: Tensor
        starts: list[int] = []
        if isinstance(space, spaces.Discrete):
            self.sizes, starts = [int(space.n)], [int(space.start)]
        elif isinstance(space, spaces.MultiDiscrete):
            self.sizes, starts = [int(n) for n in space.nvec.flat], [int(s) for s in space.start.flat]
        elif not isinstance(space, (spaces.Box, spaces.MultiBinary)):
            raise SpaceError(
                f"observations of {type(space).__name__} are not supported: {space}. Supported are Box, Discrete, "
                "MultiDiscrete, MultiBinary and a Dict of these; gymnasium.wrappers.FlattenObservation turns many "
                "other spaces into a Box."
            )
        self.register_buffer("starts", torch.tensor(starts, dtype=torch.int64), persistent=False)
        self.num_features = sum(self.sizes) or int(np.prod(space.shape or (1,)))

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        obs = cast("Tensor", obs)
        rows = obs.reshape(obs.shape[0], -1)
        if not self.sizes:
            return rows.float()
        codes = rows.long() - self.starts
        return torch.cat([F.one_hot(codes[:, i], size) for i, size in enumerate(self.sizes)], dim=1).float()


@register_encoder("dict")
class DictEncoder(Encoder):
    """Each entry of a Dict space encoded by its own encoder, joined in the order of the keys."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        if not isinstance(space, spaces.Dict):
            raise SpaceError(f"the 'dict' encoder needs a Dict observation space, got {space}")
        for key, part in space.spaces.items():
            if isinstance(part, spaces.Dict):
                raise SpaceError(f"observation '{key}' is a Dict inside a Dict; flatten it with a wrapper: {space}")
        self.keys = sorted(space.spaces)
        self.parts = nn.ModuleList(make_encoder("auto", space.spaces[key]) for key in self.keys)
        self.num_features = sum(cast("Encoder", part).num_features for part in self.parts)

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        obs = cast("dict[str, Tensor]", obs)
        return torch.cat([part(obs[key]) for key, part in zip(self.keys, self.parts, strict=True)], dim=1)
