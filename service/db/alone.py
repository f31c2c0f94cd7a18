"""Lock next to a SQLite file that shows whether another service uses it; it ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from penstock.service.db.database import Database

MOST_WORDS = 1000


class OtherServices:
    """The lock of a database's file, unless another service holds it; a server takes any number of services."""

    def __init__(self, database: Database) -> None:
        name = database.url.database if database.is_sqlite else None
        self._path = Path(f"{name}-service") if name and name != ":memory:" else None
        self._descriptor: int | None = None

    def enter(self, words: str) -> str | None:
        """Take the lock and write ``words`` about its holder; return the words of another service that holds it."""
        if self._path is None:
            return None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:  # a directory that we may not write: the database says what is wrong
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            other_service = os.read(descriptor, MOST_WORDS).decode(errors="replace")
            os.close(descriptor)
            return other_service
        os.ftruncate(descriptor, 0)
        os.write(descriptor, words.encode()[:MOST_WORDS])
        self._descriptor = descriptor
        return None

    def leave(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
