"""The tables of sweeps: the outcome of each case, and which rows are not dominated by another.

Once all cases have ended the table is stored and no longer changes, whatever happens to the jobs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from penstock.planning.sweep import figures, with_front
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.api.sweep import SweepOut, SweepRow
from penstock.schemas.errors import NotFound
from penstock.service.db.database import Database
from penstock.service.db.tables import ACTIVE, iso, jobs, now_ms, sweeps

REMEMBERED = 4096
"""Results whose rows are kept."""

AT_A_TIME = 500
"""Jobs of a query."""


class SweepTables:
    """Read access to the sweeps of all tenants."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._cached_result = lru_cache(maxsize=REMEMBERED)(self._read_result)

    def sweep(self, tenant: str, sweep_id: str) -> SweepOut:
        """Return a sweep with its present table. Raises NotFound."""
        row = self._row(tenant, sweep_id)
        rows = self._table(row)
        out = _out(row, rows)
        if row["state"] == "running" and out.ended == out.cases:
            self._settle(sweep_id, rows)
            return self.sweep(tenant, sweep_id)
        return out

    def recent(self, tenant: str, before: str | None, limit: int) -> list[SweepOut]:
        """Return sweeps without their tables, the newest first, older than the sweep ``before``."""
        query = sa.select(sweeps.c.id).where(sweeps.c.tenant == tenant).order_by(sweeps.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(sweeps.c.id < before)
        with self._database.read() as connection:
            sweep_ids = connection.scalars(query).all()
        return [self.sweep(tenant, sweep_id).model_copy(update={"rows": ()}) for sweep_id in sweep_ids]

    def settle_open(self) -> None:
        """Store the tables of all sweeps whose cases have ended."""
        with self._database.read() as connection:
            query = sa.select(sweeps.c.tenant, sweeps.c.id).where(sweeps.c.state == "running")
            open_sweeps = connection.execute(query).all()
        for tenant, sweep_id in open_sweeps:
            self.sweep(tenant, sweep_id)

    def _row(self, tenant: str, sweep_id: str) -> Any:
        with self._database.read() as connection:
            query = sa.select(sweeps).where(sweeps.c.id == sweep_id, sweeps.c.tenant == tenant)
            row = connection.execute(query).mappings().first()
        if row is None:
            raise NotFound(f"there is no sweep {sweep_id!r}", remedy="GET /v1/sweeps lists the sweeps")
        return row

    def _table(self, row: Any) -> tuple[SweepRow, ...]:
        entries = json.loads(row["body"])
        cases = [SweepRow.model_validate(entry["row"]) for entry in entries]
        if row["state"] != "running":
            return tuple(cases)
        states = self._states([entry["job_id"] for entry in entries if entry["job_id"] is not None])
        rows = [self._now(one, states.get(one.job_id)) if one.job_id is not None else one for one in cases]
        return with_front(rows)

    def _states(self, job_ids: Sequence[str]) -> dict[str | None, Any]:
        columns = (jobs.c.id, jobs.c.state, jobs.c.attempt, jobs.c.error)
        rows: dict[str | None, Any] = {}
        with self._database.read() as connection:
            for start in range(0, len(job_ids), AT_A_TIME):
                query = sa.select(*columns).where(jobs.c.id.in_(job_ids[start : start + AT_A_TIME]))
                rows |= {row["id"]: row for row in connection.execute(query).mappings()}
        return rows

    def _now(self, row: SweepRow, job: Any) -> SweepRow:
        """Return a case's row with its job's present state."""
        if job is None:
            return row.model_copy(update={"state": "deleted", "why": "its job was deleted"})
        if job["state"] == "succeeded":
            return row.model_copy(update=self._cached_result(job["id"], job["attempt"]))
        if job["state"] == "failed":
            return row.model_copy(update={"state": "failed", "why": job["error"]["detail"]})
        return row.model_copy(update={"state": job["state"]})

    def _read_result(self, job_id: str, attempt: int) -> dict[str, Any]:
        """Return a result's part of the table. ``attempt`` is part of the key, since a job may be retried."""
        with self._database.read() as connection:
            body = connection.scalar(sa.select(jobs.c.result).where(jobs.c.id == job_id, jobs.c.attempt == attempt))
        return figures(ResultOut.model_validate_json(body or b""))

    def _settle(self, sweep_id: str, rows: Sequence[SweepRow]) -> None:
        state = "cancelled" if any(row.state == "cancelled" for row in rows) else "succeeded"
        body = json.dumps([{"row": row.model_dump(mode="json"), "job_id": row.job_id} for row in rows]).encode()
        open_ = sa.and_(sweeps.c.id == sweep_id, sweeps.c.state == "running")
        with self._database.write() as connection:
            connection.execute(sweeps.update().where(open_).values(state=state, finished_ms=now_ms(), body=body))


def _out(row: Any, rows: tuple[SweepRow, ...]) -> SweepOut:
    here = f"/v1/sweeps/{row['id']}"
    ways = {"cancel": f"{here}:cancel", "finish": f"{here}:finish"} if row["state"] == "running" else {}
    return SweepOut(
        id=row["id"],
        state=row["state"],
        request_hash=row["request_hash"],
        created_at=iso(row["created_ms"]),
        finished_at=None if row["finished_ms"] is None else iso(row["finished_ms"]),
        cases=len(rows),
        ended=sum(one.state not in ACTIVE for one in rows),
        rows=rows,
        links={"self": here, "jobs": f"/v1/jobs?parent={row['id']}", **ways},
    )
