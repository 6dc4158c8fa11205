"""Reports which functions of an object are accelerated, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from rl_training.accelerate.recording import Accelerated, HasAccelerated
from rl_training.contracts.state import Stateful


def report(owner: Any) -> dict[str, str]:
    """The status of every accelerated function of an object, by name: see `Accelerated.status`."""
    return {name: function.status() for name, function in _functions(owner, "", set())}


def forget(owner: Any) -> None:
    """Drop every recording of an object, after its weights were replaced."""
    for _, function in _functions(owner, "", set()):
        function.forget()


def _functions(owner: Any, prefix: str, seen: set[int]) -> Iterator[tuple[str, Accelerated[Any]]]:
    """The accelerated functions in an object, in its Stateful parts and in its modules."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    parts = dict(getattr(owner, "__dict__", {}))
    if isinstance(owner, nn.Module):
        parts |= owner._modules
    for name, part in parts.items():
        if isinstance(part, Accelerated):
            yield f"{prefix}{name.lstrip('_')}", part
        elif isinstance(part, (Stateful, nn.Module, HasAccelerated)):
            yield from _functions(part, f"{prefix}{name.lstrip('_')}.", seen)
