"""Rows of ``jobs`` as documents, and what clients' and workers' sides share: ids and events."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import sqlalchemy as sa

from penstock.schemas.api.jobs import JobOut, ProblemDetails, ResultOut
from penstock.service.db.tables import ACTIVE, iso, job_events, jobs, now_ms

BRIEF = tuple(column for column in jobs.c if column.name not in ("incumbent", "result"))
"""The columns of a job without its documents, which may be large."""

NO_RESULT = b'"result":null'
"""JSON of the missing result in a job; within a text its quotation marks would be escaped."""

IS_ACTIVE = jobs.c.state.in_(sa.bindparam("active", ACTIVE, expanding=True, literal_execute=True))
"""Condition for active jobs, with its values written out, so that both engines use the index of active jobs."""


def new_id() -> str:
    """Return a text id that sorts by the time it was made, also within a millisecond.

    It is a UUID of version 7 with a finer clock: RFC 9562, section 6.2, method 3.
    """
    milliseconds, rest_ns = divmod(time.time_ns(), 1_000_000)
    fraction = (rest_ns << 12) // 1_000_000
    value = milliseconds << 80 | 0x7 << 76 | fraction << 64 | 0x2 << 62 | secrets.randbits(62)
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def record_event(connection: sa.Connection, job_id: str, kind: str, data: dict[str, Any]) -> None:
    """Add an event to a job. The transaction has changed the job's row, so no other adds one meanwhile."""
    last = sa.select(sa.func.max(job_events.c.sequence)).where(job_events.c.job_id == job_id).scalar_subquery()
    sequence = sa.func.coalesce(last, 0) + 1
    connection.execute(
        job_events.insert().values(job_id=job_id, sequence=sequence, kind=kind, at_ms=now_ms(), data=data)
    )


FIRST_EVENT = job_events.insert().values(sequence=1, at_ms=now_ms())
"""First event of a new job."""


def job_out(row: Any) -> JobOut:
    """Return a row as the document to send, with its result if the row has that column."""
    job_id, result = row["id"], row.get("result")
    return JobOut(
        id=job_id,
        state=row["state"],
        request_hash=row["request_hash"],
        planner=row["planner"],
        tag=row["tag"],
        priority=row["priority"],
        parent_id=row["parent_id"],
        created_at=iso(row["created_ms"]),
        started_at=None if row["started_ms"] is None else iso(row["started_ms"]),
        finished_at=None if row["finished_ms"] is None else iso(row["finished_ms"]),
        attempt=row["attempt"],
        result=None if result is None else ResultOut.model_validate_json(result),
        incumbent_ns=row["incumbent_ns"],
        bound_ns=row["bound_ns"],
        error=None if row["error"] is None else ProblemDetails.model_validate_json(json.dumps(row["error"])),
        links=_links(row),
    )


def job_body(row: Any) -> bytes:
    """Return a row with its result as the JSON to send, the same as ``job_out`` gives.

    The result is taken over as the worker has written it: to read a large plan and write it again takes far longer.
    """
    body = job_out({**row, "result": None}).model_dump_json().encode()
    return body if row["result"] is None else body.replace(NO_RESULT, b'"result":' + row["result"], 1)


def _links(row: Any) -> dict[str, str]:
    here = f"/v1/jobs/{row['id']}"
    links = {"self": here, "events": f"{here}/events"}
    if row["plan_hash"] is not None:
        plan = f"/v1/plans/{row['plan_hash']}"
        links |= {"plan": plan, "plan_file": f"{plan}/plan-file", "programs": f"{plan}/programs"}
    elif row["state"] in ACTIVE:
        links |= {"cancel": f"{here}:cancel", "finish": f"{here}:finish"}
    if row["state"] in ("failed", "cancelled"):
        links["retry"] = f"{here}:retry"
    if row["incumbent_ns"] is not None:
        links["incumbent"] = f"{here}/incumbent"
    if row["parent_id"] is not None:
        links["sweep"] = f"/v1/sweeps/{row['parent_id']}"
    return links
