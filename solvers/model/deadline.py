"""When a solve has to end."""

from __future__ import annotations

import time
from collections.abc import Callable


class Deadline:
    """When to stop, on a monotonic clock; without a limit it never comes."""

    def __init__(self, limit_ns: int | None, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock = clock
        self._start = clock()
        self._limit_ns = limit_ns

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._limit_ns is not None

    @property
    def limit_s(self) -> float | None:
        """The limit, in seconds."""
        return None if self._limit_ns is None else self._limit_ns / 1e9

    @property
    def left_s(self) -> float | None:
        """Seconds until the limit; negative when it has passed."""
        return None if self._limit_ns is None else (self._start + self._limit_ns - self._clock()) / 1e9

    @property
    def passed(self) -> bool:
        """Whether the limit has been reached."""
        return self._limit_ns is not None and self._clock() - self._start >= self._limit_ns

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return (self._clock() - self._start) / 1e9
