"""Operations on all weights of a network at once: Adam steps, target network updates, gradient norms.

Weights, gradients and optimizer state are flat tensors. If threads split these evenly, each would wait for data in the
other's cache; so each thread processes the elements that it wrote itself in the preceding backward pass. Results that
all threads read later bypass the caches, see `put` in kernels.h.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_training.accelerate.native.libraries import small_norm
from rl_training.accelerate.native.memory import Access, Pointers, Statement, by_one, extent
from rl_training.accelerate.native.products import NUM_COMPARED, library
from rl_training.accelerate.numpy_kernels import SMALL_SUM

BLOCK = 16
"""Elements per block; each block is assigned to one thread."""
MAX_SHARE = 0.65
"""Largest share of the work for one thread; above it, the work is split evenly."""
NORM_PART = 2048
"""Elements from which on a part of a norm is summed by its own thread; threads take turns, because order matters."""

Cuts = tuple[tuple[tuple[int, int], ...], ...]
"""For each thread its parts of a flat tensor, as (begin, end) indices."""


class Owners:
    """Tracks which thread wrote which memory."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._written: list[tuple[int, int, int]] = []

    def note(self, statement: Statement) -> None:
        """Record the memory that a statement writes."""
        for access in statement.accesses:
            if access.writes and (not statement.is_wide or len(set(access.ranges)) == self._threads):
                parts = enumerate(access.ranges)
                self._written += [(begin, end, thread) for thread, (begin, end) in parts if end > begin]

    def cuts(self, tensors: Sequence[Tensor]) -> Cuts:
        """How threads split flat tensors of equal size: by the owners of one of them, or evenly."""
        size = tensors[0].numel()
        blocks = -(-size // BLOCK)
        even = np.minimum(np.arange(blocks) * self._threads // blocks, self._threads - 1)
        for tensor in tensors:
            owner = self._owner(tensor, blocks)
            shares = np.bincount(owner[owner >= 0], minlength=self._threads) / blocks
            if shares.sum() > MAX_SHARE and shares.max() <= MAX_SHARE:
                return _runs(np.where(owner >= 0, owner, even), size, self._threads)
        return _runs(even, size, self._threads)

    def _owner(self, tensor: Tensor, blocks: int) -> Any:
        """The owner of each block; -1 if it is not known."""
        begin, end = extent(tensor)
        owner = np.full(blocks, -1)
        step = BLOCK * tensor.element_size()
        for low, high, thread in self._written:
            if low < end and high > begin:
                owner[max(low - begin, 0) // step : -(-(min(high, end) - begin) // step)] = thread
        return owner


def _runs(owner: Any, size: int, threads: int) -> Cuts:
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), len(owner)]
    found: list[list[tuple[int, int]]] = [[] for _ in range(threads)]
    for first, last in itertools.pairwise(edges):
        found[int(owner[first])].append((first * BLOCK, min(last * BLOCK, size)))
    return tuple(map(tuple, found))


def in_parts(code: str, cuts: Cuts, tensors: Sequence[tuple[Tensor, bool]]) -> Statement:
    """Run `code` for each thread's parts, elements [low, high) of flat tensors; the flag marks written tensors."""
    count = max(map(len, cuts))
    filled = [[*parts, *[(0, 0)] * (count - len(parts))] for parts in cuts]
    table = ", ".join("{" + ", ".join(f"{{{low}, {high}}}" for low, high in parts) + "}" for parts in filled)
    text = f"static const long cuts[{len(cuts)}][{count}][2] = {{{table}}};\n"
    text += (
        f"for (int part = 0; part < {count}; part++) {{ const long low = cuts[t][part][0], high = cuts[t][part][1];\n"
    )
    accesses = []
    for tensor, is_written in tensors:
        begin, size = tensor.data_ptr(), tensor.element_size()
        for part in zip(*filled, strict=True):
            ranges = tuple((begin + low * size, begin + high * size) if high > low else (0, 0) for low, high in part)
            accesses.append(Access(ranges, is_written))
    return Statement(f"{{ {text}{code} }} }}", accesses, True)


def _is_flat(*tensors: Tensor) -> bool:
    sizes = {tensor.numel() for tensor in tensors}
    return len(sizes) == 1 and all(t.dtype == torch.float32 and t.dim() == 1 and t.is_contiguous() for t in tensors)


@dataclass
class Flat:
    """An operation on flat tensors; each thread processes its own parts."""

    code: str
    """With a placeholder for each tensor, for each scalar that all threads read, and for `is_shared`."""
    written: list[Tensor]
    read: list[Tensor]
    numbers: list[Tensor]

    def statements(self, pointers: Pointers, owners: Owners, threads: int) -> list[Statement]:
        """As C."""
        tensors = [*self.read, *self.written]
        cuts = owners.cuts(tensors)
        is_shared = threads > 1 and self.written[0].data_ptr() % (BLOCK * self.written[0].element_size()) == 0
        names = (pointers.name(tensor) for tensor in (*self.written, *self.read, *self.numbers))
        code = self.code.format(*names, is_shared=int(is_shared))
        statement = in_parts(code, cuts, [*((t, True) for t in self.written), *((t, False) for t in self.read)])
        statement.accesses += [Access((extent(number),) * threads, False) for number in self.numbers]
        return [statement]


@dataclass
class Norm:
    """The norm of a flat tensor. The order of summation is fixed, so threads take turns; each sums its own parts."""

    x: Tensor
    result: Tensor
    sums: Tensor = field(default_factory=lambda: torch.empty(8, dtype=torch.float32))

    def statements(self, pointers: Pointers, owners: Owners, threads: int) -> list[Statement]:
        """As C."""
        x, sums, result = (pointers.name(tensor) for tensor in (self.x, self.sums, self.result))
        found = []
        for low, high, thread in self._turns(owners.cuts([self.x])):
            code = f"add_squares({x} + {low}, {high - low}, {sums});"
            if low == 0:
                code = f"memset({sums}, 0, 8 * sizeof(float)); {code}"
            touched = [(self.x[low:high], False), (self.sums, True)]
            if high == self.x.numel():
                code += f" *{result} = norm_from({sums}, {x}, {high});"
                touched.append((self.result, True))
            accesses = [Access(by_one(tensor, thread, threads), is_written) for tensor, is_written in touched]
            found.append(Statement(f"if (t == {thread}) {{ {code} }}", accesses, True))
        return found

    @staticmethod
    def _turns(cuts: Cuts) -> list[tuple[int, int, int]]:
        """(begin, end, thread) of each part, in order; small parts go to the thread of the part before."""
        found: list[tuple[int, int, int]] = []
        for low, high, thread in sorted((*part, thread) for thread, parts in enumerate(cuts) for part in parts):
            if found and (high - low < NORM_PART or found[-1][2] == thread):
                found[-1] = (found[-1][0], high, found[-1][2])
            else:
                found.append((low, high, thread))
        return found


def adam(args: Sequence[Any], kwargs: dict[str, Any]) -> Flat | None:
    """`_fused_adam_` on one flat tensor."""
    lists = args[:6]
    rate = kwargs["lr"]
    plain = {"weight_decay": 0, "amsgrad": False, "maximize": False, "grad_scale": None, "found_inf": None}
    if any(kwargs.get(name, value) != value for name, value in plain.items()) or not isinstance(rate, Tensor):
        return None
    if [len(tensors) for tensors in lists] != [1, 1, 1, 1, 0, 1] or not is_adam_known():
        return None
    (weights,), (gradient,), (average,), (square,), _, (step,) = lists
    # torch rounds elements after the last whole vector differently
    is_whole = _is_flat(weights, gradient, average, square) and weights.numel() % BLOCK == 0
    if not is_whole or rate.dtype != torch.float64 or step.dtype != torch.float32:
        return None
    betas = ", ".join(float(kwargs[name]).hex() for name in ("beta1", "beta2", "eps"))
    code = f"adam({{0}}, {{3}}, {{1}}, {{2}}, low, high, *{{4}}, *{{5}}, {betas}, {{is_shared}});"
    return Flat(code, [weights, average, square], [gradient], [rate, step])


def lerp(args: Sequence[Any], kwargs: dict[str, Any]) -> Flat | None:
    """`lerp_` of a flat tensor, with a weight below 0.5."""
    target, source, share = args
    if (
        kwargs
        or type(share) is not float
        or not 0 <= share < 0.5
        or not is_lerp_known()
        or not _is_flat(target, source)
    ):
        return None
    return Flat(f"follow({{0}}, {{1}}, low, high, (float){share.hex()}, {{is_shared}});", [target], [source], [])


def norm(
    args: Sequence[Any], kwargs: dict[str, Any], result: Tensor, pointers: Pointers, threads: int
) -> Norm | Statement | None:
    """`linalg_vector_norm` over all elements."""
    x, *rest = args
    is_whole = rest in ([], [2]) and not kwargs and x.dtype == result.dtype == torch.float32 and x.is_contiguous()
    if not is_whole or result.numel() != 1:
        return None
    if x.numel() <= SMALL_SUM:
        return small_norm(x, result, pointers, threads)
    return Norm(x.view(-1), result) if is_norm_known() else None


# ---------------------------------------------------------------------------------------------------------------------
# Whether these are bit-identical to torch
# ---------------------------------------------------------------------------------------------------------------------


def _draw(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(NUM_COMPARED, generator=generator, dtype=torch.float32) for _ in range(count)]


@functools.cache
def is_adam_known() -> bool:
    """Whether a step of Adam is bit-identical to torch's."""
    weights, gradient, average, square = _draw(4)
    square = square.square()
    step, rate = torch.tensor(7.0), torch.tensor(1e-3, dtype=torch.float64)
    mine = [weights.clone(), average.clone(), square.clone()]
    options = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    library().adam_step(
        mine[0].data_ptr(), gradient.data_ptr(), mine[1].data_ptr(), mine[2].data_ptr(), 0, NUM_COMPARED,
        *map(ctypes.c_double, (1e-3, 7.0, *options.values())),
    )  # fmt: skip
    torch._fused_adam_(  # type: ignore[call-overload]
        [weights], [gradient], [average], [square], [], [step],
        lr=rate, **options, weight_decay=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip
    return all(map(torch.equal, mine, (weights, average, square)))


@functools.cache
def is_lerp_known() -> bool:
    """Whether a target update is bit-identical to torch's."""
    target, source = _draw(2)
    mine = target.clone()
    library().follow_by(mine.data_ptr(), source.data_ptr(), 0, NUM_COMPARED, ctypes.c_float(0.005))
    return torch.equal(mine, target.lerp_(source, 0.005))


@functools.cache
def is_norm_known() -> bool:
    """Whether norms are bit-identical to torch's, also for many elements, which torch may split among threads."""
    x = torch.cat(_draw(40))
    found = [library().norm(part.data_ptr(), part.numel()) for part in (x, x[: NUM_COMPARED + 5])]
    return found == [float(part.norm()) for part in (x, x[: NUM_COMPARED + 5])]
