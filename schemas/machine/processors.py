"""The processors that this process may use. Imports the standard library alone."""

from __future__ import annotations

import os
from pathlib import Path


def processor_numbers() -> frozenset[int]:
    """Return the numbers of the processors in this process's affinity."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def available_processors() -> int:
    """Return how many processors this process may use: its affinity, limited by its control group's quota."""
    count = len(processor_numbers())
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
