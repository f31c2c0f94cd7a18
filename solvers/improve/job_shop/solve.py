"""Run CP-SAT, and read its answer back as orders."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from penstock.solvers.improve.job_shop.shop import Shop, whole_backwards
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.model.timeline import Timeline

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


EFFORT = 5.0
"""CP-SAT's deterministic time for a question."""
SHORT = 8
"""Each shorter horizon may take one part in ``SHORT`` of the remaining effort."""
POLL_S = 0.1
NAME = "job-shop"


@dataclass(frozen=True, eq=False)
class Question:
    """A search for a step of at most ``at_most_ns``, where no step is shorter than ``at_least_ns``.

    ``schedule`` defines each row's operations; their order does not matter (None: whole backwards, and devices with
    the same stages share a row). ``as_judged``: no operation or transfer waits on purpose, and a channel carries the
    transfer that is ready first, as in the judge's step. With ``workers`` CP-SAT runs several search strategies in
    turn.
    """

    problem: Problem
    allocation: Allocation
    at_most_ns: int
    at_least_ns: int = 0
    as_judged: bool = False
    effort: float = EFFORT
    schedule: Orders | None = None
    workers: int = 1

    def shop(self) -> Shop:
        """Return the operations to order."""
        return Shop(self.problem, self.allocation, self.schedule or whole_backwards(self.allocation))


@dataclass(frozen=True)
class Answer:
    """The result of a question: no step takes less than ``bound_ns``.

    ``orders``: the best orders (None: no solution exists, or no solution yet). ``proven``: the bound is the optimum of
    the model, or no step is within ``at_most_ns``. ``spent``: deterministic time.
    """

    bound_ns: int
    orders: Orders | None
    proven: bool
    spent: float


Listener = Callable[[Orders], None]


def never() -> bool:
    """Return False: the default ``stopped``, for solves that no caller interrupts."""
    return False


def solve(
    question: Question,
    hint: Timeline | None = None,
    *,
    stopped: Callable[[], bool] = never,
    on_orders: Listener | None = None,
) -> Answer:
    """Return the shortest step of an allocation, or a bound on it.

    ``hint`` is a judged step of the question's schedule to begin with; it is the answer if CP-SAT finds nothing
    better. The horizon rises, because the optimum is mostly at or near the known bound, and short horizons are decided
    quickly. ``on_orders`` is called with every solution. The same question has the same answer unless ``stopped`` ends
    it, because the seed is the request's, deterministic time is limited, and workers take turns.
    """
    shop = question.shop()
    low, gap = question.at_least_ns, question.at_most_ns - question.at_least_ns
    answer = Answer(low, None, True, 0.0)
    horizons = sorted({low, low + gap // 4, low + gap // 2, low + gap}) if gap >= 0 else []
    for horizon in horizons:
        last = horizon == horizons[-1]
        effort = question.effort - answer.spent
        rest = replace(question, at_most_ns=horizon, at_least_ns=max(low, answer.bound_ns))
        begin = hint if hint is not None and hint.time_per_global_batch_ns <= horizon else None
        run = _Run(shop, replace(rest, effort=effort if last else effort / SHORT), begin, stopped, on_orders)
        attempt = run.answer()
        answer = Answer(
            bound_ns=max(answer.bound_ns, attempt.bound_ns),
            orders=attempt.orders,
            proven=attempt.proven and (last or attempt.orders is not None),
            spent=answer.spent + attempt.spent,
        )
        if answer.orders is not None or answer.spent >= question.effort or stopped():
            break
    if answer.orders is None and hint is not None and hint.time_per_global_batch_ns <= question.at_most_ns:
        rows = tuple(Row(track.devices, track.operations) for track in hint.tracks)
        return replace(answer, orders=Orders(NAME, rows), proven=answer.bound_ns >= hint.time_per_global_batch_ns)
    return answer


class _Run:
    """The solve within one horizon."""

    def __init__(
        self,
        shop: Shop,
        question: Question,
        hint: Timeline | None,
        stopped: Callable[[], bool],
        on_orders: Listener | None,
    ) -> None:
        from penstock.solvers.improve.job_shop.as_judged import keep_the_judges_rules
        from penstock.solvers.improve.job_shop.hint import give_hint
        from penstock.solvers.improve.job_shop.model import MOST_UNITS, Model

        self.question, self.stopped, self.on_orders = question, stopped, on_orders
        unit = 1 + question.at_most_ns // MOST_UNITS
        self.model = model = Model(shop, question.at_most_ns // unit, unit)
        model.build()
        model.cp.add(model.makespan >= question.at_least_ns // unit)
        if question.as_judged:
            keep_the_judges_rules(model)
        model.cp.minimize(model.makespan)
        if hint is not None:
            give_hint(model, hint)

    def answer(self) -> Answer:
        """Return CP-SAT's answer."""
        from ortools.sat.python import cp_model

        question, model = self.question, self.model
        solver = cp_model.CpSolver()
        _set_up(solver, question)
        with _Watch(solver, self.stopped):
            status = solver.solve(model.cp, self._callback())
        spent = solver.deterministic_time
        assert status != cp_model.MODEL_INVALID, model.cp.validate()
        if status == cp_model.INFEASIBLE:
            return Answer(question.at_most_ns + 1, None, True, spent)
        reached, bound = solver.best_objective_bound, question.at_least_ns
        if math.isfinite(reached):
            bound = max(bound, round(reached) * model.unit_ns)
        if status == cp_model.UNKNOWN:
            return Answer(bound, None, False, spent)
        return Answer(bound, self._orders(solver.value), status == cp_model.OPTIMAL, spent)

    def _orders(self, value: Callable[[Any], int]) -> Orders:
        steps = self.model.steps.items()
        return self.model.shop.orders(NAME, [(each, value(step.start), step.size) for each, step in steps])

    def _callback(self) -> cp_model.CpSolverSolutionCallback | None:
        from ortools.sat.python import cp_model

        if self.on_orders is None:
            return None
        report, orders = self.on_orders, self._orders

        class Callback(cp_model.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                report(orders(self.value))

        return Callback()


def _set_up(solver: cp_model.CpSolver, question: Question) -> None:
    parameters = solver.parameters
    parameters.num_workers = question.workers
    parameters.interleave_search = question.workers > 1
    parameters.linearization_level = 0
    parameters.cp_model_probing_level = 0
    parameters.random_seed = question.problem.seed % 2**31
    parameters.max_deterministic_time = max(0.0, question.effort)


class _Watch:
    """Stops a solver soon after ``stopped`` returns True, also during CP-SAT's own work."""

    def __init__(self, solver: cp_model.CpSolver, stopped: Callable[[], bool]) -> None:
        self._solver, self._stopped, self._done = solver, stopped, Event()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        if self._stopped is not never:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(POLL_S):
            if self._stopped():
                self._solver.stop_search()
