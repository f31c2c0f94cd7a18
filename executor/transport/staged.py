"""Messages between GPU memories through host memory and gloo, for several ranks on one GPU, which NCCL refuses.

A send copies to a host buffer during computation, after the work that the compute stream has queued before it. A thread
waits for the copy and gives the buffer to gloo, so the issuing thread never waits for the GPU. A receive arrives in a
host buffer; waiting for it queues the copy to the GPU on the compute stream. On a CPU the same code stages through
plain buffers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple

from torch import Tensor

from penstock.executor.runtime.interface import Event, Runtime
from penstock.executor.transport.gloo import CLOSING_S, GlooTransport


class StagedTransport:
    """Gloo's messages for tensors that gloo cannot reach; on the wire they are the same."""

    def __init__(self, runtime: Runtime, group: Any = None) -> None:
        self._runtime = runtime
        self._gloo = GlooTransport(group)
        self._sender = _Sender(self._gloo)

    @property
    def bytes_sent(self) -> Counter[int]:
        """The bytes sent to each peer."""
        return self._gloo.bytes_sent

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Start to send a contiguous tensor; it must not change until ``drain``."""
        host = self._runtime.host_buffer(tensor)
        arrived = self._runtime.download(tensor, host)
        self._sender.work.put(_Download(arrived, tensor, host, peer, tag, size_bytes))

    def receive(self, buffer: Tensor, peer: int, tag: int) -> _Arrival:
        """Start to receive into a contiguous tensor; ``wait()`` on the result."""
        host = self._runtime.host_buffer(buffer)
        return _Arrival(self._gloo.receive(host, peer, tag), host, buffer, self._runtime)

    def hand_over(self) -> None:
        """Free the buffers of small recent sends when these are done."""
        self._sender.work.put(self._gloo.hand_over)

    def begin(self, *, is_first: bool) -> None:
        """Do nothing: no work of a GPU waits for messages."""

    def drain(self) -> None:
        """Wait until every send and all computation is done. Raises the error of a failed send."""
        drained = threading.Event()
        self._sender.work.put(drained.set)
        drained.wait()
        if self._sender.error is not None:
            raise self._sender.error
        self._gloo.drain()
        self._runtime.compute.synchronize()

    def close(self) -> None:
        """End the threads, within a second, without waiting for sends that are under way."""
        self._sender.work.put(self._gloo.close)
        self._sender.work.put(None)
        self._sender.join(CLOSING_S)


class _Download(NamedTuple):
    """A send whose numbers are being copied to the host; ``tensor`` lives until the copy is done."""

    arrived: Event
    tensor: Tensor
    host: Tensor
    peer: int
    tag: int
    size_bytes: int


class _Arrival:
    """A receive; waiting for it copies the numbers to the device."""

    __slots__ = ("_buffer", "_host", "_runtime", "_work")

    def __init__(self, work: Any, host: Tensor, buffer: Tensor, runtime: Runtime) -> None:
        self._work = work
        self._host = host
        self._buffer = buffer
        self._runtime = runtime

    def wait(self) -> None:
        self._work.wait()
        self._runtime.upload(self._host, self._buffer)


class _Sender(threading.Thread):
    """A thread that gives host buffers to gloo in the order of the sends, each when its copy is done."""

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
                    item.arrived.synchronize()
                    self._gloo.send(item.host, item.peer, item.tag, item.size_bytes)
                else:
                    item()
            except Exception as error:
                self.error = self.error or error
            del item
