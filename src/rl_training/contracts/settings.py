"""Settings: documented dataclass fields, written once, from which flags, keywords, checks and docs tables are made."""

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
    """Search between two numbers, both included; with `log`, factors count instead of differences.

    Whole numbers if both are. Of a schedule, its largest value is searched; the others keep their ratio to it.
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        """Refuse a range that has nothing in it."""
        if not self.low <= self.high:
            raise ValueError(f"low must be at most high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"low must be above 0 where factors count (log), got {self.low}")


@dataclass(frozen=True)
class Choices:
    """Search among a few values."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        """Refuse a choice of nothing."""
        if not self.values:
            raise ValueError("a choice needs at least one value")


@dataclass(frozen=True)
class SameAs:
    """Take whatever another setting is given (its name as it is for users, from the algorithm's config on)."""

    name: str


Search = Range | Choices | SameAs
"""What a search may give a setting."""


def uniform(low: float, high: float) -> Range:
    """Search real numbers between two, all equally likely.

    Example:
        >>> setting(0.2, "Clip.", gt=0, search=uniform(0.1, 0.4)).metadata["search"].high
        0.4
    """
    return Range(float(low), float(high))


def log_uniform(low: float, high: float) -> Range:
    """Search real numbers between two, all orders of magnitude equally likely: learning rates, small coefficients."""
    return Range(float(low), float(high), log=True)


def integers(low: int, high: int, *, log: bool = False) -> Range:
    """Search whole numbers between two."""
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
    """A dataclass field with its documentation, its range, and what a search for good settings may give it.

    With `registry`, its value is a name that is known there. One that is `added_later` than results were measured, and
    whose default is what was done before, does not make these results those of other settings.

    For a section or a schedule, `search` maps names of its parts to what these may be given; a part that is None is not
    searched, whatever the section itself says.

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
    return "must be " + " and ".join(f"{sign} {bound:g}" for sign, _, bound in bounds)
