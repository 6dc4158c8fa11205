"""Settings: documented dataclass fields, the single source of flags, keywords, checks and docs tables."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rl_training.contracts.plugins import Registry

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Search between two numbers, both included; with `log`, on a logarithmic scale.

    Searches integers if both bounds are integers. For a schedule, its largest value is searched; the others keep their
    ratio to it.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        """Refuse an empty range."""
        if not self.low <= self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low must be above 0 on a logarithmic scale (log), got {self.low}")


@dataclass(frozen=True)
class Choices:
    """Search among a few values."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        """Refuse an empty choice."""
        if not self.values:
            raise ValueError("a choice needs at least one value")


@dataclass(frozen=True)
class SameAs:
    """Use the value of another setting; `name` is its user-facing name, relative to the algorithm's config."""

    name: str


Search = Range | Choices | SameAs
"""Search space of a setting."""


def uniform(low: float, high: float) -> Range:
    """Search real numbers between `low` and `high`, uniformly.

    Example:
        >>> setting(0.2, "Clip.", gt=0, search=uniform(0.1, 0.4)).metadata["search"].high
        0.4
    """
    return Range(float(low), float(high))


def log_uniform(low: float, high: float) -> Range:
    """Search real numbers on a logarithmic scale, such as learning rates and small coefficients."""
    return Range(float(low), float(high), log=True)


def integers(low: int, high: int, *, log: bool = False) -> Range:
    """Search integers between `low` and `high`."""
    return Range(int(low), int(high), log)


def choices(*values: Any) -> Choices:
    """Search among these values; powers of two, for example."""
    return Choices(values)


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",  # noqa: A002 - the name that command-line libraries use
    *,
    factory: Callable[[], Any] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    search: Search | Mapping[str, Any] | None = None,
    registry: Registry[Any] | None = None,
    added_later: bool = False,
) -> Any:
    """A dataclass field with its documentation, its valid range and its search space.

    With `registry`, the value must be a name in that registry. `added_later` marks a setting that was added after
    results were measured and whose default keeps the earlier behaviour: those results stay valid.

    For a section or a schedule, `search` maps the names of its fields to search spaces; a field mapped to None is not
    searched, even if the section declares a search space for it.

    Example:
        >>> @documented
        ... @dataclasses.dataclass
        ... class Settings:
        ...     gamma: float = setting(0.99, "Discount factor.", ge=0, le=1)
    """
    metadata: dict[str, Any] = {"help": help, "ge": ge, "gt": gt, "le": le, "lt": lt, "search": search}
    metadata |= {"registry": registry, "added_later": added_later}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def documented(cls: type[T]) -> type[T]:
    """Append an `Attributes:` section made from the settings to the class docstring (help texts read it)."""
    lines = [f"    {f.name}: {f.metadata['help']}" for f in dataclasses.fields(cls) if f.metadata.get("help")]  # type: ignore[arg-type]
    cls.__doc__ = "\n".join([(cls.__doc__ or cls.__name__).rstrip(), "", "Attributes:", *lines])
    return cls


def range_problem(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Why a number is outside its declared range, or None."""
    checks: dict[str, tuple[str, Callable[[float, float], bool]]] = {
        "ge": (">=", operator.ge),
        "gt": (">", operator.gt),
        "le": ("<=", operator.le),
        "lt": ("<", operator.lt),
    }
    bounds = [(*checks[key], float(field.metadata[key])) for key in checks if field.metadata.get(key) is not None]
    if all(holds(value, bound) for _, holds, bound in bounds):
        return None
    shown = [(sign, f"{bound:,.0f}" if bound.is_integer() else f"{bound:g}") for sign, _, bound in bounds]
    return "must be " + " and ".join(f"{sign} {bound}" for sign, bound in shown)
