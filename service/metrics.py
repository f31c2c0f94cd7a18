"""Metrics for Prometheus: counters of this process, and the state of the whole database as read at each scrape.

Code counts its events here (``metrics.cache_answers.labels("hit").inc()``). ``REGISTRY`` holds what this
process has counted since its start; ``exposition`` adds what the database knows of all processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.service.db.tables import ACTIVE, agents, is_alive, jobs, now_ms, runs, workers

if TYPE_CHECKING:
    from penstock.service.db.database import Database

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

JOB_STATES = ("queued", "running", "succeeded", "failed", "cancelled")
RUN_STATES = ("preparing", "running", "recovering", "succeeded", "failed", "cancelled")

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
_GAPS = (0.0, 0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)

REGISTRY = CollectorRegistry()

http_seconds = Histogram(
    "penstock_http_request_seconds",
    "Time to answer requests, by route; waits that were asked for (Prefer, events, syncs) count as well",
    ("method", "route", "status"),
    buckets=_SECONDS,
    registry=REGISTRY,
)
http_active = Gauge("penstock_http_requests_active", "Requests that are being answered or wait", registry=REGISTRY)
waiters = Gauge("penstock_waiters", "Listeners of this process that wait for news", registry=REGISTRY)
cache_answers = Counter(
    "penstock_cache_requests", "Plan requests, by whether the answer was known", ("result",), registry=REGISTRY
)
wait_seconds = Histogram(
    "penstock_job_wait_seconds", "From a job's request to its first start", buckets=_SECONDS, registry=REGISTRY
)
solve_seconds = Histogram(
    "penstock_solve_seconds", "Time of solves", ("planner", "outcome"), buckets=_SECONDS, registry=REGISTRY
)
gap = Histogram(
    "penstock_plan_gap",
    "How far above the bound plans are: 0.1 is 10 %",
    ("planner",),
    buckets=_GAPS,
    registry=REGISTRY,
)
leases_lost = Counter(
    "penstock_leases_lost", "Jobs taken back because their worker or its process was silent", registry=REGISTRY
)
retries = Counter("penstock_job_retries", "Jobs put back into the queue to be tried again", registry=REGISTRY)
database_errors = Counter("penstock_database_errors", "Transactions that the database did not do", registry=REGISTRY)


Row = sa.Select[str, str, int]
"""A part of the scrape's query: what is counted, in which state, how many."""


class DatabaseCollector(Collector):
    """Counts what all processes of one database are doing, by one query per scrape."""

    def __init__(self, database: Database, *, silent_after_s: float, agent_timeout_s: float) -> None:
        self._database = database
        self._silent_ms, self._agent_ms = int(silent_after_s * 1000), int(agent_timeout_s * 1000)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric families; raises DatabaseAway when the database does not answer."""
        with self._database.read() as connection:
            rows = connection.execute(self._query()).all()
        found = {(row.what, row.state): row.number for row in rows}
        yield _family("penstock_jobs", "Jobs in the database", "state", found, JOB_STATES)
        yield _family("penstock_runs", "Training runs in the database", "state", found, RUN_STATES)
        oldest_ms = found.get(("oldest", ""))
        yield GaugeMetricFamily(
            "penstock_queue_oldest_seconds", "Age of the job that waits longest", value=(oldest_ms or 0) / 1000
        )
        yield GaugeMetricFamily(
            "penstock_workers_alive", "Workers with a recent heartbeat", value=found.get(("workers", ""), 0)
        )
        yield GaugeMetricFamily(
            "penstock_worker_slots", "Solves that they can do at a time", value=found.get(("slots", ""), 0) or 0
        )
        yield GaugeMetricFamily(
            "penstock_agents_alive", "Agents with a recent sync", value=found.get(("agents", ""), 0)
        )

    def _query(self) -> sa.CompoundSelect[str, str, int]:
        alive = is_alive(self._silent_ms)
        fresh = agents.c.last_seen_ms > now_ms() - self._agent_ms

        def row(what: str, state: sa.ColumnElement[str], number: sa.ColumnElement[int]) -> Row:
            return sa.select(sa.literal(what).label("what"), state.label("state"), number.label("number"))

        nothing: sa.ColumnElement[str] = sa.literal("")
        return sa.union_all(
            row("penstock_jobs", jobs.c.state, sa.func.count()).group_by(jobs.c.state),
            row("penstock_runs", runs.c.state, sa.func.count()).group_by(runs.c.state),
            row("oldest", nothing, now_ms() - sa.func.min(jobs.c.created_ms)).where(jobs.c.state == ACTIVE[0]),
            row("workers", nothing, sa.func.count()).select_from(workers).where(alive),
            row("slots", nothing, sa.func.sum(workers.c.slots)).where(alive),
            row("agents", nothing, sa.func.count()).select_from(agents).where(fresh),
        )


def exposition(collector: DatabaseCollector | None) -> bytes:
    """Return all metrics in Prometheus' text format; without a collector only those of this process."""
    text: bytes = generate_latest(REGISTRY)
    if collector is None:
        return text
    of_database = CollectorRegistry(auto_describe=False)
    of_database.register(collector)
    return text + generate_latest(of_database)


def _family(
    name: str, what: str, label: str, found: dict[tuple[str, str], int], values: tuple[str, ...]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=(label,))
    for value in values:
        family.add_metric((value,), found.get((name, value), 0))
    return family
