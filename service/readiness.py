"""Readiness of a service to accept work: checked at each question, with the reasons in words where it is not ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

import sqlalchemy as sa

from penstock.schemas.errors import Conflict, Fault, Unreachable
from penstock.service.db.database import DatabaseAway
from penstock.service.db.migrations import HEAD, revision_of
from penstock.service.db.tables import is_alive, workers

if TYPE_CHECKING:
    from penstock.service.services import Service


class NotReady(Unreachable):
    """An error for a running service whose database, workers or other parts are not ready."""

    title = "The service is not ready"
    code = "not-ready"


def readiness(service: Service) -> dict[str, str | int]:
    """Return the state of the parts. Raises NotReady with a fault for each part that is not ready."""
    faults = [Fault("/service", "the service is shutting down", "ending")] if service.ending else []
    revision, living = HEAD, 0
    try:
        with service.database.read() as connection:
            revision = revision_of(connection) or "none"
            living = connection.scalar(living_workers(service.settings.lease_s)) or 0 if revision == HEAD else 0
        faults += _of_database(revision, living)
    except DatabaseAway as away:
        faults.append(Fault("/database", away.public_detail, away.code))
    except Conflict as error:
        faults.append(Fault("/database", error.detail, error.code))
    if not service.worker.alive():
        faults.append(Fault("/worker", "a thread of the built-in worker has ended: start the service again", "worker"))
    if faults:
        raise NotReady("; ".join(fault.detail for fault in faults), faults=tuple(faults))
    return {"status": "ready", "revision": revision, "workers": living, "slots": service.settings.slots}


def living_workers(lease_s: float) -> sa.Select[int]:
    """Return how many workers had a heartbeat within a lease."""
    alive = is_alive(int(lease_s * 1000))
    return sa.select(sa.func.count()).select_from(workers).where(alive, workers.c.slots > 0)


def _of_database(revision: str, living: int) -> list[Fault]:
    if revision != HEAD:
        return [
            Fault(
                "/database",
                f"the database is at revision {revision}, not {HEAD}: run `penstock db upgrade`",
                "revision",
            )
        ]
    if not living:
        return [
            Fault(
                "/workers", "no worker is running: start `penstock worker --database …`, or set slots above 0", "none"
            )
        ]
    return []
