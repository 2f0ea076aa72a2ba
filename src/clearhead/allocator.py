"""Settings of glibc's allocator for processes that free and reallocate large tensors."""

import ctypes
import os


def keep_freed_memory() -> None:
    """Make glibc's allocator keep freed memory mapped, for reuse by the next step.

    By default tensors of 32 MiB and more go back to the system when freed, and every step pays for
    clearing pages anew. Does nothing if the user has set MALLOC_MMAP_MAX_ or
    MALLOC_TRIM_THRESHOLD_, or under another C library.
    """
    if {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} & set(os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return
    mallopt(-4, 0)  # M_MMAP_MAX of <malloc.h>
    mallopt(-1, -1)  # M_TRIM_THRESHOLD, never
