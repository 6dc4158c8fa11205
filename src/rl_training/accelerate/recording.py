"""Recorded functions: the kernels of one call are noted, and later calls run just those, on memory laid out before.

Small networks spend most of their time between kernels: in Python modules, in autograd's bookkeeping, in allocating
results. An accelerated function is run as it is written the first times it sees inputs of some shapes. Then one call is
recorded: every kernel that torch runs, forward and backward, with its arguments and results. From then on a call copies
its inputs to where the recorded ones were, runs the same kernels in the same order, and copies the outputs. So it gives
the same numbers to the bit in a fraction of the time, and the function itself stays ordinary torch code, which is also
the oracle that the tests compare with. A recording takes milliseconds; where there is a C compiler, one that is called
for long enough is then compiled, see `native`.

Kernels on small tensors are numpy's, from the first call on (see `numpy_kernels`).

The price is a rule. A recorded function depends on its inputs and on tensors that are changed in place (weights,
buffers, gradients), and on nothing else that changes: no drawing of random numbers, no reading of a tensor's value in
Python, no result whose shape depends on values. What breaks the rule visibly is refused when it is recorded, and then
always runs as written; so do functions on another device than the CPU.
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
"""Calls with inputs of the same shapes that are run as written before one is recorded."""
MAX_RECORDINGS = 64
"""Recordings of one function, for inputs of different shapes; the one unused for longest makes room for a new one."""
UNPLACED = frozenset({"convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
"""Operators that cannot write to memory they are given, and take so long that little around them matters."""
UNPLACED_MODULES = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Layers made of such operators."""


class HasAccelerated:
    """Base of objects that are neither modules nor `Stateful` but whose accelerated functions `report` shows."""


class Accelerated(Generic[R]):
    """A function of tensors (alone, or in dicts and tuples) that returns such, with the same meaning, but faster.

    Floats in the arguments become tensors without dimensions, so they may change from call to call; other plain values
    are part of what a recording is made for. `module` is the network that the function evaluates. If a part of it is of
    a class from outside of torch and this package, nothing is recorded, because such a class may do what the rule above
    forbids; `declare_pure` says that it does not. Accelerated functions may call others, which then become parts of
    their recording; the outer one's `module` must contain theirs.

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
        """Why the function runs as plain torch; empty if it does not."""
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._memory = Memory()
        self._seen: dict[Any, int] = {}
        self._is_checked = bool(self.why_plain)
        self._busy = threading.Lock()

    @property
    def num_recordings(self) -> int:
        """For how many kinds of inputs there is a recording."""
        return len(self._recordings)

    def status(self) -> str:
        """How the function runs now: `plain torch: <reason>`, `not recorded yet`, `recorded` or `compiled`."""
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
        """Drop all recordings, because weights were replaced."""
        self._recordings.clear()
        self._seen.clear()
        self.why_plain = self._given_reason
        self._is_checked = bool(self.why_plain)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """The function's value: tensors of their own, that later calls do not change."""
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
        """The function of the arguments with every tensor put in its place."""
        args, kwargs = map_tensors(place, given)
        return self.function(*args, **kwargs)

    def _as_written(self, given: Given) -> R:
        """A call that is not replayed, with the same arithmetic as one that is."""
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
        """The first call. If it shows that nothing can be recorded, its effects are undone and torch runs it.

        So a function runs either with the arithmetic of recordings or as plain torch, from its first call on, and a
        resumed run does the same as the one that was stopped.
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
        places = [torch.empty_like(leaf).copy_(leaf) for leaf in leaves]  # in the same order: kernels round by it
        queue = iter(places)
        with Recorder() as recorder, _recording():
            outputs = self._call(lambda _: next(queue), given)
        self.why_plain = recorder.refusal
        if not self.why_plain:
            try:
                self._recordings[kind] = Recording(recorder.calls, places, outputs, self._memory, self.mode)
            except Exception as error:  # an operator that is not called as others are; its results are there already
                self.why_plain = f"its kernels cannot be run again: {type(error).__name__}: {error}"
        if self.why_plain:
            self._recordings.clear()
        elif len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        return map_tensors(lambda x: x.detach().clone(), outputs)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies begin without recordings, which are bound to the memory of their tensors."""
        make = functools.partial(type(self), mode=self.mode, why_plain=self._given_reason)
        return make, (self.function, self.module)


_within = threading.local()
"""Whether this thread is within a recorded function: those that it calls are parts of it."""


def is_recording() -> bool:
    """Whether the caller is part of a function that is, or will be, recorded: it must not depend on values then."""
    return getattr(_within, "recorded", False)


@contextmanager
def _recording() -> Iterator[None]:
    """What is called meanwhile is not recorded by itself."""
    _within.recorded = True
    try:
        yield
    finally:
        _within.recorded = False


def _flatten(value: Any, leaves: list[Tensor], kinds: list[Any]) -> Any:
    """Note the tensors in a value, and what else tells it from others; floats in it become tensors."""
    if isinstance(value, Tensor):
        stride = None
        if not value.is_contiguous():
            if torch.empty_like(value).stride() != value.stride():
                value = value.contiguous()  # memory with gaps is not laid out in the same way again
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
    """A tensor whose memory begins at a multiple of `ALIGNMENT`, as torch's own does; kernels may round by that.

    The memory of a numpy array or of a slice may begin anywhere. Integers are not rounded, so they stay where they are.
    """
    return tensor.clone() if tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT else tensor


@functools.lru_cache(maxsize=64)
def _number(value: float) -> Tensor:
    """A number as a tensor without dimensions, which acts as the number would. Nobody writes into it."""
    return torch.tensor(value, dtype=torch.float64)


_pure: set[type] = set()


def declare_pure(cls: type[T]) -> type[T]:
    """Say that a class only computes tensors from its inputs and its weights, so that it may be recorded.

    For modules (`forward`) and algorithms (what is computed in gradient steps). It then draws no random numbers there,
    keeps nothing between calls but tensors that it changes in place, and does not branch on the values of tensors. A
    class decorator.

    Example:
        >>> @declare_pure
        ... class Double(nn.Module):
        ...     def forward(self, x):
        ...         return 2 * x
    """
    _pure.add(cls)
    return cls


def _unknown(cls: type) -> str:
    """Why a class is not recorded; empty if it may be."""
    if cls.__module__.split(".")[0] in ("torch", "rl_training") or cls in _pure:
        return ""
    name = f"{cls.__module__}.{cls.__qualname__}"
    return f"{name} may do more than compute tensors (if not, decorate it with rl_training.accelerate.declare_pure)"


def unknown_owner(function: Callable[..., Any]) -> str:
    """Why a method is left to torch because of its class; empty if it is not."""
    owner = getattr(function, "__self__", None)
    return "" if owner is None else _unknown(type(owner))


def unknown_part(module: nn.Module) -> str:
    """Why a network is left to torch altogether; empty if it is not."""
    for part in module.modules():
        cls = type(part)
        name = f"{cls.__module__}.{cls.__qualname__}"
        if reason := _unknown(cls):
            return reason
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
            return f"{name} has hooks, which a recording would not call"
        if isinstance(part, UNPLACED_MODULES):
            return f"{cls.__qualname__} takes so long that recording it gains little"
    for tensor in module.parameters():
        if tensor.device.type != "cpu":
            return f"the network is on {tensor.device}"
    return ""


def _unplaced(leaves: list[Tensor]) -> str:
    """Why inputs cannot be those of a recording; empty if they can."""
    is_real = all(leaf.is_cpu and not leaf.is_complex() for leaf in leaves)
    return "" if is_real else "its inputs are not all real numbers in the memory of the CPU"


class Recorder(SmallArithmetic):
    """While it is active, notes every operator that torch runs, below autograd.

    With `keeps_calls=False` it only looks whether they can be recorded, and remembers what they overwrite, for `undo`.
    """

    def __init__(self, *, keeps_calls: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.refusal = ""
        """Why what was seen cannot be recorded; empty if it can."""
        self._keeps_calls = keeps_calls
        self._overwritten: dict[int, tuple[Tensor, Tensor]] = {}
        self._drawn_from: dict[int, tuple[torch.Generator, Tensor]] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note it."""
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
        """Write back everything that was overwritten, and set random generators back."""
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
        return f"the shape of what {call.name} gives depends on values"
    if call.name in UNPLACED:
        return f"{call.name} makes its own memory"
    for tensor in (*call.inputs(), *call.outputs()):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return f"{call.name} has a tensor on {tensor.device} of layout {tensor.layout}"
        if type(tensor) not in (Tensor, nn.Parameter):
            return f"{call.name} has a {type(tensor).__name__}"
    return ""


def _by_integers(call: Call) -> bool:
    return all(index.dtype in (torch.int64, torch.int32) for index in tensors_in(call.args[1]))
