"""Time on a device: the processor time of this thread on a CPU, events in the stream on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Mark(NamedTuple):
    """A moment."""

    busy_ns: int
    event: Any = None


class Stopwatch:
    """Marks moments of what runs on ``device``; times between them are known once it has settled."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"

    def mark(self) -> Mark:
        """Now, on the device."""
        if not self._cuda:
            return Mark(time.thread_time_ns())
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return Mark(0, event)

    def between_ns(self, start: Mark, end: Mark) -> int:
        """From one moment to another; ``settle`` comes before."""
        if not self._cuda:
            return end.busy_ns - start.busy_ns
        return round(float(start.event.elapsed_time(end.event)) * 1e6)

    def settle(self) -> None:
        """Return when everything that was marked has happened."""
        if self._cuda:
            torch.cuda.synchronize(self._device)

    def times(self, action: Callable[[], object], rounds: int) -> list[int]:
        """What ``action`` takes, each time."""
        found = []
        for _ in range(rounds):
            start = self.mark()
            action()
            end = self.mark()
            self.settle()
            found.append(self.between_ns(start, end))
        return found
