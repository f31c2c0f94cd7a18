"""The built-in worker: claims jobs, and looks after one killable child process per solve.

A child that does not come back is ended in three steps: its request's own time limit, then SIGTERM, then SIGKILL. The
best plan that it has reported until then is its answer. The worker's death ends its children; its own end hands the
jobs back.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.schemas.errors import Unreachable
from penstock.schemas.jobs import ProblemDetails, ResultOut
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.service.child import Child
from penstock.service.cut_off import best_so_far
from penstock.service.forkserver import Forkserver
from penstock.service.jobs import Claim, JobQueue, new_id
from penstock.service.store import Store
from penstock.service.tasks import crashed, death, drain, end, lines, send

IDLE_POLL_S = 1.0

log = logging.getLogger("penstock.service")


@dataclass
class Solve:
    """What is known of a running child."""

    claim: Claim
    request: PlanRequest
    started: float
    deadline: float
    wake: socket.socket
    best: Plan | None = None
    result: ResultOut | None = None
    problem: ProblemDetails | None = None
    stop: str | None = None
    buffer: bytearray = field(default_factory=bytearray)


class Worker:
    """``slots`` threads, each with one solve at a time; ``workers``: processes of a solve."""

    def __init__(
        self,
        queue: JobQueue,
        store: Store,
        forkserver: Forkserver,
        *,
        slots: int,
        entry: str,
        lease_s: float,
        solve_grace_s: float,
        kill_grace_s: float,
        workers: int,
    ) -> None:
        self._queue, self._store, self._forkserver = queue, store, forkserver
        self._entry = entry
        self._processes = workers
        self._beat_s = lease_s / 3
        self._solve_grace_s, self._kill_grace_s = solve_grace_s, kill_grace_s
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{new_id()[-6:]}"[-64:]
        self._work = threading.Condition()
        self._ending = False
        self._wakers: dict[str, socket.socket] = {}
        self._threads = [threading.Thread(target=self._loop, name=f"solve-{i}", daemon=True) for i in range(slots)]

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the children, hand their jobs back, and return when that is done."""
        with self._work:
            self._ending = True
            self._work.notify_all()
            for waker in self._wakers.values():
                _poke(waker)
        for thread in self._threads:
            thread.join()

    def alive(self) -> bool:
        """Whether every thread still works."""
        return all(thread.is_alive() for thread in self._threads)

    def nudge(self, job_id: str | None = None) -> None:
        """Look at the queue, or at the wishes for one running job, now."""
        with self._work:
            if job_id is None:
                self._work.notify()
            elif (waker := self._wakers.get(job_id)) is not None:
                _poke(waker)

    def _loop(self) -> None:
        while not self._ending:
            try:
                claim = self._queue.claim(self._owner)
                if claim is None:
                    with self._work:
                        if not self._ending:
                            self._work.wait(IDLE_POLL_S)
                    continue
                self._do(claim)
            except Exception:
                log.exception("the worker met an error; it goes on")
                time.sleep(IDLE_POLL_S)

    def _do(self, claim: Claim) -> None:
        ours, theirs = socket.socketpair()
        with self._work:
            self._wakers[claim.job_id] = theirs
            if self._ending:
                _poke(theirs)
        try:
            with ours, theirs:
                self._solve(claim, ours)
        except Unreachable as gone:
            log.error("job %s goes back to the queue: %s", claim.job_id, gone)
            self._queue.give_up(claim)
        except Exception:
            log.exception("job %s: the worker met an error", claim.job_id)
            error = crashed("the worker met an error of its own; the service's log has the reason")
            self._queue.finish(claim, "failed", error=error)
        finally:
            with self._work:
                del self._wakers[claim.job_id]

    def _solve(self, claim: Claim, wake: socket.socket) -> None:
        request = self._store.request(claim.request_hash)
        started = time.monotonic()
        deadline = started + claim.limit_ms / 1000 + self._solve_grace_s
        solve = Solve(claim, request, started, deadline, wake)
        child = self._forkserver.spawn()
        document = request.model_dump(mode="json")
        task = {"task": "solve", "entry": self._entry, "request": document, "workers": self._processes}
        try:
            send(child, task)
            for message in self._messages(solve, child):
                self._take(solve, message)
            status = end(child, self._kill_grace_s)
        finally:
            child.close()
        self._conclude(solve, status)

    def _messages(self, solve: Solve, child: Child) -> Iterator[dict[str, Any]]:
        """What the child writes, until it ends or has to be ended."""
        next_beat = time.monotonic() + self._beat_s
        while True:
            now = time.monotonic()
            if now >= solve.deadline:
                solve.stop = "limit"
            elif self._ending:
                solve.stop = "hand back"
            elif now >= next_beat:
                solve.stop = self._queue.heartbeat(solve.claim)
                next_beat = now + self._beat_s
            if solve.stop is not None:
                yield from drain(solve.buffer, child)
                return
            timeout = max(0.0, min(next_beat, solve.deadline) - now)
            readable, _, _ = select.select([child.pipe, solve.wake], [], [], timeout)
            if solve.wake in readable:
                solve.wake.recv(4096)
                next_beat = now
            if child.pipe in readable:
                chunk = child.pipe.recv(1 << 20)
                if not chunk:
                    return
                yield from lines(solve.buffer, chunk)

    def _take(self, solve: Solve, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "incumbent":
                solve.best = Plan.model_validate(message["plan"])
                self._queue.report(solve.claim, solve.best)
            case "progress":
                self._queue.progress(solve.claim, message["bound_ns"], message["working"])
            case "result":
                solve.result = ResultOut.model_validate(message["result"])
            case "error":
                solve.problem = ProblemDetails.model_validate(message["problem"])
            case "crash":
                log.error("job %s: the solver crashed\n%s", solve.claim.job_id, message["traceback"])
                solve.problem = crashed("the planner met an error of its own; the service's log has the reason")

    def _conclude(self, solve: Solve, status: int) -> None:
        claim, seconds = solve.claim, time.monotonic() - solve.started
        if solve.result is not None:
            self._succeed(solve, solve.result, cacheable=True)
        elif solve.problem is not None:
            self._queue.finish(claim, "failed", error=solve.problem)
        elif solve.stop == "cancel":
            self._queue.finish(claim, "cancelled")
        elif solve.stop == "hand back":
            self._queue.hand_back(claim)
        elif solve.stop in ("finish", "limit"):
            self._succeed(solve, self._best_so_far(solve, seconds), cacheable=False)
        elif solve.stop is None:
            log.error("job %s: the solver's process ended with status %s", claim.job_id, status)
            self._queue.finish(claim, "failed", error=death(status))
        outcome = solve.result.status if solve.result else solve.stop or "failed"
        log.info("job %s %s after %.3f s (planner %s)", claim.job_id, outcome, seconds, solve.request.planner)

    def _succeed(self, solve: Solve, result: ResultOut, *, cacheable: bool) -> None:
        if result.plan is not None:
            self._store.put(result.plan)
        self._queue.finish(solve.claim, "succeeded", result=result, keep=cacheable)

    def _best_so_far(self, solve: Solve, seconds: float) -> ResultOut:
        limit = f"its limit of {solve.claim.limit_ms / 1000:g} s was over"
        because = "it was asked to finish" if solve.stop == "finish" else limit
        return best_so_far(solve.request, solve.best, because, seconds)


def _poke(waker: socket.socket) -> None:
    with suppress(OSError):
        waker.send(b"!")
