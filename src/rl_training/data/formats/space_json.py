"""Spaces as plain data for JSON, in the layout of Minari's metadata; bounds that are all equal are one number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from rl_training.contracts.arrays import AnyArray
from rl_training.data.dataset import DatasetError

MAX_ENTRIES = 2**24
"""Largest number of components that a space read from a file may have."""
_NUMBERS = frozenset("biuf")


def space_to_json(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as plain data.

    Example:
        >>> space_to_json(spaces.Box(-2.0, 2.0, (1,)))
        {'type': 'Box', 'dtype': 'float32', 'shape': [1], 'low': -2.0, 'high': 2.0}
    """
    if isinstance(space, spaces.Box):
        bounds = {"low": _bound(space.low), "high": _bound(space.high)}
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), **bounds}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        lists = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), **lists}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": space.n if isinstance(space.n, int) else [int(n) for n in space.shape]}
    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {key: space_to_json(part) for key, part in space.spaces.items()}}
    raise DatasetError(f"datasets hold Box, Discrete, MultiDiscrete, MultiBinary and Dict spaces, got {space}")


def _bound(values: AnyArray) -> Any:
    if values.size and (values == values.flat[0]).all():
        return values.flat[0].item()
    return values.tolist()


def space_from_json(data: Any) -> spaces.Space[Any]:
    """The inverse of `space_to_json`; also reads what Minari writes. Runs no code and allocates no more than it must."""
    try:
        return _space(data, depth=0)
    except DatasetError:
        raise
    except (KeyError, TypeError, ValueError, AssertionError, OverflowError, MemoryError) as error:
        raise DatasetError(f"a stored space is damaged: {type(error).__name__}: {error}") from error


def _space(data: Any, depth: int) -> spaces.Space[Any]:
    if not isinstance(data, dict) or depth > 8:
        raise ValueError("not a mapping with a type, or nested too deeply")
    kind = data.get("type")
    if kind == "Box":
        dtype, shape = np.dtype(str(data["dtype"])), tuple(int(size) for size in data["shape"])
        _check_size(shape)
        if dtype.kind not in _NUMBERS:
            raise ValueError(f"dtype {dtype}")
        low, high = (np.broadcast_to(np.asarray(data[name], dtype), shape) for name in ("low", "high"))
        return spaces.Box(low.copy(), high.copy(), shape, dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(data["n"]), start=int(data.get("start", 0)))
    if kind == "MultiDiscrete":
        nvec = np.asarray(data["nvec"], np.int64)
        start = np.asarray(data.get("start", np.zeros_like(nvec)), np.int64)
        return spaces.MultiDiscrete(nvec, start=start)
    if kind == "MultiBinary":
        n = data["n"]
        _check_size([int(size) for size in n] if isinstance(n, list) else [int(n)])
        return spaces.MultiBinary([int(size) for size in n] if isinstance(n, list) else int(n))
    if kind == "Dict":
        return spaces.Dict({str(key): _space(part, depth + 1) for key, part in data["subspaces"].items()})
    raise DatasetError(f"datasets hold Box, Discrete, MultiDiscrete, MultiBinary and Dict spaces, got {kind!r:.40}")


def _check_size(shape: Any) -> None:
    if any(size < 0 for size in shape) or math.prod(shape) > MAX_ENTRIES:
        raise ValueError(f"shape {tuple(shape)!r:.80}")


def flatten_dict(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """A Dict space without nested ones: their keys are joined by dots."""
    if not isinstance(space, spaces.Dict):
        return space
    parts: dict[str, spaces.Space[Any]] = {}
    for key, part in space.spaces.items():
        inner = flatten_dict(part)
        if isinstance(inner, spaces.Dict):
            parts.update({f"{key}.{name}": leaf for name, leaf in inner.spaces.items()})
        else:
            parts[key] = inner
    return spaces.Dict(parts)
