"""Removal of ended and unreferenced rows: jobs with their events, answers, sweeps, and documents.

Documents are removed by references: jobs, runs and sweeps name plans and requests, requests name profiles and
topologies. Storing a document again renews its age (``used_ms``), so what a current request needs stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass

import sqlalchemy as sa

from penstock.schemas.errors import UnsupportedRequest
from penstock.service.db.database import Database
from penstock.service.db.document_store import TOPOLOGIES_KEPT, stored_before
from penstock.service.db.tables import (
    ACTIVE,
    answers,
    documents,
    idempotency,
    jobs,
    now_ms,
    run_generations,
    runs,
    sweeps,
)
from penstock.service.settings import SHORTEST_DAYS

DAY_MS = 86_400_000
AT_A_TIME = 500
"""Rows of a transaction, so that others can write in between."""

HASH = re.compile(rb"sha256:[0-9a-f]{64}")

Key = tuple[str, str]
"""A tenant, and a hash of it."""


@dataclass(frozen=True)
class Pruned:
    """The number of rows removed, by kind."""

    jobs: int
    answers: int
    sweeps: int
    idempotency: int
    documents: int

    def __bool__(self) -> bool:
        return any(asdict(self).values())


def prune(database: Database, keep_days: float) -> Pruned:
    """Remove rows that ended more than ``keep_days`` days ago. Raises UnsupportedRequest for less than two days."""
    if keep_days < SHORTEST_DAYS:
        raise UnsupportedRequest(
            f"entries that are {keep_days:g} days old may still be in use; keep at least {SHORTEST_DAYS} days"
        )
    before = now_ms() - int(keep_days * DAY_MS)
    over = sweeps.c.state != "running"
    alone = answers.c.job_id.not_in(sa.select(jobs.c.id))
    return Pruned(
        sweeps=_delete(database, sweeps, over, sweeps.c.finished_ms < before),
        jobs=_delete(database, jobs, *_jobs_over(before)),
        answers=_delete(database, answers, answers.c.created_ms < before, alone),
        idempotency=_delete(database, idempotency, idempotency.c.created_ms < before),
        documents=sum(_documents(database, before)),
    )


def _jobs_over(before: sa.ColumnElement[int]) -> tuple[sa.ColumnElement[bool], ...]:
    of_a_sweep = sa.and_(jobs.c.parent_id.is_not(None), jobs.c.parent_id.in_(sa.select(sweeps.c.id)))
    return jobs.c.state.not_in(ACTIVE), jobs.c.finished_ms < before, sa.not_(of_a_sweep)


def _delete(database: Database, table: sa.Table, *conditions: sa.ColumnElement[bool]) -> int:
    key = sa.tuple_(*table.primary_key)
    gone = 0
    while True:
        with database.write() as connection:
            chosen = connection.execute(sa.select(*table.primary_key).where(*conditions).limit(AT_A_TIME)).all()
            if chosen:
                connection.execute(table.delete().where(key.in_([tuple(row) for row in chosen])))
        gone += len(chosen)
        if len(chosen) < AT_A_TIME:
            return gone


def _documents(database: Database, before: sa.ColumnElement[int]) -> Iterator[int]:
    """Delete plans and requests, then the profiles and topologies that only they named; yield the numbers of each."""
    with database.read() as connection:
        named = _named_by_rows(connection)
        old = _old(connection, before, ("plan", "plan request"))
    yield _forget(database, old - named, before)
    with database.read() as connection:
        old = _old(connection, before, ("profile", "topology"))
        needed = _named_by_requests(connection) | _newest_topologies(connection) if old else set()
    yield _forget(database, old - needed, before)


def _old(connection: sa.Connection, before: sa.ColumnElement[int], kinds: Collection[str]) -> set[Key]:
    query = sa.select(documents.c.tenant, documents.c.hash).where(documents.c.kind.in_(kinds), stored_before(before))
    return {(tenant, address) for tenant, address in connection.execute(query)}


def _named_by_rows(connection: sa.Connection) -> set[Key]:
    """Select the plans and requests that jobs, runs and sweeps name, and those plans' requests."""
    named = {key for column in (jobs.c.plan_hash, jobs.c.request_hash) for key in _column(connection, jobs, column)}
    named |= set(_column(connection, sweeps, sweeps.c.request_hash))
    generations = sa.select(runs.c.tenant, run_generations.c.plan_hash).join(
        runs, runs.c.id == run_generations.c.run_id
    )
    plans = {(tenant, address) for tenant, address in connection.execute(generations)}
    plans |= set(_column(connection, runs, runs.c.plan_hash))
    for tenant, body in connection.execute(sa.select(sweeps.c.tenant, sweeps.c.body)):
        plans |= {(tenant, address.decode()) for address in HASH.findall(body)}
    for tenant, address in plans:
        here = sa.and_(documents.c.tenant == tenant, documents.c.hash == address, documents.c.kind == "plan")
        body = connection.scalar(sa.select(documents.c.body).where(here))
        if body is not None:
            named.add((tenant, json.loads(body)["request_hash"]))
    return named | plans


def _column(connection: sa.Connection, table: sa.Table, column: sa.ColumnElement[str]) -> Iterator[Key]:
    query = sa.select(table.c.tenant, column).where(column.is_not(None)).distinct()
    return ((tenant, address) for tenant, address in connection.execute(query))


def _named_by_requests(connection: sa.Connection) -> set[Key]:
    query = sa.select(documents.c.tenant, documents.c.body).where(documents.c.kind == "plan request")
    named: set[Key] = set()
    for tenant, body in connection.execute(query.execution_options(yield_per=AT_A_TIME)):
        request = json.loads(body)
        named |= {(tenant, request["profile"]), (tenant, request["topology"])}
    return named


def _newest_topologies(connection: sa.Connection) -> set[Key]:
    """Select the topologies that may hold the links of living agents."""
    place = sa.func.row_number().over(partition_by=documents.c.tenant, order_by=documents.c.created_ms.desc())
    newest = sa.select(documents.c.tenant, documents.c.hash, place.label("place"))
    ranked = newest.where(documents.c.kind == "topology").subquery()
    query = sa.select(ranked.c.tenant, ranked.c.hash).where(ranked.c.place <= TOPOLOGIES_KEPT)
    return {(tenant, address) for tenant, address in connection.execute(query)}


def _forget(database: Database, keys: set[Key], before: sa.ColumnElement[int]) -> int:
    gone = 0
    ordered = sorted(keys)
    for start in range(0, len(ordered), AT_A_TIME):
        chosen = sa.tuple_(documents.c.tenant, documents.c.hash).in_(ordered[start : start + AT_A_TIME])
        with database.write() as connection:
            gone += connection.execute(documents.delete().where(chosen, stored_before(before))).rowcount
    return gone
