"""Recorded operator calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Apply a function to every tensor in a value; tensors may be in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: a single tensor, or those in dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(tuple(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


class Call(NamedTuple):
    """One operator call: the operator, its arguments and its result."""

    operator: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """The operator's name without its overload."""
        return str(self.operator._overloadpacket.__name__)

    @property
    def is_in_place(self) -> bool:
        """Whether the operator changes some of its arguments in-place."""
        return bool(self.operator._schema.is_mutable)

    def inputs(self) -> list[Tensor]:
        """Tensors among the arguments."""
        return list(tensors_in((self.args, self.kwargs)))

    def outputs(self) -> list[Tensor]:
        """Tensors among the results."""
        return list(tensors_in(self.result))

    def written(self) -> list[Tensor]:
        """Arguments that the operator changes in-place."""
        found: list[Tensor] = []
        for index, argument in enumerate(self.operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += tensors_in(self.args[index] if index < len(self.args) else self.kwargs.get(argument.name))
        return found


def used_tensors(function: Callable[[], Any]) -> Callable[[Tensor], bool]:
    """A predicate: whether a call of the function reads a tensor; views of the same memory count as one tensor."""
    from rl_training.accelerate.recording import Recorder

    with Recorder() as recorder:
        function()
    used = {storage_of(tensor) for call in recorder.calls for tensor in call.inputs()}
    return lambda tensor: storage_of(tensor) in used


def storage_of(tensor: Tensor) -> int:
    """An identifier of a tensor's storage; all views of the same memory share it."""
    return int(tensor.untyped_storage()._cdata)
