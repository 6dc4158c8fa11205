"""Recorded functions: the kernels of one call are noted, and later calls run just those, on memory laid out before.

Small networks spend most of their time between kernels: in Python modules, in autograd's bookkeeping, in allocating
results. A `Recorded` function is run as it is written the first times it sees inputs of some shapes. Then one call is
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

from rl_training.policies.calls import Call, map_tensors, tensors_in
from rl_training.policies.kernels import ALIGNMENT, Memory, Recording
from rl_training.policies.numpy_kernels import SmallArithmetic

R = TypeVar("R")

SEEN_BEFORE = 2
"""Calls with inputs of the same shapes that are run as written before one is recorded."""
MAX_RECORDINGS = 64
"""Recordings of one function, for inputs of different shapes; the one unused for longest makes room for a new one."""
UNPLACED = frozenset({"convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"})
"""Operators that cannot write to memory they are given, and take so long that little around them matters."""
UNPLACED_MODULES = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Layers made of such operators."""


class Recorded(Generic[R]):
    """A function of tensors (alone, or in dicts and tuples) that returns such, made quick by recording it.

    Numbers of type float that are given become tensors without dimensions, so they may change from call to call; other
    plain values are part of what a recording is made for. `module` is the network that the function evaluates: if any
    part of it is of a class from outside of torch and this package, nothing is recorded, because such a class may do
    what the rule above forbids. Recorded functions may call others, which become parts of their
    recording; the outer one's `module` must then contain theirs.

    Example:
        >>> double = Recorded(lambda x: 2 * x)
        >>> [double(torch.tensor([float(i)])).item() for i in range(4)]
        [0.0, 2.0, 4.0, 6.0]
        >>> double.num_recordings
        1
    """

    def __init__(self, function: Callable[..., R], module: nn.Module | None = None) -> None:
        self.function = function
        self.refusal = ""
        """Why nothing is recorded; empty while nothing speaks against it."""
        self._module = module
        self._recordings: OrderedDict[Any, Recording] = OrderedDict()
        self._memory = Memory()
        self._seen: dict[Any, int] = {}
        self._busy = threading.Lock()

    @property
    def num_recordings(self) -> int:
        """For how many kinds of inputs there is a recording."""
        return len(self._recordings)

    def __call__(self, *args: Any) -> R:
        """The function's value: tensors of their own, that later calls do not change."""
        leaves: list[Tensor] = []
        kinds: list[Any] = []
        given = tuple(_flatten(arg, leaves, kinds) for arg in args)
        if getattr(_within, "recorded", False):
            return self.function(*given)
        if self.is_foreign:
            return self.function(*map_tensors(_aligned, given))
        if self.refusal or not self._busy.acquire(blocking=False):  # another thread uses the memory
            return self._as_written(given)
        try:
            return self._run(tuple(kinds), leaves, given)
        finally:
            self._busy.release()

    @functools.cached_property
    def is_foreign(self) -> bool:
        """Whether the function is left to torch altogether, because of what its network is made of or where it lies."""
        self.refusal = "" if self._module is None else unknown_part(self._module)
        return bool(self.refusal)

    def _as_written(self, given: tuple[Any, ...]) -> R:
        """A call that is not replayed, with the same arithmetic as one that is."""
        with SmallArithmetic(), _part_of_another():  # type: ignore[no-untyped-call]
            return self.function(*map_tensors(_aligned, given))

    def _run(self, kind: Any, leaves: list[Tensor], given: tuple[Any, ...]) -> R:
        recording = self._recordings.get(kind)
        if recording is not None and recording.is_current():
            self._recordings.move_to_end(kind)
            return recording.replay(leaves)  # type: ignore[no-any-return]
        self._seen[kind] = self._seen.get(kind, 0) + 1
        return self._as_written(given) if self._seen[kind] <= SEEN_BEFORE else self._record(kind, leaves, given)

    def _record(self, kind: Any, leaves: list[Tensor], given: tuple[Any, ...]) -> R:
        if not all(leaf.is_cpu and not leaf.is_complex() for leaf in leaves):
            self.refusal = "its inputs are not all real numbers in the memory of the CPU"
            return self._as_written(given)
        places = [torch.empty_like(leaf).copy_(leaf) for leaf in leaves]  # in the same order: kernels round by it
        queue = iter(places)
        with Recorder() as recorder, _part_of_another():
            outputs = self.function(*map_tensors(lambda _: next(queue), given))
        self.refusal = recorder.refusal
        if not self.refusal:
            try:
                self._recordings[kind] = Recording(recorder.calls, places, outputs, self._memory)
            except Exception as error:  # an operator that is not called as others are; its results are there already
                self.refusal = f"its kernels cannot be run again: {type(error).__name__}: {error}"
        if self.refusal:
            self._recordings.clear()
        elif len(self._recordings) > MAX_RECORDINGS:
            self._recordings.popitem(last=False)
        return map_tensors(lambda x: x.detach().clone(), outputs)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies begin without recordings, which are bound to the memory of their tensors."""
        return type(self), (self.function, self._module)


_within = threading.local()
"""Whether this thread is within a recorded function: those that it calls are parts of it."""


@contextmanager
def _part_of_another() -> Iterator[None]:
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
    """A tensor whose memory begins where torch lets it begin; kernels may round by that, and a replay copies too.

    That of a numpy array or of a part of a larger tensor may begin anywhere. Whole numbers are not rounded.
    """
    return tensor.clone() if tensor.is_floating_point() and tensor.data_ptr() % ALIGNMENT else tensor


@functools.lru_cache(maxsize=64)
def _number(value: float) -> Tensor:
    """A number as a tensor without dimensions, which acts as the number would. Nobody writes into it."""
    return torch.tensor(value, dtype=torch.float64)


def unknown_part(module: nn.Module) -> str:
    """Why a network is left to torch altogether; empty if it is not."""
    for part in module.modules():
        cls = type(part)
        if cls.__module__.split(".")[0] not in ("torch", "rl_training"):
            return f"{cls.__module__}.{cls.__qualname__} may do more than compute tensors"
        if isinstance(part, UNPLACED_MODULES):
            return f"{cls.__qualname__} takes so long that little around it matters"
    for tensor in module.parameters():
        if tensor.device.type != "cpu":
            return f"it is on {tensor.device}"
    return ""


class Recorder(SmallArithmetic):
    """While it is active, notes every operator that torch runs, below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.refusal = ""
        """Why what was seen cannot be recorded; empty if it can."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note it."""
        call = Call(func, args, kwargs or {}, super().__torch_dispatch__(func, types, args, kwargs))
        self.calls.append(call)
        self.refusal = self.refusal or refusal(call)
        return call.result


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
