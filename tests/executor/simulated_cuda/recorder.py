"""What a simulated device is asked for, as it is asked: the log, the order that is known, the memory, errors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import _disable_current_modes

from simulated_cuda.allocator import Allocator
from simulated_cuda.entries import (
    Awaits,
    Drains,
    Entry,
    Gathers,
    Joins,
    Kind,
    Loads,
    Makes,
    Meets,
    Opens,
    Records,
    Waits,
    Works,
)
from simulated_cuda.ordering import HOST, Ordering

T = TypeVar("T")


class _Held(NamedTuple):
    """A storage that the device, or the host for its sake, holds: where its numbers would lie; None: it has none."""

    address: int | None
    on_host: bool


class Recorder:
    """Of one rank. ``log``: everything so far; ``current``: the stream that computation goes to.

    ``meant``: the tag of the message that is sent or received next.

    All tensors lie in the CPU's memory. Those that came to the device, and what was computed with them, are *of the
    device*; others are the host's, and what is done with them is not the device's work.
    """

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.ordering = Ordering()
        self.allocator = Allocator(self.ordering.is_past, self.ordering.place)
        self.current = 0
        self.meant = 0
        self._streams = 0
        self._held: dict[int, _Held] = {}
        self._host_end = -(1 << 40)
        self._joined: dict[str, int] = {}
        self._met: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._fails: str | None = None
        self._error: str | None = None

    # Streams

    def open(self, name: str) -> int:
        """A new stream; its number."""
        stream, self._streams = self._streams, self._streams + 1
        self.ordering.open(stream, name)
        self.log.append(Opens(stream, name))
        return stream

    def record(self, stream: int) -> int:
        """An event after what the stream has been given; its number."""
        event = self.ordering.record(stream)
        self.log.append(Records(stream, event))
        return event

    def wait(self, stream: int, event: int) -> None:
        """A stream goes on after an event."""
        self.ordering.wait(stream, event)
        self.log.append(Waits(stream, event))

    def host_waits(self, event: int) -> None:
        """The host goes on after an event. Raises what has failed on the device."""
        self.ordering.host_waits(event)
        self.log.append(Awaits(event))
        self._tell()

    def host_drains(self) -> None:
        """The host goes on when the device has nothing to do. Raises what has failed on it."""
        self.ordering.host_drains()
        self.log.append(Drains())
        self._tell()

    @contextmanager
    def inside(self, stream: int) -> Iterator[None]:
        """Computation goes to ``stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # Work

    def loads(self, kernel: str) -> None:
        """The host is about to launch a kernel, which is loaded when it is the first of its kind."""
        if kernel not in self._loaded:
            self._loaded.add(kernel)
            self.log.append(Loads(kernel))

    def works(self, *, reads: Iterable[Tensor], writes: Iterable[Tensor], copies_bytes: int | None = None) -> None:
        """The current stream computes, or copies so many bytes. Computations without anything between are one."""
        stream, last = self.current, self.log[-1] if self.log else None
        self._launched()
        if copies_bytes is not None:
            self.log.append(Works(stream, "copy", 1, copies_bytes))
        elif isinstance(last, Works) and (last.stream, last.what) == (stream, "compute"):
            self.log[-1] = last._replace(operations=last.operations + 1)
            self._touched(stream, reads, writes, "computation")
            return
        else:
            self.log.append(Works(stream, "compute"))
        self.ordering.launch(stream)
        self._touched(stream, reads, writes, "computation" if copies_bytes is None else "a copy")

    def joins(
        self,
        stream: int,
        communicator: str,
        kind: Kind,
        size_bytes: int,
        root: int,
        *,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
    ) -> None:
        """A kernel of a communicator in a stream."""
        number = self._joined[communicator] = self._joined.get(communicator, -1) + 1
        self._launched()
        self.ordering.launch(stream)
        self.log.append(Joins(stream, communicator, number, kind, size_bytes, root, self.meant))
        self._touched(stream, reads, writes, f"{kind} {number}")

    def makes(self, communicator: str, members: tuple[int, ...], blocks: int) -> None:
        """The rank comes to where a communicator is made, whether it is a member or not."""
        self.log.append(Makes(communicator, members, blocks))

    # Hosts

    def meets(self, group: str, members: tuple[int, ...], kind: str, tensors: Iterable[Tensor]) -> int:
        """The host enters a collective of hosts; its number."""
        number = self._met[group] = self._met.get(group, -1) + 1
        self.host_touches(reads=(), writes=tensors)
        self.log.append(Meets(group, members, number, kind))
        return number

    def gathers(self, group: str, number: int) -> None:
        """The host waits for a collective of hosts."""
        self.log.append(Gathers(group, number))

    def host_touches(self, *, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """The host itself reads and writes; only memory that copies of the device reach matters."""
        found = [(one, False) for one in reads] + [(one, True) for one in writes]
        for tensor, is_written in found:
            held = self._held.get(_key(tensor))
            if held is not None and held.on_host and held.address is not None:
                self.ordering.touch(HOST, *_span(held.address, tensor), writes=is_written, what="the host")

    # Memory

    def is_of_device(self, tensor: Tensor) -> bool:
        """Whether the tensor's numbers would lie on the device."""
        held = self._held.get(_key(tensor))
        return held is not None and not held.on_host

    def is_of_host(self, tensor: Tensor) -> bool:
        """Whether the tensor is memory of the host that copies of the device reach."""
        held = self._held.get(_key(tensor))
        return held is not None and held.on_host

    def take(self, tensor: Tensor) -> int | None:
        """Where a tensor's storage lies on the device, from now on if it was not there before; None: it is empty."""
        key = _key(tensor)
        held = self._held.get(key)
        if held is None:
            storage = tensor.untyped_storage()
            held = self._held[key] = _Held(self.allocator.allocate(storage.nbytes(), self.current), False)
            weakref.finalize(storage, self._gone, key).atexit = False
        return held.address

    def take_on_host(self, tensor: Tensor) -> None:
        """The tensor is memory of the host that copies of the device reach; its place is never given out again."""
        storage = tensor.untyped_storage()
        self._host_end -= storage.nbytes() + 512
        self._held[_key(tensor)] = _Held(self._host_end, True)
        weakref.finalize(storage, self._gone, _key(tensor)).atexit = False

    def keep(self, tensor: Tensor, stream: int) -> None:
        """The stream uses the tensor, up to what it is given before the tensor is gone."""
        address = self.take(tensor) if self.is_of_device(tensor) else None
        if address is not None:
            self.allocator.record(address, stream)

    def resized(self, storage: UntypedStorage) -> None:
        """A storage has another size: what it had is given back, at once, and it lies elsewhere."""
        key: int = storage._cdata
        held = self._held.get(key)
        if held is None or held.on_host:
            return
        if held.address is not None:
            self.allocator.free(held.address)
        size = storage.nbytes()
        self._held[key] = _Held(self.allocator.allocate(size, self.current) if size else None, False)

    def _gone(self, key: int) -> None:
        held = self._held.pop(key)
        if not held.on_host and held.address is not None:
            self.allocator.free(held.address)

    def _touched(self, stream: int, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
        for tensors, is_written in ((reads, False), (writes, True)):
            for tensor in tensors:
                held = self._held.get(_key(tensor))
                address = self.take(tensor) if held is None else held.address
                if address is not None:
                    self.ordering.touch(stream, *_span(address, tensor), writes=is_written, what=what)
                elif tensor.numel():
                    self.ordering.touch_nothing(stream, writes=is_written, what=what)

    # Errors

    def fail_next(self, error: str) -> None:
        """What the device is given next fails."""
        self._fails = error

    def _launched(self) -> None:
        if self._fails is not None:
            self._error, self._fails = self._fails, None

    def _tell(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"CUDA error: {self._error}")


def without_watching(function: Callable[[], T]) -> T:
    """What a function returns that does something with tensors which is not the device's work."""
    with _disable_current_modes():
        return function()


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _span(address: int, tensor: Tensor) -> tuple[int, int]:
    """The bytes of a tensor from its first element to its last."""
    size = tensor.element_size()
    low = address + int(tensor.storage_offset()) * size
    if not tensor.numel():
        return low, low
    length = 1 + sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + length * size
