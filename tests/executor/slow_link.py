"""A slow link between ranks of one machine: messages and all-reduces pass a token bucket of some bytes per second."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist

from penstock.executor.transport import GlooTransport


class SlowLink:
    """A link that carries a rank's bytes one after the other. ``bytes_sent``: by messages and by all-reduces."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.bytes_sent = {"messages": 0, "all-reduces": 0}
        self._free_at = 0.0
        self._lock = threading.Lock()

    def passed_at(self, size: int, what: str) -> float:
        """Return when so many bytes, given to the link now, have passed it."""
        with self._lock:
            self.bytes_sent[what] += size
            self._free_at = max(time.perf_counter(), self._free_at) + size / self.bytes_per_s
            return self._free_at


class SlowTransport(GlooTransport):
    """Gloo behind a slow link: a thread hands messages over when they have passed it."""

    def __init__(self, link: SlowLink) -> None:
        super().__init__()
        self._link = link
        self._waiting: Queue[tuple[float, tuple[torch.Tensor, int, int, int]]] = Queue()
        threading.Thread(target=self._pass_on, daemon=True).start()

    def send(self, tensor: torch.Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Queue it at the link."""
        self._waiting.put((self._link.passed_at(size_bytes, "messages"), (tensor, peer, tag, size_bytes)))

    def hand_over(self) -> None:
        """Keep buffers until ``drain``: another thread issues the sends."""

    def drain(self) -> None:
        """Return when every send has passed the link and is done."""
        self._waiting.join()
        GlooTransport.hand_over(self)
        super().drain()

    def _pass_on(self) -> None:
        while True:
            at, message = self._waiting.get()
            sleep_until(at)
            super().send(*message)
            self._waiting.task_done()


class _Slowed:
    """An all-reduce under way that may not end before its bytes have passed the link."""

    def __init__(self, work: Any, at: float) -> None:
        self._work, self._at = work, at

    def wait(self) -> None:
        self._work.wait()
        sleep_until(self._at)


@contextmanager
def slow_all_reduces(link: SlowLink) -> Iterator[None]:
    """Pass this process's all-reduces over the link like a ring: 2 (k - 1) / k of the bytes, after all joined."""
    original = dist.all_reduce

    def slowed(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        count = dist.get_world_size(group)
        size = 2 * (count - 1) * tensor.numel() * tensor.element_size() // count
        if not async_op:
            original(torch.zeros(1), group=group)
        at = link.passed_at(size, "all-reduces")
        work = original(tensor, op=op, group=group, async_op=async_op)
        if async_op:
            return _Slowed(work, at)
        sleep_until(at)
        return work

    dist.all_reduce = slowed
    try:
        yield
    finally:
        dist.all_reduce = original


def sleep_until(at: float) -> None:
    """Sleep until a time of ``time.perf_counter``."""
    time.sleep(max(0.0, at - time.perf_counter()))
