"""The most memory that a rank has held: of its GPU as the allocator counts, or of its process as the kernel counts."""

from __future__ import annotations

from typing import Protocol

from penstock.executor.profiling.memory_use import LiveBytes
from penstock.executor.runtime.interface import MemoryUse, Runtime


class Peak(Protocol):
    """Counts from when it was made."""

    @property
    def bytes(self) -> int:
        """The most that was held at once, beyond what was held at the beginning."""

    @property
    def reserved_bytes(self) -> int:
        """The most that was kept from others at once, with what the allocator keeps for later."""


class DevicePeak:
    """What a device has held for this process beyond its beginning.

    On a GPU ``bytes`` are of tensors in use: parameters, gradients, states, activations, buffers and workspaces.
    ``reserved_bytes`` is all that the allocator has taken, which is what other processes find missing. Neither has the
    context of CUDA, nor NCCL's communicators. On a CPU both are what the process has grown by.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._memory = runtime.memory
        self._before: MemoryUse = self._memory.reset_peak()

    @property
    def bytes(self) -> int:
        return max(0, self._memory.peak().active - self._before.active)

    @property
    def reserved_bytes(self) -> int:
        return max(0, self._memory.peak().reserved - self._before.reserved)


def peak_of(runtime: Runtime, *, counts_tensors: bool = False) -> Peak:
    """Counts what a rank holds from now on.

    ``counts_tensors``: on a CPU the tensors alone, from now until the process ends; all its operations are slowed down.
    """
    if runtime.gpu is not None or not counts_tensors:
        return DevicePeak(runtime)
    tensors = LiveBytes()
    tensors.__enter__()  # type: ignore[no-untyped-call]
    return tensors
