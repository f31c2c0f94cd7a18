"""Neighbourhood search from the best plans of a session: cuts, devices, stages, micro-batches, warm-ups.

Every neighbour gets its proven bound (``chain_tables``), and an estimate: the bound, as many times as the plan that it
is near took its own. The one with the least estimate is judged and looked around from next, if its bound is below the
best plan, or nearly; the search ends when there is none, or when it has made its number of steps. Plans that stay above
their bound under every warm-up are reordered by CP-SAT, where they are small enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from penstock.solvers.allocation import Allocation, single_pipeline
from penstock.solvers.batches import candidates, dapple_replicas
from penstock.solvers.closing import close
from penstock.solvers.pins import broken_pin
from penstock.solvers.planners.chain_tables import PlanBounds
from penstock.solvers.planners.moves import even_stages, neighbours
from penstock.solvers.planners.proposal import Proposal, unreachable
from penstock.solvers.planners.session import Session
from penstock.solvers.planners.trial import Outcome, Trial, best_of, best_order
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders, Schedule
from penstock.solvers.schedules.early_backward import fitted

NEVER = 2**62
WORK = 24_000
"""Steps × devices × layers of a walk, about."""
LEAST_STEPS, MOST_STEPS = 30, 200
DETOUR = 16
"""Plans whose bound is up to 1/16 above the best plan are passed through."""
MOST_OPERATIONS = 320
"""Forwards and backwards of a plan whose order CP-SAT is asked for."""
EFFORT = 0.3
"""CP-SAT's deterministic time for all plans together."""


def polish(session: Session) -> Iterator[Proposal]:
    """Every improvement of the session's best plan."""
    best = session.best
    if best is None or best.update_rule != "synchronous":
        return
    walk = Walk(session.problem, best.value_ns, lambda: session.done or session.deadline.passed)
    for trial in walk.run(best.allocation if _movable(best.allocation) else None, best.schedule):
        yield _proposal(session.problem, trial)


def _proposal(problem: Problem, trial: Trial) -> Proposal:
    overlaps = (problem.rules.overlap_all_reduce,)
    return Proposal(trial.allocation, (trial.orders.name,), overlaps=overlaps, fixed=trial.orders)


def _movable(allocation: Allocation) -> bool:
    """One pipeline, stages on devices of their own, replicas by rows."""
    devices = [d for stage in allocation.stages for d in stage.devices]
    by_rows = all(stage.dispatch == "rows" for stage in allocation.stages)
    return len(allocation.pipelines) == 1 and len(set(devices)) == len(devices) and by_rows


class Item(NamedTuple):
    """A plan to look at: what it may take, a number that breaks ties, its bound, itself."""

    estimate_ns: int
    number: int
    bound_ns: int
    plan: Allocation


@dataclass
class Walk:
    """One search. ``steps`` were made; ``value_ns`` is that of the best plan known; ``stopped``: enough."""

    problem: Problem
    value_ns: int
    stopped: Callable[[], bool] = lambda: False
    steps: int = 0
    best: Trial | None = None
    _tables: dict[int, PlanBounds] = field(default_factory=dict)
    _seen: set[Allocation] = field(default_factory=set)
    _heap: list[Item] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def run(self, start: Allocation | None, schedule: Schedule) -> Iterator[Trial]:
        """Every improvement on the plan to start from, if there is one, and on those with even stages."""
        problem = self.problem
        numbers = sorted(batch.num_micro_batches for batch in candidates(problem, dapple_replicas(problem)))
        shapes = dict.fromkeys([*((start.stages,) if start else ()), *even_stages(problem)])
        self._add([single_pipeline(stages, number) for stages in shapes for number in numbers], (1, 1))
        if start is not None:
            (bound_ns,) = self._bounds([start])
            self._add(list(neighbours(problem, start, numbers)), (self.value_ns, bound_ns))
        judged = []
        for item in self._steps():
            outcome = Outcome(item.estimate_ns)
            if item.bound_ns < self.value_ns:
                judged.append((item.bound_ns, item.number, item.plan))
                outcome = best_order(problem, item.plan, self.value_ns)
                if outcome.trial is not None:
                    yield self._take(outcome.trial)
            self._add(list(neighbours(problem, item.plan, numbers)), (outcome.value_ns, item.bound_ns))
        if self.best is not None:
            yield from self._warm_up(self.best.allocation, self.best.orders.warmup)
        elif start is not None and isinstance(schedule, Orders) and schedule.warmup:
            yield from self._warm_up(start, schedule.warmup)
        yield from self._reorder(sorted(judged))

    def _steps(self) -> Iterator[Item]:
        """The plan with the least estimate, again and again."""
        most = min(MOST_STEPS, max(LEAST_STEPS, WORK // (self.problem.num_devices * self.problem.num_layers)))
        while self._heap and self.steps < most and not self.stopped():
            item = heapq.heappop(self._heap)
            if item.bound_ns < self._horizon_ns and unreachable(self.problem, item.plan) is None:
                self.steps += 1
                yield item

    @property
    def _horizon_ns(self) -> int:
        """Plans up to here are looked around from, because better ones may lie behind them."""
        return self.value_ns + self.value_ns // DETOUR

    def _take(self, trial: Trial) -> Trial:
        self.best, self.value_ns = trial, trial.value_ns
        return trial

    def _add(self, plans: list[Allocation], ratio: tuple[int, int]) -> None:
        """Put new plans that may be better on the heap; ``ratio``: value and bound of the plan that they are near."""
        fresh = [plan for plan in dict.fromkeys(plans) if plan not in self._seen and self._legal(plan)]
        self._seen.update(fresh)
        for plan, bound_ns in zip(fresh, self._bounds(fresh), strict=True):
            if bound_ns < self._horizon_ns:
                estimate_ns = bound_ns * ratio[0] // max(1, ratio[1])
                heapq.heappush(self._heap, Item(estimate_ns, next(self._numbers), bound_ns, plan))

    def _bounds(self, plans: list[Allocation]) -> list[int]:
        found: dict[Allocation, int] = {}
        for number in sorted({plan.num_micro_batches for plan in plans}):
            if number not in self._tables:
                self._tables[number] = PlanBounds(self.problem, number)
            group = [plan for plan in plans if plan.num_micro_batches == number]
            found.update(zip(group, self._tables[number].bounds(group), strict=True))
        return [found[plan] for plan in plans]

    def _legal(self, plan: Allocation) -> bool:
        """Enough samples for every replica, and pins kept."""
        problem = self.problem
        least = problem.global_batch_size // plan.num_micro_batches
        if any(stage.replicas * problem.min_slice > least for stage in plan.stages):
            return False
        return not problem.pins or broken_pin(problem, plan) is None

    def _warm_up(self, allocation: Allocation, warmup: tuple[int, ...]) -> Iterator[Trial]:
        """One micro-batch more or less in flight on each stage, while that helps."""
        improved = True
        while improved and not self.stopped():
            improved = False
            for vector in list(_near(warmup)):
                wanted = fitted(self.problem, allocation, vector)
                better = best_of(self.problem, allocation, [wanted], self.value_ns).trial
                if better is not None:
                    warmup, improved = better.orders.warmup, True
                    yield self._take(better)

    def _reorder(self, plans: list[tuple[int, int, Allocation]]) -> Iterator[Trial]:
        """Other orders than warm-ups for the plans that may still be better, while the effort lasts."""
        effort = EFFORT
        for bound_ns, _number, plan in plans:
            if bound_ns >= self.value_ns or effort <= 0 or self.stopped():
                return
            if 2 * len(plan.stages) * plan.num_micro_batches <= MOST_OPERATIONS:
                closed = close(
                    self.problem,
                    plan,
                    None,
                    overlap=self.problem.rules.overlap_all_reduce,
                    value_ns=self.value_ns,
                    effort=effort,
                    stopped=self.stopped,
                )
                effort -= closed.spent
                if closed.schedule is not None:
                    yield self._take(Trial(closed.value_ns, plan, closed.schedule))


def _near(warmup: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for s in range(len(warmup)):
        for change in (1, -1):
            yield (*warmup[:s], max(1, warmup[s] + change), *warmup[s + 1 :])
