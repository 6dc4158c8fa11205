"""Types for numpy arrays; separate from tensor types, so that environments need not import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.floating[Any]]
AnyArray = npt.NDArray[Any]

ArrayObservation = AnyArray | dict[str, AnyArray]
"""A batch of observations; a dict for Dict spaces."""

In = TypeVar("In")
Out = TypeVar("Out")


def map_observation(fn: Callable[[In], Out], obs: In | dict[str, In]) -> Out | dict[str, Out]:
    """Apply `fn` to an observation, or to each entry of a dict observation."""
    if isinstance(obs, dict):
        return {key: fn(value) for key, value in obs.items()}
    return fn(obs)
