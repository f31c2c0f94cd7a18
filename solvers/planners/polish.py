"""Neighbourhood search from the best plans of a session: cuts, devices, stages, micro-batches, warm-ups.

Every neighbour gets its proven bound (``chain_tables``); the one with the lowest bound is judged and looked around
from next, so the search goes where a plan can still be better than the best, or nearly, and ends when there is none,
or when it has made its number of steps. The bound is tight for most plans (BOUNDS 4.1), hence the walk is guided well. Plans
that stay above their bound under every warm-up are reordered by CP-SAT, where they are small enough.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.solvers.allocation import Allocation, single_pipeline
from penstock.solvers.batches import candidates, dapple_replicas
from penstock.solvers.pins import broken_pin
from penstock.solvers.planners.chain_tables import PlanBounds
from penstock.solvers.planners.closing import close
from penstock.solvers.planners.moves import even_stages, neighbours
from penstock.solvers.planners.proposal import Proposal, unreachable
from penstock.solvers.planners.session import Session
from penstock.solvers.planners.trial import Trial, best_of, best_order
from penstock.solvers.problem import Problem
from penstock.solvers.schedules.early_backward import fitted

NEVER = 2**62
WORK = 40_000
"""Steps × devices × layers of a walk, about."""
LEAST_STEPS, MOST_STEPS = 40, 200
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
    walk = Walk(session.problem, best.value_ns)
    for trial in walk.run([best.allocation] if _movable(best.allocation) else []):
        yield _proposal(session.problem, trial)
        if session.done or session.deadline.passed:
            return


def _proposal(problem: Problem, trial: Trial) -> Proposal:
    overlaps = (problem.rules.overlap_all_reduce,)
    return Proposal(trial.allocation, (trial.orders.name,), overlaps=overlaps, fixed=trial.orders)


def _movable(allocation: Allocation) -> bool:
    """One pipeline, stages on devices of their own, replicas by rows."""
    devices = [d for stage in allocation.stages for d in stage.devices]
    by_rows = all(stage.dispatch == "rows" for stage in allocation.stages)
    return len(allocation.pipelines) == 1 and len(set(devices)) == len(devices) and by_rows


@dataclass
class Walk:
    """One search. ``steps`` were made; ``value_ns`` is that of the best plan known."""

    problem: Problem
    value_ns: int
    steps: int = 0
    best: Trial | None = None
    _tables: dict[int, PlanBounds] = field(default_factory=dict)
    _seen: set[Allocation] = field(default_factory=set)
    _heap: list[tuple[int, int, Allocation]] = field(default_factory=list)

    def run(self, starts: list[Allocation]) -> Iterator[Trial]:
        """Every improvement."""
        numbers = sorted(batch.num_micro_batches for batch in candidates(self.problem, dapple_replicas(self.problem)))
        shapes = dict.fromkeys([*(start.stages for start in starts), *even_stages(self.problem)])
        self._add([single_pipeline(stages, number) for stages in shapes for number in numbers])
        for start in starts:
            self._add(list(neighbours(self.problem, start, numbers)))
        most = min(MOST_STEPS, max(LEAST_STEPS, WORK // (self.problem.num_devices * self.problem.num_layers)))
        judged: list[tuple[int, int, Allocation]] = []
        while self._heap and self.steps < most:
            bound_ns, number, plan = heapq.heappop(self._heap)
            if bound_ns >= self._horizon_ns:
                break
            if unreachable(self.problem, plan) is not None:
                continue
            self.steps += 1
            if bound_ns < self.value_ns:
                judged.append((bound_ns, number, plan))
                trial = best_order(self.problem, plan, self.value_ns)
                if trial is not None:
                    yield self._take(trial)
            self._add(list(neighbours(self.problem, plan, numbers)))
        if self.best is not None:
            yield from self._warm_up(self.best)
        yield from self._reorder(sorted(judged))

    @property
    def _horizon_ns(self) -> int:
        """Plans up to here are looked around from, because better ones may lie behind them."""
        return self.value_ns + self.value_ns // DETOUR

    def _take(self, trial: Trial) -> Trial:
        self.best, self.value_ns = trial, trial.value_ns
        return trial

    def _add(self, plans: list[Allocation]) -> None:
        """Put the new ones that may be better on the heap."""
        fresh = [plan for plan in dict.fromkeys(plans) if plan not in self._seen and self._legal(plan)]
        self._seen.update(fresh)
        for number in sorted({plan.num_micro_batches for plan in fresh}):
            if number not in self._tables:
                self._tables[number] = PlanBounds(self.problem, number)
            group = [plan for plan in fresh if plan.num_micro_batches == number]
            for plan, bound_ns in zip(group, self._tables[number].bounds(group), strict=True):
                if bound_ns < self._horizon_ns:
                    heapq.heappush(self._heap, (bound_ns, len(self._seen) + len(self._heap), plan))

    def _legal(self, plan: Allocation) -> bool:
        """Enough samples for every replica, and pins kept."""
        problem, count = self.problem, plan.num_micro_batches
        least = problem.global_batch_size // count
        if any(stage.replicas * problem.min_slice > least for stage in plan.stages):
            return False
        return not problem.pins or broken_pin(problem, plan) is None

    def _warm_up(self, trial: Trial) -> Iterator[Trial]:
        """One micro-batch more or less in flight on each stage, while that helps."""
        improved = True
        while improved:
            improved = False
            for vector in list(_near(trial.orders.warmup)):
                wanted = fitted(self.problem, trial.allocation, vector)
                better = best_of(self.problem, trial.allocation, [wanted], self.value_ns)
                if better is not None:
                    trial, improved = self._take(better), True
                    yield trial

    def _reorder(self, plans: list[tuple[int, int, Allocation]]) -> Iterator[Trial]:
        """Other orders than warm-ups for the plans that may still be better, while the effort lasts."""
        effort = EFFORT
        for bound_ns, _number, plan in plans:
            if bound_ns >= self.value_ns or effort <= 0:
                return
            if 2 * len(plan.stages) * plan.num_micro_batches <= MOST_OPERATIONS:
                closed = close(self.problem, plan, bound_ns, self.value_ns, effort)
                effort -= closed.spent
                if closed.trial is not None:
                    yield self._take(closed.trial)


def _near(warmup: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for s in range(len(warmup)):
        for change in (1, -1):
            yield (*warmup[:s], max(1, warmup[s] + change), *warmup[s + 1 :])
