"""`PPO`, `A2C`, ...: one class per registered algorithm, including plug-ins, created on first access.

Editors and type checkers read `facades.pyi`, which `python -m rl_training.api.stubs` generates from the registry.
"""

from __future__ import annotations

from typing import Any

from rl_training.algorithms.registry import registry
from rl_training.api.agent import Agent


def __getattr__(name: str) -> Any:
    """The agent class with that name."""
    for spec in registry().values():
        if spec.title == name:
            summary = f"{spec.title}, ready to use ({spec.paper}).\n\n{Agent.__doc__}"
            cls = type(name, (Agent,), {"algo": spec.name, "__module__": "rl_training", "__doc__": summary})
            globals()[name] = cls
            return cls
    raise AttributeError(f"module 'rl_training.api.facades' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(spec.title for spec in registry().values())
