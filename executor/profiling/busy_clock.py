"""The processor time of processes over time: their processor clocks, read repeatedly together with the wall clock."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Sequence

_PERIOD_S = 0.002
_CPU_CLOCK_OF_PROCESS = 2
"""Linux, posix-timers.h: CPUCLOCK_SCHED, all threads of a process; the inverted pid is in the upper bits."""


class BusyClock(threading.Thread):
    """A thread that reads the processor time of each of ``pids`` every two milliseconds until ``stop``, or its end."""

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(name="penstock-busy-clock", daemon=True)
        self._clocks = [(~pid << 3) | _CPU_CLOCK_OF_PROCESS for pid in pids]
        self._wall_ns: list[list[int]] = [[] for _ in pids]
        self._busy_ns: list[list[int]] = [[] for _ in pids]
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stopped.wait(_PERIOD_S):
            for number, clock in enumerate(self._clocks):
                try:
                    busy_ns = time.clock_gettime_ns(clock)
                except OSError:
                    continue
                self._wall_ns[number].append(time.perf_counter_ns())
                self._busy_ns[number].append(busy_ns)

    def stop(self) -> None:
        """Stop reading."""
        self._stopped.set()
        self.join()

    def busy_ns(self, number: int, moment_ns: int) -> float:
        """Return the processor time of process ``number`` at a moment of ``perf_counter_ns``, interpolated."""
        wall, busy = self._wall_ns[number], self._busy_ns[number]
        if not wall:
            return 0.0
        after = bisect_right(wall, moment_ns)
        if after in (0, len(wall)):
            return float(busy[min(after, len(wall) - 1)])
        before_ns, after_ns = wall[after - 1], wall[after]
        part = (moment_ns - before_ns) / (after_ns - before_ns)
        return busy[after - 1] + part * (busy[after] - busy[after - 1])
