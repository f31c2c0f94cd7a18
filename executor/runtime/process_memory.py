"""The memory of a process, as the kernel counts it. Loads no torch."""

from __future__ import annotations

import re
import resource
from pathlib import Path

_STATUS, _MEMINFO, _CLEAR = Path("/proc/self/status"), Path("/proc/meminfo"), Path("/proc/self/clear_refs")


def present_bytes() -> int:
    """Return the bytes of memory that this process has now."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Return the most bytes that this process has had, since ``reset_peak_bytes`` where the kernel allows that."""
    return _status_bytes("VmHWM")


def reset_peak_bytes() -> int:
    """Restart the count of the peak, where the kernel allows it; return the bytes at its start."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return peak_bytes()
    return present_bytes()


def available_bytes() -> int:
    """Return the bytes that new processes could have without swapping."""
    match = re.search(r"^MemAvailable:\s+([0-9]+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _status_bytes(what: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
