"""Encoders (feature extractors): from an observation of any supported space to a feature tensor [B, F].

The trainer, the buffers and the algorithms do not depend on the observation space; only encoders do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rl_training.accelerate import ConvolutionStack, WideLinear
from rl_training.contracts.arrays import AnyArray, ArrayObservation
from rl_training.contracts.batches import Observation
from rl_training.contracts.errors import SpaceError
from rl_training.contracts.images import ImageLayout, has_images, image_layout, is_image
from rl_training.contracts.plugins import ENCODERS, FactoryT


class Encoder(nn.Module):
    """Base class of encoders; `num_features` is the number F of features that `forward` returns."""

    num_features: int

    def forward(self, obs: Observation) -> Tensor:
        """Features [B, F] of a batch of observations."""
        raise NotImplementedError


def register_encoder(name: str) -> Callable[[FactoryT], FactoryT]:
    """Make an encoder available under a name in the `network.encoder` setting.

    The class or function is called with the observation space, and with `network.encoder_kwargs` as keyword arguments.

    Example:
        >>> @register_encoder("my_encoder")
        ... def make(space):
        ...     return FlatEncoder(space)
    """
    return ENCODERS.register(name)


def make_encoder(name: str, space: spaces.Space[Any], kwargs: Mapping[str, Any] | None = None) -> Encoder:
    """The encoder with that name; `auto` chooses by the observation space.

    For a Dict space, a subclass of `ImageEncoder` encodes the images; the encoder of other entries is chosen by space.
    """
    if name == "auto":
        name = _default_name(space)
    factory = ENCODERS.get(name)
    if isinstance(space, spaces.Dict) and isinstance(factory, type) and issubclass(factory, ImageEncoder):
        return DictEncoder(space, images=name, images_kwargs=kwargs)
    encoder: Encoder = ENCODERS.make(name, (space,), kwargs or {}, "network > encoder_kwargs")
    _check_features(name, encoder, space)
    return encoder


def _check_features(name: str, encoder: Encoder, space: spaces.Space[Any]) -> None:
    """Check an encoder on two observations, so that a wrong `num_features` fails here and not in a later layer."""
    width = getattr(encoder, "num_features", None)
    if not isinstance(width, (int, np.integer)):
        raise SpaceError(f"encoder '{name}' must set self.num_features, an int: the number of features it returns")
    modes = {part: part.training for part in encoder.modules()}
    encoder.eval()  # so that the trial batch does not change running statistics
    try:
        with torch.no_grad():
            features = encoder(_samples(space))
    except Exception as error:
        raise SpaceError(
            f"encoder '{name}' fails on a batch of two observations of {space}: {type(error).__name__}: {error}"
        ) from error
    for part, training in modes.items():
        part.training = training
    if tuple(features.shape) != (2, width) or features.dtype != torch.get_default_dtype():
        raise SpaceError(
            f"encoder '{name}' has num_features {width}, so two observations should give float32 of shape (2, "
            f"{width}); got {features.dtype} of shape {tuple(features.shape)}"
        )


def _samples(space: spaces.Space[Any]) -> Observation:
    """Two random observations as policies get them. The space's random generator is not used."""
    if isinstance(space, spaces.Dict):
        return {key: cast("Tensor", _samples(part)) for key, part in space.spaces.items()}
    own = copy.deepcopy(space)
    own.seed(0)
    rows = torch.from_numpy(np.stack([np.asarray(own.sample()) for _ in range(2)]))
    return rows.float() if rows.is_floating_point() else rows


def _default_name(space: spaces.Space[Any]) -> str:
    if isinstance(space, spaces.Dict):
        return "dict"
    if not is_image(space):
        return "flat"
    return "nature_cnn" if min(image_layout(space).size) >= NATURE_SIZE else "impala_cnn"


@ENCODERS.builtin("flat")
class FlatEncoder(Encoder):
    """Box and MultiBinary flattened to floats; Discrete and MultiDiscrete as one-hot vectors."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.offsets: Tensor
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
        # start of each entry's one-hot block
        self._array_offsets = np.cumsum([0, *self.sizes[:-1]], dtype=np.int64) - np.array(starts or [0], np.int64)
        self.register_buffer("offsets", torch.from_numpy(self._array_offsets), persistent=False)
        self.num_features = sum(self.sizes) or int(np.prod(space.shape or (1,)))

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        obs = cast("Tensor", obs)
        rows = obs.reshape(obs.shape[0], -1)
        if not self.sizes:
            return rows.float()
        places = rows.long() + self.offsets
        # not F.one_hot, which reads the values and so cannot be recorded
        return torch.zeros(rows.shape[0], self.num_features, device=rows.device).scatter_(1, places, 1.0)

    def encode_arrays(self, obs: ArrayObservation) -> AnyArray | None:
        """`forward` for numpy arrays; None if the observation is not an array."""
        if not isinstance(obs, np.ndarray):
            return None
        rows = obs.reshape(len(obs), -1)
        if not self.sizes:
            return rows
        features = np.zeros((len(rows), self.num_features), np.float32)
        np.put_along_axis(features, rows.astype(np.int64) + self._array_offsets, 1.0, axis=1)
        return features


NATURE_SIZE = 36
"""Smallest image size that the three convolutions of `nature_cnn` accept, in pixels."""


class ImageEncoder(Encoder):
    """Base class of convolutional encoders: turns images in any layout into floats [B, channels, height, width]."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        self.layout = image_layout(space)
        assert isinstance(space, spaces.Box)
        brightest = float(space.high.max()) if space.dtype == np.uint8 else 1.0  # 255, but 1 for planes of bits
        self.scale = 1.0 / max(brightest, 1.0)

    def images(self, obs: Observation) -> Tensor:
        """Images in channels-first order [B, C, H, W], in the stored type."""
        ordered = cast("Tensor", obs).permute(self.layout.order)
        return ordered.reshape(ordered.shape[0], self.layout.num_channels, *self.layout.size)

    def pixels(self, obs: Observation) -> Tensor:
        """Images [B, C, H, W] as float32, scaled to [0, 1]."""
        images = self.images(obs).contiguous(memory_format=torch.channels_last)  # faster convolutions on a CPU
        return images.to(torch.float32, copy=True).mul_(self.scale)


@ENCODERS.builtin("nature_cnn")
class NatureCNN(ImageEncoder):
    """Three convolutions and a linear layer with 512 outputs (Mnih et al. 2015)."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__(space)
        if min(self.layout.size) < NATURE_SIZE:
            raise SpaceError(f"nature_cnn needs images of at least {NATURE_SIZE} pixels; for {space} use impala_cnn")
        self.convolutions = ConvolutionStack(
            nn.Conv2d(self.layout.num_channels, 32, 8, stride=4), nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, 4, stride=2), nn.ReLU(inplace=True),
            nn.Conv2d(64, 64, 3), nn.ReLU(inplace=True), nn.Flatten(),
        )  # fmt: skip
        self.num_features = 512
        width = _num_outputs(self.convolutions, self.layout)
        self.linear = nn.Sequential(WideLinear(width, self.num_features), nn.ReLU(inplace=True))

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        features: Tensor = self.linear(self.convolutions(self.images(obs), self.scale))
        return features


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.ReLU(), nn.Conv2d(num_channels, num_channels, 3, padding=1),
            nn.ReLU(), nn.Conv2d(num_channels, num_channels, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """The output has the shape of the input."""
        carried: Tensor = x + self.layers(x)
        return carried


@ENCODERS.builtin("impala_cnn")
class ImpalaCNN(ImageEncoder):
    """Three stages of a convolution, max pooling with stride 2 and two residual blocks (Espeholt et al. 2018)."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__(space)
        layers: list[nn.Module] = []
        num_inputs = self.layout.num_channels
        for num_channels in (16, 32, 32):
            layers += [nn.Conv2d(num_inputs, num_channels, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(num_channels), ResidualBlock(num_channels)]
            num_inputs = num_channels
        self.convolutions = nn.Sequential(*layers, nn.ReLU(), nn.Flatten())
        self.num_features = 256
        width = _num_outputs(self.convolutions, self.layout)
        self.linear = nn.Sequential(WideLinear(width, self.num_features), nn.ReLU())

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        features: Tensor = self.linear(self.convolutions(self.pixels(obs)))
        return features


DRQ_SIZE = 15
"""Smallest image size that the four convolutions of `drq_cnn` accept, in pixels."""


@ENCODERS.builtin("drq_cnn")
class DrQCNN(ImageEncoder):
    """Four convolutions with 32 channels, only the first with stride 2 (Yarats et al. 2021).

    The output is flattened, without a linear layer: `PixelPolicy` adds a bottleneck per network.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__(space)
        if min(self.layout.size) < DRQ_SIZE:
            raise SpaceError(f"drq_cnn needs images of at least {DRQ_SIZE} pixels; for {space} use impala_cnn")
        self.convolutions = ConvolutionStack(
            nn.Conv2d(self.layout.num_channels, 32, 3, stride=2), nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3), nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3), nn.ReLU(inplace=True),
            nn.Conv2d(32, 32, 3), nn.ReLU(inplace=True), nn.Flatten(),
        )  # fmt: skip
        self.num_features = _num_outputs(self.convolutions, self.layout)

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`. Pixels are scaled to [-0.5, 0.5]."""
        features: Tensor = self.convolutions(self.pixels(obs) - 0.5)
        return features


def _num_outputs(layers: nn.Module, layout: ImageLayout) -> int:
    with torch.no_grad():
        return int(layers(torch.zeros(1, layout.num_channels, *layout.size)).shape[1])


@ENCODERS.builtin("dict")
class DictEncoder(Encoder):
    """Encodes each entry of a Dict space with its own encoder and concatenates the features in sorted key order.

    `images` names the encoder of image entries, with keyword arguments `images_kwargs`; the encoder of other entries is
    chosen by their space.
    """

    def __init__(
        self, space: spaces.Space[Any], images: str = "auto", images_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        if not isinstance(space, spaces.Dict):
            raise SpaceError(f"the 'dict' encoder needs a Dict observation space, got {space}")
        if images != "auto" and not has_images(space):
            raise SpaceError(f"encoder '{images}' needs images, but there are none in {space}")
        for key, part in space.spaces.items():
            if isinstance(part, spaces.Dict):
                raise SpaceError(f"observation '{key}' is a Dict inside a Dict; flatten it with a wrapper: {space}")
            if not isinstance(part, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
                others = [name for name in space.spaces if name != key]
                raise SpaceError(
                    f"observation '{key}' is a {type(part).__name__}, which is not supported. Leave it out: "
                    f"gymnasium.wrappers.FilterObservation(env, {others})"
                )
        self.keys = sorted(space.spaces)
        parts = [space.spaces[key] for key in self.keys]
        self.parts = nn.ModuleList(
            make_encoder(images, part, images_kwargs) if is_image(part) else make_encoder("auto", part)
            for part in parts
        )
        self.num_features = sum(cast("Encoder", part).num_features for part in self.parts)

    def forward(self, obs: Observation) -> Tensor:
        """See `Encoder.forward`."""
        obs = cast("dict[str, Tensor]", obs)
        return torch.cat([part(obs[key]) for key, part in zip(self.keys, self.parts, strict=True)], dim=1)

    def encode_arrays(self, obs: ArrayObservation) -> AnyArray | None:
        """`forward` for numpy arrays; None if torch has to encode one of the entries."""
        found: list[AnyArray] = []
        for key, part in zip(self.keys, self.parts, strict=True):
            encode = getattr(part, "encode_arrays", None)
            features = None if encode is None else encode(cast("dict[str, AnyArray]", obs)[key])
            if features is None:
                return None
            found.append(features.astype(np.float32, copy=False))
        return np.concatenate(found, axis=1)
