"""The time limit of a solve."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """The time to stop at, on a monotonic clock; without a limit it is never reached."""

    def __init__(self, limit_ns: int | None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._start = clock()
        self._limit_ns = limit_ns

    @property
    def limited(self) -> bool:
        """Return whether there is a limit."""
        return self._limit_ns is not None

    @property
    def limit_s(self) -> float | None:
        """Return the limit, in seconds."""
        return None if self._limit_ns is None else self._limit_ns / 1e9

    @property
    def left_s(self) -> float | None:
        """Return the seconds until the limit; negative when it has passed."""
        return None if self._limit_ns is None else (self._start + self._limit_ns - self._clock()) / 1e9

    def share_ns(self, parts: int = 1) -> int | None:
        """Return one of ``parts`` equal parts of the time until the limit, at least 0; None without a limit."""
        if self._limit_ns is None:
            return None
        return max(0, self._start + self._limit_ns - self._clock()) // parts

    @property
    def passed(self) -> bool:
        """Return whether the limit has been reached."""
        return self._limit_ns is not None and self._clock() - self._start >= self._limit_ns

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return (self._clock() - self._start) / 1e9
