"""The expensive layers of image networks, bit-identical to torch's.

Image networks are not recorded as a whole, because convolutions allocate their own memory. With small batches, the time
of their large linear layer depends on how often its weights are read.
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
"""Batch sizes between which forward and backward passes are faster here than in torch."""
MIN_WEIGHTS = 500_000
"""Smallest number of weights of a layer for which this is used."""
VECTOR, ALIGNED = 8, 16
"""For products with a single vector: layer sizes must be multiples of the first, addresses (in bytes) of the second."""
PLANES = 4
"""Number of stacked frames, as is usual for Atari: a pixel of all frames is then four bytes."""
PIXELS_FOR_THREADS = 100_000
"""Pixels above which several threads are used."""


class Ready:
    """Whether something is compiled; the first check starts compilation in the background."""

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
        except NotCompiledError:  # fall back to torch
            pass


is_ready = Ready(library)
"""Whether kernels.c is compiled."""


def is_watched() -> bool:
    """Whether torch operators are traced, counted or transformed, which would miss what is done here."""
    is_transformed = torch._C._are_functorch_transforms_active()
    return _get_current_dispatch_mode() is not None or is_transformed or torch._C._is_tracing()


def is_plain(x: Tensor, *others: Tensor) -> bool:
    """Whether tensors are contiguous and on the CPU, and torch is not watched (see `is_watched`)."""
    if is_watched():
        return False
    return all(type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" and t.is_contiguous() for t in (x, *others))


_here = threading.local()
"""Where the backward pass of this thread may write gradients, by the addresses of weights."""


@contextmanager
def places_for_gradients(places: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Inside, layers of this module may write gradients of weights to these tensors, instead of to new memory.

    Each place is used once: if a layer is used twice, its gradients are summed.
    """
    _here.places = {weight.data_ptr(): place for weight, place in places if weight.numel() >= MIN_WEIGHTS}
    try:
        yield
    finally:
        _here.places = {}


class WideLinear(nn.Linear):
    """`nn.Linear` with a faster product for layers with many weights."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self._may_compile = current_mode() in ("auto", "compiled")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        """See `nn.Linear`; uses compiled kernels for common batch sizes."""
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
    """Whether products of random matrices with one vector are bit-identical to torch's."""
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
    """The chunk sizes of the forward product, and of the gradients of inputs and of weights. See `find_chunk`."""
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
    """x W' + b, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        chunk = chunks(len(x), *reversed(weight.shape))[0]
        # as W x': the long rows of W are then on the left and read once
        return _multiply(weight, x.t(), chunk, column=bias).t().contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        to_x, to_weight, to_bias = ctx.needs_input_grad
        if torch.is_grad_enabled() or not is_plain(gradient):  # second derivatives, or watched
            return gradient @ weight, gradient.t() @ x, gradient.sum(0)
        _, chunk_x, chunk_weight = chunks(len(x), *reversed(weight.shape))
        if not (chunk_x and chunk_weight):  # the number of threads has changed
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
    """Images [B, C, H, W] of any type as float32, times `scale`.

    The memory format is channels-last, with which convolutions on a CPU train faster.
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
    """Whether images are contiguous stacks of four uint8 frames."""
    return images.dtype == torch.uint8 and images.shape[1] == PLANES and is_plain(images)
