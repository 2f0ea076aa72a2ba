"""Memory that a process frees and asks for again."""

import ctypes
import os

# Names of <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Let glibc's allocator keep what is freed, so that the next step finds it mapped.

    By default tensors of 32 MiB and more go back to the system when freed, as does the free end of
    the heap, and every step pays for clearing pages anew. A process then holds its peak to its end.
    Settings of the user's own, MALLOC_MMAP_MAX_ or MALLOC_TRIM_THRESHOLD_, are left alone; so is
    another C library.
    """
    if {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_"} & set(os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return
    mallopt(_M_MMAP_MAX, 0)
    mallopt(_M_TRIM_THRESHOLD, -1)  # never
