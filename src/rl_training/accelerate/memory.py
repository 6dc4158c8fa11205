"""How the process treats memory that was freed."""

from __future__ import annotations

import ctypes
import functools
import sys

LARGEST_KEPT = 32 << 20
"""Bytes. Larger pieces, such as replay, are asked for and given back one by one, as ever."""
ALL_KEPT = 1 << 30
"""Bytes of free memory from which on some is given back."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


@functools.cache
def keep_memory() -> bool:
    """Let the C library keep freed memory for the next gradient step, instead of giving it back each time.

    A convolution makes its results anew at every step, of some megabytes each, and memory from the operating system has
    to be zeroed and mapped page by page. Returns whether it can be told; only glibc can.
    """
    if sys.platform != "linux":
        return False
    try:
        tell = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    return bool(tell(_M_MMAP_THRESHOLD, LARGEST_KEPT)) and bool(tell(_M_TRIM_THRESHOLD, ALL_KEPT))
