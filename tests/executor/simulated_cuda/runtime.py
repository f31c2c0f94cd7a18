"""A simulated GPU as a runtime: numbers are there at once, in the host's memory; what was asked for is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from penstock.executor.runtime.cuda import MESSAGE_CTAS
from penstock.executor.runtime.interface import MemoryUse, Precision, Stream
from penstock.executor.runtime.nested import on_tensors
from simulated_cuda.groups import BACKEND, making
from simulated_cuda.recorder import Recorder, without_watching

GROUP_BLOCKS = 32
"""Blocks of a collective's kernel: the most that NCCL takes by itself."""
TOTAL_BYTES = 80 << 30


class SimulatedEvent:
    """A point in a simulated stream; ``is_over`` is what the host can know without a query of the device."""

    def __init__(self, recorder: Recorder, stream: int) -> None:
        self._recorder = recorder
        self.number = recorder.record(stream)

    def is_over(self) -> bool:
        return self._recorder.ordering.is_over(self.number)

    def synchronize(self) -> None:
        self._recorder.host_waits(self.number)


class SimulatedStream:
    """A simulated stream."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self.number = recorder.open(name)

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self._recorder, self.number)

    def wait(self, event: Any) -> None:
        self._recorder.wait(self.number, event.number)

    def synchronize(self) -> None:
        self.record().synchronize()


class SimulatedTimer:
    """The host's moments; events in the log are where the engine knows the device's. ``events``: their numbers."""

    def __init__(self, runtime: SimulatedCuda) -> None:
        self._runtime = runtime
        runtime.synchronize()
        self._events: list[SimulatedEvent] = []
        self._moments_ns: list[int] = []

    def mark(self) -> None:
        self._events.append(self._runtime.compute.record())
        self._moments_ns.append(time.perf_counter_ns())

    def read_ns(self) -> list[int]:
        if self._events:
            self._events[-1].synchronize()
        self._runtime.timed += [event.number for event in self._events]
        return self._moments_ns


class SimulatedMemory:
    """The memory of the simulated allocator."""

    def __init__(self, recorder: Recorder) -> None:
        self._allocator = recorder.allocator

    def reset_peak(self) -> MemoryUse:
        self._allocator.reset_peaks()
        return self.now()

    def now(self) -> MemoryUse:
        return MemoryUse(self._allocator.active, self._allocator.reserved)

    def peak(self) -> MemoryUse:
        return MemoryUse(self._allocator.peak_active, self._allocator.peak_reserved)

    def free_bytes(self) -> int:
        return TOTAL_BYTES - self._allocator.active

    def total_bytes(self) -> int:
        return TOTAL_BYTES


class SimulatedCuda:
    """A rank's simulated GPU; see ``Runtime``. ``timed``: events of all timers that were read.

    ``message_blocks``: of kernels that carry messages. Without ``connected`` there are no peers: what they would send
    is zeros.
    """

    device = torch.device("cpu")
    kind = model = "SIM"
    direct: str | None = BACKEND

    def __init__(
        self, rank: int, *, queues: int = 32, message_blocks: int = MESSAGE_CTAS, connected: bool = True
    ) -> None:
        self.recorder = Recorder()
        self.gpu: str | None = f"SIM-{rank}"
        self.hardware_queues = queues
        self.message_blocks = message_blocks
        self.connected = connected
        self.timed: list[int] = []
        self.compute = SimulatedStream(self.recorder, "the compute stream")
        self.copies = SimulatedStream(self.recorder, "the copy stream")
        self.memory = SimulatedMemory(self.recorder)
        self.seed: Callable[[int], object] = torch.default_generator.manual_seed

    def random_state(self) -> Tensor:
        return torch.default_generator.get_state()

    def stream(self) -> SimulatedStream:
        return SimulatedStream(self.recorder, "a stream of the job")

    def inside(self, stream: Stream) -> AbstractContextManager[Any]:
        assert isinstance(stream, SimulatedStream)
        return self.recorder.inside(stream.number)

    def timer(self) -> SimulatedTimer:
        return SimulatedTimer(self)

    def synchronize(self) -> None:
        self.recorder.host_drains()

    def host_buffer(self, like: Tensor) -> Tensor:
        buffer = without_watching(lambda: torch.empty_like(like))
        self.recorder.take_on_host(buffer)
        return buffer

    def download(self, tensor: Tensor, host: Tensor) -> SimulatedEvent:
        self.copies.wait(self.compute.record())
        with self.inside(self.copies):
            self.copy(tensor, host)
        self.keep(tensor, self.copies)
        return self.copies.record()

    def upload(self, host: Tensor, tensor: Tensor) -> None:
        with self.inside(self.compute):
            self.copy(host, tensor)

    def moved(self, value: Any) -> Any:
        with self.inside(self.copies):
            result = on_tensors(self._started, value)
        self.compute.wait(self.copies.record())
        return result

    def _started(self, tensor: Tensor) -> Tensor:
        if self.recorder.is_of_device(tensor):
            return tensor
        on_device = without_watching(lambda: torch.empty_like(tensor))
        self.copy(tensor, on_device)
        self.keep(on_device, self.compute)
        return on_device

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy in the current stream."""
        without_watching(lambda: target.copy_(source))
        reads = [source] if self.recorder.is_of_host(source) or self.recorder.is_of_host(target) else []
        self.recorder.works(reads=reads, writes=[target], copies_bytes=source.nbytes)

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        assert isinstance(stream, SimulatedStream)
        self.recorder.keep(tensor, stream.number)

    def new_group(self, ranks: Sequence[int], timeout: timedelta, name: str, *, for_messages: bool) -> Any:
        blocks = self.message_blocks if for_messages else GROUP_BLOCKS
        self.recorder.makes(name, tuple(ranks), blocks)
        with making(self.recorder, name, connected=self.connected):
            group: Any = dist.new_group(list(ranks), timeout, BACKEND)
        return None if group is dist.GroupMember.NON_GROUP_MEMBER else group

    def use_precision(self, precision: Precision) -> None:
        """Do nothing: all precisions are computed as a CPU does."""

    def reproducible(self) -> None:
        """Do nothing: one thread adds in one order."""

    def prepare(self, optimizer: Optimizer) -> None:
        """Do nothing: optimizers step as they do on a CPU."""

    def flatten(self, module: torch.nn.Module) -> Callable[[Sequence[Tensor]], None] | None:
        return None
