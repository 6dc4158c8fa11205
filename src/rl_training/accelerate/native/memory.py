"""The memory that a C statement accesses, per thread."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

C_TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "unsigned char", torch.int64: "long long"}
"""The C types of supported tensor dtypes."""

Ranges = tuple[tuple[int, int], ...]
"""The address range [begin, end) of each thread; an empty range is (0, 0)."""


@dataclass(frozen=True)
class Access:
    """Memory that a statement reads or writes."""

    ranges: Ranges
    writes: bool

    def disturbs(self, other: Access) -> bool:
        """Whether the two accesses conflict across threads, so that they need a barrier in between."""
        if not (self.writes or other.writes):
            return False
        return any(
            mine[0] < its[1] and its[0] < mine[1]
            for i, mine in enumerate(self.ranges)
            for j, its in enumerate(other.ranges)
            if i != j
        )


@dataclass
class Statement:
    """C code, the memory it accesses, and whether all threads run it, each on its part, or only the first."""

    code: str
    accesses: list[Access]
    is_wide: bool


class Pointers:
    """The tensors of a program and the external functions it calls, and their names in C.

    Addresses are passed at run time, not compiled in.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.functions: list[int] = []
        self._known: dict[tuple[int, torch.dtype], int] = {}

    def name(self, tensor: Tensor) -> str:
        """A typed C pointer to the first element of a tensor."""
        key = (tensor.data_ptr(), tensor.dtype)
        if key not in self._known:
            self._known[key] = len(self.tensors)
            self.tensors.append(tensor)
        return f"(({C_TYPES[tensor.dtype]}*)p[{self._known[key]}])"

    def function(self, address: int) -> str:
        """A C expression for an external address."""
        if address not in self.functions:
            self.functions.append(address)
        return f"others[{self.functions.index(address)}]"


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the byte after its last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + tensor.element_size() * (1 + last)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors may share memory."""
    (a, b), (c, d) = extent(one), extent(other)
    return a < d and c < b


def same_elements(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in memory."""
    return one.data_ptr() == other.data_ptr() and one.dtype == other.dtype and _steps(one) == _steps(other)


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    return [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def by_first(tensor: Tensor, threads: int) -> Ranges:
    """The first thread accesses all of it."""
    return by_one(tensor, 0, threads)


def by_one(tensor: Tensor, thread: int, threads: int) -> Ranges:
    """One thread accesses all of it."""
    return tuple(extent(tensor) if t == thread else (0, 0) for t in range(threads))


def by_all(tensor: Tensor, threads: int) -> Ranges:
    """Every thread may access all of it."""
    return (extent(tensor),) * threads


def by_share(tensor: Tensor, threads: int) -> Ranges:
    """Each thread accesses its share of the first dimension; all of it if that dimension has stride 0."""
    if tensor.stride(0) == 0:
        return by_all(tensor, threads)
    cuts = [tensor.shape[0] * t // threads for t in range(threads + 1)]
    parts = [(tensor.narrow(0, a, b - a), b > a) for a, b in itertools.pairwise(cuts)]
    return tuple(extent(part) if is_some else (0, 0) for part, is_some in parts)


def share(total: int, threads: int) -> tuple[str, str]:
    """The begin and end of a thread's share of a loop, as C."""
    return f"{total}L*t/{threads}", f"{total}L*(t+1)/{threads}"
