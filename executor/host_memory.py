"""What the C library's allocator does with host memory that a process frees."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _NEVER = -1, -1
_MMAP_THRESHOLD, _LARGEST_BYTES = -3, 32 << 20
"""malloc.h and mallopt(3) of glibc: the parameters' numbers, and the largest threshold that all its versions take."""


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees, but for single blocks above 32 MiB; other C libraries are left alone.

    Micro-batch after micro-batch allocates and frees the same tensors. As glibc is by default, the top of the heap may
    go back to the system with each of them, and its pages come again one by one, zeroed and in no cache: a twentieth of
    a step, in one process and not in the next, as their heaps happen to lie.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
