"""Time on a device: the processor time of this thread on a CPU, events in the compute stream on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from penstock.executor.runtime.interface import Runtime


class Stopwatch(Protocol):
    """Notes moments of what runs on a device; ``read_ns`` gives them in ns, on a clock of its own, and begins again."""

    def mark(self) -> int:
        """Note now, on the device; the number of the moment."""

    def read_ns(self) -> list[int]:
        """Return all moments in ns once they have come, and forget them."""


class BusyWatch:
    """The processor time of this thread, which leaves out what others ran in between."""

    def __init__(self) -> None:
        self._moments_ns: list[int] = []

    def mark(self) -> int:
        self._moments_ns.append(time.thread_time_ns())
        return len(self._moments_ns) - 1

    def read_ns(self) -> list[int]:
        moments, self._moments_ns = self._moments_ns, []
        return moments


class DeviceWatch:
    """Moments of the compute stream of a device."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._timer = runtime.timer()
        self._count = 0

    def mark(self) -> int:
        self._timer.mark()
        self._count += 1
        return self._count - 1

    def read_ns(self) -> list[int]:
        moments = self._timer.read_ns()
        self._timer, self._count = self._runtime.timer(), 0
        return moments


def stopwatch(runtime: Runtime) -> Stopwatch:
    """The stopwatch of a device."""
    return BusyWatch() if runtime.device.type == "cpu" else DeviceWatch(runtime)


def times_ns(watch: Stopwatch, action: Callable[[], object], rounds: int) -> list[int]:
    """What ``action`` takes, each time, in ns."""
    found = []
    for _ in range(rounds):
        watch.mark()
        action()
        watch.mark()
        start, end = watch.read_ns()
        found.append(end - start)
    return found
