"""Messages between GPU memories through host memory and gloo: for several ranks on one GPU, which NCCL refuses.

A send copies to a host buffer on a stream of its own, after what the compute stream has queued before it; a thread
waits for the copy and hands the buffer to gloo, so the issuing thread never waits for the GPU. A receive lands in a
host buffer; waiting for it queues the copy to the GPU on the compute stream. How host and device exchange bytes is a
strategy (``HostCopies``): on a CPU device the same code stages through plain buffers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.executor.transport.gloo import GlooTransport


class HostCopies(Protocol):
    """How tensors of a device come to host memory and back."""

    def buffer(self, like: Tensor) -> Tensor:
        """Host memory for a tensor's numbers."""

    def download(self, tensor: Tensor, host: Tensor) -> Callable[[], object]:
        """Start copying a tensor to ``host``; call what is returned to wait until it is there."""

    def upload(self, host: Tensor, tensor: Tensor) -> None:
        """Copy ``host`` into a tensor, ahead of what the device is given next."""


class PlainCopies:
    """For tensors that are in host memory already."""

    def buffer(self, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    def download(self, tensor: Tensor, host: Tensor) -> Callable[[], object]:
        host.copy_(tensor)
        return _nothing

    def upload(self, host: Tensor, tensor: Tensor) -> None:
        tensor.copy_(host)


class CudaCopies:
    """Through pinned host memory; downloads on a stream of their own, uploads on the compute stream.

    Torch's allocator of pinned memory gives a buffer out again only when the copies that used it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._compute = torch.cuda.current_stream(device)
        self._downloads: Any = torch.cuda.Stream(device)

    def buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def download(self, tensor: Tensor, host: Tensor) -> Callable[[], object]:
        stream = self._downloads
        stream.wait_stream(self._compute)
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        done: Callable[[], object] = stream.record_event().synchronize
        return done

    def upload(self, host: Tensor, tensor: Tensor) -> None:
        with torch.cuda.stream(self._compute):
            tensor.copy_(host, non_blocking=True)


class StagedTransport:
    """Gloo's messages for tensors that gloo cannot reach; on the wire they are the same."""

    def __init__(self, copies: HostCopies, group: Any = None) -> None:
        self._copies = copies
        self._gloo = GlooTransport(group)
        self._sender = _Sender(self._gloo)

    @property
    def bytes_sent(self) -> Counter[int]:
        """Per peer."""
        return self._gloo.bytes_sent

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Start sending a contiguous tensor; it must not change until ``drain``."""
        host = self._copies.buffer(tensor)
        arrived = self._copies.download(tensor, host)
        self._sender.work.put(_Download(arrived, tensor, host, peer, tag, size_bytes))

    def receive(self, buffer: Tensor, peer: int, tag: int) -> _Arrival:
        """Start receiving into a contiguous tensor; ``wait()`` on what is returned."""
        host = self._copies.buffer(buffer)
        return _Arrival(self._gloo.receive(host, peer, tag), host, buffer, self._copies)

    def hand_over(self) -> None:
        """Let the buffers of small recent sends go as soon as they are done."""
        self._sender.work.put(self._gloo.hand_over)

    def drain(self) -> None:
        """Return when every send is done. Raises what a failed send raised."""
        drained = threading.Event()
        self._sender.work.put(drained.set)
        drained.wait()
        if self._sender.error is not None:
            raise self._sender.error
        self._gloo.drain()

    def close(self) -> None:
        """End the threads; sends that are under way are not waited for."""
        self._sender.work.put(self._gloo.close)
        self._sender.work.put(None)


class _Download(NamedTuple):
    """A send whose numbers are on their way to the host; ``tensor`` lives until they are there."""

    arrived: Callable[[], object]
    tensor: Tensor
    host: Tensor
    peer: int
    tag: int
    size_bytes: int


class _Arrival:
    """A receive; waiting for it brings the numbers to the device."""

    __slots__ = ("_buffer", "_copies", "_host", "_work")

    def __init__(self, work: Any, host: Tensor, buffer: Tensor, copies: HostCopies) -> None:
        self._work = work
        self._host = host
        self._buffer = buffer
        self._copies = copies

    def wait(self) -> None:
        self._work.wait()
        self._copies.upload(self._host, self._buffer)


class _Sender(threading.Thread):
    """Gives host buffers to gloo in the order of the sends, each when its copy is done."""

    def __init__(self, gloo: GlooTransport) -> None:
        super().__init__(name="penstock-staged-sends", daemon=True)
        self.work: SimpleQueue[_Download | Callable[[], object] | None] = SimpleQueue()
        self.error: Exception | None = None
        self._gloo = gloo
        self.start()

    def run(self) -> None:
        while (item := self.work.get()) is not None:
            try:
                if isinstance(item, _Download):
                    item.arrived()
                    self._gloo.send(item.host, item.peer, item.tag, item.size_bytes)
                else:
                    item()
            except Exception as error:
                self.error = self.error or error
            del item


def _nothing() -> None:
    """A copy that was done at once."""
