"""Owned, named random streams: a new consumer never shifts another's numbers."""

from __future__ import annotations

import zlib

import numpy as np


def random_stream(seed: int, name: str, index: int = 0) -> np.random.Generator:
    """The stream of that name under a run's seed. Numpy generators, because their state is a few plain integers.

    Example:
        >>> a, b = random_stream(1, "policy"), random_stream(1, "policy")
        >>> a.random() == b.random()
        True
    """
    return np.random.default_rng([seed, zlib.crc32(name.encode()), index])


def draw_seed(rng: np.random.Generator) -> int:
    """A seed for something that seeds itself, such as an environment."""
    return int(rng.integers(2**31))
