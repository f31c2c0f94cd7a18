"""The number of processors that this process may use. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def available_processors() -> int:
    """Processors that this process may use: its affinity, and the quota of its control group where there is one."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
