"""Messages over gloo: tagged, non-blocking, between host memories.

A send never blocks its issuer, and its buffer lives until the peer has taken it. Gloo can wait for a send, but not
report whether it is done. So a thread waits, and frees buffers as soon as possible. Waiting for a dead peer fails at
once; for a silent peer after the group's timeout (EXECUTOR C.1, C.4).
"""

from __future__ import annotations

import threading
from collections import Counter
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist
from torch import Tensor

CLOSING_S = 1.0
"""Seconds that a closing transport waits for its threads: a thread that ends in C++ at exit aborts the process."""
_UNLIMITED = timedelta(days=7)
_HAND_OVER_BYTES = 1 << 18
_HAND_OVER_SENDS = 16


class GlooTransport:
    """Point-to-point messages in a process group over gloo, by default the default group.

    Messages between the same two ranks are matched by their tags; equal tags are delivered in order.
    ``bytes_sent``: bytes by peer.
    """

    def __init__(self, group: Any = None) -> None:
        group = dist.group.WORLD if group is None else group
        self.bytes_sent: Counter[int] = Counter()
        self._send = group.send
        self._receive = group.recv
        self._fresh: list[tuple[Any, Tensor]] = []
        self._fresh_bytes = 0
        self._reaper = _Reaper()

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Start to send a contiguous tensor; it must not change until ``drain``."""
        self._fresh.append((self._send([tensor], peer, tag), tensor))
        self._fresh_bytes += size_bytes
        self.bytes_sent[peer] += size_bytes
        if self._fresh_bytes >= _HAND_OVER_BYTES or len(self._fresh) >= _HAND_OVER_SENDS:
            self.hand_over()

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        """Start to receive into a contiguous tensor; ``wait()`` on the result."""
        return self._receive([buffer], peer, tag)

    def hand_over(self) -> None:
        """Free the buffers of small recent sends when these are done."""
        if self._fresh:
            self._reaper.work.put(self._fresh)
            self._fresh = []
            self._fresh_bytes = 0

    def begin(self, *, is_first: bool) -> None:
        """Do nothing: no work of a GPU waits for messages."""

    def drain(self) -> None:
        """Wait until every send is done. Raises the error of a failed send."""
        self.hand_over()
        done = threading.Event()
        self._reaper.work.put(done)
        done.wait()
        if self._reaper.error is not None:
            raise self._reaper.error

    def close(self) -> None:
        """End the thread, within a second, without waiting for sends that are under way."""
        self._reaper.work.put(None)
        self._reaper.join(CLOSING_S)


class _Reaper(threading.Thread):
    """A thread that waits for sends in the order in which they were issued, and frees their buffers."""

    def __init__(self) -> None:
        super().__init__(name="penstock-sends", daemon=True)
        self.work: SimpleQueue[list[tuple[Any, Tensor]] | threading.Event | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        while (item := self.work.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            item.reverse()
            while item:
                handle, _ = item.pop()
                try:
                    handle.wait(_UNLIMITED)
                except Exception as error:
                    self.error = self.error or error
            del item, handle, _
