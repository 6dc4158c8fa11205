"""Counts registrations of submodules and parameters in any module, to detect that a network was changed."""

from __future__ import annotations

import itertools
from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

_counter = itertools.count(1)
_latest = 0


def _count(module: Any, name: str, value: Any) -> None:
    global _latest
    _latest = next(_counter)


register_module_module_registration_hook(_count)
register_module_parameter_registration_hook(_count)


def num_registrations() -> int:
    """The number of submodules and parameters set in this process; if it is unchanged, no network was changed.

    Example:
        >>> from torch import nn
        >>> network, before = nn.Sequential(nn.Linear(2, 2)), num_registrations()
        >>> network[0] = nn.Linear(2, 2)
        >>> num_registrations() > before
        True
    """
    return _latest
