"""The protocol with a child process: send a task, read its messages, end it, and report how it died.

A message, also a task, is a line of JSON and then the bytes of a document; the line has their number. A document that
is only passed on is not read.
"""

from __future__ import annotations

import json
import logging
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

from penstock.schemas.api.jobs import ProblemDetails, ResultOut
from penstock.schemas.coverage import REQUEST_SCOPE
from penstock.schemas.errors import Unreachable
from penstock.workers.child import Child, Spawner

LOOK_S = 0.2
"""Seconds between two checks, for a task outside the queue, whether its answer is still needed."""

log = logging.getLogger("penstock.service")


class Message(NamedTuple):
    """A task, or what a child answers: its kind, some facts, and a document as JSON."""

    kind: str
    facts: dict[str, Any]
    body: bytes = b""

    def written(self) -> bytes:
        """Return the message as it is sent."""
        head = {"kind": self.kind, "bytes": len(self.body), **self.facts}
        return json.dumps(head).encode() + b"\n" + self.body


def read(source: IO[bytes]) -> Message | None:
    """Return the next message of a file; None at its end."""
    line = source.readline()
    if not line:
        return None
    message, size = _headed(line)
    return message._replace(body=source.read(size))


def _headed(line: bytes) -> tuple[Message, int]:
    """Return a message without its document, and the number of the document's bytes."""
    head = json.loads(line)
    kind, size = head.pop("kind"), head.pop("bytes")
    return Message(kind, head), size


class Outcome(NamedTuple):
    """A result in figures. ``bound_ns``: the highest bound of the whole request; ``gap``: the least one."""

    status: str
    plan_hash: str | None
    value_ns: int | None
    bound_ns: int | None
    gap: float | None

    @classmethod
    def of(cls, result: ResultOut) -> Outcome:
        """Return the figures of a result."""
        prediction = None if result.plan is None else result.plan.prediction
        value_ns = None if prediction is None else prediction.time_per_global_batch_ns
        bound_ns = max((each.bound_ns for each in result.certificates if each.scope == REQUEST_SCOPE), default=None)
        gap = None if result.plan is None else min((each.gap for each in result.certificates), default=None)
        return cls(result.status, result.plan_hash, value_ns, bound_ns, gap)


def solve_task(entry: str, request: bytes, workers: int | None, memory_bytes: int = 0) -> Message:
    """Return the task to answer a request, given as JSON; ``memory_bytes`` as in ``solve_child``, 0 for no limit."""
    return Message("solve", {"entry": entry, "workers": workers, "memory_bytes": memory_bytes}, request)


def run_task(
    place: Spawner,
    task: Message,
    limit_s: float,
    take: Callable[[Message], None],
    *,
    wanted: Callable[[], bool] = lambda: True,
) -> ProblemDetails | None:
    """Do one task in a child outside the queue, within a limit; return the failure, or None.

    A child whose answer is no longer ``wanted`` is ended.
    """
    child = place.spawn()
    deadline = time.monotonic() + limit_s
    buffer, problem, done = bytearray(), None, False
    try:
        send(child, task)
        while (left := deadline - time.monotonic()) > 0 and wanted():
            if not select.select([child.pipe], [], [], min(left, LOOK_S))[0]:
                continue
            try:
                chunk = child.pipe.recv(1 << 20)
            except ConnectionError:
                chunk = b""
            if not chunk:
                break
            for message in received(buffer, chunk):
                problem = failure_of(message, task) or problem
                done = done or message.kind == "result"
                take(message)
        status = end(child, 0.5)
    finally:
        child.close()
    if done or problem is not None:
        return problem
    if time.monotonic() >= deadline:
        return crashed(f"it was not done after {limit_s:.0f} s")
    return death(status, task.facts.get("memory_bytes", 0))


def failure_of(message: Message, task: Message) -> ProblemDetails | None:
    """Return the failure that a child's message reports, or None; a crash's traceback goes to the log."""
    if message.kind == "error":
        return ProblemDetails.model_validate(message.facts["problem"])
    if message.kind == "crash":
        log.error("a %s crashed\n%s", task.kind, message.facts["traceback"])
        return crashed("a planner met an error of its own; the service's log has the reason")
    return None


def send(child: Child, task: Message) -> None:
    """Send a child its task; a dead child is noticed on reading."""
    with suppress(BrokenPipeError):
        child.pipe.sendall(task.written())


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
    child.signal(signal.SIGKILL)  # processes that it started and left in its group
    return status


def _at_end(child: Child) -> bool:
    try:
        return not child.pipe.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def drain(buffer: bytearray, child: Child) -> Iterator[Message]:
    """Read what the child has already written when it has to be ended."""
    with suppress(BlockingIOError):
        while chunk := child.pipe.recv(1 << 20, socket.MSG_DONTWAIT):
            yield from received(buffer, chunk)


def received(buffer: bytearray, chunk: bytes) -> Iterator[Message]:
    """Yield the complete messages of a chunk; of incumbents that arrive together, only the last one."""
    buffer += chunk
    messages: list[Message | None] = []
    while (message := _first(buffer)) is not None:
        messages.append(message)
    for message, following in pairwise([*messages, None]):
        assert message is not None
        if message.kind == "incumbent" and following is not None and following.kind == "incumbent":
            continue
        yield message


def _first(buffer: bytearray) -> Message | None:
    """Take the first message out of a buffer; None while it is not complete."""
    start = buffer.find(b"\n") + 1
    if not start:
        return None
    message, size = _headed(bytes(buffer[:start]))
    if len(buffer) < start + size:
        return None
    message = message._replace(body=bytes(buffer[start : start + size]))
    del buffer[: start + size]
    return message


def out_of_memory(detail: str) -> ProblemDetails:
    """Return the failure of a solver that exceeded its memory limit."""
    return ProblemDetails(
        title="The solver ran out of memory",
        status=500,
        code="out-of-memory",
        detail=detail,
        remedy="ask another planner, or raise the service's solve_memory_bytes or the host's memory",
    )


def crashed(detail: str) -> ProblemDetails:
    """Return the failure of a crashed solver."""
    return ProblemDetails(
        title="The solver failed", status=500, code="solver-failed", detail=detail, remedy="ask another planner"
    )


def was_killed(status: int) -> bool:
    """Return whether a process was ended by SIGKILL, which it cannot send itself by mistake."""
    return status == -signal.SIGKILL


def _killed(words: str) -> ProblemDetails:
    """Return the failure of a solver that somebody killed; memory is named where the kernel counts it as the cause."""
    if kills := _MEMORY_KILLS.since_last():
        return out_of_memory(f"{words}; the kernel has killed {kills} more of its control group for memory")
    return ProblemDetails(
        title="The solver was killed",
        status=500,
        code="solver-killed",
        detail=f"{words}, and not by the service; its control group counts no process that was killed for memory",
        remedy="ask again (POST /v1/jobs/ID:retry), and look for who killed it in the log of the host",
    )


def memory_kills() -> int:
    """Return how many processes of this control group the kernel has killed for memory; 0 where it counts none."""
    for events in _memory_events():
        with suppress(OSError, ValueError, LookupError):
            return int(dict(line.split() for line in events.read_text().splitlines())["oom_kill"])
    return 0


def _memory_events() -> Iterator[Path]:
    """Yield the files that may count kills, for both versions of control groups; a container's group is the root."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if not controllers:
                yield from (Path(f"/sys/fs/cgroup{folder}/memory.events") for folder in (group, ""))
            elif "memory" in controllers.split(","):
                yield from (Path(f"/sys/fs/cgroup/memory{folder}/memory.oom_control") for folder in (group, ""))


class _MemoryKills:
    """Counter of processes that the kernel has killed for memory, so that each kill explains one death only."""

    def __init__(self) -> None:
        self._counted = memory_kills()

    def since_last(self) -> int:
        """Return how many were killed since this was last called, or since this process began."""
        before, self._counted = self._counted, memory_kills()
        return self._counted - before


_MEMORY_KILLS = _MemoryKills()


def death(status: int, memory_bytes: int = 0) -> ProblemDetails:
    """Return the failure of a solver whose process ended without an answer; ``memory_bytes``: its limit, 0 for none.

    Native code aborts at its memory limit; a process that the kernel picks when memory runs out is killed, and so is
    one that an operator kills.
    """
    if status >= 0:
        return crashed(f"the solver's process ended with exit code {status} and without an answer")
    number = signal.Signals(-status)
    words = f"the solver's process was killed by {number.name}"
    if number is signal.SIGKILL:
        return _killed(words)
    if number is signal.SIGABRT and memory_bytes:
        return out_of_memory(f"{words}, most likely at its limit of {memory_bytes / 2**20:.0f} MiB")
    return crashed(words)
