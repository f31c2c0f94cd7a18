"""One task in one process: the only module that runs planners for the service.

Messages of ``protocol`` go over a pipe. In: a task of a kind in TASKS, with its ``entry`` (a ``module:function``) and a
request as its document. Out: ``incumbent``, ``progress``, ``compiling`` and a question's messages as they come. The
last message is ``result``, or ``error`` with the problem details, or ``crash`` with a traceback for the service's log.
Before the result of a solve comes its ``plan`` as it is stored. The same entry serves a child of the forkserver and a
new interpreter (``child.InterpreterChild``).
``memory_bytes`` of a task limits the memory that its process may take beyond what it had loaded before.
"""

from __future__ import annotations

import importlib
import os
import resource
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from penstock.schemas.api.jobs import ProblemDetails, ResultOut
from penstock.schemas.document import read_stored
from penstock.schemas.errors import PenstockError
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest
from penstock.workers.protocol import Message, Outcome, out_of_memory, read

if TYPE_CHECKING:
    from penstock.solvers.model.result import Progress

Send = Callable[[Message], None]


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Read one task, do it, and write its result."""

    def send(message: Message) -> None:
        sink.write(message.written())
        sink.flush()

    task = read(source)
    if task is None:  # the requester is gone, or has withdrawn the task
        return
    memory_bytes = task.facts.get("memory_bytes", 0)
    limit_memory(memory_bytes)
    try:
        TASKS[task.kind](_find(task.facts["entry"]), task, send)
    except PenstockError as error:
        send(_error(ProblemDetails.of(error)))
    except MemoryError:
        limit_memory(0)
        send(_error(_too_big(memory_bytes)))
    except Exception:  # the parent logs it; none of it reaches the client
        send(Message("crash", {"traceback": traceback.format_exc()}))


def _error(problem: ProblemDetails) -> Message:
    return Message("error", {"problem": problem.model_dump(exclude_none=True)})


def _solve(entry: Callable[..., ResultOut], task: Message, send: Send) -> None:
    request = read_stored(PlanRequest, task.body)

    def send_plan(plan: Plan) -> None:
        assert plan.prediction is not None
        facts = {"planner": plan.planner, "schedule": plan.schedule.name}
        value_ns = plan.prediction.time_per_global_batch_ns
        send(Message("incumbent", {"value_ns": value_ns, **facts}, plan.canonical_json()))

    from penstock.solvers.compiled.progress import listening

    with listening(lambda kernels: send(Message("compiling", {"kernels": kernels}))):
        result = entry(request, send_plan, Steps(send), task.facts.get("workers", 1))
    if result.plan is not None:
        from penstock.planning.judge import refuse_unsound  # the service's parent process does not need the judge

        refuse_unsound(PlanFile(plan=result.plan, request=request))
        send(Message("plan", {}, result.plan.canonical_json()))
    send(Message("result", Outcome.of(result)._asdict(), result.model_dump_json().encode()))


class Steps:
    """A filter of progress: sent are a new best time and a bound that closes a quarter of the gap.

    Each message becomes a row in the database. The filter counts steps instead of measuring time, so that no message
    is late; a search with n digits sends about 8 n.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._value_ns: int | None = None
        self._bound_ns = 0

    def __call__(self, progress: Progress) -> None:
        """Receive the progress of a solve, and send it if it is worth a row."""
        value_ns, bound_ns = progress.value_ns, progress.bound.bound_ns
        open_ns = bound_ns if value_ns is None else value_ns - self._bound_ns
        if value_ns == self._value_ns and 4 * (bound_ns - self._bound_ns) < max(open_ns, 1):
            return
        self._value_ns, self._bound_ns = value_ns, bound_ns
        working = list(progress.working)
        self._send(Message("progress", {"bound_ns": bound_ns, "working": working}))


def _ask(entry: Callable[..., bytes], task: Message, send: Send) -> None:
    answer = entry(task, lambda kind, message: send(Message(kind, {}, message)))
    send(Message("result", {}, answer))


TASKS: dict[str, Callable[[Callable[..., Any], Message, Send], None]] = {"solve": _solve, "ask": _ask}
"""The kinds of task: a request of the queue, and a question of the table (``questions.in_child:answer_task``)."""


def limit_memory(memory_bytes: int) -> None:
    """Limit the memory that this process may allocate beyond its present use; 0 for no limit.

    Linux counts private writable memory here, not the address space, which threads reserve far beyond their use.
    """
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    soft = most
    if memory_bytes:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        used_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))
        soft = used_kib * 1024 + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (soft if most < 0 else min(soft, most), most))


def _too_big(memory_bytes: int) -> ProblemDetails:
    allowed = f"more than its limit of {memory_bytes / 2**20:.0f} MiB" if memory_bytes else "more memory than there is"
    return out_of_memory(f"the solver needs {allowed}")


def _find(entry: str) -> Callable[..., Any]:
    module, _, name = entry.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def main() -> None:
    """Do one task in a new interpreter, whose standard input is the socket."""
    with socket.socket(fileno=os.dup(0)) as pipe, pipe.makefile("rb") as source, pipe.makefile("wb") as sink:
        serve(source, sink)
