"""Matrix products with few columns, as in the last layers of actors."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rl_training.accelerate.native.memory import Access, Pointers, Statement, by_all, by_first, by_share, share
from rl_training.accelerate.native.products import NUM_COMPARED, WIDE_PRODUCT, Arguments, library
from rl_training.accelerate.numpy_kernels import SmallArithmetic

FEW = 8
"""Columns below which BLAS libraries use several partial sums per element."""


def product_of_few(args: Sequence[Tensor], result: Tensor, pointers: Pointers, threads: int) -> list[Statement] | None:
    """`mm` and `addmm` with few columns; None if there are more, or their order of summation is not known."""
    *bias, a, b = args
    if a.dim() != 2 or any(tuple(t.shape) != (b.shape[1],) for t in bias):
        return None
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (*bias, a, b.mT, result)):
        return None
    (m, k), n = a.shape, b.shape[1]
    if not 1 < n < FEW or not _is_known(m, n, k, bool(bias), torch.get_num_threads()):
        return None
    is_wide = threads > 1 and m * n * k >= WIDE_PRODUCT
    low, high = share(m, threads) if is_wide else ("0", f"{m}L")
    fields = {
        "m": "high - low", "n": n, "k": k,
        "a": f"{pointers.name(a)} + low * {k}", "a_row": k, "b": pointers.name(b), "b_column": k,
        "c": f"{pointers.name(result)} + low * {n}", "c_row": n, "bias": pointers.name(bias[0]) if bias else 0,
    }  # fmt: skip
    values = ", ".join(f".{name} = {value}" for name, value in fields.items())
    code = f"{{ const long low = {low}, high = {high}; product_of_few(&(product_type){{{values}}}); }}"
    rows, others = (by_share, by_all) if is_wide else (by_first, by_first)
    read = [Access(rows(a, threads), False), *(Access(others(t, threads), False) for t in (b, *bias))]
    return [Statement(code, [*read, Access(rows(result, threads), True)], is_wide)]


@functools.cache
def _is_known(m: int, n: int, k: int, has_bias: bool, num_threads: int) -> bool:
    """Whether random products are bit-identical to the library's, with this number of threads."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(-(-NUM_COMPARED // (m * n))):
        shapes = (m, k), (n, k), (n,)
        a, weight, bias = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)
        with torch.no_grad(), SmallArithmetic():  # type: ignore[no-untyped-call]
            wanted = torch.addmm(bias, a, weight.t()) if has_bias else torch.mm(a, weight.t())
        if not torch.equal(_multiply(a, weight, bias if has_bias else None), wanted):
            return False
    return True


def _multiply(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (m, k), n = a.shape, len(weight)
    c = torch.empty(m, n, dtype=torch.float32)
    plus = None if bias is None else bias.data_ptr()
    arguments = Arguments(
        m, n, k, a.data_ptr(), k, 1, weight.data_ptr(), 1, k, None, c.data_ptr(), n, bias=plus, chunk=k
    )
    library().product_of_few(ctypes.byref(arguments))
    return c
