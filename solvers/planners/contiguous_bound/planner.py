"""``relax``: a lower bound on every plan of one contiguous pipeline, and the plans that it belongs to (BOUNDS part I).

The number of micro-batches whose bound is lowest is searched first, until its plan's bound is reached; its plans are
simulated under the usual warm-ups. Then the other numbers follow, while their bounds are below the best plan. What no
search could rule out keeps its bound. The proven bound is the least of all bounds and of the best plan's time.

Labels do not count cables that several pairs of stages share. So where the best plan stays above its bound, more plans
of the labels are timed, with other cuts and devices too. At last the plans with the least bounds and times are
reordered, to come closer to their bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.contiguous.devices_of_labels import allocations
from penstock.solvers.bounds.contiguous.label_search import BatchSearch
from penstock.solvers.bounds.contiguous.least_bound import further_ns
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.coverage import class_bound, contiguous
from penstock.solvers.grid.block_partition import thinnest
from penstock.solvers.improve.neighbourhood.moves import shifted
from penstock.solvers.improve.neighbourhood.scores import Score, Scores
from penstock.solvers.improve.order import optimise_order
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.micro_batches import Batch, batches_tried
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.planners.contiguous_bound.warm_ups import climb
from penstock.solvers.planners.proposal import Proposal, proposed, under, unreachable
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.support.fitting_orders import best_order

EFFORT = Option("effort", 30, "labels times grid points of all searches together, in millions", low=1)
OPTIONS = (EFFORT,)
MILLION = 1_000_000
LONGEST_NS = 2**52
"""A time longer than any plan: 52 days."""
MOST_DEVICES = 256
NEAR = 100
"""The share of a bound, 1/100, by which the best plan has to exceed it before more plans of the labels are timed."""
PATHS, SHIFTED, MOST_SHIFTED = 32, 4, 64
"""The plans timed for each number of micro-batches; the plans shifted, up to so many devices."""
DETOUR = 16
"""The share of the best plan's time, 1/16, by which a plan may exceed it and still be shifted."""
PLANS, TIMED = 8, 4
"""The numbers of plans that are reordered: with the least bounds, and with the least times."""
JUDGED, SHARED_JUDGED, LEAST_WARM_UPS = 240_000, 60_000, 20
"""Limits on a plan's warm-ups: simulated passes in private and in shared networks, and the least number of warm-ups.

A pass is one micro-batch through one stage. Simulation takes longer in shared networks.
"""
LARGEST, ORDERS, OF_A_PLAN = 1024, 0.4, 0.2
"""Limits on the job shop: the most passes of a plan, and the effort for all plans and for each plan."""


@dataclass
class Relaxation:
    """One search. ``value_ns`` is the time of the best plan so far; ``effort`` is the most that searches may spend.

    ``plans``: each plan that a bound belongs to, with this bound; ``timed``: other plans that were timed in bulk.
    """

    problem: Problem
    effort: int
    value_ns: int = LONGEST_NS
    best: JudgedPlan | None = None
    searches: list[BatchSearch] = field(default_factory=list)
    plans: dict[Allocation, int] = field(default_factory=dict)
    timed: list[Score] = field(default_factory=list)

    @property
    def bound_ns(self) -> int:
        """The proven bound: every plan in the model takes at least this time."""
        return min([self.value_ns, *(search.proven_ns for search in self.searches if not search.empty)])

    @property
    def bound(self) -> Bound:
        """The bound with its coverage: plans with one of the numbers of micro-batches that were searched."""
        numbers = (search.batch.num_micro_batches for search in self.searches)
        return class_bound(
            self.problem, contiguous(self.problem, numbers), self.bound_ns, "label search over all plans"
        )

    def run(self) -> Iterator[None]:
        """Run all searches, then find better orders.

        Yields after every counted piece of work, so that the caller can stop.
        """
        yield from self.prove()
        yield from self._time_paths()
        yield from self._reorder()

    def prove(self) -> Iterator[None]:
        """Run all searches."""
        self.searches = self.searches_of(batches_tried(self.problem))
        while True:
            spent = sum(search.steps for search in self.searches)
            below = [s for s in self.searches if not s.closed and s.proven_ns < self.value_ns]
            if not below or spent >= self.effort:
                break
            yield from self._look(min(below, key=lambda search: search.bound_ns))
            yield
        yield from self._carry()

    def _carry(self) -> Iterator[None]:
        """Tighten the bounds by the cables that stages share, while that may raise the least bound."""
        while waiting := [search for search in self.searches if not search.empty]:
            lowest = min(waiting, key=lambda search: search.proven_ns)
            if lowest.carried_ns >= 0 or lowest.proven_ns >= self.value_ns:
                return
            lowest.carry(self.value_ns)
            yield

    def _time_paths(self) -> Iterator[None]:
        """Search the plans that labels leave open.

        They are timed in bulk with the load on shared cables, which labels do not count.
        """
        scores = Scores(self.problem)
        for search in sorted(self.searches, key=lambda search: search.proven_ns):
            spent = sum(each.steps for each in self.searches)
            if search.empty or search.proven_ns + search.proven_ns // NEAR >= self.value_ns or spent >= self.effort:
                continue
            paths = yield from search.paths(self.value_ns, PATHS)
            number = search.batch.num_micro_batches
            plans = [(number, plan.stages) for path in paths for plan in allocations(self.problem, path, number)]
            timed = scores.fresh(plans, self.value_ns + self.value_ns // DETOUR)
            for score in timed[:SHIFTED]:
                timed += self._shift(scores, score)
            for score in sorted(timed, key=lambda score: score.value_ns):
                self._take(scores.fitting(score, self.value_ns))
            self.timed += timed
            yield

    def _shift(self, scores: Scores, score: Score) -> Iterator[Score]:
        """Shift cuts and exchange devices of a plan as long as that makes it quicker."""
        while self.problem.num_devices <= MOST_SHIFTED:
            number, stages = score.plan
            near = scores.fresh(((number, each) for each in shifted(self.problem, stages)), score.value_ns)
            if not near:
                return
            score = near[0]
            yield score

    def searches_of(self, batches: Iterable[Batch]) -> list[BatchSearch]:
        """Return a search for each number of micro-batches."""
        links = Links(self.problem)
        return [BatchSearch(self.problem, batch, links) for batch in batches]

    def _look(self, search: BatchSearch) -> Iterator[None]:
        below_ns = min(self.value_ns, further_ns(self.problem, search.bound_ns))
        path = yield from search.step(below_ns)
        for plan in () if path is None else allocations(self.problem, path, search.batch.num_micro_batches):
            if unreachable(self.problem, plan) is None:
                self.plans[plan] = search.own_bound_ns
                self._take(best_order(self.problem, plan, self.value_ns).plan)

    def _take(self, trial: JudgedPlan | None) -> None:
        if trial is not None and trial.value_ns < self.value_ns:
            self.best, self.value_ns = trial, trial.value_ns

    def _reorder(self) -> Iterator[None]:
        """Change the order of the plans with the least times and bounds: try more warm-ups, then any order."""
        timed = sorted(self.timed, key=lambda score: score.value_ns)[:TIMED]
        plans = dict(sorted(self.plans.items(), key=lambda each: each[1])[:PLANS])
        plans |= {single_pipeline(score.plan[1], score.plan[0]): score.bound_ns for score in timed}
        for plan, bound_ns in plans.items():
            start = best_order(self.problem, plan, LONGEST_NS).plan if bound_ns < self.value_ns else None
            if start is not None:
                passes = SHARED_JUDGED if self.problem.rules.shared else JUDGED
                most = max(LEAST_WARM_UPS, passes // _passes(plan))
                self._take(climb(self.problem, start, bound_ns, most))
                yield
        effort = ORDERS
        for plan, bound_ns in plans.items():
            if _passes(plan) <= LARGEST and effort > 0 and self.bound_ns < self.value_ns and bound_ns < self.value_ns:
                effort -= self._optimise_order(plan, min(effort, OF_A_PLAN))
                yield

    def _optimise_order(self, plan: Allocation, effort: float) -> float:
        """Search for an order of a plan that beats the best plan, by job shop; return the effort spent."""
        start = self.best.orders if self.best is not None and self.best.allocation == plan else None
        overlap = self.problem.rules.overlap_all_reduce
        outcome = optimise_order(self.problem, plan, start, overlap=overlap, value_ns=self.value_ns, effort=effort)
        if outcome.schedule is not None:
            self._take(JudgedPlan("", plan, outcome.schedule, outcome.value_ns, overlap))
        return outcome.spent


def _passes(plan: Allocation) -> int:
    """Return the number of passes of micro-batches through stages."""
    return len(plan.stages) * plan.num_micro_batches


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield ever better plans, each with the bound proven by then; repeat the best plan where only the bound rose.

    While nothing fits, yield the plan with the most stages and the smallest micro-batches, so that the simulator
    reports what is lacking. Raises ``UnsupportedRequest`` for more devices than it can search.
    """
    problem = setting.problem
    if problem.num_devices > MOST_DEVICES:
        raise UnsupportedRequest(
            f"planner 'relax' searches plans on at most {MOST_DEVICES} devices; there are {problem.num_devices}",
            remedy="planner auto or spread",
        )
    relaxation = Relaxation(problem, EFFORT.of(options) * MILLION)
    plain = [under(problem, each, ("early-backward",), "A") for each in thinnest(problem)[:1]]
    yield from plain
    for _piece in relaxation.run():
        best = relaxation.best
        if best is None:
            yield from (proposal._replace(proven=relaxation.bound) for proposal in plain)
        else:
            yield proposed(best, relaxation.bound)
