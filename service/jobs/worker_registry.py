"""Worker registry and heartbeats: each worker has a row in ``workers`` that it renews."""

from __future__ import annotations

import os
import socket
from importlib.metadata import version

import sqlalchemy as sa

from penstock.service.db.database import Database
from penstock.service.db.tables import is_alive, now_ms, workers

FORGOTTEN_MS = 24 * 3600 * 1000


class WorkerRegistry:
    """One worker's row, under the name that its leases use."""

    def __init__(self, database: Database, owner: str, slots: int, lease_s: float) -> None:
        self._database, self._owner, self._slots = database, owner, slots
        self._lease_ms = int(lease_s * 1000)

    def beat(self) -> bool:
        """Renew the row; return True for the oldest living worker, which does the common duties."""
        alive = is_alive(self._lease_ms)
        oldest = sa.select(workers.c.id).where(alive).order_by(workers.c.started_ms, workers.c.id).limit(1)
        with self._database.write(alone=False) as connection:
            seen = workers.update().where(workers.c.id == self._owner).values(seen_ms=now_ms())
            if not connection.execute(seen).rowcount:
                connection.execute(workers.insert().values(**self._row()))
            return connection.scalar(oldest) == self._owner

    def leave(self) -> None:
        """Remove the row, and those not renewed for a day."""
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
