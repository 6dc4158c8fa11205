"""Settings: documented dataclass fields, written once, from which flags, keywords, checks and docs tables are made."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",  # noqa: A002 - the name that command-line libraries use
    *,
    factory: Callable[[], Any] | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A dataclass field with its documentation and its range.

    Example:
        >>> @documented
        ... @dataclasses.dataclass
        ... class Settings:
        ...     gamma: float = setting(0.99, "Discount factor.", ge=0, le=1)
    """
    metadata = {"help": help, "ge": ge, "gt": gt, "le": le, "lt": lt}
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
