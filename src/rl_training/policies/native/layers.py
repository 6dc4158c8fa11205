"""Layers that networks of images spend their time in, with the bits of torch's own.

They are not recorded as a whole, because convolutions make their own memory. With small batches, their large layer is a
matter of how often its weights are read.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rl_training.policies.native.compiler import NotCompiledError, find_compiler
from rl_training.policies.native.products import PACK_COLUMNS, Arguments, find_chunk, library

MIN_ROWS, MAX_ROWS = 8, 256
"""Rows of a batch between which forward and back are quicker here than in torch."""
MIN_WEIGHTS = 500_000
"""Weights of a layer from which on it matters."""
PLANES = 4
"""Images stacked in an observation, as is usual for games: a pixel is then a number of four bytes."""
PIXELS_FOR_THREADS = 100_000
"""Pixels from which on threads share the work."""


class _Ready:
    """Whether kernels.c has been compiled, which is begun in the background when it is first asked for."""

    def __init__(self) -> None:
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
                library()
                self._found = True
        except NotCompiledError:  # then it is torch that computes
            pass


_is_ready = _Ready()


def _is_plain(x: Tensor, *others: Tensor) -> bool:
    """Whether these lie on the CPU without gaps, and nobody traces or counts what torch does."""
    if _get_current_dispatch_mode() is not None:
        return False
    return all(type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" and t.is_contiguous() for t in (x, *others))


class WideLinear(nn.Linear):
    """`nn.Linear` for a large number of inputs."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as in torch
        """See `nn.Linear`; batches of usual sizes are multiplied here."""
        is_wide = self.weight.numel() >= MIN_WEIGHTS and input.dim() == 2 and MIN_ROWS <= len(input) <= MAX_ROWS
        is_float = input.dtype == self.weight.dtype == torch.float32
        if is_wide and is_float and _is_plain(input, self.weight, self.bias) and _is_ready:
            rows, (outputs, inputs) = len(input), self.weight.shape
            if all(chunks(rows, inputs, outputs)):
                return cast("Tensor", _Linear.apply(input, self.weight, self.bias))  # type: ignore[no-untyped-call]
        return F.linear(input, self.weight, self.bias)


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
        if torch.is_grad_enabled() or not _is_plain(gradient):  # somebody differentiates this again
            return gradient @ weight, gradient.t() @ x, gradient.sum(0)
        _, chunk_x, chunk_weight = chunks(len(x), *reversed(weight.shape))
        return (
            _multiply(gradient, weight, chunk_x) if to_x else None,
            _multiply(gradient.t(), x, chunk_weight) if to_weight else None,
            gradient.sum(0) if to_bias else None,
        )


def _multiply(a: Tensor, b: Tensor, chunk: int, column: Tensor | None = None) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=torch.float32)
    is_packed = b.stride(1) != 1 or n % PACK_COLUMNS != 0
    memory = torch.empty(k * (n + PACK_COLUMNS), dtype=torch.float32) if is_packed else None
    arguments = Arguments(
        m, n, k, a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), None, c.data_ptr(), n,
        column=None if column is None else column.data_ptr(), chunk=chunk,
    )  # fmt: skip
    library().product_by_threads(arguments, None if memory is None else memory.data_ptr(), torch.get_num_threads())
    return c


def floats_of(images: Tensor, scale: float) -> Tensor | None:
    """Bytes [B, 4, H, W] as floats times a number, with the channels last in memory; None if torch has to do that."""
    count, planes, height, width = images.shape
    if images.dtype != torch.uint8 or planes != PLANES or not _is_plain(images) or not _is_ready:
        return None
    out = torch.empty(images.shape, dtype=torch.float32, memory_format=torch.channels_last)
    threads = torch.get_num_threads() if images.numel() > PIXELS_FOR_THREADS else 1
    library().pixels_to_floats(images.data_ptr(), count, height * width, scale, out.data_ptr(), threads)
    return out
