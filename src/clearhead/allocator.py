"""Settings of glibc's allocator for processes that free and reallocate large tensors."""

import ctypes
import os


def keep_freed_memory() -> None:
    """Keep freed memory mapped. By default tensors of 32 MiB and more go back to the system, and
    every step pays for zeroed pages again. A user's own MALLOC_… settings stay."""
    if {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} & set(os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return
    mallopt(-4, 0)  # M_MMAP_MAX of <malloc.h>
    mallopt(-1, -1)  # M_TRIM_THRESHOLD, never
