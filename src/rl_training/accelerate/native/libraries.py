"""Internal functions of numpy and torch that compiled recordings call directly, without Python.

They are looked up in the loaded libraries, and used if they are bit-identical to numpy and torch on random numbers. If
a function is not found, the operator stays a Python call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rl_training.accelerate.native.compiler import loaded
from rl_training.accelerate.native.elements import WIDE, Element
from rl_training.accelerate.native.memory import Access, Pointers, Statement, by_first, by_share, share
from rl_training.accelerate.native.products import NUM_COMPARED, library
from rl_training.accelerate.numpy_kernels import SMALL, SMALL_PRODUCT, SMALL_SUM


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def _alone(code: str, read: Sequence[Tensor], written: Tensor, threads: int) -> Statement:
    """A statement that only the first thread runs."""
    accesses = [Access(by_first(tensor, threads), False) for tensor in read]
    return Statement(code, [*accesses, Access(by_first(written, threads), True)], False)


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise functions
# ---------------------------------------------------------------------------------------------------------------------

_OF_NUMPY = {"exp": np.exp, "log": np.log, "tanh": np.tanh}


class _Ufunc(ctypes.Structure):
    """The first fields of `PyUFuncObject`, declared in numpy/ufuncobject.h."""

    _fields_ = [
        ("head", ctypes.c_ssize_t * 2),
        ("nin", ctypes.c_int), ("nout", ctypes.c_int), ("nargs", ctypes.c_int), ("identity", ctypes.c_int),
        ("functions", ctypes.POINTER(ctypes.c_void_p)), ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("ntypes", ctypes.c_int), ("reserved", ctypes.c_int), ("name", ctypes.c_char_p),
    ]  # fmt: skip


Loop = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_long), ctypes.POINTER(ctypes.c_long), ctypes.c_void_p
)
"""Arguments: the arrays, the number of elements, the steps in bytes, and the data registered with the function."""


@functools.cache
def numpy_loop(name: str) -> tuple[int, int] | None:
    """The addresses of numpy's float32 loop of a ufunc and of its data; None if they are not found or do not match."""
    function = _OF_NUMPY[name]
    found = _Ufunc.from_address(id(function))
    kinds = function.types
    is_there = (found.nin, found.nout, found.nargs, found.ntypes) == (1, 1, 2, len(kinds)) and "f->f" in kinds
    if not is_there or found.name != name.encode():
        return None
    number = kinds.index("f->f")
    address, data = found.functions[number], (found.data[number] if found.data else None) or 0
    if not address:
        return None
    x = _draw(NUM_COMPARED).abs().numpy() if name == "log" else 3 * _draw(NUM_COMPARED).numpy()
    y = np.empty_like(x)
    for low, high in ((0, 37), (37, NUM_COMPARED)):  # results must not depend on the number of elements
        places = (ctypes.c_void_p * 2)(x[low:].ctypes.data, y[low:].ctypes.data)
        Loop(address)(places, (ctypes.c_long * 1)(high - low), (ctypes.c_long * 2)(x.itemsize, x.itemsize), data)
    return (address, data) if np.array_equal(y, function(x)) else None


def of_elements(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Tensor, pointers: Pointers, threads: int
) -> list[Statement] | None:
    """exp, log and tanh as in numpy, and softplus as in torch; None if it stays a Python call."""
    tensors = [*(value for value in args if isinstance(value, Tensor)), result]
    if kwargs or any(t.dtype != torch.float32 or not t.is_contiguous() or t.shape != result.shape for t in tensors):
        return None
    if name in _OF_NUMPY:
        return _by_numpy(name, args[0], result, pointers, threads)
    return _softplus(name, args, result, pointers, threads)


def _by_numpy(name: str, x: Tensor, y: Tensor, pointers: Pointers, threads: int) -> list[Statement] | None:
    is_numpys = name == "tanh" or x.numel() <= SMALL  # see `numpy_kernels`
    loop = numpy_loop(name) if is_numpys else None
    if loop is None:
        return None
    function, data = map(pointers.function, loop)
    x, y = x.view(-1), y.view(-1)
    is_wide = threads > 1 and len(x) >= WIDE
    low, high = share(len(x), threads) if is_wide else ("0", str(len(x)))
    begin, out = pointers.name(x), pointers.name(y)
    code = f"apply((loop_function){function}, {data}, {begin} + {low}, {out} + {low}, {high} - {low});"
    touched = by_share if is_wide else by_first
    return [Statement(code, [Access(touched(x, threads), False), Access(touched(y, threads), True)], is_wide)]


@functools.cache
def vector_functions() -> tuple[int, int] | None:
    """The addresses of torch's vectorised exp and log1p, if softplus computed with them is bit-identical to torch's."""
    lanes = {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability())
    if lanes is None or lanes != library().lanes():
        return None
    found = loaded(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")
    names = [f"Sleef_{name}f{lanes}_u10" for name in ("exp", "log1p")]
    if not all(hasattr(found, name) for name in names):
        return None
    pair = [ctypes.cast(getattr(found, name), ctypes.c_void_p) for name in names]
    x, gradient = 10 * _draw(NUM_COMPARED), _draw(2, NUM_COMPARED)[1]
    y, back = torch.empty_like(x), torch.empty_like(x)
    library().softplus_by(*pair, x.data_ptr(), y.data_ptr(), len(x))
    library().softplus_backward_by(pair[0], gradient.data_ptr(), x.data_ptr(), back.data_ptr(), len(x))
    wanted = F.softplus(x), torch.ops.aten.softplus_backward(gradient, x, 1, 20)
    is_same = torch.equal(y, wanted[0]) and torch.equal(back, wanted[1])
    return (pair[0].value or 0, pair[1].value or 0) if is_same else None


MOST_OF_ONE_THREAD = 32_768
"""Elements below which torch uses one thread."""


def _softplus(
    name: str, args: Sequence[Any], result: Tensor, pointers: Pointers, threads: int
) -> list[Statement] | None:
    """Softplus and its gradient; only for sizes that torch computes in pairs of whole vectors."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    is_plain = [value for value in args if not isinstance(value, Tensor)] in ([], [1, 20])
    size = result.numel()
    found = vector_functions() if is_plain and size < MOST_OF_ONE_THREAD else None
    if found is None or size % (2 * library().lanes()):
        return None
    exp, log1p = map(pointers.function, found)
    functions = f"(vector_function){exp}, " + (f"(vector_function){log1p}, " if name == "softplus" else "")
    code = f"{name}({functions}{', '.join(map(pointers.name, (*tensors, result)))}, {size});"
    return [_alone(code, tensors, result, threads)]


# ---------------------------------------------------------------------------------------------------------------------
# Small products and sums
# ---------------------------------------------------------------------------------------------------------------------

ROWS_FIRST, COLUMNS_FIRST, AS_IT_IS, TURNED = 101, 102, 111, 112
"""CBLAS constants for the memory order of matrices, and for transposition."""


@functools.cache
def blas() -> dict[str, Callable[..., Any]]:
    """The functions of numpy's bundled OpenBLAS; empty if there is none."""
    for path in sorted((Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*.so")):
        found = loaded(path)
        names = {name: f"scipy_cblas_{name}64_" for name in ("sdot", "sgemm", "sgemv")}
        if not all(hasattr(found, name) for name in names.values()):
            continue
        functions = {name: getattr(found, own) for name, own in names.items()}
        place, long, real = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
        flags = [ctypes.c_int] * 3
        functions["sdot"].argtypes, functions["sdot"].restype = [long, place, long, place, long], real
        functions["sgemv"].argtypes = [*flags[:2], long, long, real, place, long, place, long, real, place, long]
        functions["sgemm"].argtypes = [*flags, long, long, long, real, place, long, place, long, real, place, long]
        return functions
    return {}


def _address(name: str) -> int:
    return ctypes.cast(blas()[name], ctypes.c_void_p).value or 0  # type: ignore[arg-type]


Numbers = tuple[Any, ...]


def _as_numpy_calls(a: Tensor, b: Tensor) -> tuple[str, Numbers] | None:
    """The BLAS function that `np.dot` calls for two matrices, and its arguments, with "a", "b" and "c" as addresses."""
    (m, k), n = a.shape, b.shape[1]
    layouts = [_layout(tensor) for tensor in (a, b)]
    if None in layouts or not blas() or min(m * n, k) < 2:
        return None
    if a.data_ptr() == b.data_ptr():  # numpy calls another function for a matrix and its transpose
        return None
    (a_first, a_step), (b_first, b_step) = layouts  # type: ignore[misc]
    if n == 1:
        order = ROWS_FIRST if a_first else COLUMNS_FIRST
        return "sgemv", (order, AS_IT_IS, m, k, 1.0, "a", a_step, "b", b.stride(0), 0.0, "c", 1)
    if m == 1:
        order = ROWS_FIRST if b_first else COLUMNS_FIRST
        return "sgemv", (order, TURNED, k, n, 1.0, "b", b_step, "a", a.stride(1), 0.0, "c", 1)
    turned = [AS_IT_IS if first else TURNED for first in (a_first, b_first)]
    return "sgemm", (ROWS_FIRST, *turned, m, n, k, 1.0, "a", a_step, "b", b_step, 0.0, "c", n)


def _layout(tensor: Tensor) -> tuple[bool, int] | None:
    """Whether a matrix is row-major (else column-major), and its leading dimension; None if it is neither."""
    if tensor.is_contiguous():
        return True, tensor.shape[1]
    return (False, tensor.shape[0]) if tensor.mT.is_contiguous() else None


@functools.cache
def _is_known(
    a_shape: tuple[int, ...], a_stride: tuple[int, ...], b_shape: tuple[int, ...], b_stride: tuple[int, ...]
) -> bool:
    """Whether the product of random matrices is bit-identical to numpy's."""
    a = _draw(a_shape[0] * a_shape[1]).as_strided(a_shape, a_stride)
    b = _draw(2, b_shape[0] * b_shape[1])[1].as_strided(b_shape, b_stride)
    call = _as_numpy_calls(a, b)
    if call is None:
        return False
    c = torch.empty(a_shape[0], b_shape[1], dtype=torch.float32)
    places = {"a": a.data_ptr(), "b": b.data_ptr(), "c": c.data_ptr()}
    blas()[call[0]](*(places.get(value, value) for value in call[1]))
    return np.array_equal(np.dot(a.numpy(), b.numpy()), c.numpy())


@functools.cache
def is_dot_known() -> bool:
    """Whether dot products of random vectors are bit-identical to numpy's."""
    x, y = _draw(2, SMALL_SUM).numpy()
    sizes = (1, 7, 16, 33, 256, 1000, 4095, SMALL_SUM)
    return bool(blas()) and all(
        blas()["sdot"](size, x.ctypes.data, 1, y.ctypes.data, 1) == np.dot(x[:size], y[:size]) for size in sizes
    )


def small_product(
    args: Sequence[Tensor], result: Tensor, pointers: Pointers, threads: int
) -> list[Statement | Element] | None:
    """`mm` and `addmm` that numpy computes in recordings; None if torch does, or numpy's call is not known."""
    *bias, a, b = args
    if any(t.dtype != torch.float32 for t in (*args, result)) or a.dim() != 2 or not result.is_contiguous():
        return None
    if a.numel() * b.shape[1] > SMALL_PRODUCT:
        return None
    after: list[Statement | Element] = [Element("{0} + {1}", [result, bias[0]], result)] if bias else []
    if a.shape[1] == 1 and min(a.shape[0], b.shape[1]) > 1:  # no sum, except to positive zero
        return [Element("0.0f + {0} * {1}", [a, b], result), *after]
    call = _as_numpy_calls(a, b)
    if call is None or not _is_known(tuple(a.shape), a.stride(), tuple(b.shape), b.stride()):
        return None
    return [_alone(_call(*call, pointers, a=a, b=b, c=result), [a, b], result, threads), *after]


def _call(name: str, numbers: Numbers, pointers: Pointers, **places: Tensor) -> str:
    values = (pointers.name(places[value]) if isinstance(value, str) else str(value) for value in numbers)
    return f"(({name}_function){pointers.function(_address(name))})({', '.join(values)});"


def small_sum_of_columns(x: Tensor, y: Tensor, pointers: Pointers, threads: int) -> Statement | None:
    """The column sums of a small matrix, which `numpy_kernels` computes as a product with ones."""
    ones = torch.ones(1, len(x), dtype=torch.float32)
    if x.shape[1] == 1 and x.is_contiguous() and is_dot_known():
        code = f"*{pointers.name(y)} = {_call('sdot', (len(x), 'a', 1, 'b', 1), pointers, a=ones, b=x)}"
        return _alone(code, [ones, x], y, threads)
    call = _as_numpy_calls(ones, x)
    if call is None or not _is_known((1, len(x)), (len(x), 1), tuple(x.shape), x.stride()):
        return None
    return _alone(_call(*call, pointers, a=ones, b=x, c=y), [ones, x], y, threads)


def small_norm(x: Tensor, y: Tensor, pointers: Pointers, threads: int) -> Statement | None:
    """The 2-norm of at most `SMALL_SUM` elements."""
    if not is_dot_known():
        return None
    numbers = (x.numel(), "x", 1, "x", 1)
    code = f"*{pointers.name(y)} = sqrtf({_call('sdot', numbers, pointers, x=x)[:-1]});"
    return _alone(code, [x], y, threads)
