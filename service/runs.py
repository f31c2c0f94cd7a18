"""Plans on agents: PREPARE → everybody ready → START(generation, store address) → done, all of it in the database.

A run's state moves only in transactions that also move the version of each agent concerned, so that an agent either
sees a change or does not have to.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import rfc8785
import sqlalchemy as sa
from pydantic import ValidationError

from penstock.schemas.agents import (
    EVENT_DATA,
    AgentEvent,
    AgentOut,
    Assignment,
    EventData,
    Progress,
    RankAssignment,
    RankDone,
    RankFailed,
    Refused,
    StoreReady,
    SyncReply,
    Traced,
)
from penstock.schemas.document import faults_of
from penstock.schemas.errors import Conflict, Fault, InvalidDocument, NotFound, RunFailed
from penstock.schemas.jobs import ProblemDetails, RunOut, RunRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.trace import RankTrace, Trace
from penstock.service.database import Database, agents, iso, now_ms, run_agents, run_ranks, run_steps, run_traces, runs
from penstock.service.jobs import new_id
from penstock.service.placement import Place, place

Row = Mapping[str, Any] | sa.RowMapping

LIVE = ("preparing", "running")
_PHASES = {"prepare": "prepare", "prepared": "prepare", "start": "start", "stop": "stop"}


@dataclass(frozen=True)
class Lowered:
    """A judged plan and its programs: ``devices[r]`` is the plan's name for rank r's device."""

    file: PlanFile
    plan_hash: str
    devices: tuple[str, ...]
    programs: tuple[Mapping[str, Any], ...]


class Runs:
    """Runs in the database. ``publish`` is told the topic of every change."""

    def __init__(self, database: Database, publish: Callable[[str], None]) -> None:
        self._database, self._publish = database, publish

    # ---- for those who ask ---------------------------------------------------------------------------------------

    def create(self, request: RunRequest, lowered: Lowered, present: Sequence[AgentOut]) -> RunOut:
        """Begin a run. Raises Conflict when devices or the model are not there."""
        plan = lowered.file.plan
        assert plan.prediction is not None
        run_id = new_id()
        with self._database.write() as connection:
            places = place(lowered.devices, present, request.model, _busy(connection))
            connection.execute(
                runs.insert().values(
                    id=run_id,
                    state="preparing",
                    plan_hash=lowered.plan_hash,
                    model=request.model,
                    generation=1,
                    world_size=len(places),
                    steps=request.steps,
                    seed=request.seed,
                    gradient_check_wanted=request.check,
                    trace_steps=request.trace_steps,
                    layers=[layer.name for layer in lowered.file.request.profile.layers],  # type: ignore[union-attr]
                    predicted_ns=plan.prediction.time_per_global_batch_ns,
                    created_ms=now_ms(),
                )
            )
            _assign(connection, run_id, places, lowered.programs, {agent.id: agent.incarnation for agent in present})
            changed = _touch(connection, run_id)
        self._tell(changed)
        return self.run(run_id)

    def run(self, run_id: str) -> RunOut:
        """A run as it stands. Raises NotFound."""
        with self._database.read() as connection:
            return _run_out(connection, _row(connection, run_id))

    def recent(self, before: str | None, limit: int) -> list[RunOut]:
        """Runs, the newest first, older than the run ``before``."""
        query = sa.select(runs).order_by(runs.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(runs.c.id < before)
        with self._database.read() as connection:
            return [_run_out(connection, row) for row in connection.execute(query).mappings().all()]

    def trace(self, run_id: str) -> Trace:
        """The steps that were traced, as far as they have arrived. Raises NotFound while there is none."""
        with self._database.read() as connection:
            row = _row(connection, run_id)
            out = _run_out(connection, row)
            bodies = connection.scalars(
                sa.select(run_traces.c.body)
                .where(run_traces.c.run_id == run_id)
                .order_by(run_traces.c.step, run_traces.c.rank)
            ).all()
        if not bodies:
            raise NotFound(f"run {run_id!r} has no trace" + (" yet" if row["state"] in LIVE else ""))
        return Trace(
            plan_hash=out.plan_hash,
            predicted_time_per_global_batch_ns=out.predicted_time_per_global_batch_ns,
            measured_times_per_global_batch_ns=out.step_times_ns[1:] or out.step_times_ns,
            losses=out.losses,
            ranks=tuple(RankTrace.model_validate_json(body) for body in bodies),
        )

    def cancel(self, run_id: str) -> RunOut:
        """Stop a run. Raises NotFound, and Conflict when it has ended in another way."""
        changed: set[str] = set()
        with self._database.write() as connection:
            state = _row(connection, run_id)["state"]
            if state in LIVE:
                changed = _end(connection, run_id, "cancelled")
            elif state != "cancelled":
                raise Conflict(f"run {run_id!r} has {state} already; it cannot be cancelled any more")
        self._tell(changed)
        return self.run(run_id)

    # ---- for agents ----------------------------------------------------------------------------------------------

    def reply(self, connection: sa.Connection, agent_id: str) -> SyncReply:
        """Everything that an agent shall have."""
        agent = connection.execute(sa.select(agents).where(agents.c.id == agent_id)).mappings().one()
        query = (
            sa.select(runs, run_agents.c.phase, run_agents.c.hosts_store)
            .join(run_agents, run_agents.c.run_id == runs.c.id)
            .where(
                run_agents.c.agent == agent_id,
                run_agents.c.incarnation == agent["incarnation"],
                run_agents.c.phase.in_(_PHASES),
            )
            .order_by(runs.c.id)
        )
        rows = connection.execute(query).mappings().all()
        return SyncReply(
            state_version=agent["state_version"],
            assignments=tuple(_assignment(connection, agent_id, row) for row in rows),
            ack=agent["ack"],
        )

    def take(self, connection: sa.Connection, agent_id: str, event: AgentEvent) -> set[str]:
        """Store an event; what follows from it happens in the same transaction. Returns the topics that changed."""
        run = connection.execute(sa.select(runs).where(runs.c.id == event.run)).mappings().first()
        mine = sa.and_(run_agents.c.run_id == event.run, run_agents.c.agent == agent_id)
        phase = connection.scalar(sa.select(run_agents.c.phase).where(mine))
        if run is None or phase is None or event.generation != run["generation"]:
            return set()
        changed = {f"run:{event.run}"}
        match event.kind, _data(event):
            case "stopped", _ if phase == "stop":
                connection.execute(run_agents.update().where(mine).values(phase="released"))
                return changed | _touch(connection, event.run, only=agent_id)
            case _, Traced(rank_trace=trace):
                _store_trace(connection, event.run, trace)
            case _ if run["state"] not in LIVE:
                return set()
            case "prepared", _:
                waiting = sa.and_(mine, run_agents.c.phase == "prepare")
                connection.execute(run_agents.update().where(waiting).values(phase="prepared"))
                return changed | _start_if_ready(connection, event.run)
            case _, StoreReady(address=address):
                connection.execute(runs.update().where(runs.c.id == event.run).values(store_address=address))
                return changed | _start_if_ready(connection, event.run)
            case _, Progress(rank=rank, step=step, loss=loss, time_ns=time_ns):
                _store_step(connection, event.run, rank, step, loss, time_ns)
            case _, RankDone() as done:
                return changed | _rank_done(connection, run, done)
            case _, Refused(reason=reason):
                refused = RunFailed(f"agent {agent_id!r} refused the run: {reason}")
                return changed | _end(connection, event.run, "failed", refused)
            case _, RankFailed() as failed:
                return changed | _end(connection, event.run, "failed", _rank_failed(agent_id, failed))
            case "stopped", _:
                gone = f"agent {agent_id!r} stopped its ranks although nobody had asked it to"
                return changed | _end(connection, event.run, "failed", RunFailed(gone))
        return changed

    def agent_lost(self, agent_id: str, how: str) -> None:
        """Fail what an agent was doing: it is gone."""
        with self._database.write() as connection:
            changed = self.lose_agent(connection, agent_id, how)
        self._tell(changed)

    def lose_agent(self, connection: sa.Connection, agent_id: str, how: str, *, replaced: bool = False) -> set[str]:
        """Fail the runs of an agent's incarnation; when it was replaced, nobody will say that they stopped."""
        mine = sa.and_(run_agents.c.agent == agent_id, run_agents.c.phase != "released")
        changed: set[str] = set()
        for run_id in connection.scalars(sa.select(run_agents.c.run_id).where(mine)).all():
            if _row(connection, run_id)["state"] in LIVE:
                error = RunFailed(
                    f"agent {agent_id!r} {how} while it held ranks of this run",
                    remedy=f"look at the log of `penstock agent` on {agent_id!r}, then start the run again",
                )
                changed |= _end(connection, run_id, "failed", error)
            if replaced:
                this = sa.and_(mine, run_agents.c.run_id == run_id)
                connection.execute(run_agents.update().where(this).values(phase="released"))
        return changed

    def _tell(self, topics: set[str]) -> None:
        for topic in topics:
            self._publish(topic)


def _row(connection: sa.Connection, run_id: str) -> Any:
    row = connection.execute(sa.select(runs).where(runs.c.id == run_id)).mappings().first()
    if row is None:
        raise NotFound(f"no run {run_id!r} here", remedy="GET /v1/runs lists the runs")
    return row


def _assign(
    connection: sa.Connection,
    run_id: str,
    places: Sequence[Place],
    programs: Sequence[Mapping[str, Any]],
    incarnations: Mapping[str, str],
) -> None:
    """Give each rank to its agent; the agent of rank 0 hosts the store."""
    for agent in sorted({spot.agent for spot in places}):
        connection.execute(
            run_agents.insert().values(
                run_id=run_id,
                agent=agent,
                incarnation=incarnations[agent],
                phase="prepare",
                hosts_store=agent == places[0].agent,
            )
        )
    for rank, spot in enumerate(places):
        program = json.dumps(programs[rank]).encode()
        connection.execute(
            run_ranks.insert().values(
                run_id=run_id, rank=rank, agent=spot.agent, device=spot.device, program=program, done=False
            )
        )


def _busy(connection: sa.Connection) -> dict[Place, str]:
    query = (
        sa.select(run_ranks.c.agent, run_ranks.c.device, runs.c.id)
        .join(runs, runs.c.id == run_ranks.c.run_id)
        .where(runs.c.state.in_(LIVE))
    )
    return {Place(agent, device): run_id for agent, device, run_id in connection.execute(query)}


def _touch(connection: sa.Connection, run_id: str, only: str | None = None) -> set[str]:
    """Move the version of the run's agents; the topics to publish."""
    query = sa.select(run_agents.c.agent).where(run_agents.c.run_id == run_id)
    names = [only] if only is not None else list(connection.scalars(query))
    connection.execute(agents.update().where(agents.c.id.in_(names)).values(state_version=agents.c.state_version + 1))
    return {f"agent:{name}" for name in names} | {f"run:{run_id}"}


def _start_if_ready(connection: sa.Connection, run_id: str) -> set[str]:
    run = _row(connection, run_id)
    mine = run_agents.c.run_id == run_id
    phases = set(connection.scalars(sa.select(run_agents.c.phase).where(mine)))
    if run["state"] != "preparing" or run["store_address"] is None or phases != {"prepared"}:
        return set()
    connection.execute(run_agents.update().where(mine).values(phase="start"))
    connection.execute(runs.update().where(runs.c.id == run_id).values(state="running"))
    return _touch(connection, run_id)


def _end(connection: sa.Connection, run_id: str, state: str, error: RunFailed | None = None) -> set[str]:
    """End a run in ``state``; unless it succeeded, its agents have to stop what is left of it."""
    details = None if error is None else ProblemDetails.of(error).model_dump(exclude_none=True)
    connection.execute(
        runs.update().where(runs.c.id == run_id).values(state=state, finished_ms=now_ms(), error=details)
    )
    held = sa.and_(run_agents.c.run_id == run_id, run_agents.c.phase != "released")
    after = "released" if state == "succeeded" else "stop"
    connection.execute(run_agents.update().where(held).values(phase=after))
    return _touch(connection, run_id)


def _rank_done(connection: sa.Connection, run: Row, done: RankDone) -> set[str]:
    run_id = run["id"]
    losses = done.losses or ()
    for step, time_ns in enumerate(done.step_times_ns or ()):
        _store_step(connection, run_id, done.rank, step, losses[step] if step < len(losses) else None, time_ns)
    here = sa.and_(run_ranks.c.run_id == run_id, run_ranks.c.rank == done.rank)
    values = {"done": True, "peak_memory_bytes": done.peak_memory_bytes}
    connection.execute(run_ranks.update().where(here).values(**values))
    check = done.gradient_check
    if check is not None and (run["gradient_check"] is None or check > run["gradient_check"]):
        connection.execute(runs.update().where(runs.c.id == run_id).values(gradient_check=check))
    left = sa.select(sa.func.count()).where(run_ranks.c.run_id == run_id, sa.not_(run_ranks.c.done))
    return set() if connection.scalar(left) else _end(connection, run_id, "succeeded")


def _store_step(
    connection: sa.Connection, run_id: str, rank: int, step: int, loss: float | None, time_ns: int | None
) -> None:
    here = sa.and_(run_steps.c.run_id == run_id, run_steps.c.rank == rank, run_steps.c.step == step)
    if connection.execute(sa.select(run_steps.c.rank).where(here)).first() is None:
        values = {"run_id": run_id, "rank": rank, "step": step, "loss": loss, "time_ns": time_ns}
        connection.execute(run_steps.insert().values(**values))


def _store_trace(connection: sa.Connection, run_id: str, trace: RankTrace) -> None:
    here = (run_traces.c.run_id == run_id, run_traces.c.rank == trace.rank, run_traces.c.step == trace.step)
    if connection.execute(sa.select(run_traces.c.rank).where(*here)).first() is None:
        body = trace.model_dump_json().encode()
        connection.execute(run_traces.insert().values(run_id=run_id, rank=trace.rank, step=trace.step, body=body))


def _data(event: AgentEvent) -> EventData:
    try:
        return EVENT_DATA[event.kind].model_validate(event.data)
    except ValidationError as error:
        faults = [
            Fault(f"/data{fault.pointer}", fault.detail, fault.code) for fault in faults_of(error.errors(), event.data)
        ]
        raise InvalidDocument(
            f"event {event.sequence} ({event.kind}) does not hold what such an event holds", faults=tuple(faults)
        ) from None


def _rank_failed(agent_id: str, failed: RankFailed) -> RunFailed:
    at = f" at {failed.instruction}" if failed.instruction else ""
    tail = "; its last lines: " + " | ".join(failed.last_lines[-5:]) if failed.last_lines else ""
    return RunFailed(f"rank {failed.rank} on agent {agent_id!r} failed{at}: {failed.reason}{tail}")


def _assignment(connection: sa.Connection, agent_id: str, row: Row) -> Assignment:
    mine = sa.and_(run_ranks.c.run_id == row["id"], run_ranks.c.agent == agent_id)
    query = sa.select(run_ranks.c.rank, run_ranks.c.device, run_ranks.c.program).where(mine).order_by(run_ranks.c.rank)
    ranks = [
        RankAssignment(rank=rank, device=device, program=json.loads(program))
        for rank, device, program in connection.execute(query)
    ]
    phase = _PHASES[row["phase"]]
    return Assignment(
        run=row["id"],
        generation=row["generation"],
        phase=phase,  # type: ignore[arg-type]
        plan_hash=row["plan_hash"],
        digest=digest_of([one.program for one in ranks]),
        model=row["model"],
        world_size=row["world_size"],
        steps=row["steps"],
        seed=row["seed"],
        check=row["gradient_check_wanted"],
        trace_steps=row["trace_steps"],
        hosts_store=row["hosts_store"],
        store_address=row["store_address"],
        ranks=() if phase == "stop" else tuple(ranks),
        layers=row["layers"],
    )


def digest_of(programs: Sequence[Mapping[str, Any]]) -> str:
    """SHA-256 of the canonical JSON of a list of programs."""
    return hashlib.sha256(rfc8785.dumps(list(programs))).hexdigest()


def _run_out(connection: sa.Connection, row: Row) -> RunOut:
    run_id = row["id"]
    steps = connection.execute(
        sa.select(run_steps.c.step, run_steps.c.loss, run_steps.c.time_ns)
        .where(run_steps.c.run_id == run_id)
        .order_by(run_steps.c.step, run_steps.c.rank)
    ).all()
    losses: dict[int, float] = {}
    times: dict[int, int] = {}
    for step, loss, time_ns in steps:
        if loss is not None:
            losses.setdefault(step, loss)
        if time_ns is not None:
            times[step] = max(times.get(step, 0), time_ns)
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
        steps_done=max((step + 1 for step, _, _ in steps), default=0),
        losses=tuple(losses[step] for step in sorted(losses)),
        step_times_ns=step_times,
        predicted_time_per_global_batch_ns=row["predicted_ns"],
        measured_time_per_global_batch_ns=int(statistics.median(measured)) if measured else None,
        gradient_check=row["gradient_check"],
        error=None if row["error"] is None else ProblemDetails.model_validate_json(json.dumps(row["error"])),
        agents=tuple(names),
    )
