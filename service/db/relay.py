"""Relay of changes in the database, from every process: one thread and one connection serve all listeners here.

PostgreSQL notifies (LISTEN). A SQLite file is polled after each commit of this process, and every 100 ms for
other processes' commits: by a pragma that reads a counter in shared memory, and by one query where that has changed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.service.db.database import Database
from penstock.service.db.tables.telling import CHANGES, CHANNEL

POLL_S = 0.1
TOGETHER_S = 0.01
"""The least time between two polls: commits that follow each other faster are read together."""
AGAIN_S = 1.0
"""Delay before reconnecting after a connection broke off, in seconds."""

log = logging.getLogger("penstock.service")


class Relay:
    """A thread that calls ``on_change`` with each topic that changed; None means that anything may have changed."""

    def __init__(self, database: Database, on_change: Callable[[str | None], None]) -> None:
        self._database, self._on_change = database, on_change
        self._end = threading.Event()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)

    def start(self, wait_s: float = 5.0) -> None:
        """Begin to listen; return when listening, or after ``wait_s`` while the database is away."""
        self._thread.start()
        self._listens.wait(wait_s)

    def stop(self) -> None:
        """End the thread; return when it has ended."""
        self._end.set()
        self._database.committed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        listen = self._poll if self._database.is_sqlite else self._listen
        while not self._end.is_set():
            try:
                with self._connection() as connection:
                    listen(connection)
            except Exception as error:
                self._listens.clear()
                log.warning("changes in the database are not noticed for a moment: %s", str(error).partition("\n")[0])
                self._end.wait(AGAIN_S)

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """Yield a driver's connection outside the pool, without transactions."""
        pooled = self._database.engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()
        try:
            if not self._database.is_sqlite:
                connection.autocommit = True
            yield connection
        finally:
            connection.close()

    def _began(self) -> None:
        self._listens.set()
        self._on_change(None)

    def _poll(self, connection: Any) -> None:
        """Watch a SQLite file for changes until stopped."""
        newest = f"SELECT coalesce(max(id), 0) FROM {CHANGES}"
        version = connection.execute("PRAGMA data_version").fetchone()
        last = connection.execute(newest).fetchone()[0]
        self._began()
        polled = 0.0
        while not self._end.is_set():
            self._database.committed.wait(POLL_S)
            self._end.wait(polled + TOGETHER_S - time.monotonic())
            self._database.committed.clear()
            polled = time.monotonic()
            if (now := connection.execute("PRAGMA data_version").fetchone()) == version:
                continue
            version = now
            rows = connection.execute(f"SELECT id, topic FROM {CHANGES} WHERE id > ? ORDER BY id", (last,)).fetchall()
            if rows and rows[0][0] > last + 1:
                self._on_change(None)
            for topic in dict.fromkeys(topic for _, topic in rows):
                self._on_change(topic)
            last = rows[-1][0] if rows else last

    def _listen(self, connection: Any) -> None:
        """Wait for PostgreSQL's notifications until stopped."""
        connection.execute(f"LISTEN {CHANNEL}")
        self._began()
        while not self._end.is_set():
            for notice in connection.notifies(timeout=0.5, stop_after=1):
                self._on_change(notice.payload)
