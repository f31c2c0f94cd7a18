"""A stopwatch for a device: the processor time of this thread on a CPU, events in the compute stream on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from penstock.executor.runtime.interface import Runtime


class Stopwatch(Protocol):
    """A list of moments on a device; ``read_ns`` returns them in ns, on any clock, and starts over."""

    def mark(self) -> int:
        """Note the present moment of the device, and return its number."""

    def read_ns(self) -> list[int]:
        """Wait until all moments have passed, return them in ns, and forget them."""


class BusyWatch:
    """A stopwatch of this thread's processor time, which excludes the time of other threads."""

    def __init__(self) -> None:
        self._moments_ns: list[int] = []

    def mark(self) -> int:
        self._moments_ns.append(time.thread_time_ns())
        return len(self._moments_ns) - 1

    def read_ns(self) -> list[int]:
        moments, self._moments_ns = self._moments_ns, []
        return moments


class DeviceWatch:
    """A stopwatch of a device's compute stream."""

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
    """Create the stopwatch for a device."""
    return BusyWatch() if runtime.gpu is None else DeviceWatch(runtime)


def times_ns(watch: Stopwatch, action: Callable[[], object], rounds: int) -> list[int]:
    """Measure how long ``action`` takes each time, in ns."""
    durations = []
    for _ in range(rounds):
        watch.mark()
        action()
        watch.mark()
        start, end = watch.read_ns()
        durations.append(end - start)
    return durations
