"""The most memory that a rank held: of its GPU as the allocator counts, or of its process as the kernel counts."""

from __future__ import annotations

from typing import Protocol

from penstock.executor.profiling.memory_use import LiveBytes
from penstock.executor.runtime.interface import MemoryUse, Runtime


class Peak(Protocol):
    """A count that starts when it is created."""

    @property
    def bytes(self) -> int:
        """The most bytes in use at once, beyond the bytes at the beginning."""

    @property
    def reserved_bytes(self) -> int:
        """The most bytes that the allocator had at once, including memory that it keeps for later."""


class DevicePeak:
    """The memory that a device holds for this process beyond its beginning.

    On a GPU ``bytes`` counts tensors in use: parameters, gradients, states, activations, buffers and workspaces.
    ``reserved_bytes`` counts all memory of the allocator, which other processes cannot use. Neither includes the
    context of CUDA or NCCL's communicators. On a CPU both are the growth of the process.
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
    """Start to count the memory that a rank holds.

    ``counts_tensors``: on a CPU count only tensors, until the process ends; this slows all its operations down.
    """
    if runtime.gpu is not None or not counts_tensors:
        return DevicePeak(runtime)
    tensors = LiveBytes()
    tensors.__enter__()  # type: ignore[no-untyped-call]
    return tensors
