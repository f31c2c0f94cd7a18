"""A solve in a separate process that is ended at the request's limit, whatever it does then.

Nothing can stop the compiler but the end of its process. So requests with a time limit are solved here while there are
kernels to compile. Meanwhile another process solves the request with interpreted kernels (``stand_in``), until the
compiled kernels have found a plan that is as good. That process starts at once if judging plans needs a kernel that is
not compiled yet, otherwise when the first compilation starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.coverage import REQUEST_SCOPE
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.coverage import allowed
from penstock.solvers.compiled.progress import tell
from penstock.solvers.judge.simulate import is_compiled
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, Progress
from penstock.solvers.solve.workers import one_thread
from penstock.workers.child import Child, InterpreterChild
from penstock.workers.cut_off import best_so_far
from penstock.workers.forks import OwnFork
from penstock.workers.protocol import Message, run_task, solve_task
from penstock.workers.stand_in import StandIn

ENTRY = "penstock.planning.solve:solve_here"
GRACE_S = 1.0
"""Seconds from the limit to the end of the process, for delivering an answer that was ready in time."""


def solve_apart(
    request: PlanRequest,
    problem: Problem,
    on_incumbent: Callable[[Plan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    workers: int | None = None,
) -> ResultOut:
    """Answer a request with a time limit as ``planning.solve.solve_here``, or with the best plan at its limit.

    ``problem`` is the problem of the request. Raises the errors of the solve.
    """
    limit_ns = request.termination.time_limit_ns
    assert limit_ns is not None
    began, limit_s = time.monotonic(), limit_ns / 1e9
    messages = _Messages(request, problem, began + limit_s, on_incumbent, on_progress)
    task = solve_task(ENTRY, request.model_dump_json().encode(), workers)
    try:
        if not is_compiled():
            messages.stand_in.start()
        failed = run_task(_Place(), task, limit_s + GRACE_S, messages.take, wanted=messages.look)
    finally:
        messages.stand_in.end()
    seconds = time.monotonic() - began
    result, best = messages.result, messages.best
    if result is not None and not (messages.stands_in and _slower(result, best)):
        return result
    if result is None and failed is not None and seconds < limit_s + GRACE_S:
        raise failed.as_error()
    compiled = ", most of which went to compiling what plans are searched with, once" if messages.compiled else ""
    over = f"its limit of {limit_s:g} s was over{compiled}"
    return best_so_far(request, best, over, seconds, verified=messages.stands_in)


def _slower(result: ResultOut, best: Plan | None) -> bool:
    """Return whether a result is worse than ``best``: its plan takes longer, or it has neither plan nor proof."""
    if result.plan is None:
        return result.status == "time_limit"
    return best is not None and _time_ns(best) < _time_ns(result.plan)


def _time_ns(plan: Plan) -> int:
    assert plan.prediction is not None
    return plan.prediction.time_per_global_batch_ns


class _Place:
    """Starts children of this process."""

    def spawn(self) -> Child:
        """Return a fork where that is safe, else a new interpreter."""
        return OwnFork() if one_thread() else InterpreterChild()


class _Messages:
    """The messages of both processes, which are passed on; the best plan and the result are kept.

    ``stands_in``: whether the best plan is from the interpreting process, which has verified it.
    """

    def __init__(
        self,
        request: PlanRequest,
        problem: Problem,
        until: float,
        on_incumbent: Callable[[Plan], None] | None,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._covers = allowed(problem)
        self._on_incumbent, self._on_progress = on_incumbent, on_progress
        self.stand_in = StandIn(request, until, self._take_of_stand_in)
        self.best: Plan | None = None
        self.stands_in = False
        self.result: ResultOut | None = None
        self.compiled = False

    def take(self, message: Message) -> None:
        """Take one message of the compiling process."""
        facts = message.facts
        match message.kind:
            case "incumbent":
                plan = Plan.model_validate_json(message.body)
                if self.best is None or _time_ns(plan) <= _time_ns(self.best):
                    self.stand_in.end()
                    self._offer(plan, stands_in=False)
            case "progress" if self._on_progress is not None:
                bound = Bound(REQUEST_SCOPE, self._covers, facts["bound_ns"], "")
                best_ns = None if self.best is None else _time_ns(self.best)
                self._on_progress(Progress(best_ns, bound, tuple(facts["working"])))
            case "compiling":
                self.compiled = True
                self.stand_in.start()
                tell(facts["kernels"])
            case "crash":
                raise RuntimeError(f"the solver failed with an internal error:\n{facts['traceback']}")
            case "result":
                self.result = ResultOut.model_validate_json(message.body)

    def look(self) -> bool:
        """Take the messages of the interpreting process; return True, because the compiled solve is still needed."""
        self.stand_in.look()
        return True

    def _take_of_stand_in(self, message: Message) -> None:
        if message.kind not in ("incumbent", "plan"):
            return
        plan = Plan.model_validate_json(message.body)
        if self.best is None or _time_ns(plan) <= _time_ns(self.best):
            self._offer(plan, stands_in=True)

    def _offer(self, plan: Plan, *, stands_in: bool) -> None:
        """Take the best plan. A plan of equal time is taken for its certificates, but not announced."""
        news = self.best is None or _time_ns(plan) < _time_ns(self.best)
        self.best, self.stands_in = plan, stands_in
        if news and self._on_incumbent is not None:
            self._on_incumbent(plan)
