"""How many threads torch uses inside one operation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def using_threads(num_threads: int | None) -> Iterator[None]:
    """Set torch's number of intra-op threads; the previous number is restored on exit."""
    before = torch.get_num_threads()
    wanted = num_threads or before
    if before != wanted:
        torch.set_num_threads(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_num_threads(before)
