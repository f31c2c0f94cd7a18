"""Runs as rows: how they are written, and how they are read as the documents that are sent."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import sqlalchemy as sa

from penstock.schemas.api.agents import Assignment, RankPrograms, digest_of
from penstock.schemas.api.jobs import EvaluationOut, GenerationOut, ProblemDetails, RunEvent, RunOut
from penstock.schemas.errors import NotFound
from penstock.schemas.quantities import Loss, spell
from penstock.schemas.trace import Hardware, RankTrace, alike, first_difference, summed
from penstock.service.db.tables import (
    agents,
    iso,
    now_ms,
    run_agents,
    run_events,
    run_generations,
    run_ranks,
    run_steps,
    run_traces,
    runs,
)
from penstock.service.runs.placement import Place

Row = Mapping[str, Any] | sa.RowMapping

LIVE = ("preparing", "running", "recovering")
"""States of runs that hold their devices, or will again."""
MOST_EVENTS = 1000
"""Events of a run in one answer."""

WISHES = {"prepare": "prepare", "prepared": "prepare", "start": "start", "save": "stop", "stop": "stop"}
"""State that an agent is asked for in each phase of its part of a generation. After ``released`` it holds nothing."""


def topic_of(tenant: str, agent_id: str) -> str:
    """Return the topic of an agent's assignments; no tenant's name has a slash."""
    return f"agent:{tenant}/{agent_id}"


def row_of(connection: sa.Connection, run_id: str, tenant: str | None = None) -> Any:
    """Return the row of a run; for ``tenant`` another tenant's run does not exist. Raises NotFound."""
    row = connection.execute(sa.select(runs).where(runs.c.id == run_id)).mappings().first()
    if row is None or tenant not in (None, row["tenant"]):
        raise NotFound(f"there is no run {run_id!r}", remedy="GET /v1/runs lists the runs")
    return row


def touch(connection: sa.Connection, run_id: str, only: str | None = None) -> None:
    """Increase the version of the run's assignments, which the database announces to its agents."""
    query = sa.select(run_agents.c.agent).where(run_agents.c.run_id == run_id)
    names = [only] if only is not None else list(connection.scalars(query))
    tenant = row_of(connection, run_id)["tenant"]
    theirs = sa.and_(agents.c.tenant == tenant, agents.c.id.in_(names))
    connection.execute(agents.update().where(theirs).values(state_version=agents.c.state_version + 1))


def record_event(connection: sa.Connection, run_id: str, kind: str, **data: Any) -> None:
    """Add an event to the run's history."""
    last = connection.scalar(sa.select(sa.func.max(run_events.c.sequence)).where(run_events.c.run_id == run_id))
    connection.execute(
        run_events.insert().values(run_id=run_id, sequence=(last or 0) + 1, kind=kind, at_ms=now_ms(), data=data)
    )


def events_after(connection: sa.Connection, run_id: str, after: int) -> list[RunEvent]:
    """Return the run's events after event ``after``, at most ``MOST_EVENTS``."""
    query = (
        sa.select(run_events)
        .where(run_events.c.run_id == run_id, run_events.c.sequence > after)
        .order_by(run_events.c.sequence)
        .limit(MOST_EVENTS)
    )
    return [
        RunEvent(sequence=row["sequence"], kind=row["kind"], at=iso(row["at_ms"]), data=row["data"])
        for row in connection.execute(query).mappings()
    ]


def busy_places(connection: sa.Connection, tenant: str, but: str = "") -> dict[Place, str]:
    """Return the run that each device of a tenant belongs to now; devices of run ``but`` count as free."""
    query = (
        sa.select(run_ranks.c.agent, run_ranks.c.device, runs.c.id)
        .join(runs, runs.c.id == run_ranks.c.run_id)
        .where(runs.c.tenant == tenant, runs.c.state.in_(LIVE), runs.c.id != but)
    )
    return {Place(agent, device): run_id for agent, device, run_id in connection.execute(query)}


def store_steps(
    connection: sa.Connection,
    run_id: str,
    rank: int,
    first: int,
    losses: Sequence[Loss | None],
    times_ns: Sequence[int | None],
) -> None:
    """Store a rank's report of its steps from ``first`` on; a step that was trained again replaces the earlier one."""
    rows = [
        {"run_id": run_id, "rank": rank, "step": step, "loss": loss, "time_ns": time_ns}
        for step, (loss, time_ns) in enumerate(zip_longest(losses, times_ns), first)
    ]
    if rows:
        here = sa.and_(run_steps.c.run_id == run_id, run_steps.c.rank == rank)
        old = run_steps.c.step.between(first, first + len(rows) - 1)
        connection.execute(run_steps.delete().where(here, old))
        connection.execute(run_steps.insert(), rows)


def store_trace(connection: sa.Connection, run_id: str, trace: RankTrace) -> None:
    """Keep a rank's trace of a step, once."""
    here = (run_traces.c.run_id == run_id, run_traces.c.rank == trace.rank, run_traces.c.step == trace.step)
    if connection.execute(sa.select(run_traces.c.rank).where(*here)).first() is None:
        body = trace.model_dump_json().encode()
        connection.execute(run_traces.insert().values(run_id=run_id, rank=trace.rank, step=trace.step, body=body))


def assignment(connection: sa.Connection, agent_id: str, row: Row) -> Assignment:
    """Return an agent's assignment in a run. ``row``: the run's, with the agent's phase and the host of the store."""
    mine = sa.and_(run_ranks.c.run_id == row["id"], run_ranks.c.agent == agent_id)
    query = sa.select(run_ranks.c.rank, run_ranks.c.device, run_ranks.c.programs).where(mine).order_by(run_ranks.c.rank)
    phase = WISHES[row["phase"]]
    ranks = [
        RankPrograms(rank=rank, device=device, programs=json.loads(programs))
        for rank, device, programs in (connection.execute(query) if phase != "stop" else ())
    ]
    options = dict(row["options"])
    if row["generation"] > 1:
        options["resume"] = "auto"
    return Assignment(
        run=row["id"],
        generation=row["generation"],
        phase=phase,  # type: ignore[arg-type]
        plan_hash=row["plan_hash"],
        digest=digest_of(program for one in ranks for program in one.programs),
        model=row["model"],
        world_size=row["world_size"],
        steps=row["steps"],
        seed=row["seed"],
        check=row["gradient_check_wanted"] and row["generation"] == 1,
        trace_steps=row["trace_steps"],
        options=options,  # type: ignore[arg-type]
        segments=tuple(row["segments"]),
        save=row["phase"] == "save",
        hosts_store=row["hosts_store"],
        store_address=row["store_address"],
        ranks=tuple(ranks),
        layers=row["layers"],
        boundaries=row["boundaries"],
    )


def run_out(connection: sa.Connection, row: Row) -> RunOut:
    """Return a run in the form in which it is sent."""
    run_id = row["id"]
    losses, times = _steps(connection, run_id)
    ranks = _ranks(connection, run_id)
    step_times = tuple(times[step] for step in sorted(times))
    measured = step_times[1:] or step_times
    names = connection.scalars(
        sa.select(run_agents.c.agent).where(run_agents.c.run_id == run_id).order_by(run_agents.c.agent)
    )
    return RunOut(
        id=run_id,
        state=row["state"],
        plan_hash=row["plan_hash"],
        model=row["model"],
        generation=row["generation"],
        created_at=iso(row["created_ms"]),
        finished_at=None if row["finished_ms"] is None else iso(row["finished_ms"]),
        steps=row["steps"],
        steps_done=max((step + 1 for step in (*losses, *times)), default=0),
        losses=tuple(losses.get(step) for step in range(max(losses, default=-1) + 1)),
        step_times_ns=step_times,
        predicted_time_per_global_batch_ns=row["predicted_ns"],
        measured_time_per_global_batch_ns=int(statistics.median(measured)) if measured else None,
        gradient_check=row["gradient_check"],
        error=None if row["error"] is None else ProblemDetails.model_validate_json(json.dumps(row["error"])),
        agents=tuple(names),
        checkpoint_step=row["checkpoint_step"],
        evaluations=_evaluations(connection, run_id),
        restarts=row["restarts"],
        max_restarts=row["max_restarts"],
        generations=tuple(map(_generation, _generations(connection, run_id))),
        collectives=summed(rank.collectives for rank in ranks),
        collectives_differ=first_difference(rank.collectives_differ for rank in ranks),
        hardware=alike(Hardware.model_validate(rank.hardware) for rank in ranks if rank.hardware is not None),
    )


def _ranks(connection: sa.Connection, run_id: str) -> Sequence[sa.Row[Any, Any, Any]]:
    """Return what the ranks of a run reported at their ends, in their order."""
    columns = (run_ranks.c.collectives, run_ranks.c.collectives_differ, run_ranks.c.hardware)
    return connection.execute(sa.select(*columns).where(run_ranks.c.run_id == run_id).order_by(run_ranks.c.rank)).all()


def _steps(connection: sa.Connection, run_id: str) -> tuple[dict[int, Loss], dict[int, int]]:
    """Return the loss of each step by the lowest rank that has it, and the time of its slowest rank."""
    query = sa.select(run_steps.c.step, run_steps.c.loss, run_steps.c.time_ns).where(run_steps.c.run_id == run_id)
    losses: dict[int, Loss] = {}
    times: dict[int, int] = {}
    for step, loss, time_ns in connection.execute(query.order_by(run_steps.c.step, run_steps.c.rank)):
        if loss is not None:
            losses.setdefault(step, spell(loss) if isinstance(loss, float) else loss)
        if time_ns is not None:
            times[step] = max(times.get(step, 0), time_ns)
    return losses, times


def _generations(connection: sa.Connection, run_id: str) -> Iterable[Row]:
    query = sa.select(run_generations).where(run_generations.c.run_id == run_id).order_by(run_generations.c.generation)
    return connection.execute(query).mappings().all()


def _generation(row: Row) -> GenerationOut:
    return GenerationOut(
        generation=row["generation"],
        plan_hash=row["plan_hash"],
        agents=row["agents"],
        began_at=iso(row["began_ms"]),
        ended_at=None if row["ended_ms"] is None else iso(row["ended_ms"]),
        why=row["why"],
    )


def _evaluations(connection: sa.Connection, run_id: str) -> tuple[EvaluationOut, ...]:
    query = sa.select(run_events.c.data).where(run_events.c.run_id == run_id, run_events.c.kind == "evaluation")
    newest = {data["step"]: data for data in connection.scalars(query.order_by(run_events.c.sequence))}
    return tuple(EvaluationOut(step=step, loss=newest[step]["loss"]) for step in sorted(newest))
