"""Gauges of the whole database, read at each scrape, and the text of all metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from penstock.service.db.database import Database
from penstock.service.db.tables import ACTIVE, agents, is_alive, jobs, now_ms, runs, workers
from penstock.service.metrics import REGISTRY

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

JOB_STATES = ("queued", "running", "succeeded", "failed", "cancelled")
RUN_STATES = ("preparing", "running", "recovering", "succeeded", "failed", "cancelled")

Row = sa.Select[str, str, int]
"""A part of the scrape's query: what is counted, in which state, how many."""


class DatabaseCollector(Collector):
    """A collector of counts over all processes of one database, with one query per scrape."""

    def __init__(self, database: Database, *, silent_after_s: float, agent_timeout_s: float) -> None:
        self._database = database
        self._silent_ms, self._agent_ms = int(silent_after_s * 1000), int(agent_timeout_s * 1000)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric families; raises DatabaseAway when the database does not answer."""
        with self._database.read() as connection:
            rows = connection.execute(self._query()).all()
        numbers = {(row.what, row.state): row.number for row in rows}
        yield _family("penstock_jobs", "Jobs in the database", "state", numbers, JOB_STATES)
        yield _family("penstock_runs", "Training runs in the database", "state", numbers, RUN_STATES)
        oldest_ms = numbers.get(("oldest", ""))
        yield GaugeMetricFamily(
            "penstock_queue_oldest_seconds", "Age of the job that waits longest", value=(oldest_ms or 0) / 1000
        )
        yield GaugeMetricFamily(
            "penstock_workers_alive", "Workers with a recent heartbeat", value=numbers.get(("workers", ""), 0)
        )
        yield GaugeMetricFamily(
            "penstock_worker_slots", "Solves that they can do at a time", value=numbers.get(("slots", ""), 0) or 0
        )
        yield GaugeMetricFamily(
            "penstock_agents_alive", "Agents with a recent sync", value=numbers.get(("agents", ""), 0)
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
    """Return all metrics in Prometheus' text format; without a collector only the metrics of this process."""
    text: bytes = generate_latest(REGISTRY)
    if collector is None:
        return text
    of_database = CollectorRegistry(auto_describe=False)
    of_database.register(collector)
    return text + generate_latest(of_database)


def _family(
    name: str, what: str, label: str, numbers: dict[tuple[str, str], int], values: tuple[str, ...]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=(label,))
    for value in values:
        family.add_metric((value,), numbers.get((name, value), 0))
    return family
