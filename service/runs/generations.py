"""Generations of a run: how each begins, starts, and ends. Each function is part of a transaction.

``preparing`` (agents check and start the store) → ``running`` → ``succeeded``. A death makes it ``recovering`` until
the next generation begins, or ``failed`` where that cannot be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from penstock.planning.programs.lowered import Lowered
from penstock.schemas.api.agents import AgentOut, RankDone
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import RunFailed
from penstock.service.db.tables import now_ms, run_agents, run_generations, run_ranks, runs
from penstock.service.runs.placement import Place
from penstock.service.runs.run_rows import Row, record_event, row_of, store_steps, touch

RECOVERY = "recovery"
"""The topic of runs that wait for their next generation."""


def about(lowered: Lowered) -> dict[str, Any]:
    """Return the columns of a run that its present plan fills."""
    plan = lowered.file.plan
    assert plan.prediction is not None
    return {
        "state": "preparing",
        "plan_hash": lowered.plan_hash,
        "world_size": len(lowered.devices),
        "predicted_ns": plan.prediction.time_per_global_batch_ns,
        "segments": list(lowered.segments),
        "store_address": None,
        "replans": [],
    }


def begin(
    connection: sa.Connection,
    run_id: str,
    generation: int,
    places: Sequence[Place],
    lowered: Lowered,
    present: Sequence[AgentOut],
) -> None:
    """Give each rank to its agent; the agent of rank 0 hosts the store."""
    incarnations = {agent.id: agent.incarnation for agent in present}
    names = sorted({spot.agent for spot in places})
    for agent in names:
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
        programs = json.dumps(lowered.programs[rank]).encode()
        values = {"run_id": run_id, "rank": rank, "agent": spot.agent, "device": spot.device, "programs": programs}
        connection.execute(run_ranks.insert().values(done=False, **values))
    values = {"generation": generation, "plan_hash": lowered.plan_hash, "agents": names}
    connection.execute(run_generations.insert().values(run_id=run_id, began_ms=now_ms(), **values))
    record_event(connection, run_id, "state", state="preparing", **values)
    touch(connection, run_id)


def start_if_ready(connection: sa.Connection, run_id: str) -> None:
    """Start the ranks once every agent is prepared and the store is there."""
    run = row_of(connection, run_id)
    mine = run_agents.c.run_id == run_id
    phases = set(connection.scalars(sa.select(run_agents.c.phase).where(mine)))
    if run["state"] != "preparing" or run["store_address"] is None or phases != {"prepared"}:
        return
    connection.execute(run_agents.update().where(mine).values(phase="start"))
    connection.execute(runs.update().where(runs.c.id == run_id).values(state="running"))
    record_event(connection, run_id, "state", state="running", generation=run["generation"])
    touch(connection, run_id)


def fail(connection: sa.Connection, run_id: str, error: RunFailed) -> None:
    """End a generation by a death: the run waits for the next one, or fails when it has had all of its restarts."""
    run = row_of(connection, run_id)
    if not run["max_restarts"]:
        end(connection, run_id, "failed", error)
        return
    if run["restarts"] >= run["max_restarts"]:
        spent = RunFailed(f"{error.detail} (this was the last of {run['max_restarts']} restarts)", remedy=error.remedy)
        end(connection, run_id, "failed", spent)
        return
    _end_generation(connection, run, "stop", error.detail)
    connection.execute(runs.update().where(runs.c.id == run_id).values(state="recovering", replans=[]))
    record_event(connection, run_id, "state", state="recovering", generation=run["generation"], why=error.detail)
    touch(connection, run_id)


def end(connection: sa.Connection, run_id: str, state: str, error: RunFailed | None = None) -> None:
    """End a run in ``state``; unless it succeeded, its agents have to stop what is left of it."""
    details = None if error is None else ProblemDetails.of(error).model_dump(exclude_none=True)
    run = row_of(connection, run_id)
    phase = {"succeeded": "released", "cancelled": "save"}.get(state, "stop")
    _end_generation(connection, run, phase, None if error is None else error.detail)
    connection.execute(
        runs.update().where(runs.c.id == run_id).values(state=state, finished_ms=now_ms(), error=details)
    )
    why = {} if error is None else {"why": error.detail}
    record_event(connection, run_id, "state", state=state, generation=run["generation"], **why)
    touch(connection, run_id)


def _end_generation(connection: sa.Connection, run: Row, phase: str, why: str | None) -> None:
    active = sa.and_(run_agents.c.run_id == run["id"], run_agents.c.phase.not_in(("released", "stop")))
    connection.execute(run_agents.update().where(active).values(phase=phase))
    this = sa.and_(
        run_generations.c.run_id == run["id"],
        run_generations.c.generation == run["generation"],
        run_generations.c.ended_ms.is_(None),
    )
    connection.execute(run_generations.update().where(this).values(ended_ms=now_ms(), why=why))


def rank_done(connection: sa.Connection, run: Row, done: RankDone) -> None:
    """Record that a rank has trained all its steps; the last one ends the run."""
    run_id = run["id"]
    store_steps(connection, run_id, done.rank, done.first_step, done.losses or (), done.step_times_ns or ())
    here = sa.and_(run_ranks.c.run_id == run_id, run_ranks.c.rank == done.rank)
    hardware = None if done.hardware is None else done.hardware.model_dump()
    values = done.model_dump(include={"peak_memory_bytes", "collectives", "collectives_differ"})
    connection.execute(run_ranks.update().where(here).values(done=True, hardware=hardware, **values))
    check = done.gradient_check
    if check is not None and (run["gradient_check"] is None or check > run["gradient_check"]):
        connection.execute(runs.update().where(runs.c.id == run_id).values(gradient_check=check))
    left = sa.select(sa.func.count()).where(run_ranks.c.run_id == run_id, sa.not_(run_ranks.c.done))
    if not connection.scalar(left):
        end(connection, run_id, "succeeded")
