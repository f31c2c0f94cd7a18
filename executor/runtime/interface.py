"""The interface of a device for ranks, transports and the profiler. Only this package uses ``torch.cuda``.

A device runs work in *streams*: in order within one, in any order between two unless one waits for an *event* of the
other. The host does not wait unless it asks to. On a CPU all work is done when a call returns, so its streams and
events are empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
"""``tf32``: fp32 whose matrix products round their factors to 10 bits of mantissa, on GPUs that support it."""


class Event(Protocol):
    """A point in a stream."""

    def is_over(self) -> bool:
        """Return whether the device has reached it."""

    def synchronize(self) -> None:
        """Wait until the device has reached it."""


class Stream(Protocol):
    """Work of a device that runs in the order of its calls."""

    def record(self) -> Event:
        """Return the point after all work that was given to the stream."""

    def wait(self, event: Event) -> None:
        """Make the stream's next work start after an event of another stream; the host does not wait."""

    def synchronize(self) -> None:
        """Wait until the device has done all work that was given to the stream."""


class Timer(Protocol):
    """Moments between the instructions of one step, at which the device reaches them."""

    def mark(self) -> None:
        """Note this moment: on a GPU, the moment at which the work given so far is done."""

    def read_ns(self) -> list[int]:
        """Return all moments in ns of ``time.perf_counter_ns``; waits for the last one."""


class MemoryUse(NamedTuple):
    """Bytes of a device's memory that this process has: of tensors in use, and of all memory that it keeps.

    Memory that is kept for later, and memory of tensors that a stream may still read, belongs to ``reserved`` alone.
    """

    active: int
    reserved: int


class Memory(Protocol):
    """The memory of a device, as this process has it."""

    def reset_peak(self) -> MemoryUse:
        """Restart the count of ``peak``; return the use at its start."""

    def now(self) -> MemoryUse:
        """Return the present use."""

    def peak(self) -> MemoryUse:
        """Return the largest use at once, of each kind, since ``reset_peak``."""

    def free_bytes(self) -> int:
        """Return the bytes that this process could still use: free memory, and memory that it keeps for later."""

    def total_bytes(self) -> int:
        """Return the bytes of the device."""


class Runtime(Protocol):
    """A device, opened by this process.

    ``gpu``: a text that is equal in all processes on one GPU; None where ranks share no GPU. ``kind``: its name in
    topologies; ``model``: its maker's name. ``direct``: torch's name of the backend that sends from device to device;
    None without one. ``compute``: the stream in which layers run. ``hardware_queues``: the number of streams that
    progress concurrently.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def gpu(self) -> str | None: ...

    @property
    def kind(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def direct(self) -> str | None: ...

    @property
    def compute(self) -> Stream: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def hardware_queues(self) -> int: ...

    # Random state

    @property
    def seed(self) -> Callable[[int], object]:
        """A function that sets every random state from which a layer on the device may draw."""

    def random_state(self) -> Tensor:
        """Return the states that ``seed`` sets, as one tensor to compare."""

    # Streams and time

    def stream(self) -> Stream:
        """Return a new stream."""

    def inside(self, stream: Stream) -> AbstractContextManager[Any]:
        """Create a context in which the device's work goes to ``stream``."""

    def timer(self) -> Timer:
        """Create a timer of the compute stream; waits until the device is idle."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""

    # Host and device

    def host_buffer(self, like: Tensor) -> Tensor:
        """Allocate host memory for a tensor's numbers, which can be copied during computation."""

    def download(self, tensor: Tensor, host: Tensor) -> Event:
        """Start to copy a tensor to ``host``, after the present work of the compute stream and during its next work."""

    def upload(self, host: Tensor, tensor: Tensor) -> None:
        """Copy ``host`` into a tensor, before the next work of the compute stream."""

    def moved(self, value: Any) -> Any:
        """Return ``value`` with its tensors on the device, also within tuples, lists and mappings.

        The copies start at once, and the compute stream waits for them.
        """

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Keep the memory of a tensor from other tensors until ``stream`` has done its present work."""

    # Processes

    def new_group(self, ranks: Sequence[int], timeout: timedelta, name: str, *, for_messages: bool) -> Any:
        """Create a process group over ``direct``, or gloo without it; collective over all ranks, in one order.

        ``for_messages``: it carries messages between two ranks, and uses little of the device. Returns None on ranks
        outside of the group.
        """

    # Numbers

    def use_precision(self, precision: Precision) -> None:
        """Multiply matrices in this precision from here on; autocast handles precisions of 16 bits.

        Raises UnsupportedRequest where the device does not support it.
        """

    def reproducible(self) -> None:
        """Make equal operations on equal numbers give equal results from here on, where the device can."""

    def prepare(self, optimizer: Optimizer) -> None:
        """Let an optimizer step without a workspace, where torch can and the job does not choose otherwise."""

    def flatten(self, module: torch.nn.Module) -> Callable[[Sequence[Tensor]], None] | None:
        """Return a function that lays out the weights of a recurrent layer for the device; None where none is needed.

        It is called with the layer's weights in the order of ``_flat_weights``, and moves their storage.
        """
