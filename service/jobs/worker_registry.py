"""Who is there to solve: each worker writes itself into ``workers``, and says now and then that it still lives."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version

import sqlalchemy as sa

from penstock.service.db.database import Database
from penstock.service.db.tables import now_ms, workers

FORGOTTEN_MS = 24 * 3600 * 1000


class Attendance:
    """One worker's row, under the name that its leases have."""

    def __init__(self, database: Database, owner: str, slots: int, lease_s: float) -> None:
        self._database, self._owner, self._slots = database, owner, slots
        self._lease_ms = int(lease_s * 1000)

    def beat(self) -> bool:
        """Say that this worker lives; True for the one of all living ones that looks after common things."""
        alive = workers.c.seen_ms > now_ms() - self._lease_ms
        eldest = sa.select(workers.c.id).where(alive).order_by(workers.c.started_ms, workers.c.id).limit(1)
        with self._database.write(alone=False) as connection:
            seen = workers.update().where(workers.c.id == self._owner).values(seen_ms=now_ms())
            if not connection.execute(seen).rowcount:
                connection.execute(workers.insert().values(**self._row()))
            return connection.scalar(eldest) == self._owner

    def leave(self) -> None:
        """Say that this worker has ended; rows of those that never said so go after a day."""
        with self._database.write(alone=False) as connection:
            silent = workers.c.seen_ms < now_ms() - FORGOTTEN_MS
            connection.execute(workers.delete().where(sa.or_(workers.c.id == self._owner, silent)))

    def _row(self) -> dict[str, object]:
        return {
            "id": self._owner,
            "host": socket.gethostname()[:255],
            "pid": os.getpid(),
            "slots": self._slots,
            "started_ms": now_ms(),
            "seen_ms": now_ms(),
            "version": version("penstock"),
        }
