"""What ranks, transports and the profiler ask of a device. Nothing outside this room says ``torch.cuda``.

A device runs what it is given in *streams*: in order within one, in any order between two unless one waits for an
*event* of the other. The host does not wait unless it asks to. On a CPU everything has happened when a call returns,
so its streams and events are empty.
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
"""``tf32``: fp32 whose matrix products round their factors to 10 bits of mantissa, on GPUs that have it."""


class Event(Protocol):
    """A point in a stream."""

    def is_over(self) -> bool:
        """Return whether the device has come to it."""

    def synchronize(self) -> None:
        """Return when the device has come to it."""


class Stream(Protocol):
    """Work of a device that runs in the order in which it is given."""

    def record(self) -> Event:
        """Return the point after everything that the stream has been given."""

    def wait(self, event: Event) -> None:
        """Let what the stream is given next start after an event of another stream; the host goes on."""

    def synchronize(self) -> None:
        """Return when the device has done everything that the stream has been given."""


class Timer(Protocol):
    """Moments between the instructions of one step, as the device comes to them."""

    def mark(self) -> None:
        """Note this moment: on a GPU that at which it has done what it has been given so far."""

    def read_ns(self) -> list[int]:
        """Return all moments in ns of ``time.perf_counter_ns``; waits until the last one has come."""


class MemoryUse(NamedTuple):
    """Bytes of a device's memory that this process has: of tensors that are in use, and all that it keeps.

    What is kept for later, and of tensors that a stream may still read, belongs to ``reserved`` alone.
    """

    active: int
    reserved: int


class Memory(Protocol):
    """The memory of a device, as this process has it."""

    def reset_peak(self) -> MemoryUse:
        """Let ``peak`` count from now on; return what it starts from."""

    def now(self) -> MemoryUse:
        """Return what is held now."""

    def peak(self) -> MemoryUse:
        """Return the most that was held at once, of each kind, since ``reset_peak``."""

    def free_bytes(self) -> int:
        """Return what this process could still take: what no process has, and what it keeps for later."""

    def total_bytes(self) -> int:
        """Return what the device has."""


class Runtime(Protocol):
    """A device, opened by this process.

    ``gpu``: the same text in all processes on one GPU; None where ranks share no GPU. ``kind``: as topologies name it;
    ``model``: as its maker names it.
    ``direct``: torch's name of the backend that sends from device to device; None where there is none. ``compute``:
    the stream that layers run in. ``hardware_queues``: how many streams make progress side by side.
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
        """Sets every random state that a layer on the device may draw from."""

    def random_state(self) -> Tensor:
        """Return the states that ``seed`` sets, as one tensor to compare."""

    # Streams and time

    def stream(self) -> Stream:
        """Return a new stream."""

    def inside(self, stream: Stream) -> AbstractContextManager[Any]:
        """Return a context in which what the device is given goes to ``stream``."""

    def timer(self) -> Timer:
        """Return a timer of the compute stream; waits until the device has nothing to do."""

    def synchronize(self) -> None:
        """Return when the device has nothing to do."""

    # Host and device

    def host_buffer(self, like: Tensor) -> Tensor:
        """Return host memory for a tensor's numbers, from which and to which copies run during computation."""

    def download(self, tensor: Tensor, host: Tensor) -> Event:
        """Start to copy what a tensor has once the compute stream is here to ``host``, during what it does next."""

    def upload(self, host: Tensor, tensor: Tensor) -> None:
        """Copy ``host`` into a tensor, ahead of what the compute stream is given next."""

    def moved(self, value: Any) -> Any:
        """Return ``value`` with its tensors on the device: of tuples, lists and mappings, too; the rest as it is.

        The copies start at once, whatever the compute stream does, which waits for them.
        """

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """Give the memory of a tensor to no other one before ``stream`` has done what it has been given."""

    # Processes

    def new_group(self, ranks: Sequence[int], timeout: timedelta, name: str, *, for_messages: bool) -> Any:
        """Make a process group over ``direct``, or gloo without it; collective over all ranks of the run, in one order.

        ``for_messages``: it carries messages between two ranks, and takes little of the device. Returns None on other
        ranks.
        """

    # Numbers

    def use_precision(self, precision: Precision) -> None:
        """Multiply matrices in this precision from here on; that of 16 bits is left to autocast.

        Raises UnsupportedRequest where the device does not have it.
        """

    def reproducible(self) -> None:
        """Let equal operations on equal numbers give equal results from here on, as far as the device can."""

    def prepare(self, optimizer: Optimizer) -> None:
        """Let an optimizer step without memory of its own, where torch can and the job leaves it open."""

    def flatten(self, module: torch.nn.Module) -> Callable[[Sequence[Tensor]], None] | None:
        """Return what lays the weights of a recurrent layer out as the device wants them; None where it does not care.

        It is called with the layer's weights in the order of ``_flat_weights`` and moves their storage.
        """
