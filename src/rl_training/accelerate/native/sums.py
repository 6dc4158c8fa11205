"""Sums, means, minima, maxima, `gather` and `scatter_add`, as C statements."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rl_training.accelerate.native.elements import Element
from rl_training.accelerate.native.libraries import small_sum_of_columns
from rl_training.accelerate.native.memory import Access, Pointers, Statement, by_all, by_first, by_share, share
from rl_training.accelerate.numpy_kernels import SMALL

FEW, FEW_OF_TORCH = 7, 4
"""Elements up to which numpy, and torch, add sequentially."""
MAX_LANES = 512
"""Contiguous elements below which torch uses one level of partial sums."""
COLUMNS = 32
"""Columns that torch sums in one block."""

_JOINED = {"sum": "({0} + {1})", "mean": "({0} + {1})", "amin": "least({0}, {1})", "amax": "largest({0}, {1})"}


def reduction(
    name: str, args: list[Any], result: Tensor, pointers: Pointers, threads: int
) -> list[Element | Statement] | None:
    """Sums, means, minima and maxima; None if the order of summation is not known."""
    x: Tensor = args[0]
    axes = sorted(d % x.dim() for d in args[1]) if len(args) > 1 and args[1] else list(range(x.dim()))
    axes = [d for d in axes if x.shape[d] > 1]
    kept = [d for d in range(x.dim()) if d not in axes and x.shape[d] > 1]
    if not result.is_contiguous():
        return None
    if not axes:
        is_same = x.is_contiguous() and x.dtype == result.dtype == torch.float32
        text = "{0}" if name in ("amin", "amax") else "0.0f + {0}"  # a sum of minus zero is zero
        return [Element(text, [x.view(result.shape)], result)] if is_same else None
    is_first = name == "sum" and x.dim() == 2 and len(args) > 1 and tuple(args[1]) == (0,)
    rest = [d for d in range(x.dim()) if d not in (*kept, *axes)]
    x = x.permute(*rest, *kept, *axes)[(0,) * len(rest)]
    y = result.view([x.shape[d] for d in range(len(kept))])
    count = math.prod(x.shape[len(kept) :])
    after: list[Element | Statement] = [Element("{0} / {1}", [y, count], y)] if name == "mean" else []
    is_small = max(x.numel(), y.numel()) <= SMALL  # see `numpy_kernels`
    few = FEW if is_small or name in ("amin", "amax") else FEW_OF_TORCH
    if len(axes) == 1 and count <= few and not (is_first and x.dtype == torch.float32):
        if name != "sum" and x.dtype != torch.float32:
            return None
        text = "{0}"
        for i in range(1, count):
            text = _JOINED[name].format(text, f"{{{i}}}")
        return [Element(text, [x.select(-1, i) for i in range(count)], y), *after]
    if name in ("amin", "amax") or any(tensor.dtype != torch.float32 for tensor in (x, y)):
        return None
    if is_small:
        columns = args[0]
        found = (
            small_sum_of_columns(columns, y, pointers, threads)
            if is_first
            else _sum_pairs(x, y, count, pointers, threads)
        )
    else:
        found = _sum_lanes(x, y, pointers, threads) or _sum_rows(x, y, pointers, threads) if len(axes) == 1 else None
    return None if found is None else [found, *after]


def _sum_pairs(x: Tensor, y: Tensor, count: int, pointers: Pointers, threads: int) -> Statement | None:
    """Sums of contiguous elements, in numpy's order."""
    if not x.is_contiguous():
        return None
    begin, out = pointers.name(x), pointers.name(y)
    code = f"for (long i = 0; i < {y.numel()}; i++) {out}[i] = sum_pairs({begin} + i * {count}L, {count}L);"
    return Statement(code, [Access(by_first(x, threads), False), Access(by_first(y, threads), True)], False)


def _sum_lanes(x: Tensor, y: Tensor, pointers: Pointers, threads: int) -> Statement | None:
    """Sums of contiguous elements, in torch's order."""
    count = x.shape[-1]
    if not x.is_contiguous() or count >= MAX_LANES or y.dim() == 0:
        return None
    x, y = x.view(-1, count), y.view(-1)
    (low, high), begin, out = share(len(y), threads), pointers.name(x), pointers.name(y)
    code = f"for (long i = {low}; i < {high}; i++) {out}[i] = sum_lanes({begin} + i * {count}L, {count}L);"
    return Statement(code, [Access(by_share(x, threads), False), Access(by_share(y, threads), True)], True)


def _sum_rows(x: Tensor, y: Tensor, pointers: Pointers, threads: int) -> Statement | None:
    """Column sums of [R, C] or [B, R, C], in torch's order; `x` is transposed to [C, R] or [B, C, R] here."""
    if y.dim() not in (1, 2):
        return None
    columns, count = x.shape[-2:]
    if x.stride(-2) != 1 or x.stride(-1) != columns or columns % (COLUMNS * threads):
        return None
    power = max(4, (count - 1).bit_length() // 4)
    begin, out = pointers.name(x), pointers.name(y)
    if y.dim() == 1:
        part = columns // threads
        code = f"sum_rows({begin} + t * {part}, {count}, {columns}, {part}, {power}, {out} + t * {part});"
        return Statement(code, [Access(by_all(x, threads), False), Access(by_share(y, threads), True)], True)
    if y.shape[0] % threads:
        return None
    low, high = share(y.shape[0], threads)
    code = (
        f"for (long i = {low}; i < {high}; i++) sum_rows({begin} + i * {x.stride(0)}L, {count}, {columns}, {columns}, "
        f"{power}, {out} + i * {columns});"
    )
    return Statement(code, [Access(by_share(x, threads), False), Access(by_share(y, threads), True)], True)


# ---------------------------------------------------------------------------------------------------------------------
# One element of each row
# ---------------------------------------------------------------------------------------------------------------------


def gather(args: list[Any], result: Tensor, pointers: Pointers, threads: int) -> list[Element | Statement] | None:
    """`x.gather(1, index)` of a matrix [B, A] with one column index per row [B, 1]."""
    x, dim, index = args[:3]
    if not _is_of_rows(x, dim, index) or result.dtype != torch.float32:
        return None
    names = [pointers.name(tensor) for tensor in (result, x, index)]
    code = "for (long i = 0; i < {3}; i++) {0}[i] = (unsigned long){2}[i] < {4} ? {1}[i * {4}L + {2}[i]] : NAN;"
    code = code.format(*names, *x.shape)
    return [Statement(code, [Access(by_first(t, threads), t is result) for t in (x, index, result)], False)]


def scatter_add(args: list[Any], result: Tensor, pointers: Pointers, threads: int) -> list[Element | Statement] | None:
    """`x.scatter_add(1, index, added)` for the same shapes."""
    x, dim, index, added = args
    if not _is_of_rows(result, dim, index) or added.shape != index.shape or not added.is_contiguous():
        return None
    names = [pointers.name(tensor) for tensor in (result, added, index)]
    code = "for (long i = 0; i < {3}; i++) if ((unsigned long){2}[i] < {4}) {0}[i * {4}L + {2}[i]] += {1}[i];"
    code = code.format(*names, *result.shape)
    accesses = [Access(by_first(t, threads), t is result) for t in (added, index, result)]
    return [Element("{0}", [x], result), Statement(code, accesses, False)]


def _is_of_rows(x: Tensor, dim: int, index: Tensor) -> bool:
    is_matrix = x.dim() == 2 and x.dtype == torch.float32 and x.is_contiguous() and dim in (1, -1)
    return is_matrix and index.dtype == torch.int64 and index.is_contiguous() and index.shape == (len(x), 1)
