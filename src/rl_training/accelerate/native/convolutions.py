"""Convolutions followed by relus, bit-identical to torch's.

Torch reorders weights at every call, and runs relus as separate passes. Here a stack of such layers is one function.
The order of summation is found by comparing results, as for matrix products; if it is not found, or there is no
compiler, torch is the fallback.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_training.accelerate.modes import current_mode
from rl_training.accelerate.native import layers
from rl_training.accelerate.native.products import CHUNKS, NUM_COMPARED, built, library

MIN_PIXELS = 12
"""Smallest number of output pixels for which these kernels can be used."""


@functools.cache
def convolutions_library() -> Any:
    """The compiled convolutions.c; kernels.c is compiled first."""
    library()
    return built("convolutions.c")


is_ready = layers.Ready(convolutions_library)
"""Whether convolutions.c is compiled."""


class Shape(NamedTuple):
    """The sizes of one layer: its images, its kernel and its number of output channels."""

    images: int
    height: int
    width: int
    channels: int
    outputs: int
    size: int
    stride: int

    @property
    def result(self) -> tuple[int, int, int, int]:
        """The shape of the results."""
        down, across = ((n - self.size) // self.stride + 1 for n in (self.height, self.width))
        return self.images, self.outputs, down, across


class Order(NamedTuple):
    """An order of summation. The names are those of `convolution_type`."""

    chunk: int = 0
    parts: int = 1
    by_rows: bool = False
    last_row_first: bool = False
    last_column_first: bool = False


UNKNOWN = Order(parts=0)
"""The order of summation was not found."""


class ConvolutionStack(nn.Sequential):
    """`nn.Sequential` of convolutions that are each followed by a relu; other layers may follow."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__(*modules)
        pairs = zip(modules[::2], modules[1::2], strict=False)
        known = itertools.takewhile(lambda pair: _is_simple(pair[0]) and type(pair[1]) is nn.ReLU, pairs)
        self._num_convolutions = len(list(known)) if current_mode() in ("auto", "compiled") else 0
        """Number of leading convolutions that are computed here."""

    def forward(self, input: Tensor, scale: float | None = None) -> Tensor:  # noqa: A002 - as in torch
        """See `nn.Sequential`; the input is images [B, C, H, W], multiplied by `scale` if it is given."""
        modules = list(self._modules.values())
        first = cast("list[nn.Conv2d]", modules[: 2 * self._num_convolutions : 2])
        tensors = [tensor for layer in first for tensor in (layer.weight, cast("Tensor", layer.bias))]
        are_floats = all(tensor.dtype == torch.float32 for tensor in tensors)
        if tensors and are_floats and layers.is_plain(*tensors) and is_ready:
            learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
            shapes = _shapes(input.shape, tuple((*layer.weight.shape[:3], layer.stride[0]) for layer in first))
            if is_known(shapes, learns, torch.get_num_threads()):
                can_be_read = layers.in_planes(input) or _has_channels_last(input, torch.uint8)
                is_bytes = can_be_read and scale is not None
                x = input if scale is None or is_bytes else layers.scale_images(input, scale)
                if is_bytes or (_has_channels_last(x, torch.float32) and not x.requires_grad):
                    x = _convolve_all(x, scale, shapes, tensors, learns)
                    for module in modules[2 * self._num_convolutions :]:
                        x = module(x)
                    return x
        images = input if scale is None else layers.scale_images(input, scale, may_compile=bool(first))
        return cast("Tensor", super().forward(images))  # type: ignore[no-untyped-call]


def _is_simple(layer: nn.Module) -> bool:
    if type(layer) is not nn.Conv2d or layer.bias is None:
        return False
    is_square = layer.kernel_size[0] == layer.kernel_size[1] and layer.stride[0] == layer.stride[1]
    return is_square and layer.padding == (0, 0) and layer.dilation == (1, 1) and layer.groups == 1


def _has_channels_last(images: Tensor, dtype: torch.dtype) -> bool:
    """Whether images are in channels-last memory format."""
    return images.dtype == dtype and images.dim() == 4 and layers.is_plain(images.permute(0, 2, 3, 1))


@functools.lru_cache(maxsize=64)
def _shapes(images: tuple[int, ...], kernels: tuple[tuple[int, ...], ...]) -> tuple[Shape, ...]:
    """The shapes of all layers; empty if the sizes are invalid, so that torch raises its error."""
    found: list[Shape] = []
    if len(images) != 4 or images[0] == 0:
        return ()
    for outputs, channels, size, stride in kernels:
        count, given, height, width = images
        if given != channels or min(height, width) < size:
            return ()
        found.append(Shape(count, height, width, channels, outputs, size, stride))
        images = found[-1].result
    return tuple(found)


def _convolve_all(
    images: Tensor, scale: float | None, shapes: tuple[Shape, ...], tensors: Sequence[Tensor], learns: bool
) -> Tensor:
    if learns:
        return cast("Tensor", _Stack.apply(images, scale, shapes, *tensors))  # type: ignore[no-untyped-call]
    return _results(images, scale, shapes, tensors)[-1]


def _results(images: Tensor, scale: float | None, shapes: tuple[Shape, ...], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The images, followed by the results of all layers."""
    threads = torch.get_num_threads()
    found = [images]
    for shape, weight, bias in zip(shapes, tensors[::2], tensors[1::2], strict=True):
        found.append(convolve(shape, to_result(shape, threads), found[-1], weight, bias, scale=scale))
    return found


class _Stack(torch.autograd.Function):
    """relu(convolution(... relu(convolution(images)))), of bytes or floats."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, scale: float, shapes: tuple[Shape, ...], *tensors: Tensor) -> Tensor:
        found = _results(images, scale, shapes, tensors)
        ctx.shapes, ctx.scale, ctx.threads = shapes, scale, torch.get_num_threads()
        ctx.save_for_backward(*found, *tensors)
        return found[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        shapes: tuple[Shape, ...] = ctx.shapes
        results, tensors = ctx.saved_tensors[: len(shapes) + 1], ctx.saved_tensors[len(shapes) + 1 :]
        wanted = ctx.needs_input_grad[3:]
        if torch.is_grad_enabled() or layers.is_watched() or type(gradients[0]) is not Tensor:
            images = results[0] if results[0].is_floating_point() else layers.scale_images(results[0], ctx.scale)
            return (None, None, None, *_by_torch(images, shapes, tensors, wanted, gradients[0]))
        threads = ctx.threads  # the orders are known for this number of threads
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        gradient = torch.ops.aten.threshold_backward(gradient, results[-1], 0)
        found: list[Tensor] = []
        for n in reversed(range(len(shapes))):
            shape, x = shapes[n], results[n]
            found += reversed(weight_gradient(shape, to_weight(shape, threads), x, gradient, scale=ctx.scale))
            if n > 0:
                gradient = x_gradient(shape, to_x(shape, threads), tensors[2 * n], gradient, mask=x)
        return (None, None, None, *(g if w else None for g, w in zip(reversed(found), wanted, strict=True)))


def _by_torch(
    x: Tensor, shapes: Sequence[Shape], tensors: Sequence[Tensor], wanted: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    """The gradients computed by torch, for second derivatives or when torch is watched."""
    is_differentiated = torch.is_grad_enabled()
    with torch.enable_grad():
        for shape, weight, bias in zip(shapes, tensors[::2], tensors[1::2], strict=True):
            x = F.relu(F.conv2d(x, weight, bias, shape.stride))
        of = [tensor for tensor, is_wanted in zip(tensors, wanted, strict=True) if is_wanted]
        found = iter(torch.autograd.grad(x, of, gradient, create_graph=is_differentiated))
    return [next(found) if is_wanted else None for is_wanted in wanted]


# ---------------------------------------------------------------------------------------------------------------------
# One layer
# ---------------------------------------------------------------------------------------------------------------------


def convolve(
    shape: Shape,
    order: Order,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    relu: bool = True,
    scale: float | None = None,
) -> Tensor:
    """The results of a convolution, by default after a relu."""
    out = torch.empty(shape.result, dtype=torch.float32, memory_format=torch.channels_last)
    memory = _memory(shape, x, weight.numel())
    _call("convolution", shape, order, {"weight": weight, "bias": bias, "out": out, "memory": memory}, x, relu, scale)
    return out


def weight_gradient(
    shape: Shape, order: Order, x: Tensor, gradient: Tensor, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias, from the gradient of the results."""
    out = torch.empty((shape.outputs, shape.channels, shape.size, shape.size), dtype=torch.float32)
    out_bias = torch.empty(shape.outputs, dtype=torch.float32)
    tensors = {"gradient": gradient, "out": out, "out_bias": out_bias}
    tensors["memory"] = _memory(shape, x, out.numel() * order.parts)
    _call("convolution_to_weight", shape, order, tensors, x, False, scale)
    return out, out_bias


def x_gradient(shape: Shape, order: Order, weight: Tensor, gradient: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The gradient of the images, from the gradient of the results; zero where `mask` is not positive."""
    size = (shape.images, shape.channels, shape.height, shape.width)
    out = torch.empty(size, dtype=torch.float32, memory_format=torch.channels_last)
    memory = torch.empty(weight.numel(), dtype=torch.float32)
    tensors = {"weight": weight, "gradient": gradient, "out": out, "memory": memory}
    _call("convolution_to_x", shape, order, tensors if mask is None else {**tensors, "mask": mask})
    return out


class Arguments(ctypes.Structure):
    """`convolution_type` of convolutions.c."""

    _fields_ = [
        *((name, ctypes.c_long) for name in Shape._fields),
        ("x", ctypes.c_void_p), ("bytes", ctypes.c_void_p), ("in_planes", ctypes.c_int), ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "gradient", "mask", "out", "out_bias", "memory")),
        ("relu", ctypes.c_int), ("chunk", ctypes.c_long), ("parts", ctypes.c_long),
        ("by_rows", ctypes.c_int), ("last_row_first", ctypes.c_int), ("last_column_first", ctypes.c_int),
    ]  # fmt: skip


def _memory(shape: Shape, x: Tensor, size: int) -> Tensor:
    """A buffer for `size` floats and, if images are bytes, for one float image per thread."""
    images = 0 if x.is_floating_point() else torch.get_num_threads() * shape.height * shape.width * shape.channels
    return torch.empty(size + images, dtype=torch.float32)


def _call(
    name: str, shape: Shape, order: Order, tensors: dict[str, Tensor], x: Tensor | None = None, relu: bool = False,
    scale: float | None = None,
) -> None:  # fmt: skip
    places = {key: tensor.data_ptr() for key, tensor in tensors.items()}
    if x is not None:
        places["x" if x.is_floating_point() else "bytes"] = x.data_ptr()
    in_planes = x is not None and layers.in_planes(x)
    arguments = Arguments(
        *shape, relu=relu, in_planes=in_planes, scale=1.0 if scale is None else scale, **places, **order._asdict()
    )
    getattr(convolutions_library(), name)(ctypes.byref(arguments), torch.get_num_threads())


# ---------------------------------------------------------------------------------------------------------------------
# The order of summation
# ---------------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def is_known(shapes: tuple[Shape, ...], learns: bool, num_threads: int) -> bool:
    """Whether all orders of summation are known, including those of gradients if `learns`."""
    if not shapes or any(not _fits(shape, is_first=n == 0) for n, shape in enumerate(shapes)):
        return False
    orders = [to_result(shape, num_threads) for shape in shapes]
    if learns and UNKNOWN not in orders:
        orders += [to_weight(shape, num_threads) for shape in shapes]
        orders += [to_x(shape, num_threads) for shape in shapes[1:]]
    return UNKNOWN not in orders


def _fits(shape: Shape, is_first: bool) -> bool:
    """Whether the kernels support these sizes."""
    _, outputs, down, across = shape.result
    columns = library().panel_columns() // 2
    is_whole = outputs % columns == 0 and (is_first or shape.channels % columns == 0)
    return is_whole and down * across >= MIN_PIXELS


@functools.lru_cache(maxsize=256)
def to_result(shape: Shape, num_threads: int) -> Order:
    """The order of summation of the results."""
    number = shape.size**2 * shape.channels
    chunks = dict.fromkeys((number, -(-number // 2), *(size for size in CHUNKS if size < number)))

    def own(order: Order, case: _Case) -> tuple[Tensor, ...]:
        return (convolve(shape, order, case.x, case.weight, case.bias, relu=False),)

    def wanted(case: _Case) -> tuple[Tensor, ...]:
        return (F.conv2d(case.x, case.weight, case.bias, shape.stride),)

    return _find(shape, [Order(chunk=chunk) for chunk in chunks], own, wanted)


@functools.lru_cache(maxsize=256)
def to_weight(shape: Shape, num_threads: int) -> Order:
    """The order of summation of the gradients of weight and bias."""
    parts = [1, *([num_threads] if 1 < num_threads <= shape.images else [])]
    orders = [Order(parts=n, by_rows=by_rows) for n, by_rows in itertools.product(parts, (False, True))]

    def own(order: Order, case: _Case) -> tuple[Tensor, ...]:
        return weight_gradient(shape, order, case.x, case.gradient)

    def wanted(case: _Case) -> tuple[Tensor, ...]:
        return _gradients(shape, case, [False, True, True])[1:]

    return _find(shape, orders, own, wanted)


@functools.lru_cache(maxsize=256)
def to_x(shape: Shape, num_threads: int) -> Order:
    """The order of summation of the gradient of images."""
    orders = [Order(last_row_first=a, last_column_first=b) for a, b in itertools.product((False, True), repeat=2)]

    def own(order: Order, case: _Case) -> tuple[Tensor, ...]:
        return (x_gradient(shape, order, case.weight, case.gradient),)

    def wanted(case: _Case) -> tuple[Tensor, ...]:
        return _gradients(shape, case, [True, False, False])[:1]

    return _find(shape, orders, own, wanted)


class _Case(NamedTuple):
    """Random inputs of one layer."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    gradient: Tensor


def _gradients(shape: Shape, case: _Case, wanted: list[bool]) -> tuple[Tensor, ...]:
    stride = [shape.stride] * 2
    gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
        case.gradient, case.x, case.weight, [shape.outputs], stride, [0, 0], [1, 1], False, [0, 0], 1, wanted
    )
    return gradients


def _find(
    shape: Shape,
    orders: Iterable[Order],
    own: Callable[[Order, _Case], tuple[Tensor, ...]],
    wanted: Callable[[_Case], tuple[Tensor, ...]],
) -> Order:
    """The first order that is bit-identical to torch; `UNKNOWN` if there is none."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int) -> Tensor:
        images = torch.randn(size, generator=generator, dtype=torch.float32)
        return images.contiguous(memory_format=torch.channels_last)

    s = shape
    cases = []
    with torch.no_grad():
        for _ in range(-(-NUM_COMPARED // (s.images * s.outputs * s.result[2] * s.result[3]))):
            weight = torch.randn((s.outputs, s.channels, s.size, s.size), generator=generator, dtype=torch.float32)
            bias = torch.randn(s.outputs, generator=generator, dtype=torch.float32)
            case = _Case(draw(s.images, s.channels, s.height, s.width), weight, bias, draw(*s.result))
            cases.append((case, wanted(case)))
        for order in orders:
            if all(torch.equal(a, b) for case, found in cases for a, b in zip(own(order, case), found, strict=True)):
                return order
    return UNKNOWN
