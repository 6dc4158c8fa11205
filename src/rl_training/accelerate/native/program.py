"""A recording as a C program: the translation of calls, the barriers between threads, and the source text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_training.accelerate.calls import Call, map_tensors, storage_of, tensors_in
from rl_training.accelerate.native.elements import Element, can_join, element, loop
from rl_training.accelerate.native.few import product_of_few
from rl_training.accelerate.native.flat import Flat, Norm, Owners, adam, lerp, norm
from rl_training.accelerate.native.libraries import of_elements, small_product
from rl_training.accelerate.native.memory import C_TYPES, Access, Pointers, Statement, extent
from rl_training.accelerate.native.products import Product
from rl_training.accelerate.native.sums import gather, reduction, scatter_add
from rl_training.accelerate.numpy_kernels import Kernel

if TYPE_CHECKING:
    from rl_training.accelerate.kernels import Mover

Part = Element | Product | Flat | Norm | Statement

ZERO_STAYS_ZERO = frozenset({"bmm", "div", "mm", "mul", "neg", "threshold_backward"})
"""Operators that map rows of zeros to rows of zeros."""
BEGINNING = """
#include "kernels.h"
static product_function product;
static product_of_some_function product_of_some;
static product_function product_of_few;
static pack_function pack;
static void** others;
void set_functions(void** own, void** given) {
    product = (product_function)own[0];
    product_of_some = (product_of_some_function)own[1];
    product_of_few = (product_function)own[2];
    pack = (pack_function)own[3];
    others = given;
}
"""


class Program:
    """The C code of a recording, in segments, and the Python calls between them.

    `calls` are those of the recording, `kernels` their callable versions; `move` maps tensors to their memory.
    """

    def __init__(
        self, calls: Sequence[Call], kernels: Sequence[Kernel], move: Mover, outputs: Any, num_threads: int
    ) -> None:
        self.pointers = Pointers()
        self.num_threads = num_threads
        self.steps: list[Kernel | int] = []
        """Python kernels and indices of C segments, in order of execution."""
        self.foreign: list[str] = []
        """Operators that stay Python calls."""
        self._segments: list[list[Statement]] = []
        self._owners = Owners(num_threads)
        self._products: list[Product] = []  # they own memory
        self._packed: dict[Any, Product] = {}
        """Products by the matrix that they packed, if it has not changed since."""
        self._with_zeros: set[int] = set()
        self._is_open = False
        self._pending: list[tuple[int, int, Element]] = []
        self._held: tuple[int, Product] | None = None
        last = _last_uses(calls, move, outputs)
        for step, (call, kernel) in enumerate(zip(calls, kernels, strict=True)):
            parts = translate(call, move, self.pointers, num_threads)
            if parts is None:
                self._finish()
                self._is_open = False
                self._packed = {}
                self.steps.append(kernel)
                self.foreign.append(call.name)
                continue
            self._look_for_zeros(call, parts)
            for part in parts:
                # a call ends with its last part; its inputs must stay valid until then
                done = step if part is parts[-1] else step - 1
                self._take(part, done, last.get(_target(call), len(calls)), call.name)
        self._finish()

    def _look_for_zeros(self, call: Call, parts: Sequence[Part]) -> None:
        """Find results with many zero rows: gradients multiplied by booleans (as for the minimum of two critics).

        Products with them have zero rows too.
        """
        inputs = [value for value in call.args if isinstance(value, Tensor)]
        is_masked = call.name == "mul" and any(tensor.dtype == torch.bool for tensor in inputs)
        if is_masked or (call.name in ZERO_STAYS_ZERO and any(storage_of(t) in self._with_zeros for t in inputs)):
            self._with_zeros |= {storage_of(tensor) for tensor in call.outputs()}
            for part in parts:
                if isinstance(part, Product):
                    part.leave_out_zeros()

    def _take(self, part: Part, step: int, until: int, name: str) -> None:
        """Add a part that ends at `step`; its result is used until step `until`."""
        if isinstance(part, Element):
            if self._held is not None:
                used, product = self._held
                if not self._pending and used <= step and product.absorb(name, part):
                    self._held = (until, product)
                    return
                self._flush_product()
            self._pending.append((step, until, part))
            return
        if isinstance(part, Statement) and self._held is not None and self._held[1].is_apart_from(part):
            self._add(part)  # before the product, whose activation may still follow
            return
        self._finish()
        if isinstance(part, Product):
            self._held = (until, part)
        elif isinstance(part, Flat | Norm):
            for statement in part.statements(self.pointers, self._owners, self.num_threads):
                self._add(statement)
        else:
            self._add(part)

    def _flush_product(self) -> None:
        if self._held is not None:
            product, self._held = self._held[1], None
            self._products.append(product)
            product.reserve(self.num_threads)
            if product.packed is not None:
                b = product.b
                key = b.data_ptr(), b.shape, b.stride(), product.split(self.num_threads)
                if key in self._packed:
                    product.packed, product.is_packed = self._packed[key].packed, True
                else:
                    self._packed[key] = product
            for statement in product.statements(self.pointers, self.num_threads):
                self._add(statement)

    def _finish(self) -> None:
        """Emit the pending product and elements, which were held back for fusion."""
        self._flush_product()
        while self._pending:
            group = [self._pending.pop(0)]
            while self._pending and can_join([part for *_, part in group], self._pending[0][-1]):
                group.append(self._pending.pop(0))
            for _, until, part in group:
                part.is_kept = until > group[-1][0]
            self._add(loop([part for *_, part in group], self.pointers, self.num_threads))

    def _add(self, statement: Statement) -> None:
        if not self._is_open:
            self.steps.append(len(self._segments))
            self._segments.append([])
            self._is_open = True
        self._segments[-1].append(statement)
        self._owners.note(statement)
        written = [part for access in statement.accesses if access.writes for part in access.ranges]
        self._packed = {
            key: product
            for key, product in self._packed.items()
            if not any(low < end and begin < high for begin, end in [extent(product.b)] for low, high in written)
        }

    def source(self) -> str:
        """The C source of the program."""
        text = [BEGINNING, "#include <omp.h>" if self.num_threads > 1 else ""]
        for number, segment in enumerate(self._segments):
            for place, statement in enumerate(segment):
                text.append(f"static void part_{number}_{place}(char** p, const long t) {{ {statement.code} }}")
            text += [f"void segment_{number}(char** p) {{", *self._segment(number, segment), "}"]
        return "\n".join(text)

    def _segment(self, number: int, statements: Sequence[Statement]) -> list[str]:
        threads = self.num_threads
        alone, together = [], []
        since: list[Access] = []
        for place, statement in enumerate(statements):
            part = f"part_{number}_{place}(p, t);"
            if any(access.disturbs(other) for access in since for other in statement.accesses):
                together.append("#pragma omp barrier")
                since = []
            since += statement.accesses
            together.append(part if statement.is_wide else f"if (t == 0) {part}")
            alone.append(f"for (long t = 0; t < {threads if statement.is_wide else 1}; t++) {part}")
        if threads == 1 or not any(statement.is_wide for statement in statements):
            return alone
        return [
            "static team_type team;",
            "int is_done = 0;",
            "if (!begin_call(&team)) {",
            f"#pragma omp parallel num_threads({threads})",
            f"if (omp_get_num_threads() == {threads}) {{",
            "const long t = omp_get_thread_num();",
            "if (t == 0) is_done = 1;",
            *together,
            "}",
            "}",
            "if (!is_done) {",  # one thread is faster, or OpenMP gave fewer threads than requested
            *alone,
            "}",
            "end_call(&team);",
        ]


def _target(call: Call) -> int:
    """The storage that a call writes."""
    return storage_of((call.written() if call.is_in_place else call.outputs())[0])


def _last_uses(calls: Sequence[Call], move: Mover, outputs: Any) -> dict[int, int]:
    """The last call that uses each storage; only for storages that are not read from outside."""
    last: dict[int, int] = {}
    for step, call in enumerate(calls):
        last |= {storage_of(t): step for t in (*call.inputs(), *call.outputs()) if storage_of(t) in move.offsets}
    for tensor in tensors_in(outputs):
        last.pop(storage_of(tensor), None)
    return last


def translate(call: Call, move: Mover, pointers: Pointers, threads: int) -> Sequence[Part] | None:
    """A call as parts of a program; None if it stays a Python call."""
    if "out" in call.kwargs:
        return None
    name = "clone" if call.name == "_to_copy" else call.name
    args, kwargs, result = (map_tensors(move, value) for value in (list(call.args), call.kwargs, call.result))
    if name == "_foreach_add_":
        if len(args[0]) != 1 or kwargs or type(args[1]) not in (int, float):
            return None
        name, args, result = "add_", [args[0][0], args[1]], args[0][0]
    if name == "_fused_adam_":
        step = adam(args, kwargs)
        return None if step is None else [step]
    if call.is_in_place:
        result = args[0]
    tensors = [value for value in (*args, *(args[0] if name == "cat" else ()), result) if isinstance(value, Tensor)]
    if not isinstance(result, Tensor) or any(t.dtype not in C_TYPES or t.numel() == 0 for t in tensors):
        return None
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        return None if kwargs else _product(args, result, pointers, threads)
    if name in ("sum", "mean", "amin", "amax"):
        return None if kwargs.get("dtype") is not None else reduction(name, args, result, pointers, threads)
    if name == "lerp_":
        moved = lerp(args, kwargs)
        return None if moved is None else [moved]
    if name == "linalg_vector_norm":
        total = norm(args, kwargs, result, pointers, threads)
        return None if total is None else [total]
    if name in ("gather", "scatter_add"):
        return None if kwargs else {"gather": gather, "scatter_add": scatter_add}[name](args, result, pointers, threads)
    if name == "cat":
        return _joined(args[0], args[1] if len(args) > 1 else 0, result)
    if name in ("exp", "log", "tanh", "softplus", "softplus_backward"):
        return of_elements(name, args, kwargs, result, pointers, threads)
    found = element(name, args, kwargs, result)
    return None if found is None else [found]


def _product(args: Sequence[Tensor], result: Tensor, pointers: Pointers, threads: int) -> Sequence[Part] | None:
    """A matrix product, by the first method that is bit-identical."""
    *bias, a, b = args
    large = [part for product in Product.of(a, b, result, *bias) for part in product.parts()]
    return large or product_of_few(args, result, pointers, threads) or small_product(args, result, pointers, threads)


def _joined(parts: Sequence[Tensor], dim: int, result: Tensor) -> list[Element] | None:
    """`cat`, as copies of its parts."""
    found, start = [], 0
    for part in parts:
        if part.dtype != torch.float32 or part.dim() != result.dim():
            return None
        size = part.shape[dim]
        found.append(Element("{0}", [part], result.narrow(dim, start, size)))
        start += size
    return found
