"""Matrix products as C statements, and their order of summation."""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_training.accelerate.native.compiler import NotCompiledError, build
from rl_training.accelerate.native.elements import Element
from rl_training.accelerate.native.memory import (
    Access,
    Pointers,
    Statement,
    by_all,
    by_first,
    by_share,
    extent,
    overlap,
    same_elements,
    share,
)
from rl_training.accelerate.numpy_kernels import SmallArithmetic

WIDE_PRODUCT = 300_000
"""Multiplications from which on a product is split among threads."""
PACK_COLUMNS = 64
"""The columns of a packed matrix are padded to a multiple of this; kernels.c may need less."""


MIN_ROWS = 6
"""Smallest number of rows for full tiles; see ROWS in kernels.h."""


Split = Literal["by the first", "by matrices", "by rows", "by columns"]
"""How a product is split among threads."""


def _is_plain(b: Tensor) -> bool:
    """Whether B is used without packing."""
    return b.stride(2) == 1 and b.shape[2] % PACK_COLUMNS == 0


@dataclass
class Product:
    """C = A B of matrices [count, m, k] and [count, k, n], plus a bias.

    Optionally followed by a relu, or set to zero where `mask` is not positive (the gradient of a relu).
    """

    a: Tensor
    b: Tensor
    c: Tensor
    chunk: int
    """How many products are summed at a time (see `chunks_of_rows`)."""
    bias: Tensor | None = None
    relu: bool = False
    mask: Tensor | None = None
    packed: Tensor | None = None
    """Memory for B packed by panels of columns [count, copies, size], if B does not have the layout for kernels.c."""
    is_packed: bool = False
    """Whether another product has packed B already."""
    some: tuple[Tensor, Tensor] | None = None
    """Memory for the nonzero rows of A and their indices, if many rows are likely to be zero; these are skipped."""

    @classmethod
    def of(cls, a: Tensor, b: Tensor, c: Tensor, bias: Tensor | None = None) -> list[Product]:
        """A matrix product or batched product, split by rows if their orders of summation differ.

        Empty if it cannot be computed bit-identically.
        """
        is_batch = a.dim() == 3
        if any(tensor.dtype != torch.float32 for tensor in (a, b, c)) or min(a.shape[-2:] + b.shape[-1:]) < 2:
            return []
        a, b, c = (tensor[None] if tensor.dim() == 2 else tensor for tensor in (a, b, c))
        if any(1 not in tensor.stride()[1:] for tensor in (a, b)) or c.stride(2) != 1:
            return []
        if bias is not None:
            bias = bias.expand_as(c)
            if bias.dtype != torch.float32 or bias.stride(1) != 0 or bias.stride(2) != 1:
                return []
        layouts = tuple(a.shape), a.stride(), tuple(b.shape), b.stride()
        chunks = chunks_of_rows(layouts, bias is not None, is_batch, torch.get_num_threads())
        return [
            cls(a[:, rows], b, c[:, rows], chunk, None if bias is None else bias[:, rows]) for rows, chunk in chunks
        ]

    def parts(self) -> list[Product | Element]:
        """This product; with few columns, the transposed product (with few rows) may be faster."""
        turned = self.b.mT, self.a.mT
        (_, n, _), m = turned[0].shape, turned[1].shape[2]
        if self.bias is not None or not MIN_ROWS <= n <= PACK_COLUMNS // 2 or m <= n or not _is_plain(turned[1]):
            return [self]
        c = torch.empty(self.c.mT.shape, dtype=torch.float32)
        return [Product(*turned, c, self.chunk), Element("{0}", [c.mT], self.c)]

    def leave_out_zeros(self) -> None:
        """Skip zero rows of A, because there may be many."""
        if self.bias is None and self.a.stride(2) == 1:
            self.some = torch.empty(self.a.shape, dtype=torch.float32), torch.empty(self.a.shape[:2], dtype=torch.int64)

    def absorb(self, name: str, element: Element) -> bool:
        """Fuse an activation, or its gradient, if that is the only use of the product; returns whether it did."""
        first, result = element.operands[0], element.result
        if self.relu or self.mask is not None or result.numel() != self.c.numel() or not result.is_contiguous():
            return False
        if not isinstance(first, Tensor) or not same_elements(first, self.c):
            return False
        result = result.view(self.c.shape)
        others = [self.a, self.b, *([] if self.bias is None else [self.bias])]
        if any(overlap(result, tensor) for tensor in others):
            return False
        if name == "relu":
            self.c, self.relu = result, True
            return True
        if name != "threshold_backward" or element.operands[2] != 0:
            return False
        mask = element.operands[1]
        if not isinstance(mask, Tensor) or not mask.is_contiguous() or any(overlap(mask, t) for t in (result, self.c)):
            return False  # rows at the end may be computed twice, and the product itself is no longer stored
        self.c, self.mask = result, mask.view(self.c.shape)
        return True

    def is_apart_from(self, statement: Statement) -> bool:
        """Whether the two are independent, so that their order does not matter."""
        touched = [(extent(tensor), is_written) for tensor, is_written in self._touched()]
        return not any(
            (access.writes or is_written) and its[0] < mine[1] and mine[0] < its[1]
            for access in statement.accesses
            for its in access.ranges
            for mine, is_written in touched
        )

    def split(self, threads: int) -> Split:
        """The best split among threads."""
        count, m, k = self.a.shape
        n = self.b.shape[2]
        if threads == 1 or count * m * n * k < WIDE_PRODUCT:
            return "by the first"
        if count % threads == 0:
            return "by matrices"
        return "by rows" if m >= n or n < PACK_COLUMNS * threads else "by columns"

    def reserve(self, threads: int) -> None:
        """Allocate memory for packing B, if that is needed.

        If the rows are split among threads, every thread reads all of B and packs its own copy. A shared copy would be
        in another core's cache; writing and reading it takes longer than packing it once per thread.
        """
        if not _is_plain(self.b):
            count, k, n = self.b.shape
            columns = -(-n // PACK_COLUMNS) * PACK_COLUMNS
            copies = threads if self.split(threads) == "by rows" else 1
            self.packed = torch.empty(count, copies, k * columns, dtype=torch.float32)

    def statements(self, pointers: Pointers, threads: int) -> list[Statement]:
        """The product as C."""
        count, split = self.a.shape[0], self.split(threads)
        if split == "by the first":
            code = "".join(self._pack(i, pointers, 1, "0") + self._call(i, pointers) for i in range(count))
            accesses = [Access(by_first(tensor, threads), is_written) for tensor, is_written in self._touched()]
            return [Statement(code, accesses, False)]
        if split == "by matrices":
            low, high = share(count, threads)
            each = self._pack("i", pointers, 1, "0") + self._call("i", pointers)
            code = f"for (long i = {low}; i < {high}; i++) {{ {each} }}"
            accesses = [Access(by_share(tensor, threads), is_written) for tensor, is_written in self._touched()]
            return [Statement(code, accesses, True)]
        return [part for i in range(count) for part in self._shared(i, pointers, threads, split == "by rows")]

    def _shared(self, i: int, pointers: Pointers, threads: int, is_by_rows: bool) -> list[Statement]:
        """One matrix, split by rows or columns among all threads, after packing B."""
        m, n = self.c.shape[1:]
        found = []
        ranges = None if self.packed is None else (by_share if is_by_rows else by_all)(self.packed[i], threads)
        if ranges is not None and not self.is_packed:
            code = self._pack(i, pointers, 1, "0") if is_by_rows else self._pack(i, pointers, threads, "t")
            found.append(Statement(code, [Access(by_all(self.b[i], threads), False), Access(ranges, True)], True))
        if is_by_rows:
            code = f"{{ const long low = {share(m, threads)[0]}, high = {share(m, threads)[1]}; "
            code += self._call(i, pointers, rows=True) + " }"
        else:
            panels = f"(({n} + PANEL - 1) / PANEL)"
            code = f"{{ const long low = PANEL * ({panels}*t/{threads}), end = PANEL * ({panels}*(t+1)/{threads}), "
            code += f"high = end < {n} ? end : {n}; " + self._call(i, pointers, columns=True) + " }"
        accesses = [] if ranges is None else [Access(ranges, False)]
        for tensor, is_written in self._touched():
            if tensor is self.packed:
                continue
            part = tensor[i]
            is_cut = is_by_rows and part.dim() == 2 and part.shape[0] == m and tensor is not self.b
            is_cut = is_cut and (tensor is not self.a or part.stride(1) == 1)
            accesses.append(Access(by_share(part, threads) if is_cut else by_all(part, threads), is_written))
        return [*found, Statement(code, accesses, True)]

    def _touched(self) -> list[tuple[Tensor, bool]]:
        """The tensors [count, ...] that it accesses, each with whether it is written."""
        read = [self.a, self.b, self.packed, self.bias, self.mask, *(self.some or ())]
        written = (self.c, None if self.is_packed else self.packed, *(self.some or ()))
        return [(t, any(t is w for w in written)) for t in (*read, self.c) if t is not None]

    def _pack(self, i: int | str, pointers: Pointers, threads: int, thread: str) -> str:
        if self.packed is None or self.is_packed:
            return ""
        _, k, n = self.b.shape
        panels = f"(({n} + PANEL - 1) / PANEL)"
        begin, out = self._at(self.b, i, pointers), self._own_copy(i, pointers)
        first, last = f"{panels}*{thread}/{threads}", f"{panels}*({thread}+1)/{threads}"
        return f"pack({begin}, {self.b.stride(1)}, {self.b.stride(2)}, {k}, {n}, {out}, {first}, {last});\n"

    def _call(self, i: int | str, pointers: Pointers, *, rows: bool = False, columns: bool = False) -> str:
        a, b, c, bias, mask, packed = self.a, self.b, self.c, self.bias, self.mask, self.packed
        row, column = ("low" if rows else "0"), ("low" if columns else "0")
        size = "(high - low)"
        fields = {
            "m": size if rows else a.shape[1],
            "n": size if columns else b.shape[2],
            "k": a.shape[2],
            "a": f"{self._at(a, i, pointers)} + {row} * {a.stride(1)}L",
            "a_row": a.stride(1),
            "a_column": a.stride(2),
            "b": f"{self._at(b, i, pointers)} + {column} * {b.stride(2)}L",
            "b_row": b.stride(1),
            "b_column": b.stride(2),
            "packed": 0 if packed is None else f"{self._own_copy(i, pointers)} + {column} * {a.shape[2]}L",
            "c": f"{self._at(c, i, pointers)} + {row} * {c.stride(1)}L + {column}",
            "c_row": c.stride(1),
            "bias": 0 if bias is None else f"{self._at(bias, i, pointers)} + {column}",
            "relu": int(self.relu),
            "mask": 0 if mask is None else f"{self._at(mask, i, pointers)} + {row} * {mask.stride(1)}L + {column}",
            "mask_row": 0 if mask is None else mask.stride(1),
            "chunk": self.chunk,
        }
        values = ", ".join(f".{name} = {value}" for name, value in fields.items())
        if self.some is None or columns:
            return f"product(&(product_type){{{values}}});"
        memory, some = (f"{self._at(x, i, pointers)} + {row} * {x.stride(1)}L" for x in self.some)
        return f"product_of_some(&(product_type){{{values}}}, {memory}, (long*)({some}));"

    def _own_copy(self, i: int | str, pointers: Pointers) -> str:
        """The address of a thread's packed copy of B."""
        assert self.packed is not None
        _, copies, size = self.packed.shape
        return self._at(self.packed, i, pointers) + (f" + t * {size}L" if copies > 1 else "")

    @staticmethod
    def _at(tensor: Tensor, i: int | str, pointers: Pointers) -> str:
        return f"{pointers.name(tensor)} + {i} * {tensor.stride(0)}L"


# ---------------------------------------------------------------------------------------------------------------------
# The order of summation
# ---------------------------------------------------------------------------------------------------------------------

NUM_COMPARED = 4096
"""Number of sums that must agree; with fewer, they could agree by chance."""
CHUNKS = (128, 160, 192, 256, 320, 384, 512)
"""How many products BLAS libraries sum sequentially, if not all or half of them."""
FOUR, FEW_ROWS = 4, 8
"""With fewer than `FEW_ROWS` rows, BLAS libraries process four rows together, and the rest in another way.

Products of the rest are rounded before they are summed: chunks of a single product."""


_compiling = threading.RLock()
"""Compilation is serialised: kernels.c is built once per process."""


def library() -> Any:
    """The compiled kernels.c."""
    with _compiling:
        return _library()


def built(name: str) -> Any:
    """Compile a C file of this folder; with OpenMP, if the compiler supports it."""
    source = f'#include "{name}"'
    try:
        return build(name, source, ("-fopenmp",))
    except NotCompiledError:
        return build(name, source)


@functools.cache
def _library() -> Any:
    found = built("kernels.c")
    found.pack.argtypes = [ctypes.c_void_p, *[ctypes.c_long] * 4, ctypes.c_void_p, *[ctypes.c_long] * 2]
    found.product.argtypes = found.product_of_few.argtypes = [ctypes.POINTER(Arguments)]
    found.product_by_threads.argtypes = [ctypes.POINTER(Arguments), ctypes.c_void_p, ctypes.c_int]
    places, numbers = [ctypes.c_void_p] * 4, [ctypes.c_long] * 2
    found.adam_step.argtypes = [*places, *numbers, *[ctypes.c_double] * 5]
    found.follow_by.argtypes = [*places[:2], *numbers, ctypes.c_float]
    found.norm.argtypes, found.norm.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_float
    found.softplus_by.argtypes = found.softplus_backward_by.argtypes = [*places, ctypes.c_long]
    vector = (ctypes.c_void_p, ctypes.c_long, ctypes.c_long, *[ctypes.c_void_p] * 3, ctypes.c_int)
    found.product_of_vector.argtypes = vector
    images = (ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_float, ctypes.c_void_p, ctypes.c_int)
    found.pixels_to_floats.argtypes = images
    return found


def find_chunk(
    a_shape: tuple[int, ...],
    a_stride: tuple[int, ...],
    b_shape: tuple[int, ...],
    b_stride: tuple[int, ...],
    has_bias: bool,
    is_batch: bool,
) -> int:
    """How many products the library sums at a time; 0 if that is not found, or differs between rows."""
    found = chunks_of_rows((a_shape, a_stride, b_shape, b_stride), has_bias, is_batch, torch.get_num_threads())
    return found[0][1] if len(found) == 1 else 0


@functools.cache
def chunks_of_rows(
    layouts: tuple[tuple[int, ...], ...], has_bias: bool, is_batch: bool, num_threads: int
) -> list[tuple[slice, int]]:
    """The chunk size for each range of rows with the same order of summation; empty if it is not found.

    It depends on shapes, threads and the machine, so products of random numbers are compared bit for bit. `layouts` are
    the shape and stride of A, and those of B.
    """
    a_shape, a_stride, b_shape, b_stride = layouts
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        return torch.randn(size, generator=generator, dtype=torch.float32).as_strided(shape, stride)

    cases = []
    for _ in range(-(-NUM_COMPARED // (a_shape[0] * a_shape[1] * b_shape[2]))):
        a, b = draw(a_shape, a_stride), draw(b_shape, b_stride)
        bias = draw((a_shape[0], 1, b_shape[2]), (b_shape[2], 0, 1)) if has_bias else None
        with torch.no_grad(), SmallArithmetic():  # type: ignore[no-untyped-call]
            if is_batch:
                wanted = torch.bmm(a, b) if bias is None else torch.baddbmm(bias, a, b)
            else:
                wanted = (torch.mm(a[0], b[0]) if bias is None else torch.addmm(bias[0, 0], a[0], b[0]))[None]
        cases.append((a, b, bias, wanted))
    _, m, k = a_shape
    sizes = list(
        dict.fromkeys((k, -(-k // 2), *(size for size in CHUNKS if size < k), *((1,) if m < FEW_ROWS else ())))
    )

    def is_chunk(size: int, rows: slice) -> bool:
        return all(torch.equal(_multiply(a[:, rows], b, bias, size), wanted[:, rows]) for a, b, bias, wanted in cases)

    whole, four, left = slice(0, m), slice(0, FOUR), slice(FOUR, m)
    for parts in [[whole], [four, left]] if FOUR < m < FEW_ROWS else [[whole]]:
        found = [(rows, next((size for size in sizes if is_chunk(size, rows)), 0)) for rows in parts]
        if all(chunk for _, chunk in found):
            return found
    return []


def _multiply(a: Tensor, b: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    """The product, computed by kernels.c."""
    count, m, k = a.shape
    n = b.shape[2]
    c = torch.empty(count, m, n, dtype=torch.float32)
    packed = torch.empty(k * (n + PACK_COLUMNS), dtype=torch.float32)
    for i in range(count):
        of_b = (b[i].data_ptr(), *b.stride()[1:])
        library().pack(*of_b, k, n, packed.data_ptr(), 0, -(-n // library().panel_columns()))
        plus = None if bias is None else bias[i].data_ptr()
        library().product(
            Arguments(
                m, n, k, a[i].data_ptr(), *a.stride()[1:], *of_b, packed.data_ptr(), c[i].data_ptr(), n,
                bias=plus, chunk=chunk,
            )
        )  # fmt: skip
    return c


class Arguments(ctypes.Structure):
    """`product_type` of kernels.h."""

    _fields_ = [
        ("m", ctypes.c_long), ("n", ctypes.c_long), ("k", ctypes.c_long),
        ("a", ctypes.c_void_p), ("a_row", ctypes.c_long), ("a_column", ctypes.c_long),
        ("b", ctypes.c_void_p), ("b_row", ctypes.c_long), ("b_column", ctypes.c_long), ("packed", ctypes.c_void_p),
        ("c", ctypes.c_void_p), ("c_row", ctypes.c_long), ("bias", ctypes.c_void_p), ("column", ctypes.c_void_p),
        ("relu", ctypes.c_int),
        ("mask", ctypes.c_void_p), ("mask_row", ctypes.c_long), ("chunk", ctypes.c_long),
    ]  # fmt: skip
