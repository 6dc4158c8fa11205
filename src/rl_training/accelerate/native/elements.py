"""Elementwise loops, and the operators that are translated to them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_training.accelerate.native.memory import (
    C_TYPES,
    Access,
    Pointers,
    Ranges,
    Statement,
    by_all,
    by_first,
    overlap,
    same_elements,
    share,
)

WIDE = 8192
"""Elements from which on a loop is split among threads."""

Operand = Tensor | float | int | bool


@dataclass
class Element:
    """One elementwise operation: `expression` has a placeholder {0}, {1}, ... for each operand."""

    expression: str
    operands: list[Operand]
    result: Tensor
    is_kept: bool = True
    """Whether the result is read after its loop, and so must be stored."""

    def inputs(self) -> list[Tensor]:
        """Tensors among the operands."""
        return [value for value in self.operands if isinstance(value, Tensor)]


def can_join(group: Sequence[Element], new: Element) -> bool:
    """Whether an operation can be fused into the loop of those before it.

    All operations then run on one element before the next, so tensors that overlap must have the same elements.
    """
    if new.result.shape != group[0].result.shape:
        return False
    return all(
        not overlap(one, other) or same_elements(one, other)
        for old in group
        for one, other in (
            *((tensor, new.result) for tensor in (*old.inputs(), old.result)),
            *((tensor, old.result) for tensor in new.inputs()),
        )
    )


def loop(group: Sequence[Element], pointers: Pointers, threads: int) -> Statement:
    """One fused loop that applies all operations to each element."""
    body = _Body(tuple(group[0].result.shape))
    for element in group:
        body.add(element)
    dims = coalesce(body.shape, [tensor.stride() for tensor in body.tensors])
    is_wide = threads > 1 and math.prod(body.shape) >= WIDE and dims[0][0] >= threads
    text = "\n".join(body.lines)
    begin = ""
    for i, tensor in enumerate(body.tensors):
        place = " + ".join(f"i{d} * {steps[i]}L" for d, (_, steps) in enumerate(dims) if steps[i]) or "0"
        text = text.replace(f"@{i}@", f"a{i}[{place}]")
        begin += f"{C_TYPES[tensor.dtype]}* a{i} = {pointers.name(tensor)};\n"
    for d, (size, _) in enumerate(dims):
        low, high = share(size, threads) if d == 0 and is_wide else ("0", f"{size}L")
        # there are no dependencies between iterations, see `can_join`
        begin += "#pragma GCC ivdep\n" if d == len(dims) - 1 else ""
        begin += f"for (long i{d} = {low}; i{d} < {high}; i{d}++) {{\n"
    written = {body.index(element.result) for element in group if element.is_kept}
    accesses = [
        Access(
            _ranges(tensor, dims[0][0], dims[0][1][i], threads) if is_wide else by_first(tensor, threads), i in written
        )
        for i, tensor in enumerate(body.tensors)
    ]
    return Statement(f"{{ {begin}{text}\n{'}' * len(dims)} }}", accesses, is_wide)


def _ranges(tensor: Tensor, size: int, step: int, threads: int) -> Ranges:
    """The memory that each thread accesses, if the outermost dimension has `size` entries with stride `step`."""
    if step == 0:
        return by_all(tensor, threads)
    begin, end = by_first(tensor, threads)[0]
    step *= tensor.element_size()
    inner = end - begin - (size - 1) * step
    cuts = [size * t // threads for t in range(threads + 1)]
    return tuple((begin + a * step, begin + (b - 1) * step + inner) for a, b in itertools.pairwise(cuts))


class _Body:
    """The loop body. Tensors are written as @number@ until their index expressions are known."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.tensors: list[Tensor] = []
        self.lines: list[str] = []
        self._numbers: dict[Any, int] = {}
        self._values: dict[int, str] = {}

    def add(self, element: Element) -> None:
        text = element.expression.format(*map(self._value, element.operands))
        number, name = self.index(element.result), f"r{len(self.lines)}_"
        self.lines.append(f"{C_TYPES[element.result.dtype]} {name} = {text};")
        self._values[number] = name
        if element.is_kept:
            self.lines.append(f"@{number}@ = {name};")

    def index(self, tensor: Tensor) -> int:
        view = tensor.expand(self.shape)
        steps = tuple(stride for n, stride in zip(self.shape, view.stride(), strict=True) if n > 1)
        key = (view.data_ptr(), view.dtype, steps)
        if key not in self._numbers:
            self._numbers[key] = len(self.tensors)
            self.tensors.append(view)
        return self._numbers[key]

    def _value(self, operand: Operand) -> str:
        if not isinstance(operand, Tensor):
            return literal(operand)
        number = self.index(operand)
        if number not in self._values:
            self._values[number] = f"v{len(self.lines)}_"
            self.lines.append(f"{C_TYPES[operand.dtype]} {self._values[number]} = @{number}@;")
        return self._values[number]


def literal(value: float | int | bool) -> str:
    """A number as a C literal."""
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    return f"((float){float(value).hex()})"


def coalesce(shape: tuple[int, ...], strides: list[tuple[int, ...]]) -> list[tuple[int, tuple[int, ...]]]:
    """Merge dimensions where possible: the remaining sizes, and the strides of each tensor.

    Example: in the second call, the second tensor is a broadcast row.
        >>> coalesce((4, 1, 8), [(8, 8, 1), (8, 8, 1)])
        [(32, (1, 1))]
        >>> coalesce((4, 1, 8), [(8, 8, 1), (0, 8, 1)])
        [(4, (8, 0)), (8, (1, 1))]
    """
    dims = [(n, tuple(steps[d] for steps in strides)) for d, n in enumerate(shape) if n != 1]
    found = dims[:1] or [(1, (0,) * len(strides))]
    for n, steps in dims[1:]:
        size, outer = found[-1]
        if all(before == n * step for before, step in zip(outer, steps, strict=True)):
            found[-1] = (size * n, steps)
        else:
            found.append((n, steps))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Operators
# ---------------------------------------------------------------------------------------------------------------------

Rule = Callable[[list[Any], dict[str, Any], Tensor], Element | None]
"""Makes an `Element` from arguments, keyword arguments and result; None if they are not supported."""


def _simple(expression: str) -> Rule:
    count = 1 + max(int(c) for c in expression if c.isdigit() and f"{{{c}}}" in expression)

    def rule(args: list[Any], kwargs: dict[str, Any], result: Tensor) -> Element | None:
        return None if kwargs or len(args) != count else Element(expression, args, result)

    return rule


def _clamp(args: list[Any], kwargs: dict[str, Any], result: Tensor) -> Element | None:
    x, low, high = [*args, None, None][:3]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    if low is None:
        return Element("least({1}, {0})", [x, high], result)
    if high is None:
        return Element("largest({1}, {0})", [x, low], result)
    return Element("least({2}, largest({1}, {0}))", [x, low, high], result)


def _pow(args: list[Any], kwargs: dict[str, Any], result: Tensor) -> Element | None:
    powers = {1: "{0}", 2: "{0} * {0}"}
    return Element(powers[args[1]], args[:1], result) if type(args[1]) in (int, float) and args[1] in powers else None


def _copy(args: list[Any], kwargs: dict[str, Any], result: Tensor) -> Element | None:
    return Element("{0}", args[1:2] if len(args) > 1 else args, result)


def _fill(args: list[Any], kwargs: dict[str, Any], result: Tensor) -> Element | None:
    return Element("{0}", [args[1]], result)


def _zero(args: list[Any], kwargs: dict[str, Any], result: Tensor) -> Element | None:
    return Element("{0}", [0], result)


_ARITHMETIC: dict[str, Rule] = {
    "abs": _simple("fabsf({0})"),
    "add": _simple("{0} + {1}"),
    "addcmul": _simple("fmaf({1}, {2}, {0})"),
    "clamp": _clamp,
    "clamp_min": _simple("largest({1}, {0})"),
    "clone": _copy,
    "copy_": _copy,
    "div": _simple("{0} / {1}"),
    "fill_": _fill,
    "maximum": _simple("largest({0}, {1})"),
    "minimum": _simple("least({0}, {1})"),
    "mul": _simple("{0} * {1}"),
    "neg": _simple("-{0}"),
    "pow": _pow,
    "reciprocal": _simple("1.0f / {0}"),
    "relu": _simple("({0} < 0.0f ? 0.0f : {0})"),
    "rsub": _simple("{1} - {0}"),
    "sqrt": _simple("sqrtf({0})"),
    "sub": _simple("{0} - {1}"),
    "tanh_backward": _simple("{0} * fmaf(-{1}, {1}, 1.0f)"),
    "threshold_backward": _simple("({1} <= {2} ? 0.0f : {0})"),
    "where": _simple("({0} ? {1} : {2})"),
    "zero_": _zero,
    "zeros_like": _zero,
}
"""Operators with float results."""
_COMPARISONS: dict[str, Rule] = {
    name: _simple(f"({{0}} {sign} {{1}})")
    for name, sign in {"eq": "==", "ge": ">=", "gt": ">", "le": "<=", "lt": "<", "ne": "!="}.items()
}
_LOGIC: dict[str, Rule] = {
    f"{kind}_{name}": _simple(expression)
    for kind in ("bitwise", "logical")
    for name, expression in {"and": "({0} && {1})", "not": "(!{0})", "or": "({0} || {1})"}.items()
}
"""Operators on booleans."""
_ARITHMETIC |= {f"{name}_": _ARITHMETIC[name] for name in ("add", "div", "mul", "sub")}
_LOGIC |= {f"{name}_": rule for name, rule in _LOGIC.items()}


def element(name: str, args: list[Any], kwargs: dict[str, Any], result: Tensor) -> Element | None:
    """An operator as an elementwise operation; None if it is not elementwise or not supported."""
    kinds = [value.dtype for value in args if isinstance(value, Tensor)]
    are_floats = all(kind == torch.float32 for kind in kinds)
    if result.dtype == torch.float32:
        rule = _ARITHMETIC.get(name)
        if torch.float64 in kinds and name not in ("clone", "copy_"):
            return None
        has_float = torch.float32 in kinds or name in ("clone", "copy_", "zeros_like")
        if rule is None or not has_float or (name in ("maximum", "minimum", "clamp", "addcmul") and not are_floats):
            return None
        return rule(args, {} if name in ("clone", "copy_", "zeros_like") else kwargs, result)
    if result.dtype == torch.bool and are_floats and name in _COMPARISONS:
        return _COMPARISONS[name](args, kwargs, result)
    if result.dtype == torch.bool and all(kind == torch.bool for kind in kinds) and name in _LOGIC:
        return _LOGIC[name](args, kwargs, result)
    return None
