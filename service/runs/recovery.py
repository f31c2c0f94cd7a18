"""Recovery of runs after deaths, unattended: a next generation, with the same plan or one for the remaining devices.

A run that is ``recovering`` waits until nothing of its last generation is left (each of its agents has said so, or is
lost) and until every agent is either there or lost. Then it begins again with its first plan if all devices of that are
there, else with its present one, else with a new plan for the devices that are: the plan's own request with a smaller
topology, solved in a process as any other. Where no device is left it waits for a while: agents are started again.
Everything that has to last is in the database, so a service that is killed meanwhile continues where it was.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import sqlalchemy as sa
from anyio.to_thread import run_sync

from penstock.planning.programs.lowered import lower
from penstock.schemas.api.agents import AgentOut
from penstock.schemas.api.jobs import JobOut
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import Conflict, PenstockError, RunFailed
from penstock.schemas.plan import PlanFile
from penstock.service.db.database import Database
from penstock.service.db.notifier import Notifier
from penstock.service.db.tables import ACTIVE, now_ms, run_agents, run_generations, runs
from penstock.service.jobs.queue import JobQueue
from penstock.service.jobs.submit import Planning
from penstock.service.runs.agents import Agents
from penstock.service.runs.generations import RECOVERY
from penstock.service.runs.placement import ANY_MODEL, Place
from penstock.service.runs.replanning import requests_for
from penstock.service.runs.run_rows import busy_places, row_of
from penstock.service.runs.runs import Runs
from penstock.service.security.principals import service_itself

POLL_S = 0.5
"""Agents grow old and solves end without a word on the topic of recovering runs."""

log = logging.getLogger("penstock.service")


class Recovery:
    """The recovery of runs. Its coroutine belongs to the service's event loop."""

    def __init__(
        self,
        database: Database,
        notifier: Notifier,
        runs: Runs,
        agents: Agents,
        planning: Planning,
        queue: JobQueue,
        *,
        wait_s: float,
    ) -> None:
        self._database, self._notifier, self._runs, self._agents = database, notifier, runs, agents
        self._planning, self._queue = planning, queue
        self._wait_s = wait_s

    async def watch(self) -> None:
        """Watch recovering runs; for ever."""
        with self._notifier.listen(RECOVERY) as listener:
            while True:
                for run_id in await run_sync(self._recovering):
                    await self._look_after(run_id)
                await listener.wait(POLL_S)
                if self._notifier.closed:
                    await asyncio.sleep(POLL_S)

    async def _look_after(self, run_id: str) -> None:
        try:
            await run_sync(self._go_on, run_id)
        except PenstockError as error:
            await run_sync(self._runs.give_up, run_id, _cannot(error.detail, error.remedy))
        except Exception:
            log.exception("run %s could not be looked after; it is tried again", run_id)

    def _recovering(self) -> list[str]:
        with self._database.read() as connection:
            return list(connection.scalars(sa.select(runs.c.id).where(runs.c.state == "recovering")))

    def _go_on(self, run_id: str) -> None:
        """Take one step towards the next generation. Raises PenstockError when no way is left."""
        if not self._is_over(run_id):
            return
        with self._database.read() as connection:
            row = row_of(connection, run_id)
            first = connection.scalar(
                sa.select(run_generations.c.plan_hash).where(
                    run_generations.c.run_id == run_id, run_generations.c.generation == 1
                )
            )
            busy = busy_places(connection, row["tenant"], but=run_id)
        if row["state"] != "recovering":
            return
        tenant = row["tenant"]
        everybody = self._agents.everybody(tenant)
        if any(not one.alive and not self._agents.is_lost(tenant, one.id, one.incarnation) for one in everybody):
            return  # it may be back in a moment: its connection broke off, or this service has just been started
        present = [one for one in everybody if self._may_train(tenant, one, row["model"])]
        if not _free(present, busy) and self._down_for_s(run_id) < self._wait_s:
            return
        options = RunOptions.model_validate(row["options"])
        assert isinstance(first, str)
        planning = self._planning.of(tenant)
        for plan_hash in dict.fromkeys((first, row["plan_hash"])):
            file = planning.plan_file(plan_hash)
            if _devices(file) <= _free(present, busy) and self._begin(run_id, file, options, row["steps"], present):
                return
        self._plan_again(run_id, row, planning.plan_file(first), options, present, busy)

    def _down_for_s(self, run_id: str) -> float:
        """Return how long ago the run's last generation ended, in seconds by the database's clock."""
        last = sa.func.max(run_generations.c.ended_ms)
        query = sa.select(now_ms() - last).where(run_generations.c.run_id == run_id)
        with self._database.read() as connection:
            return int(connection.scalar(query) or 0) / 1000

    def _may_train(self, tenant: str, agent: AgentOut, model: str) -> bool:
        lost = self._agents.is_lost(tenant, agent.id, agent.incarnation)
        return agent.alive and not lost and (model in agent.models or ANY_MODEL in agent.models)

    def _is_over(self, run_id: str) -> bool:
        """Return whether nothing of the last generation is left; lost agents hold nothing."""
        with self._database.write() as connection:
            mine = sa.and_(run_agents.c.run_id == run_id, run_agents.c.phase != "released")
            waiting = connection.execute(sa.select(run_agents.c.agent, run_agents.c.incarnation).where(mine)).all()
            tenant = row_of(connection, run_id)["tenant"]
            lost = [agent for agent, incarnation in waiting if self._agents.is_lost(tenant, agent, incarnation)]
            for agent in lost:
                self._runs.release(connection, run_id, agent)
        return len(lost) == len(waiting)

    def _begin(self, run_id: str, file: PlanFile, options: RunOptions, steps: int, present: list[AgentOut]) -> bool:
        try:
            self._runs.begin_again(run_id, lower(file, options, steps), present)
        except Conflict as conflict:
            log.info("run %s cannot begin again yet: %s", run_id, conflict.detail)
            return False
        return True

    def _plan_again(
        self,
        run_id: str,
        row: Any,
        first: PlanFile,
        options: RunOptions,
        present: list[AgentOut],
        busy: dict[Place, str],
    ) -> None:
        """Request a plan for the remaining devices, or use its result. ``replans``: a job's id, or why it failed."""
        replans = [dict(one) for one in row["replans"]]
        principal = service_itself(row["tenant"])
        while replans and "job" in replans[-1]:
            job = self._queue.job(principal.tenant, replans[-1]["job"])
            if job.state in ACTIVE:
                return
            if job.result is not None and job.result.plan_hash is not None:
                file = self._planning.of(principal.tenant).plan_file(job.result.plan_hash)
                if not self._begin(run_id, file, options, row["steps"], present):
                    self._note(run_id, [])
                return
            replans[-1] = {"why": _no_plan(job)}
        requests = requests_for(first.request, _free(present, busy))
        if len(replans) >= len(requests):
            raise RunFailed(
                "; ".join(
                    f"planner {request.planner!r}: {one['why']}"
                    for request, one in zip(requests, replans, strict=False)
                )
            )
        try:
            submitted = self._planning.submit(principal, requests[len(replans)])
        except PenstockError as error:
            replans.append({"why": error.detail})
        else:
            has_answer = submitted.answer is not None
            job_id = JobOut.model_validate_json(submitted.answer).id if has_answer else submitted.job_id  # type: ignore[arg-type]
            replans.append({"job": job_id})
        self._note(run_id, replans)

    def _note(self, run_id: str, replans: list[dict[str, Any]]) -> None:
        with self._database.write() as connection:
            connection.execute(runs.update().where(runs.c.id == run_id).values(replans=replans))


def _free(present: list[AgentOut], busy: dict[Place, str]) -> set[str]:
    """Return the devices that a generation may have."""
    return {device.id for agent in present for device in agent.devices if Place(agent.id, device.id) not in busy}


def _devices(file: PlanFile) -> set[str]:
    return {device for pipeline in file.plan.pipelines for stage in pipeline.stages for device in stage.devices}


def _no_plan(job: JobOut) -> str:
    if job.result is not None:
        return f"{job.result.status}: {job.result.sentence}"
    return job.error.detail if job.error is not None else f"its job was {job.state}"


def _cannot(detail: str, remedy: str | None) -> RunFailed:
    return RunFailed(f"the run cannot go on with what is left: {detail}", remedy=remedy)
