"""Settings of glibc's allocator for processes that free and reallocate large tensors."""

import ctypes
import os

# Names of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory mapped, for reuse by the next step.

    By default tensors of 32 MiB and more go back to the system when freed, as does the free end of
    the heap, and every step pays for clearing pages anew. The process then keeps its peak memory
    until it exits. Does nothing if the user has set MALLOC_MMAP_MAX_ or MALLOC_TRIM_THRESHOLD_, or
    under another C library.
    """
    if {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} & set(os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
