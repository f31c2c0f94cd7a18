"""The most memory that a rank has held: of its GPU as the allocator counts, or of its process as the kernel counts."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Protocol

import torch

from penstock.executor.profiling.memory_use import LiveBytes


class Peak(Protocol):
    """Counts from when it was made."""

    @property
    def bytes(self) -> int:
        """The most that was held at once, beyond what was held at the beginning."""


class GpuPeak:
    """What torch's allocator has given out: parameters, gradients, states, activations, buffers and workspaces.

    Not the context of CUDA, nor what the allocator keeps for later.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.reset_peak_memory_stats(device)
        self._before = torch.cuda.memory_allocated(device)

    @property
    def bytes(self) -> int:
        return max(0, torch.cuda.max_memory_allocated(self._device) - self._before)


class ProcessPeak:
    """By how much this process has grown."""

    def __init__(self) -> None:
        self._before = _start_of_peak()

    @property
    def bytes(self) -> int:
        return max(0, _memory_bytes("VmHWM") - self._before)


def peak_of(device: torch.device, *, counts_tensors: bool = False) -> Peak:
    """Counts what a rank on ``device`` holds from now on.

    ``counts_tensors``: on a CPU the tensors alone, from now until the process ends; all its operations are slowed down.
    """
    if device.type == "cuda":
        return GpuPeak(device)
    if not counts_tensors:
        return ProcessPeak()
    tensors = LiveBytes()
    tensors.__enter__()  # type: ignore[no-untyped-call]
    return tensors


def _memory_bytes(what: str) -> int:
    """VmHWM (peak) or VmRSS (present) of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _start_of_peak() -> int:
    """Reset the peak where the kernel allows it; return what the process uses now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _memory_bytes("VmHWM")
    return _memory_bytes("VmRSS")
