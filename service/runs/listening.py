"""A clock of the time during which the service could answer agents."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

TICK_S = 0.25
"""The time between two ticks while nothing holds the event loop up."""
LONGEST_S = 1.0
"""Most seconds between two ticks that count: some delay is usual on a busy machine."""


class ListeningClock:
    """A clock of seconds, without the seconds in which the event loop answered nobody.

    While modules are loaded or kernels compiled, calls of agents wait in their sockets: by another clock those agents
    would have been silent. ``now`` may be called from any thread; ``clock`` counts all seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock(), 0.0
        """Times of the last tick, by each of the two clocks."""

    def now(self) -> float:
        """Return the seconds that counted since this clock was made."""
        ticked_at, counted = self._last
        return counted + min(self._clock() - ticked_at, LONGEST_S)

    def tick(self) -> None:
        """Count the time since the last tick; the event loop calls this while it runs."""
        self._last = self._clock(), self.now()

    async def watch(self) -> None:
        """Run ``tick`` for ever."""
        while True:
            self.tick()
            await asyncio.sleep(TICK_S)
