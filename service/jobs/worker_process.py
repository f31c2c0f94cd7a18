"""``penstock worker``: the service's worker without the service, on this machine or another one."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from prometheus_client import start_http_server

from penstock.schemas.errors import InvalidDocument, Unreachable
from penstock.service import logs, metrics
from penstock.service.db.database import Database
from penstock.service.db.document_store import Stores
from penstock.service.db.relay import Relay
from penstock.service.jobs.leases import Leases
from penstock.service.jobs.worker import Worker
from penstock.service.settings import Settings
from penstock.workers.forkserver import Forkserver

LOOPBACK = "127.0.0.1"

log = logging.getLogger("penstock.service")


def work(settings: Settings) -> None:
    """Claim and solve until SIGINT or SIGTERM, which returns the jobs to the queue; a second one ends at once.

    Raises InvalidDocument without slots, Conflict or Unreachable when the database or the metrics' port cannot be used.
    """
    if not settings.slots:
        raise InvalidDocument("a worker needs at least one slot", remedy="--slots 1, or PENSTOCK_SLOTS=1")
    logs.configure(settings.log_format, settings.log_level)
    database = Database.of(settings)
    database.create(wait_s=settings.database_wait_s)
    forkserver = Forkserver.for_solves(warm_up=settings.warm_up)
    worker = _worker(settings, database, forkserver)
    relay = Relay(database, worker.on_change)
    ended = _until_signalled()
    _serve_metrics(settings.metrics_port)
    forkserver.start()
    relay.start()
    worker.start()
    log.info("working on %s with %d slots as %s", database.name, settings.slots, worker.owner)
    ended.wait()
    log.info("ending: running jobs go back to the queue")
    worker.stop()
    relay.stop()
    forkserver.stop()
    database.close()


def _worker(settings: Settings, database: Database, forkserver: Forkserver) -> Worker:
    leases = Leases(database, lease_s=settings.lease_s, max_attempts=settings.max_attempts)
    return Worker(database, leases, Stores(database), forkserver, settings)


def _until_signalled() -> threading.Event:
    """Return an event set by the first signal; the second one ends the process: children die too, leases expire."""
    ended = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if ended.is_set():
            os._exit(128 + number)
        ended.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    return ended


def _serve_metrics(port: int) -> None:
    if not port:
        return
    try:
        start_http_server(port, addr=LOOPBACK, registry=metrics.REGISTRY)
    except OSError as error:
        raise Unreachable(
            f"cannot listen on {LOOPBACK}:{port} for metrics: {error.strerror}", remedy="choose another metrics_port"
        ) from None
