"""A worker: claims jobs, and supervises one killable child process per solve.

It is the same in the service and in ``penstock worker``. A child that does not return is ended in three steps: its
request's own time limit, then SIGTERM, then SIGKILL. Its answer is the best plan that it has reported by then. A
worker's death ends its children; its regular end returns the jobs to the queue.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from penstock.planning.code_digest import code_digest
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import PenstockError, Unreachable
from penstock.schemas.machine.processors import available_processors
from penstock.schemas.plan import Plan
from penstock.service import metrics
from penstock.service.db.database import Database, DatabaseAway
from penstock.service.db.document_store import Stores
from penstock.service.db.upkeep.clocks import set_right
from penstock.service.jobs.claimed_solve import Incumbent, Solve
from penstock.service.jobs.duties import do_hourly
from penstock.service.jobs.job_rows import new_id
from penstock.service.jobs.leases import Claim, Leases
from penstock.service.jobs.worker_registry import WorkerRegistry
from penstock.service.logs import about
from penstock.service.settings import Settings
from penstock.workers.child import Child
from penstock.workers.cut_off import best_so_far
from penstock.workers.forkserver import Forkserver
from penstock.workers.protocol import (
    Message,
    Outcome,
    crashed,
    death,
    drain,
    end,
    received,
    send,
    solve_task,
    was_killed,
)

IDLE_POLL_S = 0.5
REPORT_S = 0.25
"""Delay between two reports of a solve, in seconds: of plans and bounds that come faster, the newest are written."""
AGAIN_S = 0.5
"""Delay before retrying an unreachable database, in seconds."""

log = logging.getLogger("penstock.service")


class Worker:
    """``settings.slots`` threads with one solve at a time each, and one that sends the worker's heartbeat.

    One of all workers of the database does their common duties: most once an hour, at each heartbeat what depends on a
    clock that was set back.
    """

    def __init__(
        self,
        database: Database,
        leases: Leases,
        stores: Stores,
        forkserver: Forkserver,
        settings: Settings,
    ) -> None:
        code_digest()  # before a checkout can change: what this process and its children run
        self._leases, self._stores, self._forkserver, self._settings = leases, stores, forkserver, settings
        self._database = database
        self._beat_s = settings.lease_s / 3
        self._processes = settings.solve_workers or max(1, available_processors() // max(1, settings.slots))
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{new_id()[-6:]}"[-128:]
        self._registry = WorkerRegistry(database, self.owner, settings.slots, settings.lease_s)
        self._work = threading.Condition()
        self._ending = False
        self._is_away = False
        """Whether the database was away at the last query, so that its absence is logged once and not at each try."""
        self._wakers: dict[str, socket.socket] = {}
        self._threads = [
            threading.Thread(target=self._loop, name=f"solve-{i}", daemon=True) for i in range(settings.slots)
        ]
        if settings.slots:
            self._threads.append(threading.Thread(target=self._attend, name="attendance", daemon=True))

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the children, return their jobs to the queue, and return when that is done."""
        with self._work:
            self._ending = True
            self._work.notify_all()
            for waker in self._wakers.values():
                _poke(waker)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def alive(self) -> bool:
        """Return whether every thread still works."""
        return all(thread.is_alive() for thread in self._threads)

    def nudge(self, job_id: str | None = None) -> None:
        """Check now for new jobs, or for requests to one running job."""
        with self._work:
            if job_id is None:
                self._work.notify_all()
            elif (waker := self._wakers.get(job_id)) is not None:
                _poke(waker)

    def on_change(self, topic: str | None) -> None:
        """Wake the threads that a change in the database concerns; None: anything may have changed."""
        if topic in (None, "jobs"):
            self.nudge()
        if topic is None:
            for job_id in list(self._wakers):
                self.nudge(job_id)
        elif topic.startswith("stop:"):
            self.nudge(topic.removeprefix("stop:"))

    # ---- the worker itself ---------------------------------------------------------------------------------------

    def _attend(self) -> None:
        """Renew this worker's heartbeat regularly; the oldest worker does the common duties."""
        last = 0.0
        while not self._ending:
            try:
                if self._registry.beat():
                    set_right(self._database)
                    if time.monotonic() - last > 3600:
                        last = time.monotonic()
                        do_hourly(self._database, self._settings)
            except DatabaseAway as away:
                self._say_away(away)
            except Exception:
                log.exception("the worker met an error outside its jobs; it goes on")
            self._rest(self._beat_s)
        with suppress(DatabaseAway):
            self._registry.leave()

    def _rest(self, seconds: float) -> None:
        """Wait for the given time, or until the worker ends."""
        until = time.monotonic() + seconds
        with self._work:
            while not self._ending and (left := until - time.monotonic()) > 0:
                self._work.wait(left)

    def _say_away(self, away: DatabaseAway) -> None:
        if not self._is_away:
            self._is_away = True
            log.warning("the database is tried again and again from now on: %s", away.detail)

    def _say_back(self) -> None:
        if self._is_away:
            self._is_away = False
            log.info("the database answers again")

    def _loop(self) -> None:
        while not self._ending:
            try:
                if not self._forkserver.wait_ready(IDLE_POLL_S):
                    continue
                claim = self._leases.claim(self.owner)
                self._say_back()
                if claim is not None:
                    with about(job_id=claim.job_id, tenant=claim.tenant, request_id=claim.request_id):
                        self._do(claim)
                    continue
            except DatabaseAway as away:
                self._say_away(away)
            except Exception:
                log.exception("the worker met an error; it goes on")
            with self._work:
                if not self._ending:
                    self._work.wait(IDLE_POLL_S)

    def _do(self, claim: Claim) -> None:
        ours, theirs = socket.socketpair()
        with self._work:
            self._wakers[claim.job_id] = theirs
            if self._ending:
                _poke(theirs)
        try:
            with ours, theirs:
                self._solve(claim, ours)
        except DatabaseAway as away:
            log.error("the job waits until its lease is over: %s", away.detail)
        except Unreachable as gone:
            log.error("the job goes back to the queue: %s", gone)
            self._leases.give_up(claim)
        except PenstockError as error:
            self._leases.finish(claim, "failed", error=ProblemDetails.of(error))
        except Exception:
            log.exception("the worker met an error")
            problem = crashed("the worker met an error of its own; the service's log has the reason")
            self._leases.finish(claim, "failed", error=problem)
        finally:
            with self._work:
                del self._wakers[claim.job_id]

    # ---- one solve -----------------------------------------------------------------------------------------------

    def _solve(self, claim: Claim, wake: socket.socket) -> None:
        began = time.monotonic()
        child = self._forkserver.spawn()
        try:
            request = self._stores.of(claim.tenant).request_body(claim.request_hash)
            started = time.monotonic()
            deadline = started + claim.limit_ms / 1000 + self._settings.solve_grace_s
            solve = Solve(claim, wake, deadline, started, renewed=began)
            if (reported := self._leases.best_of_earlier_attempts(claim)) is not None:
                solve.best = Incumbent(*reported, {})
            settings = self._settings
            send(child, solve_task(settings.solve_entry, request, self._processes, settings.solve_memory_bytes))
            log.info("the solve has started after %.3f s", time.monotonic() - began)
            for message in self._messages(solve, child):
                self._take(solve, message)
            self._report(solve, at_once=True)
            if solve.stop == "hand back":
                self._leases.hand_back(claim)
            status = end(child, self._settings.kill_grace_s if solve.stop != "lost" else 0.0)
        finally:
            child.close()
        self._conclude(solve, status)

    def _messages(self, solve: Solve, child: Child) -> Iterator[Message]:
        """Yield the child's messages until it ends or has to be ended."""
        next_beat = time.monotonic() + self._beat_s
        while True:
            now = time.monotonic()
            if now >= next_beat:
                solve.stop = self._beat(solve)
                next_beat = now + (self._beat_s if solve.renewed >= now else AGAIN_S)
            if solve.stop is None and now >= solve.deadline:
                solve.stop = "limit"
            if solve.stop is None and self._ending:
                solve.stop = "hand back"
            if solve.stop is not None:
                yield from drain(solve.buffer, child)
                return
            self._report(solve)
            wake_at = min(next_beat, solve.deadline, solve.next_report if solve.has_news else math.inf)
            timeout = max(0.0, wake_at - time.monotonic())
            readable, _, _ = select.select([child.pipe, solve.wake], [], [], timeout)
            if solve.wake in readable:
                solve.wake.recv(4096)
                next_beat = now
            if child.pipe in readable:
                chunk = child.pipe.recv(1 << 20)
                if not chunk:
                    return
                yield from received(solve.buffer, chunk)

    def _beat(self, solve: Solve) -> str | None:
        """Renew the lease; one that could not be renewed in time counts as lost."""
        now = time.monotonic()
        try:
            stop = self._leases.heartbeat(solve.claim)
        except DatabaseAway as away:
            self._say_away(away)
            return "lost" if now - solve.renewed > self._settings.lease_s else None
        solve.renewed = time.monotonic()
        return stop

    def _take(self, solve: Solve, message: Message) -> None:
        facts = message.facts
        match message.kind:
            case "incumbent":
                value_ns = facts.pop("value_ns")
                if value_ns < solve.best.value_ns:
                    solve.best, solve.is_reported = Incumbent(value_ns, message.body, facts), False
            case "progress":
                solve.progress = facts["bound_ns"], facts["working"]
            case "plan":
                solve.plan = message.body
            case "result":
                solve.result = Outcome(**facts), message.body
            case "error":
                solve.problem = ProblemDetails.model_validate(facts["problem"])
            case "crash":
                log.error("the solver crashed\n%s", facts["traceback"])
                solve.problem = crashed("the planner met an error of its own; the service's log has the reason")
        self._report(solve)

    def _report(self, solve: Solve, *, at_once: bool = False) -> None:
        """Write the newest plan and bound that are not written yet, unless others were written a moment ago."""
        now = time.monotonic()
        if not solve.has_news or (now < solve.next_report and not at_once):
            return
        solve.next_report = now + REPORT_S
        with suppress(DatabaseAway):
            if not solve.is_reported:
                self._leases.report(solve.claim, *solve.best)
                solve.is_reported = True
            if solve.progress is not None:
                self._leases.progress(solve.claim, *solve.progress)
                solve.progress = None

    def _conclude(self, solve: Solve, status: int) -> None:
        seconds = time.monotonic() - solve.started
        outcome = self._outcome(solve, status, seconds)
        plan_hash = None if solve.result is None else solve.result[0].plan_hash
        planner = solve.claim.planner
        metrics.solve_seconds.labels(planner, outcome).observe(seconds)
        facts = {"planner": planner, "seconds": round(seconds, 3), "plan_hash": plan_hash}
        log.info("the job ended as %s after %.3f s", outcome, seconds, extra=facts)

    def _outcome(self, solve: Solve, status: int, seconds: float) -> str:
        """Write the outcome of a solve; return it as a word."""
        if solve.stop == "hand back":
            return "went back to the queue"
        if solve.stop == "lost":
            log.warning("the lease was lost; what was found is dropped")
            return "was lost"
        if solve.stop == "cancel":
            return self._finish(solve, "cancelled")
        kept = solve.result is not None
        if solve.result is None and solve.stop is not None:
            self._cut_off(solve, seconds)
        if solve.result is not None:
            return self._finish(solve, "succeeded", keep=kept)
        if solve.problem is None:
            solve.problem = death(status, self._settings.solve_memory_bytes)
            if was_killed(status) and self._leases.try_again(solve.claim):
                log.warning("%s; the job is tried once more", solve.problem.detail)
                return "went back to the queue"
            log.error("the solver's process ended with status %s: %s", status, solve.problem.detail)
        return self._finish(solve, "failed", error=solve.problem)

    def _finish(self, solve: Solve, state: Any, **more: Any) -> str:
        """End the job once the database answers: until another worker takes it, this answer is valid."""
        result = solve.result if state == "succeeded" else None
        while True:
            try:
                if result is not None and solve.plan is not None:
                    self._stores.of(solve.claim.tenant).put_plan(solve.plan)
                is_ours = self._leases.finish(solve.claim, state, result=result, **more)
            except DatabaseAway as away:
                if self._ending:
                    raise
                self._say_away(away)
                self._rest(AGAIN_S)
                continue
            if not is_ours:
                return "was lost"
            if result is None:
                return str(state)
            if result[0].gap is not None:
                metrics.gap.labels(solve.claim.planner).observe(result[0].gap)
            return result[0].status

    def _cut_off(self, solve: Solve, seconds: float) -> None:
        """Make the best plan so far the result of a solve that was ended."""
        limit = f"its limit of {solve.claim.limit_ms / 1000:g} s was over"
        because = "it was asked to finish" if solve.stop == "finish" else limit
        request = self._stores.of(solve.claim.tenant).request(solve.claim.request_hash)
        best = Plan.model_validate_json(solve.best.body) if solve.best.body else None
        result = best_so_far(request, best, because, seconds)
        solve.plan = None if result.plan is None else result.plan.canonical_json()
        solve.result = Outcome.of(result), result.model_dump_json().encode()


def _poke(waker: socket.socket) -> None:
    with suppress(OSError):
        waker.send(b"!")
