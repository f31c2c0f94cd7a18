"""A record of the calls of a simulated device, made with them: the log, the known order, the memory, errors."""

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


class _Storage(NamedTuple):
    """A storage of the device, or of the host for it: the address where its numbers would lie; None if it is empty."""

    address: int | None
    on_host: bool


class Recorder:
    """The record of one rank. ``log``: everything so far; ``current``: the stream of computation.

    ``meant``: the tag of the message that is sent or received next.

    All tensors lie in the CPU's memory. Tensors that were copied to the device, and results computed with them, are *of
    the device*. Others belong to the host, and operations on them are not the device's work.
    """

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.ordering = Ordering()
        self.allocator = Allocator(self.ordering.is_past, self.ordering.place)
        self.current = 0
        self.meant = 0
        self._streams = 0
        self._storages: dict[int, _Storage] = {}
        self._host_end = -(1 << 40)
        self._joined: dict[str, int] = {}
        self._met: dict[str, int] = {}
        self._loaded: set[str] = set()
        self._fails: str | None = None
        self._error: str | None = None

    # Streams

    def open(self, name: str) -> int:
        """Open a new stream; return its number."""
        stream, self._streams = self._streams, self._streams + 1
        self.ordering.open(stream, name)
        self.log.append(Opens(stream, name))
        return stream

    def record(self, stream: int) -> int:
        """Record an event after a stream's present work; return its number."""
        event = self.ordering.record(stream)
        self.log.append(Records(stream, event))
        return event

    def wait(self, stream: int, event: int) -> None:
        """Let a stream continue after an event."""
        self.ordering.wait(stream, event)
        self.log.append(Waits(stream, event))

    def host_waits(self, event: int) -> None:
        """Let the host continue after an event. Raises an error of the device."""
        self.ordering.host_waits(event)
        self.log.append(Awaits(event))
        self._tell()

    def host_drains(self) -> None:
        """Let the host continue when the device is idle. Raises an error of the device."""
        self.ordering.host_drains()
        self.log.append(Drains())
        self._tell()

    @contextmanager
    def inside(self, stream: int) -> Iterator[None]:
        """Send computation within this context to ``stream``."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # Work

    def loads(self, kernel: str) -> None:
        """Note a kernel that the host is about to launch; the first of its kind is loaded."""
        if kernel not in self._loaded:
            self._loaded.add(kernel)
            self.log.append(Loads(kernel))

    def works(self, *, reads: Iterable[Tensor], writes: Iterable[Tensor], copies_bytes: int | None = None) -> None:
        """Note a computation of the current stream, or a copy of so many bytes. Consecutive computations are one."""
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
        """Note a kernel of a communicator in a stream."""
        number = self._joined[communicator] = self._joined.get(communicator, -1) + 1
        self._launched()
        self.ordering.launch(stream)
        self.log.append(Joins(stream, communicator, number, kind, size_bytes, root, self.meant))
        self._touched(stream, reads, writes, f"{kind} {number}")

    def makes(self, communicator: str, members: tuple[int, ...], blocks: int) -> None:
        """Note that the rank reaches the creation of a communicator, as a member or not."""
        self.log.append(Makes(communicator, members, blocks))

    # Hosts

    def meets(self, group: str, members: tuple[int, ...], kind: str, tensors: Iterable[Tensor]) -> int:
        """Note that the host enters a collective of hosts; return its number."""
        number = self._met[group] = self._met.get(group, -1) + 1
        self.host_touches(reads=(), writes=tensors)
        self.log.append(Meets(group, members, number, kind))
        return number

    def gathers(self, group: str, number: int) -> None:
        """Note that the host waits for a collective of hosts."""
        self.log.append(Gathers(group, number))

    def host_touches(self, *, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Note reads and writes of the host; only memory that copies of the device reach matters."""
        accesses = [(one, False) for one in reads] + [(one, True) for one in writes]
        for tensor, is_written in accesses:
            entry = self._storages.get(_key(tensor))
            if entry is not None and entry.on_host and entry.address is not None:
                self.ordering.touch(HOST, *_span(entry.address, tensor), writes=is_written, what="the host")

    # Memory

    def is_of_device(self, tensor: Tensor) -> bool:
        """Return whether the tensor's numbers would lie on the device."""
        entry = self._storages.get(_key(tensor))
        return entry is not None and not entry.on_host

    def is_of_host(self, tensor: Tensor) -> bool:
        """Return whether the tensor is memory of the host that copies of the device reach."""
        entry = self._storages.get(_key(tensor))
        return entry is not None and entry.on_host

    def take(self, tensor: Tensor) -> int | None:
        """Return the address of a tensor's storage on the device, allocated if it is new; None if it is empty."""
        key = _key(tensor)
        entry = self._storages.get(key)
        if entry is None:
            storage = tensor.untyped_storage()
            entry = self._storages[key] = _Storage(self.allocator.allocate(storage.nbytes(), self.current), False)
            weakref.finalize(storage, self._gone, key).atexit = False
        return entry.address

    def take_on_host(self, tensor: Tensor) -> None:
        """Make a tensor memory of the host that copies of the device reach; its address is never reused."""
        storage = tensor.untyped_storage()
        self._host_end -= storage.nbytes() + 512
        self._storages[_key(tensor)] = _Storage(self._host_end, True)
        weakref.finalize(storage, self._gone, _key(tensor)).atexit = False

    def keep(self, tensor: Tensor, stream: int) -> None:
        """Note that the stream uses the tensor, up to the stream's work at the tensor's end."""
        address = self.take(tensor) if self.is_of_device(tensor) else None
        if address is not None:
            self.allocator.record(address, stream)

    def resized(self, storage: UntypedStorage) -> None:
        """Note another size of a storage: its memory is freed at once, and it moves to another address."""
        key: int = storage._cdata
        entry = self._storages.get(key)
        if entry is None or entry.on_host:
            return
        if entry.address is not None:
            self.allocator.free(entry.address)
        size = storage.nbytes()
        self._storages[key] = _Storage(self.allocator.allocate(size, self.current) if size else None, False)

    def _gone(self, key: int) -> None:
        entry = self._storages.pop(key)
        if not entry.on_host and entry.address is not None:
            self.allocator.free(entry.address)

    def _touched(self, stream: int, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str) -> None:
        for tensors, is_written in ((reads, False), (writes, True)):
            for tensor in tensors:
                entry = self._storages.get(_key(tensor))
                address = self.take(tensor) if entry is None else entry.address
                if address is not None:
                    self.ordering.touch(stream, *_span(address, tensor), writes=is_written, what=what)
                elif tensor.numel():
                    self.ordering.touch_nothing(stream, writes=is_written, what=what)

    # Errors

    def fail_next(self, error: str) -> None:
        """Make the device's next work fail."""
        self._fails = error

    def _launched(self) -> None:
        if self._fails is not None:
            self._error, self._fails = self._fails, None

    def _tell(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"CUDA error: {self._error}")


def without_watching(function: Callable[[], T]) -> T:
    """Call a function whose work on tensors is not the device's work; return its result."""
    with _disable_current_modes():
        return function()


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _span(address: int, tensor: Tensor) -> tuple[int, int]:
    """Return the bytes of a tensor from its first element to its last."""
    size = tensor.element_size()
    low = address + int(tensor.storage_offset()) * size
    if not tensor.numel():
        return low, low
    length = 1 + sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + length * size
