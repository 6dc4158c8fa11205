"""What torch imports: its compiler only if somebody compiles."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

_DISABLED = "__dynamo_disable"
"""Where `torch._disable_dynamo` keeps the function that it calls, see torch/_compile.py."""


@contextlib.contextmanager
def without_torchs_compiler() -> Iterator[None]:
    """Make a torch optimizer without importing `torch._dynamo`, which takes about two seconds.

    Torch imports it only to exclude `Optimizer.add_param_group` from compilation. Nothing is compiled here, and
    afterwards everything is as before. If the compiler was imported already, or torch has changed, this does nothing.
    """
    function: Any = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or "torch._dynamo" in sys.modules or hasattr(function, _DISABLED):
        yield
        return
    setattr(function, _DISABLED, function)
    try:
        yield
    finally:
        delattr(function, _DISABLED)
