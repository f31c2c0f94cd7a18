"""Notifier of waiting endpoints: one asyncio notifier per process, and no thread is held while waiting.

What a transaction changes is published by `relay`, whichever process committed it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Notifier:
    """Topics (``job:<id>``, ``agent:<name>``, ``run:<id>``) and their listeners."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: dict[str, set[asyncio.Event]] = {}
        self.closed = False

    def bind(self) -> None:
        """Bind the notifier to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self.closed = False

    def close(self) -> None:
        """Wake every listener for the last time: the service shuts down."""
        self.closed = True
        self._wake_all()

    def publish(self, topic: str) -> None:
        """Wake the listeners of a topic, from any thread; later listeners read the state after the change."""
        if topic in self._listeners and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, topic)

    def publish_all(self) -> None:
        """Wake every listener, from any thread: changes may have been missed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_all)

    def waiting(self) -> int:
        """Return the number of current listeners."""
        return sum(len(events) for events in self._listeners.values())

    @contextmanager
    def listen(self, topic: str) -> Iterator[Listener]:
        """Listen from now on; the caller reads the state after this call, so that no change is missed in between."""
        event = asyncio.Event()
        self._listeners.setdefault(topic, set()).add(event)
        try:
            yield Listener(event)
        finally:
            listeners = self._listeners[topic]
            listeners.discard(event)
            if not listeners:
                del self._listeners[topic]

    def _wake(self, topic: str) -> None:
        for event in self._listeners.get(topic, ()):
            event.set()

    def _wake_all(self) -> None:
        for topic in list(self._listeners):
            self._wake(topic)


class Listener:
    """One waiting endpoint."""

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event

    def wake(self) -> None:
        """End this listener's wait. Call it on the loop's own thread."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next change; return False when the time is up first."""
        if timeout_s <= 0:
            return False
        try:
            async with asyncio.timeout(timeout_s):  # wait_for would lose a cancellation that comes with the event
                await self._event.wait()
        except TimeoutError:
            return False
        self._event.clear()
        return True
