"""A solve in a process of its own that is ended at the request's limit, whatever it does then.

Nothing can stop the compiler but the end of its process. So requests with a time limit are solved here as long as
there are kernels to compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.coverage import REQUEST_SCOPE
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.coverage import allowed
from penstock.solvers.compiled.progress import tell
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, Progress
from penstock.solvers.solve.workers import one_thread
from penstock.workers.child import Child, InterpreterChild
from penstock.workers.cut_off import best_so_far
from penstock.workers.forks import OwnFork
from penstock.workers.protocol import run_task

ENTRY = "penstock.planning.solve:solve_here"
GRACE_S = 1.0
"""From the limit until the process is ended: what an answer takes that was found in time."""


def solve_apart(
    request: PlanRequest,
    problem: Problem,
    on_incumbent: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> ResultOut:
    """Answer a request with a time limit as ``planning.solve.solve_here``, or with the best plan at its limit.

    ``problem``: the request's. Raises what the solve raises.
    """
    limit_ns = request.termination.time_limit_ns
    assert limit_ns is not None
    messages = _Messages(problem, on_incumbent, on_progress)
    began, limit_s = time.monotonic(), limit_ns / 1e9
    task = {"task": "solve", "entry": ENTRY, "request": request.model_dump(mode="json"), "workers": workers}
    failed = run_task(_Place(), task, limit_s + GRACE_S, messages.take)
    seconds = time.monotonic() - began
    if messages.result is not None:
        return messages.result
    if failed is not None and seconds < limit_s + GRACE_S:
        raise failed.as_error()
    compiled = ", most of which went to compiling what plans are searched with, once" if messages.compiled else ""
    return best_so_far(request, messages.best, f"its limit of {limit_s:g} s was over{compiled}", seconds)


class _Place:
    """Starts children of this process."""

    def spawn(self) -> Child:
        """Return a fork where that is safe, else a new interpreter."""
        return OwnFork() if one_thread() else InterpreterChild()


class _Messages:
    """What a child has said: passed on, and the best plan and the result kept."""

    def __init__(
        self,
        problem: Problem,
        on_incumbent: Callable[[Plan], None] | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._covers = allowed(problem)
        self._on_incumbent, self._on_progress = on_incumbent, on_progress
        self.best: Plan | None = None
        self.result: ResultOut | None = None
        self.compiled = False

    def take(self, message: dict[str, Any]) -> None:
        """Take one message."""
        match message["kind"]:
            case "incumbent":
                self.best = Plan.model_validate(message["plan"])
                if self._on_incumbent is not None:
                    self._on_incumbent(self.best)
            case "progress" if self._on_progress is not None:
                bound = Bound(REQUEST_SCOPE, self._covers, message["bound_ns"], "")
                self._on_progress(Progress(self._best_ns, bound, tuple(message["working"])))
            case "compiling":
                self.compiled = True
                tell(message["kernels"])
            case "crash":
                raise RuntimeError(f"the solver met an error of its own:\n{message['traceback']}")
            case "result":
                self.result = ResultOut.model_validate(message["result"])

    @property
    def _best_ns(self) -> int | None:
        prediction = None if self.best is None else self.best.prediction
        return None if prediction is None else prediction.time_per_global_batch_ns
