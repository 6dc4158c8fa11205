"""Named random streams with one owner each: a new consumer never changes another's numbers."""

from __future__ import annotations

import zlib

import numpy as np


def random_stream(seed: int, name: str, index: int = 0) -> np.random.Generator:
    """The random stream with that name for a run's seed, as a numpy generator: its state is a few plain integers.

    Example:
        >>> a, b = random_stream(1, "policy"), random_stream(1, "policy")
        >>> a.random() == b.random()
        True
    """
    return np.random.default_rng([seed, zlib.crc32(name.encode()), index])


def draw_seed(rng: np.random.Generator) -> int:
    """A seed for something that seeds itself, such as an environment."""
    return int(rng.integers(2**31))
