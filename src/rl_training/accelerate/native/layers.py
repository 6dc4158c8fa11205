"""Layers that networks of images spend their time in, with the bits of torch's own.

They are not recorded as a whole, because convolutions make their own memory. With small batches, their large layer is a
matter of how often its weights are read.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rl_training.accelerate.modes import current_mode
from rl_training.accelerate.native.compiler import NotCompiledError, find_compiler
from rl_training.accelerate.native.products import NUM_COMPARED, PACK_COLUMNS, Arguments, find_chunk, library

MIN_ROWS, MAX_ROWS = 8, 256
"""Rows of a batch between which forward and back are quicker here than in torch."""
MIN_WEIGHTS = 500_000
"""Weights of a layer from which on it matters."""
VECTOR, ALIGNED = 8, 16
"""What the sizes of a layer must be multiples of to be multiplied with a single vector, and addresses in bytes."""
PLANES = 4
"""Images stacked in an observation, as is usual for games: a pixel is then a number of four bytes."""
PIXELS_FOR_THREADS = 100_000
"""Pixels from which on threads share the work."""


class Ready:
    """Whether something has been compiled, which is begun in the background when it is first asked for."""

    def __init__(self, compile_it: Callable[[], object]) -> None:
        self._compile_it = compile_it
        self._thread: threading.Thread | None = None
        self._found = False

    def __bool__(self) -> bool:
        if self._thread is None:
            self._thread = threading.Thread(target=self._compile)
            self._thread.start()
        return self._found

    def _compile(self) -> None:
        try:
            if find_compiler() is not None:
                self._compile_it()
                self._found = True
        except NotCompiledError:  # then it is torch that computes
            pass


is_ready = Ready(library)
"""Whether there is a compiled kernels.c."""


def is_watched() -> bool:
    """Whether somebody traces, counts or transforms what torch does, and would not see what is done here."""
    is_transformed = torch._C._are_functorch_transforms_active()
    return _get_current_dispatch_mode() is not None or is_transformed or torch._C._is_tracing()


def is_plain(x: Tensor, *others: Tensor) -> bool:
    """Whether these lie on the CPU without gaps, and nobody traces or counts what torch does."""
    if is_watched():
        return False
    return all(type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" and t.is_contiguous() for t in (x, *others))


_here = threading.local()
"""Where the pass back of this thread may write gradients, by the addresses of weights."""


@contextmanager
def places_for_gradients(places: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Layers of this module may write gradients of weights to these places, instead of to new memory.

    Only the first that a layer finds, since those of a layer that is used twice are added up.
    """
    _here.places = {weight.data_ptr(): place for weight, place in places if weight.numel() >= MIN_WEIGHTS}
    try:
        yield
    finally:
        _here.places = {}


class WideLinear(nn.Linear):
    """`nn.Linear` for a large number of inputs."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self._may_compile = current_mode() in ("auto", "compiled")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        """See `nn.Linear`; batches of usual sizes are multiplied here."""
        weight, bias = self.weight, self.bias
        is_wide = weight.numel() >= MIN_WEIGHTS and input.dim() == 2 and input.dtype == weight.dtype == torch.float32
        if self._may_compile and is_wide and is_plain(input, weight, bias) and is_ready:
            rows, (outputs, inputs) = len(input), weight.shape
            if rows == 1 and not torch.is_grad_enabled() and _is_vector_known(inputs, outputs):
                if input.data_ptr() % ALIGNED == weight.data_ptr() % ALIGNED == 0:
                    return _multiply_vector(weight, input, bias)
            elif MIN_ROWS <= rows <= MAX_ROWS and all(chunks(rows, inputs, outputs)):
                return cast("Tensor", _Linear.apply(input, weight, bias))  # type: ignore[no-untyped-call]
        return F.linear(input, weight, bias)


@functools.cache
def _is_vector_known(inputs: int, outputs: int) -> bool:
    """Whether the product with one vector has torch's bits, as comparing those of random numbers shows."""
    if inputs % VECTOR or outputs % VECTOR:
        return False
    generator = torch.Generator().manual_seed(0)
    for _ in range(-(-NUM_COMPARED // outputs)):
        x, weight, bias = (torch.randn(n, generator=generator) for n in ((1, inputs), (outputs, inputs), (outputs,)))
        if not torch.equal(_multiply_vector(weight, x, bias), F.linear(x, weight, bias)):
            return False
    return True


def _multiply_vector(weight: Tensor, x: Tensor, bias: Tensor) -> Tensor:
    out = torch.empty(1, len(weight), dtype=torch.float32)
    places = (x.data_ptr(), bias.data_ptr(), out.data_ptr())
    library().product_of_vector(weight.data_ptr(), *weight.shape, *places, torch.get_num_threads())
    return out


def chunks(rows: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """How products are added up in the layer itself, and back to its inputs and its weights. See `find_chunk`."""
    x = (1, rows, inputs), (rows * inputs, inputs, 1)
    turned = (1, inputs, outputs), (inputs * outputs, 1, inputs)
    weight = (1, outputs, inputs), (inputs * outputs, inputs, 1)
    gradient = (1, rows, outputs), (rows * outputs, outputs, 1)
    gradient_turned = (1, outputs, rows), (rows * outputs, 1, outputs)
    return (
        find_chunk(*x, *turned, True, False),
        find_chunk(*gradient, *weight, False, False),
        find_chunk(*gradient_turned, *x, False, False),
    )


class _Linear(torch.autograd.Function):
    """x W' + b, and its derivatives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        chunk = chunks(len(x), *reversed(weight.shape))[0]
        # W x' has long rows on its left, which are read once
        return _multiply(weight, x.t(), chunk, column=bias).t().contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        to_x, to_weight, to_bias = ctx.needs_input_grad
        if torch.is_grad_enabled() or not is_plain(gradient):  # somebody differentiates this again
            return gradient @ weight, gradient.t() @ x, gradient.sum(0)
        _, chunk_x, chunk_weight = chunks(len(x), *reversed(weight.shape))
        if not (chunk_x and chunk_weight):  # the number of threads was changed meanwhile
            return gradient @ weight, gradient.t() @ x, gradient.sum(0)
        place = getattr(_here, "places", {}).pop(weight.data_ptr(), None)
        return (
            _multiply(gradient, weight, chunk_x) if to_x else None,
            _multiply(gradient.t(), x, chunk_weight, out=place) if to_weight else None,
            gradient.sum(0) if to_bias else None,
        )


def _multiply(a: Tensor, b: Tensor, chunk: int, column: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32) if out is None else out
    is_packed = b.stride(1) != 1 or n % PACK_COLUMNS != 0
    memory = torch.empty(k * (n + PACK_COLUMNS), dtype=torch.float32) if is_packed else None
    arguments = Arguments(
        m, n, k, a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), None, c.data_ptr(), n,
        column=None if column is None else column.data_ptr(), chunk=chunk,
    )  # fmt: skip
    library().product_by_threads(arguments, None if memory is None else memory.data_ptr(), torch.get_num_threads())
    return c


def scale_images(images: Tensor, scale: float, *, may_compile: bool = True) -> Tensor:
    """Images [B, C, H, W] of any type as floats times a number.

    In memory the channels come last, which convolutions on a CPU learn faster with.
    """
    if may_compile and in_planes(images) and is_ready:
        count, _, height, width = images.shape
        out = torch.empty(images.shape, dtype=torch.float32, memory_format=torch.channels_last)
        threads = torch.get_num_threads() if images.numel() > PIXELS_FOR_THREADS else 1
        library().pixels_to_floats(images.data_ptr(), count, height * width, scale, out.data_ptr(), threads)
        return out
    images = images.contiguous(memory_format=torch.channels_last)
    return images.to(torch.float32, copy=True).mul_(scale)


def in_planes(images: Tensor) -> bool:
    """Whether these are stacks of four images of bytes, one after the other."""
    return images.dtype == torch.uint8 and images.shape[1] == PLANES and is_plain(images)
