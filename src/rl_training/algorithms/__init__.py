"""Algorithms, one module each, and the registry that finds them.

`from rl_training.algorithms import PPO` gives the same ready-to-use class as `from rl_training import PPO`. It is
resolved when asked for, because this layer does not import the one above it.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Facades (`PPO`, `A2C`, ...) by name."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(importlib.import_module("rl_training.api.facades"), name)
