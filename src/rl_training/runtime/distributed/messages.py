"""Messages between a fleet and its workers: JSON, and the bytes of arrays. Reading one cannot run code."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Message = dict[str, Any]
"""Dicts with string keys, lists, plain values, arrays and tensors."""
_ARRAY, _TENSOR = "$array", "$tensor"
_ALIGNMENT = 64
_LENGTH = struct.Struct("<Q")


def pack(message: Message) -> bytes:
    """A message as bytes.

    Example:
        >>> unpack(pack({"rows": np.arange(3), "steps": 7}))
        {'rows': array([0, 1, 2]), 'steps': 7}
    """
    arrays: list[Any] = []

    def split(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            arrays.append(value.detach().cpu().numpy())
            return {_TENSOR: [arrays[-1].dtype.str, arrays[-1].shape]}
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return {_ARRAY: [value.dtype.str, value.shape]}
        if isinstance(value, dict):
            return {key: split(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [split(item) for item in value]
        return value.item() if isinstance(value, np.generic) else value

    header = json.dumps(split(message)).encode()
    parts = [_LENGTH.pack(len(header)), header]
    size = sum(map(len, parts))
    for array in arrays:
        parts += [bytes(-size % _ALIGNMENT), array.tobytes()]
        size += len(parts[-2]) + len(parts[-1])
    return b"".join(parts)


def unpack(data: bytes) -> Message:
    """The inverse of `pack`; arrays and tensors are copies. Tuples have become lists."""
    (length,) = _LENGTH.unpack_from(data)
    place = _LENGTH.size + length

    def read(dtype: str, shape: list[int]) -> Any:
        nonlocal place
        place += -place % _ALIGNMENT
        kind = np.dtype(dtype)
        count = int(np.prod(shape))
        found = np.frombuffer(data, kind, count, place).reshape(shape).copy()
        place += count * kind.itemsize
        return found

    makers: dict[str, Callable[[Any], Any]] = {_ARRAY: np.asarray, _TENSOR: torch.from_numpy}

    def join(value: Any) -> Any:
        if isinstance(value, dict):
            for key, make in makers.items():
                if value.keys() == {key}:
                    return make(read(*value[key]))
            return {key: join(item) for key, item in value.items()}
        return [join(item) for item in value] if isinstance(value, list) else value

    message: Message = join(json.loads(data[_LENGTH.size : _LENGTH.size + length]))
    return message
