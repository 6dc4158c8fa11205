"""Recorded functions: the kernels of one call are recorded, and later calls replay only those, on preallocated memory.

Small networks spend most of their time between kernels: in Python modules, in autograd, in allocating results. An
accelerated function runs as written the first few times it gets inputs of certain shapes. Then one call is recorded:
every kernel that torch runs, forward and backward, with its arguments and results. Later calls copy their inputs into
the recorded input buffers, run the same kernels in the same order, and copy the outputs. The results are bit-identical
in a fraction of the time. The function itself stays ordinary torch code, and the tests compare with it. Recording takes
milliseconds. With a C compiler, a recording that has run for long enough is then compiled, see `native`.

From the first call on, numpy computes the operators on small tensors (see `numpy_kernels`).

There is one rule. A recorded function may depend only on its inputs and on tensors that are changed in-place (weights,
buffers, gradients): it must not draw random numbers, read a tensor's value in Python, or have a result whose shape
depends on values. A function that is seen to break the rule while it is recorded always runs as written. So do
functions on devices other than the CPU.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from rl_training.accelerate.calls import Call, map_tensors, storage_of, tensors_in
from rl_training.accelerate.kernels import ALIGNMENT, Memory, Recording
from rl_training.accelerate.modes import Mode, current_mode
from rl_training.accelerate.numpy_kernels import SmallArithmetic

R = TypeVar("R")
Given = tuple[list[Any], dict[str, Any]]
"""Arguments and keyword arguments of a call."""
T = TypeVar("T")

SEEN_BEFORE = 2
"""Number of calls with the same input shapes that run as written before one is recorded."""
MAX_RECORDINGS = 64
"""Recordings per function, for different input shapes; the least recently used one is dropped."""
UNPLACED = frozenset({"convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
"""Operators that cannot write to given memory, and take so long that call overhead does not matter."""
UNPLACED_MODULES = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Layers made of such operators."""


class HasAccelerated:
    """Marks classes, neither modules nor `Stateful`, whose accelerated functions `report` lists."""


class Accelerated(Generic[R]):
    """A faster version of a function from tensors to tensors (single, or in dicts and tuples), with the same results.

    Floats in the arguments become 0-d tensors, so they may change from call to call; there is a separate recording for
    each combination of other plain values. `module` is the network that the function evaluates. If a submodule's class
    is not from torch or this package, nothing is recorded, because it may break the rule above; `declare_pure` marks
    classes that do not. Accelerated functions may call others, which then become parts of their recording; the outer
    one's `module` must contain theirs.

    Example:
        >>> double = Accelerated(lambda x: 2 * x)
        >>> [double(torch.tensor([float(i)])).item() for i in range(4)]
        [0.0, 2.0, 4.0, 6.0]
        >>> double.status()
        'recorded'
    """

    def __init__(
        self,
        function: Callable[..., R],
        module: nn.Module | None = None,
        *,
        mode: Mode | None = None,
        why_plain: str = "",
    ) -> None:
        self.function = function
        self.module = module
        self.mode: Mode = current_mode() if mode is None else mode
        self._given_reason = "accelerate is off" if self.mode == "off" else why_plain
        self.why_plain = self._given_reason
        """Why recording is disabled; empty if it is enabled."""
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._memory = Memory()
        self._seen: dict[Any, int] = {}
        self._is_checked = bool(self.why_plain)
        self._busy = threading.Lock()

    @property
    def num_recordings(self) -> int:
        """The number of recordings, one per kind of inputs."""
        return len(self._recordings)

    def status(self) -> str:
        """How the function currently runs: `plain torch: <reason>`, `not recorded yet`, `recorded` or `compiled`."""
        if self.why_plain:
            return f"plain torch: {self.why_plain}"
        if not self._recordings:
            return "not recorded yet"
        reasons = {recording.why_not_compiled for recording in self._recordings.values()}
        if "" in reasons:
            return "compiled"
        said = sorted(reason for reason in reasons if reason is not None)
        return f"recorded; not compiled: {said[0]}" if said else "recorded"

    def forget(self) -> None:
        """Drop all recordings, after weights were replaced."""
        self._recordings.clear()
        self._seen.clear()
        self.why_plain = self._given_reason
        self._is_checked = bool(self.why_plain)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the function. The returned tensors are copies that later calls do not change."""
        leaves: list[Tensor] = []
        kinds: list[Any] = []
        given: Given = (
            [_flatten(arg, leaves, kinds) for arg in args],
            _flatten(kwargs, leaves, kinds) if kwargs else {},
        )
        if is_recording():
            return self.function(*given[0], **given[1])
        if not self._is_checked:
            self._is_checked = True
            self.why_plain = unknown_owner(self.function) or ("" if self.module is None else unknown_part(self.module))
        if self.why_plain:
            return self._call(_aligned, given)
        if not self._busy.acquire(blocking=False):  # another thread uses the memory
            return self._as_written(given)
        try:
            return self._run(tuple(kinds), leaves, given)
        finally:
            self._busy.release()

    def _call(self, place: Callable[[Tensor], Tensor], given: Given) -> R:
        """Call the function after applying `place` to every tensor in the arguments."""
        args, kwargs = map_tensors(place, given)
        return self.function(*args, **kwargs)

    def _as_written(self, given: Given) -> R:
        """A call that is not replayed, with the same arithmetic as a replay."""
        with SmallArithmetic(), _recording():  # type: ignore[no-untyped-call]
            return self._call(_aligned, given)

    def _run(self, kind: Any, leaves: list[Tensor], given: Given) -> R:
        recording = self._recordings.get(kind)
        if recording is not None and recording.is_current():
            self._recordings.move_to_end(kind)
            return recording.replay(leaves)  # type: ignore[no-any-return]
        if not self._seen:
            return self._try(kind, leaves, given)
        self._seen[kind] = self._seen.get(kind, 0) + 1
        return self._as_written(given) if self._seen[kind] <= SEEN_BEFORE else self._record(kind, leaves, given)

    def _try(self, kind: Any, leaves: list[Tensor], given: Given) -> R:
        """The first call. If it cannot be recorded, its effects are undone and plain torch runs it.

        So from its first call on, a function uses either the arithmetic of recordings or that of plain torch, and a
        resumed run computes the same as an uninterrupted one.
        """
        self._seen[kind] = 1
        with Recorder(keeps_calls=False) as recorder, _recording():
            outputs = self._call(_aligned, given)
        self.why_plain = recorder.refusal or _unplaced(leaves)
        if not self.why_plain:
            return outputs
        recorder.undo()
        return self._call(_aligned, given)

    def _record(self, kind: Any, leaves: list[Tensor], given: Given) -> R:
        places = [torch.empty_like(leaf).copy_(leaf) for leaf in leaves]  # keeps strides: kernels may round by them
        queue = iter(places)
        with Recorder() as recorder, _recording():
            outputs = self._call(lambda _: next(queue), given)
        self.why_plain = recorder.refusal
        if not self.why_plain:
            try:
                self._recordings[kind] = Recording(recorder.calls, places, outputs, self._memory, self.mode)
            except Exception as error:  # an operator that cannot be replayed; this call's results are complete
                self.why_plain = f"its kernels cannot be replayed: {type(error).__name__}: {error}"
        if self.why_plain:
            self._recordings.clear()
        elif len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        return map_tensors(lambda x: x.detach().clone(), outputs)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies start without recordings, which are bound to the memory of their tensors."""
        make = functools.partial(type(self), mode=self.mode, why_plain=self._given_reason)
        return make, (self.function, self.module)


_within = threading.local()
"""Whether this thread is inside a recorded function; the functions it calls become part of its recording."""


def is_recording() -> bool:
    """Whether the caller is part of a function that is or will be recorded, and so must not depend on values."""
    return getattr(_within, "recorded", False)


@contextmanager
def _recording() -> Iterator[None]:
    """Accelerated functions called inside are not recorded separately."""
    _within.recorded = True
    try:
        yield
    finally:
        _within.recorded = False


def _flatten(value: Any, leaves: list[Tensor], kinds: list[Any]) -> Any:
    """Collect the tensors of a value in `leaves` and its shapes and plain values in `kinds`; floats become tensors."""
    if isinstance(value, Tensor):
        stride = None
        if not value.is_contiguous():
            if torch.empty_like(value).stride() != value.stride():
                value = value.contiguous()  # `empty_like` does not keep the strides of tensors with gaps
            stride = value.stride()
        leaves.append(value)
        kinds += (value.shape, value.dtype, stride, value.is_cpu)
        return value
    if isinstance(value, tuple):
        kinds.append(type(value))
        items = [_flatten(item, leaves, kinds) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        kinds.append(tuple(value))
        return {key: _flatten(item, leaves, kinds) for key, item in value.items()}
    if isinstance(value, float):
        return _flatten(_number(value), leaves, kinds)
    kinds.append(value)
    return value


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied if its memory is not aligned to `ALIGNMENT`: kernels may round by alignment.

    Torch aligns its own memory; that of numpy arrays and slices may begin anywhere. Integers are not rounded, so they
    are never copied.
    """
    return tensor.clone() if tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT else tensor


@functools.lru_cache(maxsize=64)
def _number(value: float) -> Tensor:
    """A number as a cached, read-only 0-d tensor, which promotes types as the number would."""
    return torch.tensor(value, dtype=torch.float64)


_pure: set[type] = set()


def declare_pure(cls: type[T]) -> type[T]:
    """Class decorator: declares that a class only computes tensors from its inputs and weights, so it may be recorded.

    For modules (`forward`) and algorithms (gradient steps). The code must not draw random numbers, must keep no state
    between calls except tensors that it changes in-place, and must not branch on the values of tensors.

    Example:
        >>> @declare_pure
        ... class Double(nn.Module):
        ...     def forward(self, x):
        ...         return 2 * x
    """
    _pure.add(cls)
    return cls


def _unknown(cls: type) -> str:
    """Why a class must not be recorded; empty if it may be."""
    if cls.__module__.split(".")[0] in ("torch", "rl_training") or cls in _pure:
        return ""
    name = f"{cls.__module__}.{cls.__qualname__}"
    return f"{name} may do more than compute tensors (if not, decorate it with rl_training.accelerate.declare_pure)"


def unknown_owner(function: Callable[..., Any]) -> str:
    """Why a method must not be recorded because of its class; empty if it may be."""
    owner = getattr(function, "__self__", None)
    return "" if owner is None else _unknown(type(owner))


def unknown_part(module: nn.Module) -> str:
    """Why a network must not be recorded; empty if it may be."""
    for part in module.modules():
        cls = type(part)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if reason := _unknown(cls):
            return reason
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
            return f"{name} has hooks, which a recording would not call"
        if isinstance(part, UNPLACED_MODULES):
            return f"{cls.__qualname__} is so slow that recording it gains little"
    for tensor in module.parameters():
        if tensor.device.type != "cpu":
            return f"the network is on {tensor.device}"
    return ""


def _unplaced(leaves: list[Tensor]) -> str:
    """Why inputs do not allow a recording; empty if they do."""
    is_real = all(leaf.is_cpu and not leaf.is_complex() for leaf in leaves)
    return "" if is_real else "its inputs are not all real-valued CPU tensors"


class Recorder(SmallArithmetic):
    """While active, records every operator that torch runs, below autograd.

    With `keeps_calls=False` it only checks whether they can be recorded, and saves what they overwrite, for `undo`.
    """

    def __init__(self, *, keeps_calls: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.refusal = ""
        """Why the operators seen so far cannot be recorded; empty if they can."""
        self._keeps_calls = keeps_calls
        self._overwritten: dict[int, tuple[Tensor, Tensor]] = {}
        self._drawn_from: dict[int, tuple[torch.Generator, Tensor]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and record it."""
        if not self._keeps_calls:
            self._remember(Call(func, args, kwargs or {}, None))
        call = Call(func, args, kwargs or {}, super().__torch_dispatch__(func, types, args, kwargs))
        if self._keeps_calls:
            self.calls.append(call)
        self.refusal = self.refusal or refusal(call)
        return call.result

    def _remember(self, call: Call) -> None:
        if torch.Tag.nondeterministic_seeded in call.operator.tags:
            generator = call.kwargs.get("generator") or torch.default_generator
            self._drawn_from.setdefault(id(generator), (generator, generator.get_state()))
        for tensor in call.written() if call.is_in_place else ():
            if storage_of(tensor) not in self._overwritten:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                whole.set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().nbytes(),), (1,))
                self._overwritten[storage_of(tensor)] = (whole, whole.clone())

    def undo(self) -> None:
        """Restore everything that was overwritten, and the states of random generators."""
        for generator, state in self._drawn_from.values():
            generator.set_state(state)
        for whole, before in self._overwritten.values():
            whole.copy_(before)


def refusal(call: Call) -> str:
    """Why a call must not be recorded; empty if it may be."""
    tags = call.operator.tags
    if torch.Tag.data_dependent_output in tags:
        return f"{call.name} reads a tensor's value"
    if torch.Tag.nondeterministic_seeded in tags:
        return f"{call.name} draws random numbers"
    if torch.Tag.dynamic_output_shape in tags and not (call.name == "index" and _by_integers(call)):
        return f"the output shape of {call.name} depends on values"
    if call.name in UNPLACED:
        return f"{call.name} allocates its own memory"
    for tensor in (*call.inputs(), *call.outputs()):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return f"{call.name} has a tensor on {tensor.device} of layout {tensor.layout}"
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"{call.name} has a {type(tensor).__name__}"
    return ""


def _by_integers(call: Call) -> bool:
    return all(index.dtype in (torch.int64, torch.int32) for index in tensors_in(call.args[1]))
