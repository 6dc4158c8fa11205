"""Acceleration modes: the setting `accelerate` of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal, get_args

from rl_training.accelerate.native.compiler import find_compiler

Mode = Literal["auto", "off", "recorded", "compiled"]
"""`auto`: record, and compile what runs long enough. `off`: plain torch, to step through in a debugger. `recorded`:
record, but never call a compiler. `compiled`: compile every recording as soon as it exists."""

_mode: ContextVar[Mode] = ContextVar("accelerate", default="auto")


def current_mode() -> Mode:
    """The mode given to functions and layers that are created now."""
    return _mode.get()


@contextmanager
def using(mode: Mode) -> Iterator[None]:
    """Set the mode of all functions and layers created inside; they keep it for their lifetime.

    Example:
        >>> with using("off"):
        ...     current_mode()
        'off'
    """
    before = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(before)


def mode_problem(mode: str) -> str | None:
    """Why a mode cannot be used on this machine, or None."""
    if mode == "compiled" and find_compiler() is None:
        return "compiled needs a C compiler (cc, gcc or clang on the PATH, or CC); use auto or recorded"
    return None


def describe_machine() -> str:
    """One line of text: what `auto` does on this machine."""
    compiler = find_compiler()
    if compiler is None:
        return "auto records, but cannot compile: no C compiler (cc, gcc, clang or CC) was found"
    return f"auto records and compiles with {Path(compiler).name} (modes: {', '.join(get_args(Mode))})"
