"""The built-in worker: claims jobs, and looks after one killable child process per solve.

A child that does not come back is ended in three steps: its request's own time limit, then SIGTERM, then SIGKILL. The
best plan that it has reported until then is its answer. The worker's death ends its children; its own end hands the
jobs back.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from penstock.schemas.errors import PenstockError, Unreachable
from penstock.schemas.jobs import ProblemDetails, ResultOut
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest
from penstock.service.forkserver import Child, Forkserver
from penstock.service.jobs import Claim, JobQueue, new_id
from penstock.service.solve_child import refuse_unsound
from penstock.service.store import Store

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
    """``slots`` threads, each with one solve at a time."""

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
    ) -> None:
        self._queue, self._store, self._forkserver = queue, store, forkserver
        self._entry = entry
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
        except Unreachable as error:
            log.error("job %s goes back to the queue: %s", claim.job_id, error)
            self._queue.give_up(claim)
        finally:
            with self._work:
                del self._wakers[claim.job_id]

    def _solve(self, claim: Claim, wake: socket.socket) -> None:
        request = self._store.request(claim.request_hash)
        started = time.monotonic()
        deadline = started + claim.limit_ms / 1000 + self._solve_grace_s
        solve = Solve(claim, request, started, deadline, wake)
        child = self._forkserver.spawn()
        task = {"task": "solve", "entry": self._entry, "request": request.model_dump(mode="json")}
        try:
            _send(child, task)
            for message in self._messages(solve, child):
                self._take(solve, message)
            status = _end(child, self._kill_grace_s)
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
                yield from _drain(solve, child)
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
                yield from _lines(solve.buffer, chunk)

    def _take(self, solve: Solve, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "incumbent":
                solve.best = Plan.model_validate(message["plan"])
                self._queue.report(solve.claim, solve.best)
            case "result":
                solve.result = ResultOut.model_validate(message["result"])
            case "error":
                solve.problem = ProblemDetails.model_validate(message["problem"])
            case "crash":
                log.error("job %s: the solver crashed\n%s", solve.claim.job_id, message["traceback"])
                solve.problem = _crashed("the planner met an error of its own; the service's log has the reason")

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
            self._queue.finish(claim, "failed", error=_crashed(_death(status)))
        outcome = solve.result.status if solve.result else solve.stop or "failed"
        log.info("job %s %s after %.3f s (planner %s)", claim.job_id, outcome, seconds, solve.request.planner)

    def _succeed(self, solve: Solve, result: ResultOut, *, cacheable: bool) -> None:
        if result.plan is not None:
            self._store.put(result.plan)
        self._queue.finish(solve.claim, "succeeded", result=result, keep=cacheable)

    def _best_so_far(self, solve: Solve, seconds: float) -> ResultOut:
        asked = (
            "it was asked to finish"
            if solve.stop == "finish"
            else f"its limit of {solve.claim.limit_ms / 1000:g} s was over"
        )
        if solve.best is not None:
            try:
                refuse_unsound(PlanFile(plan=solve.best, request=solve.request))
            except PenstockError as error:
                log.error("job %s: %s", solve.claim.job_id, error)
                solve.best = None
        plan = solve.best
        return ResultOut(
            status="time_limit" if plan is None else "feasible",
            why=f"the solver was stopped because {asked}; "
            + ("no plan had been found" if plan is None else "this is the best plan until then"),
            plan=plan,
            plan_hash=None if plan is None else plan.content_hash(),
            certificates=() if plan is None else plan.certificates,
            seconds=seconds,
        )


def run_task(
    forkserver: Forkserver, task: dict[str, Any], limit_s: float, take: Callable[[dict[str, Any]], None]
) -> ProblemDetails | None:
    """Do one task in a child outside the queue, within a limit; return what went wrong, if anything did."""
    child = forkserver.spawn()
    deadline = time.monotonic() + limit_s
    buffer, problem, done = bytearray(), None, False
    try:
        _send(child, task)
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([child.pipe], [], [], left)
            chunk = child.pipe.recv(1 << 20) if readable else b""
            if not chunk:
                break
            for message in _lines(buffer, chunk):
                if message["kind"] == "error":
                    problem = ProblemDetails.model_validate(message["problem"])
                elif message["kind"] == "crash":
                    log.error("a %s crashed\n%s", task["task"], message["traceback"])
                    problem = _crashed("a planner met an error of its own; the service's log has the reason")
                done = done or message["kind"] == "result"
                take(message)
        status = _end(child, 0.5)
    finally:
        child.close()
    if done or problem is not None:
        return problem
    return _crashed(f"it was not done after {limit_s:.0f} s" if time.monotonic() >= deadline else _death(status))


def _send(child: Child, task: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):
        child.pipe.sendall(json.dumps(task).encode() + b"\n")


def _end(child: Child, grace_s: float) -> int:
    """Wait for a child that has closed its pipe; end one that has not: SIGTERM, then SIGKILL."""
    if not _at_end(child):
        child.signal(signal.SIGTERM)
    status = child.wait(grace_s)
    if status is None:
        child.signal(signal.SIGKILL)
        status = child.wait(10)
    if status is None:
        raise Unreachable(f"process {child.pid} cannot be ended")
    child.signal(signal.SIGKILL)  # whatever it started and left behind in its group
    return status


def _at_end(child: Child) -> bool:
    try:
        return not child.pipe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _drain(solve: Solve, child: Child) -> Iterator[dict[str, Any]]:
    """What the child has written already when it has to be ended."""
    with suppress(BlockingIOError):
        while chunk := child.pipe.recv(1 << 20, socket.MSG_DONTWAIT):
            yield from _lines(solve.buffer, chunk)


def _lines(buffer: bytearray, chunk: bytes) -> Iterator[dict[str, Any]]:
    """The complete lines of a chunk; of incumbents that came together only the last one."""
    buffer += chunk
    *lines, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    messages = [json.loads(line) for line in lines]
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        if message["kind"] == "incumbent" and following is not None and following["kind"] == "incumbent":
            continue
        yield message


def _poke(waker: socket.socket) -> None:
    with suppress(OSError):
        waker.send(b"!")


def _crashed(detail: str) -> ProblemDetails:
    return ProblemDetails(
        title="The solver failed", status=500, code="solver-failed", detail=detail, remedy="ask another planner"
    )


def _death(status: int) -> str:
    if status >= 0:
        return f"the solver's process ended with exit code {status} and without an answer"
    name = signal.Signals(-status).name
    hint = " (the host may be out of memory)" if -status == signal.SIGKILL else ""
    return f"the solver's process was killed by {name}{hint}"
