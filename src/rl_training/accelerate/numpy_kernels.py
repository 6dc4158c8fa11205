"""Operators on small tensors computed by numpy, whose calls take a third of the time of torch's.

A recorded function uses these rules from its first call on, recorded or not, so all of its calls are bit-identical.
They differ from torch in the last digit where IEEE 754 leaves a choice: in sums over many numbers, matrix products, and
functions such as exp. Torch computes all large tensors, except for tanh, for which it takes five times as long as
numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from rl_training.contracts.arrays import AnyArray

SMALL = 4096
"""Elements up to which call overhead exceeds the time of the computation."""
SMALL_PRODUCT = 262_144
"""Multiplications in a matrix product up to which numpy's OpenBLAS uses one thread."""
SMALL_SUM = 10_000
"""Elements in a dot product up to which OpenBLAS uses one thread."""

Kernel = Callable[[], Any]
Rule = Callable[[list[Any], dict[str, Any], AnyArray], Kernel | None]
"""Makes a kernel from arguments, keyword arguments, and the array to write to; None if it does not apply."""

_TYPES = (torch.float32, torch.float64, torch.bool, torch.int64)


class SmallArithmetic(TorchDispatchMode):
    """While active, numpy computes the operators that `numpy_kernel` has a rule for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing here is compiled, and to exclude it torch would import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and overwrite torch's result with numpy's."""
        result = func(*args, **(kwargs or {}))
        if not func._schema.is_mutable:  # in-place operators are bit-identical in numpy and torch
            kernel = numpy_kernel(func._overloadpacket.__name__, args, kwargs or {}, result)
            if kernel is not None:
                with np.errstate(all="ignore"):
                    kernel()
        return result


def numpy_kernel(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Kernel | None:
    """The operator as numpy calls that write to `result`; None if there is no rule for it."""
    rule = _RULES.get(name)
    if rule is None:
        return None
    target = result[0] if isinstance(result, (list, tuple)) and len(result) == 1 else result
    tensors = [value for arg in (*args, *kwargs.values()) for value in (arg if isinstance(arg, list) else [arg])]
    tensors = [value for value in tensors if isinstance(value, Tensor)]
    if not isinstance(target, Tensor):  # `_foreach_add_` returns nothing
        target = tensors[0]
    everything = (*tensors, target)
    if any(tensor.device.type != "cpu" or tensor.dtype not in _TYPES for tensor in everything):
        return None
    if name not in _ANY_SIZE and any(tensor.numel() > SMALL for tensor in everything):
        return None
    given = [_array(arg) for arg in args]
    options = {key: _array(value) for key, value in kwargs.items()}
    return rule(given, options, target.detach().numpy())


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().numpy()
    return [_array(item) for item in value] if isinstance(value, list) else value


def _is_float(*values: Any) -> bool:
    """Whether all arrays have the same floating type; plain numbers are ignored."""
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    return all(array.dtype == arrays[0].dtype and array.dtype.kind == "f" for array in arrays)


# ---------------------------------------------------------------------------------------------------------------------
# Elementwise operators
# ---------------------------------------------------------------------------------------------------------------------


def _elementwise(function: Any) -> Rule:
    def rule(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
        if options or len(given) != function.nin or not _is_float(*given, out):
            return None
        return functools.partial(function, *given, out=out)

    return rule


def _comparison(function: Any) -> Rule:
    def rule(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
        if options or len(given) != 2 or not _is_float(*given) or out.dtype != np.bool_:
            return None
        return functools.partial(function, *given, out=out)

    return rule


def _logical(function: Any) -> Rule:
    def rule(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
        if any(array.dtype != np.bool_ for array in (*given, out)):
            return None
        return functools.partial(function, *given, out=out)

    return rule


def _reversed_sub(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    return _elementwise(np.subtract)(given[1::-1], options, out) if len(given) == 2 else None


def _pow(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    if not _is_float(given[0], out) or given[1] not in (1, 2):
        return None
    return functools.partial(np.square if given[1] == 2 else np.positive, given[0], out=out)


def _relu(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    # this order of arguments keeps minus zero, as torch does; an array of zeros is faster than a number
    return functools.partial(np.maximum, np.zeros_like(out), given[0], out=out) if _is_float(given[0], out) else None


def _clamp(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    x, low, high = [*given, None, None][:3]
    low, high = options.get("min", low), options.get("max", high)
    if not _is_float(x, low, high, out):
        return None
    if low is None:
        return functools.partial(np.minimum, x, high, out=out)
    if high is None:
        return functools.partial(np.maximum, x, low, out=out)
    return functools.partial(_between, x, low, high, out)


def _between(x: AnyArray, low: Any, high: Any, out: AnyArray) -> None:
    np.maximum(x, low, out=out)
    np.minimum(out, high, out=out)


def _where(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    if len(given) != 3 or any(isinstance(value, np.ndarray) and value.dtype != out.dtype for value in given[1:]):
        return None
    condition, yes, no = given
    return functools.partial(_choose, condition, yes, no, out)


def _choose(condition: AnyArray, yes: Any, no: Any, out: AnyArray) -> None:
    np.copyto(out, no)
    np.copyto(out, yes, where=condition)


def _masked_fill(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    return None if isinstance(given[2], np.ndarray) else functools.partial(np.copyto, out, given[2], where=given[1])


def _copy(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    return functools.partial(np.copyto, out, given[1], "unsafe")


def _to_copy(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    return functools.partial(np.copyto, out, given[0], "unsafe")


def _fill(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    return None if isinstance(given[1], np.ndarray) else functools.partial(out.fill, given[1])


def _foreach_add(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    (array, *others), number = given[:2]
    if others or options or not isinstance(number, (int, float)):
        return None
    return functools.partial(np.add, array, number, out=array)


def _cat(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    if out.size > 8 * SMALL or any(part.dtype != out.dtype or part.ndim == 0 for part in given[0]):
        return None
    return functools.partial(np.concatenate, given[0], given[1] if len(given) > 1 else 0, out)


# ---------------------------------------------------------------------------------------------------------------------
# Reductions and matrix products
# ---------------------------------------------------------------------------------------------------------------------


def _axes(given: list[Any], options: dict[str, Any]) -> tuple[Any, bool] | None:
    """The dimensions to reduce, and whether they are kept; None if a dtype is given, which is not supported."""
    if options.get("dtype") is not None:
        return None
    axes = given[1] if len(given) > 1 else None
    keep = given[2] if len(given) > 2 else False
    return (tuple(axes) if axes else None), bool(keep)


def _reduction(function: Any) -> Rule:
    def rule(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
        axes = _axes(given, options)
        if axes is None or not _is_float(given[0], out) or given[0].size == 0:
            return None
        return functools.partial(function.reduce, given[0], axes[0], None, out, axes[1])

    return rule


def _sum(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    """Column sums as a product with ones, which is faster than numpy's own sum."""
    x, axes = given[0], _axes(given, options)
    if axes is not None and axes[0] == (0,) and x.ndim == 2 and out.flags.c_contiguous and _is_float(x, out):
        return functools.partial(np.dot, np.ones(len(x), x.dtype), x, out.reshape(-1))
    return _reduction(np.add)(given, options, out)


def _norm(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    """The 2-norm over all elements."""
    x, order = given[0], given[1] if len(given) > 1 else 2
    is_plain = order == 2 and out.ndim == 0 and options.get("dtype") is None and x.flags.c_contiguous
    if not is_plain or x.size > SMALL_SUM or not _is_float(x, out):
        return None
    x = x.reshape(-1)

    def kernel() -> None:
        np.sqrt(np.dot(x, x), out=out)

    return kernel


def _mean(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    total = _reduction(np.add)(given, options, out)
    if total is None:
        return None
    count = given[0].size // max(out.size, 1)

    def kernel() -> None:
        total()
        np.true_divide(out, count, out=out)

    return kernel


def _matrix_product(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    a, b = given
    if not _is_float(a, b, out) or not out.flags.c_contiguous or a.shape[0] * a.shape[1] * b.shape[1] > SMALL_PRODUCT:
        return None
    return functools.partial(np.dot, a, b, out)


def _linear(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    bias, a, b = given
    product = None if options else _matrix_product([a, b], {}, out)
    if product is None or not _is_float(bias, out):
        return None

    def kernel() -> None:
        product()
        np.add(out, bias, out=out)

    return kernel


# ---------------------------------------------------------------------------------------------------------------------
# One element of each row
# ---------------------------------------------------------------------------------------------------------------------


def _places(x: AnyArray, axis: int, index: AnyArray) -> tuple[Kernel, AnyArray] | None:
    """A kernel that computes the flat indices [B] of one element per row, and the array it writes them to.

    None unless `x` is a matrix [B, A] and `index` has shape [B, 1].
    """
    if x.ndim != 2 or axis not in (1, -1) or index.shape != (len(x), 1) or index.dtype != np.int64:
        return None
    if not x.flags.c_contiguous or not index.flags.c_contiguous:
        return None
    found = np.empty(len(x), np.int64)
    return functools.partial(np.add, np.arange(len(x)) * x.shape[1], index.reshape(-1), out=found), found


def _gather(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    x, axis, index = given[:3]
    is_plain = not options and out.flags.c_contiguous and _is_float(x, out)
    places = _places(x, axis, index) if is_plain else None
    if places is None:
        return None
    find, found = places
    source, target = x.reshape(-1), out.reshape(-1)

    def kernel() -> None:
        find()
        source.take(found, out=target)

    return kernel


def _scatter_add(given: list[Any], options: dict[str, Any], out: AnyArray) -> Kernel | None:
    x, axis, index, added = given
    is_plain = not options and added.shape == index.shape and _is_float(x, added, out)
    places = _places(out, axis, index) if is_plain else None
    if places is None:
        return None
    find, found = places
    target, values = out.reshape(-1), added.reshape(-1)

    def kernel() -> None:
        np.copyto(out, x)
        find()
        target[found] += values  # indices are unique

    return kernel


_ELEMENTWISE = {
    "abs": np.absolute, "add": np.add, "div": np.true_divide, "exp": np.exp, "log": np.log, "maximum": np.maximum,
    "minimum": np.minimum, "mul": np.multiply, "neg": np.negative, "reciprocal": np.reciprocal, "sqrt": np.sqrt,
    "sub": np.subtract, "tanh": np.tanh,
}  # fmt: skip
_COMPARISONS = {
    "eq": np.equal, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "ne": np.not_equal,
}  # fmt: skip
_RULES: dict[str, Rule] = {
    **{name: _elementwise(function) for name, function in _ELEMENTWISE.items()},
    **{f"{name}_": _elementwise(_ELEMENTWISE[name]) for name in ("add", "div", "mul", "sub")},
    **{name: _comparison(function) for name, function in _COMPARISONS.items()},
    "_foreach_add_": _foreach_add,
    "_to_copy": _to_copy,
    "addmm": _linear,
    "amax": _reduction(np.maximum),
    "amin": _reduction(np.minimum),
    "cat": _cat,
    "clamp": _clamp,
    "clone": _to_copy,
    "copy_": _copy,
    "fill_": _fill,
    "gather": _gather,
    "linalg_vector_norm": _norm,
    "logical_and": _logical(np.logical_and),
    "logical_or": _logical(np.logical_or),
    "masked_fill_": _masked_fill,
    "mean": _mean,
    "mm": _matrix_product,
    "pow": _pow,
    "relu": _relu,
    "rsub": _reversed_sub,
    "scatter_add": _scatter_add,
    "sum": _sum,
    "where": _where,
}
_ANY_SIZE = {"tanh", "mm", "addmm", "cat", "linalg_vector_norm"}
"""Operators not limited to `SMALL` elements; products, norms and `cat` have limits of their own."""
