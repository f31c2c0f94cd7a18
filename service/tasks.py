"""Talking with a child process: give it a task, read what it writes, end it, and say how it died."""

from __future__ import annotations

import json
import logging
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from penstock.schemas.errors import Unreachable
from penstock.schemas.jobs import ProblemDetails
from penstock.service.forkserver import Child, Forkserver

log = logging.getLogger("penstock.service")


def run_task(
    forkserver: Forkserver, task: dict[str, Any], limit_s: float, take: Callable[[dict[str, Any]], None]
) -> ProblemDetails | None:
    """Do one task in a child outside the queue, within a limit; return what went wrong, if anything did."""
    child = forkserver.spawn()
    deadline = time.monotonic() + limit_s
    buffer, problem, done = bytearray(), None, False
    try:
        send(child, task)
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([child.pipe], [], [], left)
            chunk = child.pipe.recv(1 << 20) if readable else b""
            if not chunk:
                break
            for message in lines(buffer, chunk):
                if message["kind"] == "error":
                    problem = ProblemDetails.model_validate(message["problem"])
                elif message["kind"] == "crash":
                    log.error("a %s crashed\n%s", task["task"], message["traceback"])
                    problem = crashed("a planner met an error of its own; the service's log has the reason")
                done = done or message["kind"] == "result"
                take(message)
        status = end(child, 0.5)
    finally:
        child.close()
    if done or problem is not None:
        return problem
    return crashed(f"it was not done after {limit_s:.0f} s" if time.monotonic() >= deadline else death(status))


def send(child: Child, task: dict[str, Any]) -> None:
    """Give a child its task; one that is dead already is noticed when it is read."""
    with suppress(BrokenPipeError):
        child.pipe.sendall(json.dumps(task).encode() + b"\n")


def end(child: Child, grace_s: float) -> int:
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


def drain(buffer: bytearray, child: Child) -> Iterator[dict[str, Any]]:
    """What the child has written already when it has to be ended."""
    with suppress(BlockingIOError):
        while chunk := child.pipe.recv(1 << 20, socket.MSG_DONTWAIT):
            yield from lines(buffer, chunk)


def lines(buffer: bytearray, chunk: bytes) -> Iterator[dict[str, Any]]:
    """The complete lines of a chunk; of incumbents that came together only the last one."""
    buffer += chunk
    *complete, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    messages = [json.loads(line) for line in complete]
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        if message["kind"] == "incumbent" and following is not None and following["kind"] == "incumbent":
            continue
        yield message


def crashed(detail: str) -> ProblemDetails:
    """The failure of a solver."""
    return ProblemDetails(
        title="The solver failed", status=500, code="solver-failed", detail=detail, remedy="ask another planner"
    )


def death(status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"the solver's process ended with exit code {status} and without an answer"
    name = signal.Signals(-status).name
    hint = " (the host may be out of memory)" if -status == signal.SIGKILL else ""
    return f"the solver's process was killed by {name}{hint}"
