"""One task in one process: the only place where planners run for the service.

The protocol is one line of JSON in, lines of JSON out, over a pipe. In: ``{"task": "solve" | "compare", "entry":
"module:function", …}``. Out: ``incumbent`` and ``row`` as they are found, then ``result``, or ``error`` with the
problem details, or ``crash`` with a traceback for the service's log. The same entry serves a child of the forkserver
(a socket) and ``python -m penstock.service.solve_child`` (standard input and output).
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from typing import IO, Any

from penstock.schemas.errors import InvalidPlan, PenstockError
from penstock.schemas.jobs import PlanComparison, ProblemDetails, ResultOut
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest

Send = Callable[[dict[str, Any]], None]


def serve(source: IO[bytes], sink: IO[bytes]) -> None:
    """Read one task, do it, and write what comes of it."""

    def send(message: dict[str, Any]) -> None:
        sink.write(json.dumps(message).encode() + b"\n")
        sink.flush()

    task = json.loads(source.readline())
    try:
        TASKS[task["task"]](_find(task["entry"]), task, send)
    except PenstockError as error:
        send({"kind": "error", "problem": ProblemDetails.of(error).model_dump(exclude_none=True)})
    except Exception:  # the parent logs it; nothing of it reaches the client
        send({"kind": "crash", "traceback": traceback.format_exc()})


def _solve(entry: Callable[..., ResultOut], task: dict[str, Any], send: Send) -> None:
    request = PlanRequest.model_validate(task["request"])

    def tell(plan: Plan) -> None:
        send({"kind": "incumbent", "plan": plan.model_dump(mode="json")})

    result = entry(request, tell)
    if result.plan is not None:
        refuse_unsound(PlanFile(plan=result.plan, request=request))
    send({"kind": "result", "result": result.model_dump(mode="json")})


def _compare(entry: Callable[..., Any], task: dict[str, Any], send: Send) -> None:
    request = PlanRequest.model_validate(task["request"])
    row: PlanComparison
    for row in entry(request, task["planners"], task["schedules"]):
        send({"kind": "row", "row": row.model_dump(mode="json")})
    send({"kind": "result", "result": None})


TASKS: dict[str, Callable[[Callable[..., Any], dict[str, Any], Send], None]] = {"solve": _solve, "compare": _compare}


def refuse_unsound(file: PlanFile) -> None:
    """Raise InvalidPlan when a plan of our own planners does not verify: it must not leave the service."""
    from penstock.api import judge

    faults = judge(file).faults
    if faults:
        raise InvalidPlan(
            f"planner {file.plan.planner!r} made a plan that does not verify: {faults[0]}",
            remedy="ask another planner, and report this request: it is a fault of Penstock",
        )


def _find(entry: str) -> Callable[..., Any]:
    module, _, name = entry.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
