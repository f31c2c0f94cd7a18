"""Dependency container: the parts of one service, made from its settings, opened and closed with the app."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from penstock.schemas.machine.processors import available_processors
from penstock.service.db.database import Database, DatabaseAway
from penstock.service.db.document_store import Stores
from penstock.service.db.gauges import DatabaseCollector
from penstock.service.db.notifier import Notifier
from penstock.service.db.relay import Relay
from penstock.service.idempotency import Idempotency
from penstock.service.jobs import judging
from penstock.service.jobs.judging import ProgramCache
from penstock.service.jobs.leases import Leases
from penstock.service.jobs.queue import JobQueue
from penstock.service.jobs.submissions import Submissions
from penstock.service.jobs.submit import Planning
from penstock.service.jobs.sweeps import Sweeps
from penstock.service.jobs.worker import Worker
from penstock.service.runs.agents import Agents
from penstock.service.runs.listening import ListeningClock
from penstock.service.runs.recovery import Recovery
from penstock.service.runs.runs import Runs
from penstock.service.security.authenticator import Authenticator
from penstock.service.security.child_places import Places
from penstock.service.security.held_bytes import HeldBytes
from penstock.service.security.sizes import Sizes
from penstock.service.settings import Settings
from penstock.workers.forkserver import Forkserver

WATCH_AGAIN_S = 1.0

log = logging.getLogger("penstock.service")


class Service:
    """The stores, queues and registries that the endpoints call."""

    def __init__(self, settings: Settings, forkserver: Forkserver | None = None) -> None:
        self.settings = settings
        self.started = time.monotonic()
        self.ending = False
        """Whether the first SIGTERM has arrived: the service is not ready, and takes nothing new."""
        self.notifier = Notifier()
        self.heavy = CapacityLimiter(max(2, available_processors()))
        """Limit of threads that judge and lower at a time, so that the others stay free."""
        self.children = Places(max(2, available_processors()), settings.question_wait_s)
        """Places of the children that import, compare and explain."""
        self.held_bytes = HeldBytes(settings.max_held_body_bytes)
        self.large_bodies = CapacityLimiter(2)
        """Limit of large bodies that are parsed at a time: each may take ten times its size meanwhile."""
        self.database = Database.of(settings)
        self.relay = Relay(self.database, self._on_change)
        self.stores = Stores(self.database)
        self.queue = JobQueue(self.database)
        self.authenticator = Authenticator(self.database, settings)
        self.forkserver = forkserver or Forkserver.for_solves(warm_up=settings.warm_up)
        leases = Leases(self.database, lease_s=settings.lease_s, max_attempts=settings.max_attempts)
        self.worker = Worker(self.database, leases, self.stores, self.forkserver, settings)
        self.sizes = Sizes(settings)
        self.planning = Planning(self.stores, self.queue, self.sizes, max_solve_s=settings.max_solve_s)
        self.sweeps = Sweeps(self.database, self.stores, self.planning, self.queue, max_cases=settings.max_sweep_cases)
        self.programs = ProgramCache(self.stores)
        self.submissions = Submissions(self.stores, self.planning)
        self.idempotency = Idempotency(self.database, lease_s=settings.lease_s)
        self.runs = Runs(self.database)
        self.listening = ListeningClock()
        self.agents = Agents(
            self.database,
            self.notifier,
            self.runs,
            hold_s=settings.agent_hold_s,
            timeout_s=settings.agent_timeout_s,
            clock=self.listening,
        )
        self.recovery = Recovery(
            self.database,
            self.notifier,
            self.runs,
            self.agents,
            self.planning,
            self.queue,
            wait_s=settings.recovery_wait_s,
        )
        self.collector = DatabaseCollector(
            self.database, silent_after_s=settings.lease_s, agent_timeout_s=settings.agent_timeout_s
        )
        self._watches: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Create the tables, start the worker, and load the solvers in the background."""
        await run_sync(partial(self.database.create, wait_s=self.settings.database_wait_s))
        self.notifier.bind()
        await run_sync(self.relay.start)
        await run_sync(self.forkserver.start)
        self.worker.start()
        self._watches = [
            asyncio.create_task(_kept_up(one.watch)) for one in (self.listening, self.agents, self.recovery)
        ]
        if self.settings.warm_up:
            judging.warm_up(lambda: self.ending)

    async def close(self) -> None:
        """Wake all waiters, hand running jobs back to the queue, and end every child."""
        self.ending = True
        self.notifier.close()
        for watch in self._watches:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch
        await run_sync(self.worker.stop)
        await run_sync(self.forkserver.stop)
        await run_sync(self.relay.stop)
        self.database.close()

    def _on_change(self, topic: str | None) -> None:
        """Wake the listeners of a change that any process has committed; None: anything may have changed."""
        if topic is None:
            self.notifier.publish_all()
        else:
            self.notifier.publish(topic)
        self.worker.on_change(topic)


async def _kept_up(watch: Callable[[], Awaitable[None]]) -> None:
    """Run a watch, and start it again when the database is back."""
    while True:
        try:
            await watch()
        except DatabaseAway as away:
            log.debug("what is watched is looked at again in %g s: %s", WATCH_AGAIN_S, away.detail)
            await asyncio.sleep(WATCH_AGAIN_S)
