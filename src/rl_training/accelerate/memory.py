"""How the process keeps freed memory."""

from __future__ import annotations

import ctypes
import functools
import sys

LARGEST_KEPT = 32 << 20
"""Bytes. Larger allocations, such as replay buffers, are still mapped and unmapped one by one."""
ALL_KEPT = 1 << 30
"""Bytes of free memory above which some is returned to the operating system."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@functools.cache
def keep_memory() -> bool:
    """Let the C library keep freed memory for the next gradient step, instead of returning it each time.

    A convolution allocates results of some megabytes at every step, and memory from the operating system has to be
    zeroed and mapped page by page. Returns whether the C library supports this; only glibc does.
    """
    if sys.platform != "linux":
        return False
    try:
        tell = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(tell(_M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(tell(_M_TRIM_THRESHOLD, ALL_KEPT))
