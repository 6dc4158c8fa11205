"""State that checkpoints save, collected from attributes by their types instead of from lists of names.

A `Stateful` object's state is found in its attributes:

- other `Stateful` objects, `torch.nn.Module`s, numpy and torch random generators, tensors and arrays;
- lists and dicts of `Stateful` objects;
- for a dataclass, every field, so counters belong in a dataclass.

Plain numbers and strings of other classes are settings, not state. A class lists its scratch attributes in
`transient`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from rl_training.contracts.errors import CheckpointError

PLAIN = (bool, int, float, str, type(None))
MAX_NUMBER = 2**63
"""Upper limit of counters."""


@dataclasses.dataclass(eq=False)
class Segment:
    """A large, append-only part of a state, such as a range of replay rows, stored in its own file.

    A segment with a `file` is not written again: later checkpoints share that file.
    """

    tensors: Callable[[], dict[str, torch.Tensor]]
    """Its contents, as views of memory or read from its file; called only when it is written or restored."""
    complete: bool = True
    """Whether it will never change, so that its file may be shared."""
    file: Path | None = None
    sha256: str = ""
    stamp: tuple[int, int] = (0, 0)
    """Inode and time of the file, to detect whether another file has replaced it."""
    unverified: int = 0
    """Checkpoints that shared the file since its checksum was last compared."""


class Stateful:
    """Base class of objects whose state checkpoints save.

    Example:
        >>> @dataclasses.dataclass
        ... class Counter(Stateful):
        ...     count: int = 0
        >>> Counter(3).state_dict()
        {'count': 3}
    """

    transient: ClassVar[tuple[str, ...]] = ()
    """Attributes that are scratch space: rebuilt or overwritten before they are read after a restore."""

    def keeps(self, field: dataclasses.Field[Any]) -> bool:
        """Whether a dataclass field is state; by default each is."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """State as nested dicts of tensors, arrays and plain values. Tensors are not copied."""
        return {name: _capture(value) for name, value in _state_items(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; unknown, missing or mistyped entries raise `CheckpointError`."""
        items, hints = dict(_state_items(self)), _hints(type(self))
        check_keys(type(self).__name__, items.keys(), state)
        for name, value in items.items():
            restored = _restore(f"{type(self).__name__}.{name}", value, state[name], hints.get(name, Any))
            if restored is not value:
                setattr(self, name, restored)


def check_keys(owner: str, expected: Any, found: Any) -> None:
    """Refuse a state whose keys are not exactly the expected ones."""
    if not isinstance(found, Mapping):
        raise CheckpointError(f"the saved state does not fit {owner}: expected a mapping, got {found!r:.60}")
    missing, unknown = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or unknown:
        differences = (("missing", missing), ("unknown", unknown))
        parts = [f"{label} {', '.join(map(str, names))}" for label, names in differences if names]
        raise CheckpointError(f"the saved state does not fit {owner}: {'; '.join(parts)}")


def same_state(one: Any, other: Any) -> bool:
    """Whether two states are bitwise equal, including types; NaN equals NaN.

    Example:
        >>> same_state({"a": [1, float("nan")]}, {"a": [1, float("nan")]}), same_state([1], [1.0])
        (True, False)
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same_state, one, other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and same_state(one.numpy(force=True), other.numpy(force=True))
    return bool(one == other) or (one != one and other != other)


def _state_items(owner: Stateful) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(owner):
        for field in dataclasses.fields(owner):
            if field.name not in owner.transient and owner.keeps(field):
                yield field.name, getattr(owner, field.name)
        return
    for name, value in vars(owner).items():
        if name not in owner.transient and _is_state(value):
            yield name, value


def _is_state(value: Any) -> bool:
    if isinstance(value, torch.optim.Optimizer):
        raise TypeError("a bare optimizer cannot be saved: wrap it in a ParameterStore, which names its slots")
    if isinstance(value, (Stateful, nn.Module, np.random.Generator, torch.Generator, torch.Tensor, np.ndarray)):
        return True
    if isinstance(value, (list, tuple)):
        return any(_is_state(item) for item in value)
    if isinstance(value, dict):
        return any(_is_state(item) for item in value.values())
    return False


def _capture(value: Any) -> Any:
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, nn.Module):
        return dict(value.state_dict())
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (np.ndarray, *PLAIN)):
        return value
    if isinstance(value, (list, tuple, deque)):
        return [_capture(item) for item in value]
    if isinstance(value, dict):
        return {key: _capture(item) for key, item in value.items()}
    raise TypeError(f"cannot put a {type(value).__name__} into a checkpoint")


def check_tensor(where: str, expected: torch.Tensor, found: Any) -> None:
    """Refuse what is not a tensor of the same shape and type."""
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(f"{where} is a tensor, the checkpoint has {found!r:.60}")
    _check_shape(where, tuple(expected.shape), tuple(found.shape))
    if expected.dtype != found.dtype:
        raise CheckpointError(f"{where} is of type {expected.dtype}, the checkpoint has {found.dtype}")


def _restore(where: str, current: Any, saved: Any, hint: Any = Any) -> Any:
    """Restore in place where the object allows it; return the object or the new plain value."""
    if isinstance(current, Stateful):
        current.load_state_dict(saved)
    elif isinstance(current, nn.Module):
        own = current.state_dict()
        check_keys(where, own.keys(), saved)
        with torch.no_grad():
            for name, tensor in own.items():
                _restore(f"{where}.{name}", tensor, saved[name])
    elif isinstance(current, np.random.Generator):
        current.bit_generator.state = saved
    elif isinstance(current, torch.Generator):
        current.set_state(torch.as_tensor(saved, dtype=torch.uint8).cpu())
    elif isinstance(current, torch.Tensor):
        check_tensor(where, current, torch.from_numpy(saved) if isinstance(saved, np.ndarray) else saved)
        with torch.no_grad():
            current.copy_(torch.as_tensor(saved))
    elif isinstance(current, np.ndarray):
        check_tensor(where, torch.from_numpy(current), torch.as_tensor(saved))
        np.copyto(current, np.asarray(saved))
    elif isinstance(current, deque):
        check_plain(where, hint, saved, current)
        current.clear()
        current.extend(saved)
    elif isinstance(current, (list, tuple)) and any(_is_state(item) for item in current):
        if len(current) != len(saved):
            raise CheckpointError(f"{where} has {len(current)} parts, the checkpoint {len(saved)}")
        items = [_restore(f"{where}[{index}]", item, saved[index]) for index, item in enumerate(current)]
        if isinstance(current, tuple):
            return current if all(a is b for a, b in zip(items, current, strict=True)) else tuple(items)
        current[:] = items
    elif isinstance(current, dict) and any(_is_state(item) for item in current.values()):
        check_keys(where, current.keys(), saved)
        for key, item in current.items():
            current[key] = _restore(f"{where}[{key}]", item, saved[key])
    else:
        check_plain(where, hint, saved, current)
        return tuple(saved) if isinstance(current, tuple) and isinstance(saved, list) else saved  # files have no tuples
    return current


def _hints(cls: type[Any]) -> dict[str, Any]:
    """Type hints of a dataclass's fields."""
    try:
        return typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    except NameError:  # names imported only for type checking
        return {}


def check_plain(where: str, hint: Any, saved: Any, current: Any = ...) -> None:
    """Refuse plain data that matches neither the type hint nor the type of the current value."""
    if not _fits(hint, saved) and not (type(saved) is type(current) and _fits(type(saved), saved)):
        expected = getattr(hint, "__name__", hint) if not typing.get_args(hint) else hint
        raise CheckpointError(f"{where} is of type {expected}, the checkpoint has {saved!r:.60}")


def _fits(hint: Any, value: Any) -> bool:
    """Whether plain data matches a type hint; other data is checked where it is restored."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(arg, value) for arg in args)
    if hint is float:
        return isinstance(value, float) or (type(value) is int and abs(value) <= MAX_NUMBER)
    if hint is int:
        return type(value) is int and abs(value) <= MAX_NUMBER
    if hint in (bool, str, type(None), dict, list):
        return isinstance(value, hint)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(args[1], item) for item in value.values())
    if origin in (list, tuple, deque) or hint in (tuple, deque):
        item_hint = args[0] if args and (origin is not tuple or args[1:] == (...,)) else Any
        return isinstance(value, (list, tuple)) and all(_fits(item_hint, item) for item in value)
    return True


def _check_shape(where: str, expected: tuple[int, ...], found: tuple[int, ...]) -> None:
    if expected != found:
        raise CheckpointError(f"{where} has shape {expected}, the checkpoint has {found}")
