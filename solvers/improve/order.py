"""Search for a better order of one allocation's operations, or for the proof that none exists.

These methods run in this order, each for a counted part of the effort, until the bound is reached:

* for plans of more than ``FEW`` operations tabu search from the known order (BOUNDS Part II, section 3): the shorter
  the known step, the quicker the other methods are (section 4). Then the suffix search (``suffix``), for whole
  backwards and stages on separate devices, first with transfers as in its model, then under the judge's rules;
* for plans of at most ``MANY`` operations CP-SAT (ALGORITHMS 7.8);
* where the model's optimum runs longer under the judge, tabu search from its order, and CP-SAT under the judge's rules
  where its model has them.

Every order is simulated; a bound covers every order of the same operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from penstock.solvers.bounds import suffix
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.improve import job_shop as jobshop
from penstock.solvers.improve import tabu
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.support.fitting_orders import judged

FEW, MANY = 160, 5_000
STATES = 600_000
"""States of the suffix search that count as one unit of effort."""
SEARCHED = (0.1, 0.6)
"""Shares of the remaining effort for the suffix searches, in order."""
MOVED = 6_000_000
"""Operations of the orders that tabu search times that count as one unit of effort."""
MOVING, ROUNDS = 0.25, 4
"""The part of the effort for tabu search, and its number of rounds."""


class OptimisedOrder(NamedTuple):
    """``schedule``: a better order that fits, or None; ``value_ns``: its time, or without it the time to beat.

    ``bound``: for all schedules of the allocation with these operations. ``spent``: the effort used.
    """

    schedule: Orders | None
    value_ns: int
    bound: Bound
    spent: float


Listener = Callable[[Orders, int], None]


def optimise_order(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule | None,
    *,
    overlap: bool,
    value_ns: int,
    effort: float,
    update_rule: UpdateRule = "synchronous",
    stopped: Callable[[], bool] = jobshop.never,
    on_better: Listener | None = None,
) -> OptimisedOrder:
    """Return an order of the allocation that takes less than ``value_ns`` and fits, and a bound of all its orders.

    ``schedule`` is the best judged order, which takes ``value_ns``; it defines the operations (None: no order is known,
    backwards are whole). ``effort`` is about seconds of one core, but counted. ``stopped`` is called between pieces
    of work and during CP-SAT's search, which it ends. Patterns, and pipelines that average, get their analytic bound
    and nothing else.
    """
    if problem.rules.overlap_all_reduce != overlap:
        problem = replace(problem, rules=replace(problem.rules, overlap_all_reduce=overlap))
    start = jobshop.whole_backwards(allocation) if schedule is None else schedule
    best = OptimisedOrder(None, value_ns, schedule_bound(problem, allocation, start, update_rule), 0.0)
    if update_rule != "synchronous" or not isinstance(start, Orders):
        return best
    order_search = _OrderSearch(problem, allocation, start, schedule is not None, effort, stopped, on_better, best)
    order_search.run()
    return order_search.best


class _OrderSearch:
    """The methods for one allocation, the effort that is left and the best order so far."""

    def __init__(
        self,
        problem: Problem,
        allocation: Allocation,
        orders: Orders,
        is_judged: bool,
        effort: float,
        stopped: Callable[[], bool],
        on_better: Listener | None,
        best: OptimisedOrder,
    ) -> None:
        self.problem, self.allocation, self.orders, self.is_judged = problem, allocation, orders, is_judged
        self.effort, self.stopped, self.on_better, self.best = effort, stopped, on_better, best
        self.operations = sum(len(row.operations) for row in orders.rows)

    def run(self) -> None:
        """Run all methods that apply."""
        if self.operations > FEW:
            if self.is_judged:
                self._move(self.orders)
            self._search_suffixes()
        if self.operations <= MANY:
            for as_judged in (False, True):
                self._order(as_judged)

    @property
    def _left(self) -> float:
        """The remaining effort; 0 once the bound is reached or the search is stopped."""
        if self.best.bound.bound_ns >= self.best.value_ns or self.stopped():
            return 0.0
        return max(0.0, self.effort - self.best.spent)

    def _move(self, start: Orders) -> None:
        """Run rounds of tabu search from the best order, the first from ``start``, each with another seed."""
        steps = int(MOVING * self._left * MOVED) // (max(1, self.operations) * ROUNDS)
        for turn in range(ROUNDS if steps else 0):
            if self._left <= 0:
                return
            orders = start if turn == 0 else self.best.schedule or self.orders
            how: dict[str, Any] = {"steps": steps, "seed": self.problem.seed + turn, "stopped": self.stopped}
            improvement = tabu.improve(self.problem, self.allocation, orders, **how)
            self._note(0, "", improvement.steps * self.operations / MOVED)
            self._offer(improvement.orders)

    def _search_suffixes(self) -> None:
        """Run the suffix searches, first briefly: a search cannot be stopped, and mostly a short one is enough."""
        times = StageTimes(self.problem, self.allocation, self.orders)
        if not suffix.takes(times):
            return
        if self._searched(as_judged=False) and suffix.judgeable(times):
            self._searched(as_judged=True)

    def _searched(self, *, as_judged: bool) -> bool:
        """Run suffix searches, and return whether one of them finished."""
        for part in SEARCHED:
            states = int(part * self._left * STATES)
            if states == 0:
                return False
            at_most_ns = self.best.value_ns - 1
            answer = suffix.prove(self.problem, self.allocation, at_most_ns, states, as_judged=as_judged)
            self._note(answer.bound_ns, "exact suffix search", answer.spent / STATES)
            if answer.orders is not None:
                self._offer(answer.orders)
            if answer.proven:
                return True
        return False

    def _order(self, as_judged: bool) -> None:
        if self._left <= 0:
            return
        hint = self._known_step()
        at_most = self.best.value_ns - (hint is None)
        bound_ns = self.best.bound.bound_ns
        question = jobshop.Question(
            self.problem, self.allocation, at_most, bound_ns, as_judged, self._left, self.orders
        )
        if as_judged and not question.shop().judgeable:
            return
        answer = jobshop.solve(question, hint, stopped=self.stopped, on_orders=self._offer)
        self._note(answer.bound_ns, "job shop by CP-SAT", answer.spent)
        if answer.orders is not None:
            self._offer(answer.orders)
            if self.operations > FEW:
                self._move(answer.orders)

    def _known_step(self) -> Timeline | None:
        """Return the judged step of the best known order, for CP-SAT to begin with."""
        orders = self.best.schedule or self.orders
        if self.best.schedule is None and not self.is_judged:
            return None
        timeline = simulate(self.problem, self.allocation, orders)
        return timeline if timeline.time_per_global_batch_ns == self.best.value_ns else None

    def _note(self, bound_ns: int, method: str, spent: float) -> None:
        bound = self.best.bound
        if bound_ns > bound.bound_ns:
            bound = replace(bound, bound_ns=bound_ns, method=method)
        self.best = self.best._replace(bound=bound, spent=self.best.spent + spent)

    def _offer(self, orders: Orders) -> None:
        trial = judged(self.problem, self.allocation, orders, self.best.value_ns).plan
        if trial is not None:
            self.best = self.best._replace(schedule=orders, value_ns=trial.value_ns)
            if self.on_better is not None:
                self.on_better(orders, trial.value_ns)
