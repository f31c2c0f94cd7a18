"""Limits of one key, or one address: requests in a while, and requests that are open at a time."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from penstock.schemas.errors import QuotaExceeded

BURST_S = 5.0
"""Seconds' worth of requests that may come at once."""

KEPT = 10_000
"""Most buckets that are kept; a bucket that has filled up again is not needed."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The rest of a bucket: ``remaining`` of ``limit`` requests, one more each ``1 / per_s`` seconds."""

    limit: int
    remaining: int
    per_s: float

    def headers(self) -> dict[str, str]:
        """Return the headers of the IETF's draft of RateLimit fields."""
        window_s = math.ceil(self.limit / self.per_s)
        refilled_s = math.ceil((self.limit - self.remaining) / self.per_s)
        return {
            "RateLimit-Policy": f'"requests";q={self.limit};w={window_s}',
            "RateLimit": f'"requests";r={self.remaining};t={refilled_s}',
        }


class Rates:
    """A bucket of tokens per subject, refilled at ``per_s``; 0: no limit. For one event loop."""

    def __init__(self, per_s: float, *, burst_s: float = BURST_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = per_s, clock
        self._limit = max(1, math.ceil(per_s * burst_s))
        self._buckets: dict[str, tuple[float, float]] = {}

    def take(self, subject: str) -> Allowance | None:
        """Take a token. Raises QuotaExceeded when no token is left; returns None without a limit."""
        if not self._per_s:
            return None
        now = self._clock()
        tokens = self._tokens(subject, now)
        if tokens < 1:
            wait_s = (1 - tokens) / self._per_s
            raise QuotaExceeded(
                f"too many requests: the limit is {self._per_s:g} per second, and {self._limit} at once",
                remedy="wait for the time in Retry-After, and combine requests where possible",
                retry_after_s=wait_s,
            )
        self._forget_full(now)
        self._buckets[subject] = tokens - 1, now
        return Allowance(self._limit, int(tokens - 1), self._per_s)

    def _tokens(self, subject: str, now: float) -> float:
        tokens, at = self._buckets.get(subject, (float(self._limit), now))
        return min(float(self._limit), tokens + (now - at) * self._per_s)

    def _forget_full(self, now: float) -> None:
        if len(self._buckets) >= KEPT:
            kept = {name: bucket for name, bucket in self._buckets.items() if self._tokens(name, now) < self._limit}
            self._buckets = dict(list(kept.items())[-KEPT // 2 :])


class OpenRequests:
    """The open requests of each subject: requests that wait for an answer, and streams."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, subject: str) -> Callable[[], None]:
        """Count a request, until what is returned is called. Raises QuotaExceeded."""
        if self._open[subject] >= self._most:
            raise QuotaExceeded(
                f"{self._most} requests of this key are already open, which is the limit",
                remedy="close streams and waits that are no longer needed",
            )
        self._open[subject] += 1

        def leave() -> None:
            self._open[subject] -= 1
            if not self._open[subject]:
                del self._open[subject]

        return leave
