"""Algorithms, one module each, and the registry that finds them.

`from rl_training.algorithms import PPO` gives the same class as `from rl_training import PPO`. It is imported lazily,
because this layer must not import the API layer above it.
"""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Agent classes (`PPO`, `A2C`, ...) by name."""
    if name.startswith("_"):
        raise AttributeError(name)
    return getattr(importlib.import_module("rl_training.api.facades"), name)
