"""Kernels of a recorded call: which of them a replay runs, where their results are stored, and how each is called."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from rl_training.accelerate.calls import Call, map_tensors, storage_of, tensors_in
from rl_training.accelerate.modes import Mode
from rl_training.accelerate.native.takeover import Library, Takeover
from rl_training.accelerate.numpy_kernels import numpy_kernel

Kernel = Callable[[], Any]

ALIGNMENT = 64
"""Bytes; the alignment of torch's allocator. Kernels may round differently with another."""
MAKERS = frozenset(
    {
        "arange", "empty", "empty_like", "empty_strided", "full", "full_like", "new_empty", "new_empty_strided",
        "new_full", "new_ones", "new_zeros", "ones", "ones_like", "scalar_tensor", "zeros", "zeros_like",
    }
)  # fmt: skip
"""Operators with constant results: a replay skips them, unless something writes into the result."""
METHODS = frozenset({"add_", "copy_", "div_", "fill_", "lerp_", "masked_fill_", "mul_", "sub_", "zero_"})
"""In-place operators that are faster to call as methods."""


ELEMENTWISE = frozenset(
    {
        "abs", "add", "div", "exp", "log", "maximum", "minimum", "mul", "neg", "pow", "reciprocal", "relu", "rsub",
        "sigmoid", "sqrt", "sub", "tanh", "tanh_backward", "threshold_backward",
    }
)  # fmt: skip
"""Elementwise operators, which may write their result over an input."""


class Recording:
    """The kernels of one call, ready to be replayed on their own memory.

    `places` are the input buffers. Weights and other tensors from before the call are used at their own addresses. The
    kernels' results are stored in `memory`.
    """

    def __init__(
        self, calls: Sequence[Call], places: list[Tensor], outputs: Any, memory: Memory, mode: Mode = "auto"
    ) -> None:
        needed = calls_to_repeat(calls)
        straight = copies_to_spare(needed, outputs)
        needed = [call for step, call in enumerate(needed) if step not in straight]
        move = Mover(needed, outputs, straight.values(), memory)
        self.places = [place.detach() for place in places]
        self._places = [place.data_ptr() for place in places]
        self._sizes = [place.numel() * place.element_size() for place in places]
        self.outputs = map_tensors(move, outputs)
        written = (t for call in needed for t in call.written() if storage_of(t) not in move.offsets)
        state = [*map(move, written), *(call.args[0] for call in straight.values())]
        kernels = [make_kernel(call, move) for call in needed]
        self.takeover: Takeover | None = Takeover(needed, kernels, move, outputs, state, mode)
        self.kernels = kernels
        self.library: Library | None = None
        self.why_not_compiled: str | None = None
        """Why it is not compiled; empty if it is, None if that is not decided yet."""
        self.is_flat = type(outputs) is dict and all(isinstance(value, Tensor) for value in outputs.values())
        made = {id(tensor) for tensor in (*places, *(t for call in calls for t in call.outputs()))}
        used = {id(tensor): tensor for call in calls for tensor in call.inputs() if id(tensor) not in made}
        self.outside = list(used.values())
        self.addresses = [tensor.data_ptr() for tensor in self.outside]

    def is_current(self) -> bool:
        """Whether the weights and buffers still have the recorded addresses."""
        return [tensor.data_ptr() for tensor in self.outside] == self.addresses

    def replay(self, leaves: list[Tensor]) -> Any:
        """Run the kernels on new inputs, and return copies of the outputs."""
        with torch.no_grad(), np.errstate(all="ignore"):  # torch does not warn about infinities either
            for place, size, leaf in zip(self._places, self._sizes, leaves, strict=True):
                ctypes.memmove(place, leaf.data_ptr(), size)  # same layout, no gaps; a faster call than `copy_`
            if self.takeover is None:
                for kernel in self.kernels:
                    kernel()
            else:
                self._prepare()
            if self.is_flat:  # a faster version of the next line
                return {name: value.clone() for name, value in self.outputs.items()}
            return map_tensors(Tensor.clone, self.outputs)

    def _prepare(self) -> None:
        """Run the kernels while it is not decided yet whether they are compiled."""
        takeover = self.takeover
        assert takeover is not None
        takeover.run()
        if takeover.is_done:
            self.kernels, self.library, self.takeover = takeover.kernels, takeover.library, None
            self.why_not_compiled = takeover.refusal


def calls_to_repeat(calls: Sequence[Call]) -> list[Call]:
    """The calls that a replay needs: no views (they stay valid), no constants that nothing writes into."""
    changed = {storage_of(tensor) for call in calls for tensor in call.written()}
    needed = []
    for call in calls:
        inputs = {storage_of(tensor) for tensor in call.inputs()}
        results = {storage_of(tensor) for tensor in call.outputs()}
        is_view = results <= inputs and not call.is_in_place
        is_constant = call.name in MAKERS and not results & changed
        if (inputs or results) and not is_view and not is_constant:
            needed.append(call)
    return needed


def copies_to_spare(calls: Sequence[Call], outputs: Any) -> dict[int, Call]:
    """Copies, by step, that only move a result to its final place, so that it can be written there directly.

    Gradients are such results.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, call in enumerate(calls):
        for tensor in call.outputs() if not call.is_in_place else ():
            first.setdefault(storage_of(tensor), step)
        last |= dict.fromkeys(map(storage_of, (*call.inputs(), *call.outputs())), step)
    last |= dict.fromkeys(map(storage_of, tensors_in(outputs)), len(calls))
    found = {}
    for step, call in enumerate(calls):
        if call.name != "copy_" or storage_of(call.args[0]) in first:
            continue
        place, source = call.args[:2]
        begin = first.get(storage_of(source), step)
        is_free = not any(_overlap(place, other) for between in calls[begin:step] for other in between.inputs())
        if begin < step and last[storage_of(source)] == step and is_free and _can_replace(place, source):
            found[step] = call
    return found


def _can_replace(place: Tensor, source: Tensor) -> bool:
    """Whether results for `source` may be written to `place` instead, bit-identically."""
    layouts = [(t.dtype, t.shape, [t.stride(d) for d in range(t.dim()) if t.shape[d] > 1]) for t in (place, source)]
    is_whole = source.storage_offset() == 0 and source.untyped_storage().nbytes() == source.nbytes
    return layouts[0] == layouts[1] and is_whole and place.data_ptr() % ALIGNMENT == 0


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory; `one` has no gaps."""
    last = sum((n - 1) * stride for n, stride in zip(other.shape, other.stride(), strict=True))
    end = other.data_ptr() + other.element_size() * (1 + last)
    return one.data_ptr() < end and other.data_ptr() < one.data_ptr() + one.nbytes


class Memory:
    """A memory block shared by all recordings of a function: only one runs at a time, and nothing in it is kept.

    An update of TD3 alternates between two recordings: separate blocks would use twice the memory and cache.
    """

    def __init__(self) -> None:
        self._block: torch.UntypedStorage | None = None

    def of(self, size: int) -> torch.UntypedStorage:
        """A block of at least `size` bytes; blocks returned earlier stay valid."""
        if self._block is None or self._block.nbytes() < size:
            self._block = torch.empty(size, dtype=torch.uint8).untyped_storage()
        return self._block


class Mover:
    """Moves the tensors created by a recording into one block, where tensors with disjoint lifetimes share memory.

    Recently used memory is still in the CPU cache: on networks of 256 x 256 this saves a fifth of the time. The sources
    of `copies` are placed at the destinations of these copies.
    """

    def __init__(self, calls: Sequence[Call], outputs: Any, copies: Iterable[Call], memory: Memory) -> None:
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        self._kept: dict[int, Tensor] = {storage_of(call.args[1]): call.args[0] for call in copies}
        made = {storage_of(t): t.untyped_storage() for call in calls if not call.is_in_place for t in call.outputs()}
        made = {storage: memory for storage, memory in made.items() if storage not in self._kept}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for step, call in enumerate(calls):
            for tensor in (*call.inputs(), *call.outputs()):
                if (storage := storage_of(tensor)) in made:
                    first.setdefault(storage, step)
                    last[storage] = step
        last |= {storage_of(t): len(calls) for t in tensors_in(outputs) if storage_of(t) in made}
        sizes = {storage: -(-memory.nbytes() // ALIGNMENT) * ALIGNMENT for storage, memory in made.items()}
        places = take_over(calls, first, last)
        self.offsets = lay_out(first, last, sizes)
        self.offsets |= {heir: self.offsets[place] for heir, place in places.items()}
        total = max((offset + sizes[storage] for storage, offset in self.offsets.items()), default=0)
        self._block = memory.of(total + ALIGNMENT)
        self._base = -self._block.data_ptr() % ALIGNMENT

    def __call__(self, tensor: Tensor) -> Tensor:
        """The tensor at its new address, without gradients; unmoved if no recorded call created it."""
        if id(tensor) not in self._moved:
            self._moved[id(tensor)] = (tensor, self._move(tensor))  # keeps both, so that the id is not reused
        return self._moved[id(tensor)][1]

    def forget(self) -> None:
        """Overwrite the block, so that a later check cannot succeed with old results."""
        torch.empty(0, dtype=torch.uint8).set_(self._block, 0, (self._block.nbytes(),), (1,)).fill_(255)

    def _move(self, tensor: Tensor) -> Tensor:
        place = self._kept.get(storage_of(tensor))
        if place is not None:
            return _view(tensor, place.untyped_storage(), int(place.storage_offset()) * place.element_size())
        offset = self.offsets.get(storage_of(tensor))
        return tensor.detach() if offset is None else _view(tensor, self._block, self._base + offset)


def _view(tensor: Tensor, memory: torch.UntypedStorage, offset: int) -> Tensor:
    """A tensor with the layout of another, in `memory` at an offset in bytes."""
    start = offset // tensor.element_size() + tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype).set_(memory, start, tensor.shape, tensor.stride())


def take_over(calls: Sequence[Call], first: dict[int, int], last: dict[int, int]) -> dict[int, int]:
    """Storages that may reuse the memory of another: results of elementwise operators on an input's last use.

    The lifetime of the reused storage is extended to that of the new one, which is removed from `first` and `last`.
    """
    places: dict[int, int] = {}
    for step, call in enumerate(calls):
        heir = storage_of(call.result) if isinstance(call.result, Tensor) else 0
        if call.name not in ELEMENTWISE or first.get(heir) != step:
            continue
        for tensor in call.inputs():
            piece = places.get(storage_of(tensor), storage_of(tensor))
            if last.get(piece) == step and all(_same_layout(t, call.result) for t in _views_of(tensor, call)):
                places[heir] = piece
                last[piece] = last.pop(heir)
                del first[heir]
                break
    return places


def _views_of(tensor: Tensor, call: Call) -> list[Tensor]:
    """The arguments of a call that share memory with a tensor."""
    return [other for other in call.inputs() if storage_of(other) == storage_of(tensor)]


def _same_layout(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same layout in storages of equal size."""
    layouts = [(t.dtype, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes()) for t in (one, other)]
    return layouts[0] == layouts[1]


def lay_out(first: dict[int, int], last: dict[int, int], sizes: dict[int, int]) -> dict[int, int]:
    """Offsets of storages that are used from a first to a last step, each at the lowest free offset.

    Example: the third storage reuses the memory of the first.
        >>> lay_out(first={1: 0, 2: 1, 3: 2}, last={1: 1, 2: 2, 3: 3}, sizes={1: 64, 2: 64, 3: 64})
        {1: 0, 2: 64, 3: 0}
    """
    offsets: dict[int, int] = {}
    live: list[int] = []
    for piece in first:  # in the order of their first steps
        live = [other for other in live if last[other] >= first[piece]]
        place = 0
        for other in sorted(live, key=offsets.__getitem__):
            if offsets[other] - place >= sizes[piece]:
                break
            place = max(place, offsets[other] + sizes[other])
        offsets[piece] = place
        live.append(piece)
    return offsets


# ---------------------------------------------------------------------------------------------------------------------
# How to call an operator so that it writes its results to given memory
# ---------------------------------------------------------------------------------------------------------------------

Writer = Callable[[tuple[Any, ...], dict[str, Any], Any], Kernel]
"""Makes a kernel from arguments, keyword arguments, and the tensors to write to."""

_WRITERS: dict[Any, Writer] = {}
"""Cache: the writer of each form of operator call."""


def make_kernel(call: Call, move: Callable[[Tensor], Tensor]) -> Kernel:
    """A kernel that repeats a call: with bound arguments, and results written to the (moved) recorded ones."""
    args, kwargs, result = (map_tensors(move, value) for value in (call.args, call.kwargs, call.result))
    kernel = None if "out" in kwargs else numpy_kernel(call.name, args, kwargs, result)
    if kernel is not None:
        return kernel
    if call.is_in_place:
        method = getattr(Tensor, call.name) if call.name in METHODS else call.operator
        return functools.partial(method, *args, **kwargs)
    # some operators return fewer tensors if fewer gradients are needed
    form = (call.operator, len(args), tuple(kwargs), type(call.result), len(call.outputs()))
    if form not in _WRITERS:
        _WRITERS[form] = find_writer(call)
    return _WRITERS[form](args, kwargs, result)


def find_writer(call: Call) -> Writer:
    """The fastest way to call an operator that is bit-identical to the operator itself."""
    for writer in (_by_twin(call), _by_copy(call), _by_function(call), _by_overload(call)):
        if writer is not None and _repeats(writer, call):
            return writer
    return functools.partial(_run_and_copy, call.operator)


def _by_twin(call: Call) -> Writer | None:
    """An equivalent operator that can write to given memory; relu itself would allocate a result and copy it."""
    if call.name != "relu":
        return None
    return lambda args, kwargs, result: functools.partial(torch.clamp_min, *args, 0, out=result)


def _by_function(call: Call) -> Writer | None:
    """`torch.name(..., out=...)`."""
    function = getattr(torch, call.name, None)
    if function is None:
        return None
    return lambda args, kwargs, result: functools.partial(function, *args, **kwargs, out=result)


def _by_overload(call: Call) -> Writer | None:
    """The overload of the operator that takes the same arguments and output tensors."""
    packet = call.operator._overloadpacket
    wanted = [(argument.name, str(argument.type)) for argument in call.operator._schema.arguments]
    for name in packet.overloads():
        overload = getattr(packet, name)
        outs = [a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        rest = [(a.name, str(a.type)) for a in overload._schema.arguments if a.name not in outs]
        if outs and rest == wanted and len(outs) == len(call.outputs()):
            return functools.partial(_bind_overload, overload, outs)
    return None


def _bind_overload(
    overload: OpOverload, outs: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> Kernel:
    # `_op` directly, without the Python wrapper around it
    return functools.partial(overload._op, *args, **kwargs, **dict(zip(outs, tensors_in(result), strict=True)))


def _by_copy(call: Call) -> Writer | None:
    """`copy_`, for operators that only copy, possibly to another type."""
    if call.name not in ("clone", "_to_copy"):
        return None
    return lambda args, kwargs, result: functools.partial(result.copy_, args[0])


def _run_and_copy(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Kernel:
    def kernel() -> None:
        for place, value in zip(tensors_in(result), tensors_in(operator(*args, **kwargs)), strict=True):
            place.copy_(value)

    return kernel


@torch.no_grad()
def _repeats(writer: Writer, call: Call) -> bool:
    """Whether a writer runs, on memory like that of the recorded results, and is bit-identical to the operator.

    The operator is run again for comparison, since its arguments may have changed after it was recorded.
    """
    args, kwargs = map_tensors(Tensor.detach, call.args), map_tensors(Tensor.detach, call.kwargs)
    result = map_tensors(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), call.result)
    before = [(t.data_ptr(), t.shape, t.stride()) for t in tensors_in(result)]
    try:
        writer(args, kwargs, result)()
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    if before != [(t.data_ptr(), t.shape, t.stride()) for t in tensors_in(result)]:
        return False
    pairs = zip(tensors_in(result), tensors_in(call.operator(*args, **kwargs)), strict=True)
    return all(torch.equal(_bits(mine), _bits(its)) for mine, its in pairs)


def _bits(tensor: Tensor) -> Tensor:
    """Floats reinterpreted as integers, because NaN is not equal to itself."""
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}
    return tensor.contiguous().view(integers[tensor.dtype]) if tensor.dtype in integers else tensor
