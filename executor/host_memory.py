"""Settings of the C library's allocator for host memory that a process frees."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _NEVER = -1, -1
_MMAP_THRESHOLD, _LARGEST_BYTES = -3, 32 << 20
"""malloc.h and mallopt(3) of glibc: the parameters' numbers, and the largest threshold that all its versions accept."""


def keep_freed_memory() -> None:
    """Let glibc keep the memory that this process frees, except single blocks above 32 MiB. Other libraries stay as is.

    Each micro-batch allocates and frees the same tensors. By default glibc may return the top of the heap to the system
    with each of them, and its pages come back one by one, zeroed and in no cache. That costs a twentieth of a step, in
    one process and not in the next, depending on their heaps.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
