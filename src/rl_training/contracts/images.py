"""Which observations are images, and what their dimensions mean."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from rl_training.contracts.errors import SpaceError

MIN_GREY_SIDE = 8
"""Smallest side of a greyscale image; a smaller two-dimensional uint8 array may be a table or a few vectors."""


def is_image(space: spaces.Space[Any]) -> bool:
    """Whether a space holds images or stacks of images: uint8 with two, three or four dimensions.

    Two dimensions are one greyscale image if both sides are at least 8.

    Example:
        >>> is_image(spaces.Box(0, 255, (84, 84), np.uint8)), is_image(spaces.Box(0, 255, (4, 128), np.uint8))
        (True, False)
    """
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8:
        return False
    return len(space.shape) in (3, 4) or (len(space.shape) == 2 and min(space.shape) >= MIN_GREY_SIDE)


def has_images(space: spaces.Space[Any]) -> bool:
    """Whether observations are images, or a Dict with at least one image."""
    return any(map(is_image, space.spaces.values())) if isinstance(space, spaces.Dict) else is_image(space)


class ImageLayout(NamedTuple):
    """What the dimensions of an image space mean."""

    num_channels: int
    """Channels times stacked frames."""
    size: tuple[int, int]
    order: tuple[int, ...]
    """Permutation of a batch's dimensions to batch, (stack,) (channels,) height, width."""

    @property
    def channel_dim(self) -> int | None:
        """Channel dimension of one image (not of a batch); None if it has only height and width."""
        return self.order[-3] - 1 if len(self.order) > 3 else None


def image_layout(space: spaces.Space[Any]) -> ImageLayout:
    """Which dimensions are channels, height and width; a fourth dimension in front stacks frames.

    If exactly one of channels-first and channels-last makes the image square, that layout is used. Otherwise the
    smaller of the first and the last dimension is the channels. An image with two dimensions has one channel.
    """
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3, 4):
        raise SpaceError(f"convolutions need images: a Box with 2, 3 or 4 dimensions; got {space}")
    if len(space.shape) == 2:
        height, width = space.shape
        return ImageLayout(1, (height, width), (0, 1, 2))
    *stack, first, middle, last = space.shape
    batch = tuple(range(1 + len(stack)))
    here = len(batch)
    square_behind, square_in_front = middle == last, first == middle
    if square_behind if square_behind != square_in_front else first <= last:
        return ImageLayout(math.prod(stack) * first, (middle, last), (*batch, here, here + 1, here + 2))
    return ImageLayout(math.prod(stack) * last, (first, middle), (*batch, here + 2, here, here + 1))
