"""Plans on agents: PREPARE → everybody ready → START(generation, store address) → done, all of it in the database.

A run's state moves only in transactions that also move the version of each agent concerned, so that an agent either
sees a change or does not have to. A death ends a *generation*; a run that may recover waits then, ``recovering``, until
`recovery` begins the next one, and what the agents still report of the old one is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from pydantic import ValidationError

from penstock.planning.programs.lowered import Lowered
from penstock.schemas.api.agents import (
    EVENT_DATA,
    AgentEvent,
    AgentOut,
    Checkpointed,
    EventData,
    Progress,
    RankDone,
    RankFailed,
    Refused,
    StoreReady,
    SyncReply,
    Traced,
)
from penstock.schemas.api.jobs import RunEvent, RunOut, RunRequest
from penstock.schemas.document import faults_of
from penstock.schemas.errors import Conflict, Fault, InvalidDocument, NotFound, RunFailed
from penstock.schemas.profile import ModelProfile
from penstock.schemas.trace import RankTrace, Trace
from penstock.service.db.database import Database, Note
from penstock.service.db.tables import agents, now_ms, run_agents, run_ranks, run_traces, runs
from penstock.service.jobs.queue import new_id
from penstock.service.runs.generations import about, begin, end, fail, rank_done, start_if_ready
from penstock.service.runs.placement import place
from penstock.service.runs.run_rows import (
    LIVE,
    WISHES,
    Row,
    assignment,
    busy_places,
    events_after,
    record_event,
    row_of,
    run_out,
    store_steps,
    store_trace,
    touch,
)


class Runs:
    """Runs in the database, which announces every change of theirs itself (`tables.telling`)."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # ---- for those who ask, each for a tenant --------------------------------------------------------------------

    def create(
        self,
        tenant: str,
        request: RunRequest,
        lowered: Lowered,
        present: Sequence[AgentOut],
        note: Note | None = None,
    ) -> RunOut:
        """Begin a run; ``note`` is called with its id in the same transaction.

        Raises Conflict when devices or the model are not there.
        """
        run_id = new_id()
        profile = lowered.file.request.profile
        assert isinstance(profile, ModelProfile)
        with self._database.write() as connection:
            if note is not None:
                note(connection, run_id)
            places = place(lowered.devices, present, request.model, busy_places(connection, tenant))
            connection.execute(
                runs.insert().values(
                    id=run_id,
                    tenant=tenant,
                    **about(lowered),
                    generation=1,
                    model=request.model,
                    steps=request.steps,
                    seed=request.seed,
                    gradient_check_wanted=request.check,
                    trace_steps=request.trace_steps,
                    layers=[layer.name for layer in profile.layers],
                    boundaries=profile.boundary_sizes(),
                    options=request.options.model_dump(mode="json"),
                    max_restarts=0 if request.recover is None else request.recover.max_restarts,
                    restarts=0,
                    created_ms=now_ms(),
                )
            )
            begin(connection, run_id, 1, places, lowered, present)
        return self.run(tenant, run_id)

    def run(self, tenant: str, run_id: str) -> RunOut:
        """Return a run as it stands. Raises NotFound."""
        with self._database.read() as connection:
            return run_out(connection, row_of(connection, run_id, tenant))

    def recent(self, tenant: str, before: str | None, limit: int) -> list[RunOut]:
        """Return runs, the newest first, older than the run ``before``."""
        query = sa.select(runs).where(runs.c.tenant == tenant).order_by(runs.c.id.desc()).limit(limit)
        if before is not None:
            query = query.where(runs.c.id < before)
        with self._database.read() as connection:
            return [run_out(connection, row) for row in connection.execute(query).mappings().all()]

    def events(self, tenant: str, run_id: str, after: int) -> tuple[list[RunEvent], bool]:
        """Return the events of a run after event ``after``, and whether the run has ended. Raises NotFound."""
        with self._database.read() as connection:
            is_over = row_of(connection, run_id, tenant)["state"] not in LIVE
            return events_after(connection, run_id, after), is_over

    def trace(self, tenant: str, run_id: str) -> Trace:
        """Return the traced steps that have arrived so far. Raises NotFound while no step has arrived."""
        with self._database.read() as connection:
            row = row_of(connection, run_id, tenant)
            out = run_out(connection, row)
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
            losses=tuple(loss for loss in out.losses if isinstance(loss, float)),
            ranks=tuple(RankTrace.model_validate_json(body) for body in bodies),
        )

    def cancel(self, tenant: str, run_id: str) -> RunOut:
        """Stop a run; its ranks may save a checkpoint. Raises NotFound, and Conflict when it has ended otherwise."""
        with self._database.write() as connection:
            state = row_of(connection, run_id, tenant)["state"]
            if state in LIVE:
                end(connection, run_id, "cancelled")
            elif state != "cancelled":
                raise Conflict(f"run {run_id!r} has already ended ({state}); cannot cancel it")
        return self.run(tenant, run_id)

    def agent_of(self, tenant: str, run_id: str, rank: int, generation: int | None) -> tuple[str, int]:
        """Return the agent that holds a rank in the present generation, and its number. Raises NotFound, Conflict."""
        with self._database.read() as connection:
            row = row_of(connection, run_id, tenant)
            here = sa.and_(run_ranks.c.run_id == run_id, run_ranks.c.rank == rank)
            agent = connection.scalar(sa.select(run_ranks.c.agent).where(here))
        wanted = row["generation"] if generation is None else generation
        if agent is None:
            raise NotFound(f"run {run_id!r} has no rank {rank}; its ranks are 0…{row['world_size'] - 1}")
        if not 1 <= wanted <= row["generation"]:
            raise NotFound(f"run {run_id!r} has no generation {wanted}; it is in generation {row['generation']}")
        return agent, wanted

    # ---- for agents ----------------------------------------------------------------------------------------------

    def reply(self, connection: sa.Connection, tenant: str, agent_id: str) -> SyncReply:
        """Return the state version, the acknowledgement and all assignments of an agent."""
        this = sa.and_(agents.c.tenant == tenant, agents.c.id == agent_id)
        agent = connection.execute(sa.select(agents).where(this)).mappings().one()
        query = (
            sa.select(runs, run_agents.c.phase, run_agents.c.hosts_store)
            .join(run_agents, run_agents.c.run_id == runs.c.id)
            .where(
                runs.c.tenant == tenant,
                run_agents.c.agent == agent_id,
                run_agents.c.incarnation == agent["incarnation"],
                run_agents.c.phase.in_(WISHES),
            )
            .order_by(runs.c.id)
        )
        rows = connection.execute(query).mappings().all()
        return SyncReply(
            state_version=agent["state_version"],
            assignments=tuple(assignment(connection, agent_id, row) for row in rows),
            ack=agent["ack"],
        )

    def take(self, connection: sa.Connection, tenant: str, agent_id: str, event: AgentEvent) -> None:
        """Store an event; what follows from it happens in the same transaction."""
        this = sa.and_(runs.c.id == event.run, runs.c.tenant == tenant)
        run = connection.execute(sa.select(runs).where(this)).mappings().first()
        mine = sa.and_(run_agents.c.run_id == event.run, run_agents.c.agent == agent_id)
        phase = connection.scalar(sa.select(run_agents.c.phase).where(mine))
        if run is None or phase is None or event.generation != run["generation"]:
            return
        data = _data(event)
        match event.kind, data:
            case "stopped", _ if WISHES.get(phase) == "stop":
                connection.execute(run_agents.update().where(mine).values(phase="released"))
                touch(connection, event.run, only=agent_id)
            case _, Traced(rank_trace=trace):
                store_trace(connection, event.run, trace)
            case "checkpoint", Checkpointed(step=step):
                connection.execute(runs.update().where(runs.c.id == event.run).values(checkpoint_step=step))
                record_event(connection, event.run, event.kind, generation=event.generation, **data.model_dump())
            case "resumed" | "evaluation" | "rung" | "warning", _:
                record_event(connection, event.run, event.kind, generation=event.generation, **data.model_dump())
            case _, Progress(rank=rank, step=step, losses=losses, times_ns=times_ns):
                store_steps(connection, event.run, rank, step, losses, times_ns)
            case _ if run["state"] in ("preparing", "running"):
                self._advance(connection, agent_id, run, event, data)

    def _advance(self, connection: sa.Connection, agent_id: str, run: Row, event: AgentEvent, data: EventData) -> None:
        """Apply an event to a run that is being prepared or trained."""
        run_id = event.run
        mine = sa.and_(run_agents.c.run_id == run_id, run_agents.c.agent == agent_id)
        match event.kind, data:
            case "prepared", _:
                waiting = sa.and_(mine, run_agents.c.phase == "prepare")
                connection.execute(run_agents.update().where(waiting).values(phase="prepared"))
                start_if_ready(connection, run_id)
            case _, StoreReady(address=address):
                connection.execute(runs.update().where(runs.c.id == run_id).values(store_address=address))
                start_if_ready(connection, run_id)
            case _, RankDone() as done:
                rank_done(connection, run, done)
            case _, Refused(reason=reason):
                error = RunFailed(f"agent {agent_id!r} refused the run: {reason}")
                if run["generation"] == 1:
                    end(connection, run_id, "failed", error)
                else:
                    fail(connection, run_id, error)
            case _, RankFailed() as failed:
                error = _rank_failed(agent_id, failed)
                if failed.is_final:
                    end(connection, run_id, "failed", error)
                else:
                    fail(connection, run_id, error)
            case "stopped", _:
                gone = f"agent {agent_id!r} stopped its ranks although it was not asked to"
                fail(connection, run_id, RunFailed(gone))

    def agent_lost(self, tenant: str, agent_id: str, how: str) -> None:
        """End the generations that an agent takes part in: it is gone."""
        with self._database.write() as connection:
            self.lose_agent(connection, tenant, agent_id, how)

    def lose_agent(
        self, connection: sa.Connection, tenant: str, agent_id: str, how: str, *, replaced: bool = False
    ) -> None:
        """End the generations of an agent's incarnation; a ``replaced`` one will not report that they stopped."""
        mine = sa.and_(runs.c.tenant == tenant, run_agents.c.agent == agent_id, run_agents.c.phase != "released")
        query = sa.select(run_agents.c.run_id).join(runs, runs.c.id == run_agents.c.run_id).where(mine)
        for run_id in connection.scalars(query).all():
            if row_of(connection, run_id)["state"] in ("preparing", "running"):
                error = RunFailed(
                    f"agent {agent_id!r} {how} while it held ranks of this run",
                    remedy=f"look at the log of `penstock agent` on {agent_id!r}, then start the run again",
                )
                fail(connection, run_id, error)
            if replaced:
                self.release(connection, run_id, agent_id)

    def release(self, connection: sa.Connection, run_id: str, agent_id: str) -> None:
        """Record that an agent holds nothing of a run any more."""
        this = sa.and_(run_agents.c.run_id == run_id, run_agents.c.agent == agent_id)
        connection.execute(run_agents.update().where(this).values(phase="released"))

    # ---- for recovery --------------------------------------------------------------------------------------------

    def begin_again(self, run_id: str, lowered: Lowered, present: Sequence[AgentOut]) -> None:
        """Begin the next generation of a run that is recovering. Raises Conflict when devices are not there."""
        with self._database.write() as connection:
            row = row_of(connection, run_id)
            if row["state"] != "recovering":
                return
            places = place(lowered.devices, present, row["model"], busy_places(connection, row["tenant"], but=run_id))
            touch(connection, run_id)
            for table in (run_agents, run_ranks, run_traces):
                connection.execute(table.delete().where(table.c.run_id == run_id))
            generation = row["generation"] + 1
            values = about(lowered) | {"generation": generation, "restarts": row["restarts"] + 1}
            connection.execute(runs.update().where(runs.c.id == run_id).values(**values))
            begin(connection, run_id, generation, places, lowered, present)

    def give_up(self, run_id: str, error: RunFailed) -> None:
        """End a run that cannot recover."""
        with self._database.write() as connection:
            if row_of(connection, run_id)["state"] in LIVE:
                end(connection, run_id, "failed", error)


def _data(event: AgentEvent) -> EventData:
    try:
        return EVENT_DATA[event.kind].model_validate(event.data)
    except ValidationError as error:
        faults = [
            Fault(f"/data{fault.pointer}", fault.detail, fault.code) for fault in faults_of(error.errors(), event.data)
        ]
        raise InvalidDocument(
            f"event {event.sequence} ({event.kind}) does not have the fields of this kind of event",
            faults=tuple(faults),
        ) from None


def _rank_failed(agent_id: str, failed: RankFailed) -> RunFailed:
    at = f" at {failed.instruction}" if failed.instruction else ""
    tail = "; its last lines: " + " | ".join(failed.last_lines[-5:]) if failed.last_lines else ""
    return RunFailed(f"rank {failed.rank} on agent {agent_id!r} failed{at}: {failed.reason}{tail}")
