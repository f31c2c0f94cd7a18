"""A CPU as a device: all work is done when a call returns, so no wait is needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from penstock.executor.devices import machine_memory_bytes, processor_model
from penstock.executor.runtime.interface import Event, MemoryUse, Precision, Stream
from penstock.executor.runtime.process_memory import available_bytes, peak_bytes, present_bytes, reset_peak_bytes
from penstock.schemas.errors import UnsupportedRequest

_UNLIMITED = 2**31


class Happened:
    """A point that the host has passed."""

    def is_over(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Return at once: the point is passed."""


class HostStream:
    """The order of the host's calls."""

    def record(self) -> Event:
        return _HAPPENED

    def wait(self, event: Event) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once: all calls have returned."""


class HostTimer:
    """The host's clock."""

    def __init__(self) -> None:
        self._moments_ns: list[int] = []
        self._add = self._moments_ns.append

    def mark(self) -> None:
        self._add(time.perf_counter_ns())

    def read_ns(self) -> list[int]:
        return self._moments_ns


class ProcessMemory:
    """The memory that this process has of the machine, in pages of any kind."""

    def reset_peak(self) -> MemoryUse:
        start = reset_peak_bytes()
        return MemoryUse(start, start)

    def now(self) -> MemoryUse:
        return MemoryUse(present_bytes(), present_bytes())

    def peak(self) -> MemoryUse:
        return MemoryUse(peak_bytes(), peak_bytes())

    def free_bytes(self) -> int:
        return available_bytes()

    def total_bytes(self) -> int:
        return machine_memory_bytes()


class CpuRuntime:
    """A device that computes at once, in the host's memory; see `Runtime`."""

    device = torch.device("cpu")
    gpu: str | None = None
    kind = "cpu"
    direct: str | None = None
    hardware_queues = _UNLIMITED

    def __init__(self) -> None:
        self.compute: Stream = HostStream()
        self.memory = ProcessMemory()
        self.seed = torch.default_generator.manual_seed

    @property
    def model(self) -> str:
        return processor_model()

    def random_state(self) -> Tensor:
        return torch.default_generator.get_state()

    def stream(self) -> Stream:
        return HostStream()

    def inside(self, stream: Stream) -> AbstractContextManager[Any]:
        return nullcontext()

    def timer(self) -> HostTimer:
        return HostTimer()

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def download(self, tensor: Tensor, host: Tensor) -> Event:
        host.copy_(tensor)
        return _HAPPENED

    def upload(self, host: Tensor, tensor: Tensor) -> None:
        tensor.copy_(host)

    def moved(self, value: Any) -> Any:
        return value

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Do nothing: memory is reused only after its last tensor is gone, and nothing reads it by then."""

    def new_group(self, ranks: Sequence[int], timeout: timedelta, name: str, *, for_messages: bool) -> Any:
        group: Any = dist.new_group(list(ranks), timeout, "gloo", group_desc=name)
        return None if group is dist.GroupMember.NON_GROUP_MEMBER else group

    def use_precision(self, precision: Precision) -> None:
        if precision == "tf32":
            raise UnsupportedRequest("TensorFloat-32 is a precision of GPUs, not of CPUs", remedy="precision fp32")

    def reproducible(self) -> None:
        """Do nothing: one thread adds in one order."""

    def prepare(self, optimizer: Optimizer) -> None:
        """Do nothing: on a CPU torch steps parameter by parameter."""

    def flatten(self, module: torch.nn.Module) -> Callable[[Sequence[Tensor]], None] | None:
        return None


_HAPPENED = Happened()
CPU = CpuRuntime()
"""The host, which needs no opening."""
