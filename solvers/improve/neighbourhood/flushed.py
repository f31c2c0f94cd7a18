"""Large neighbourhood search over partition, placement, warm-ups, micro-batches, recomputation and order.

The search starts from the best plan and from even ones, and runs in rounds. Each round starts from some plans and takes
steps: the plan that is fastest under the usual warm-ups (``scores``) is judged if it may be better than the best, and
its small moves are scored. A round ends after some steps in a row without an improvement. The first round starts from
all plans. The next rounds free a window of neighbouring stages of the best plan, two, three, ... of them at every
place, and repair it (``repair``); after that, windows are drawn at random. Every improvement gets a better warm-up and
is tried with all numbers of micro-batches. At the end the order of operations is optimised (``optimise_order``) for
plans that may still be better.

All limits are counts and random draws use the request's seed: the same request gives the same plans.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from penstock.solvers.improve.neighbourhood.moves import even_stages, moved
from penstock.solvers.improve.neighbourhood.recut import recuts
from penstock.solvers.improve.neighbourhood.repair import Repairs
from penstock.solvers.improve.neighbourhood.scores import Plan, Score, Scores, Vector
from penstock.solvers.improve.order import optimise_order
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.micro_batches import candidates, dapple_replicas
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders, Schedule

DETOUR = 16
"""Plans up to 1/16 above the best plan are passed through."""
FIRST_PATIENCE, PATIENCE = 24, 4
"""Steps without an improvement that end the first round, and another."""
WIDTHS = (2, 3, 4)
MOST_REPAIRS = 400
IDLE_ROUNDS = 40
"""Rounds in a row without an improvement that end the search."""
MOST_OPERATIONS = 320
"""Largest number of forwards and backwards of a plan whose order is optimised."""
ORDER_EFFORT = 0.3
"""Effort for orders, of all plans together."""
SECOND = 1_000_000_000


def search(problem: Problem, start: JudgedPlan, effort: float, stopped: Callable[[], bool]) -> Iterator[JudgedPlan]:
    """Yield ever better plans than a flushed ``start``. ``effort`` is about seconds of one core, but counted."""
    value_ns = start.value_ns
    if isinstance(start.schedule, Orders):
        overlap = start.overlap_all_reduce
        for plan in recuts(problem, start.allocation, start.schedule, overlap, value_ns, stopped):
            value_ns = plan.value_ns
            yield plan
    neighbourhood = LargeNeighbourhoodSearch(problem, value_ns, int(effort * SECOND), stopped)
    yield from neighbourhood.run(start.allocation if is_movable(start.allocation) else None, start.schedule)


def is_movable(allocation: Allocation) -> bool:
    """Return whether the search can move a plan: one pipeline, no device with two stages, replicas by rows."""
    devices = [d for stage in allocation.stages for d in stage.devices]
    by_rows = all(stage.dispatch == "rows" for stage in allocation.stages)
    return len(allocation.pipelines) == 1 and len(set(devices)) == len(devices) and by_rows


class Item(NamedTuple):
    """A plan to visit, the shortest first; a number breaks ties."""

    value_ns: int
    number: int
    score: Score


@dataclass
class LargeNeighbourhoodSearch:
    """The search of one request.

    ``value_ns``: the best plan's time. ``effort``: in counted ns. ``stopped``: returns True to end the search.
    """

    problem: Problem
    value_ns: int
    effort: int
    stopped: Callable[[], bool] = lambda: False
    best: JudgedPlan | None = None
    _centre: Plan | None = None
    _heap: list[Item] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _hopeful: dict[Plan, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._scores = Scores(self.problem)
        self._batches = sorted({b.num_micro_batches for b in candidates(self.problem, dapple_replicas(self.problem))})

    def run(self, start: Allocation | None, schedule: Schedule | None) -> Iterator[JudgedPlan]:
        """Yield every improvement, beginning from ``start``, if it is not None, and from plans with even stages."""
        shapes = dict.fromkeys([*((start.stages,) if start else ()), *even_stages(self.problem)])
        begin = [(number, stages) for stages in shapes for number in self._batches]
        if start is not None:
            self._centre = start.num_micro_batches, start.stages
            begin += [self._centre, *self._around(self._centre)]
            if isinstance(schedule, Orders) and schedule.name == "early-backward":
                yield from self._mended(self._centre, schedule.warmup)
        yield from self._round(begin, FIRST_PATIENCE)
        yield from self._rounds()
        yield from self._reordered()

    @property
    def _enough(self) -> bool:
        return self._scores.spent >= self.effort or self.stopped()

    @property
    def _horizon_ns(self) -> int:
        """The largest value of a plan whose neighbours are searched: worse plans may lead to better ones."""
        return self.value_ns + self.value_ns // DETOUR

    def _rounds(self) -> Iterator[JudgedPlan]:
        """Yield improvements by windows at every place of the best plan while that helps, then by drawn windows."""
        repairs, idle = Repairs(self.problem, MOST_REPAIRS), 0
        draw = random.Random(self.problem.seed)
        while self._centre is not None and idle < IDLE_ROUNDS and not self._enough:
            before = self.value_ns
            for low, high in _windows(len(self._centre[1])):
                number, stages = self._centre
                plans = ((number, each) for each in repairs.of(stages, low, high, draw))
                yield from self._round(plans, PATIENCE)
                idle = 0 if self.value_ns < before else idle + 1
                if self.value_ns < before or self._enough:
                    break
            else:
                yield from self._drawn(repairs, draw)
                idle += 1

    def _drawn(self, repairs: Repairs, draw: random.Random) -> Iterator[JudgedPlan]:
        """Walk from the repairs of a window whose place and width are drawn."""
        assert self._centre is not None
        number, stages = self._centre
        width = draw.randint(1, len(stages))
        low = draw.randint(0, len(stages) - width)
        yield from self._round([(number, each) for each in repairs.of(stages, low, low + width, draw)], PATIENCE)

    def _round(self, plans: Iterable[Plan], patience: int) -> Iterator[JudgedPlan]:
        """Walk from some plans until ``patience`` steps in a row have found nothing."""
        self._heap = []
        self._push(plans)
        left = patience
        while self._heap and left > 0 and not self._enough:
            score = heapq.heappop(self._heap).score
            left -= 1
            if score.value_ns < self.value_ns:
                trial = self._scores.fitting(score, self.value_ns)
                if trial is not None:
                    left = patience
                    yield self._take(trial)
                    yield from self._mended(score.plan, trial.orders.warmup)
            if score.bound_ns < self._horizon_ns:
                self._push(self._around(score.plan))

    def _push(self, plans: Iterable[Plan]) -> None:
        for score in self._scores.fresh(plans, self._horizon_ns):
            self._hopeful[score.plan] = score.bound_ns
            heapq.heappush(self._heap, Item(score.value_ns, next(self._numbers), score))

    def _around(self, plan: Plan) -> Iterator[Plan]:
        """Yield a plan's small moves, and the plan with all numbers of micro-batches."""
        number, stages = plan
        for each in moved(self.problem, stages):
            yield number, each
        for other in self._batches:
            yield other, stages

    def _take(self, trial: JudgedPlan) -> JudgedPlan:
        self.best, self.value_ns = trial, trial.value_ns
        self._centre = trial.allocation.num_micro_batches, trial.allocation.stages
        return trial

    def _mended(self, plan: Plan, warmup: Vector) -> Iterator[JudgedPlan]:
        """Yield improvements of a plan by other warm-ups; each step takes the best near one, while that helps."""
        while not self._enough:
            near = list(dict.fromkeys(_near(warmup, plan[0])))
            timed = tuple(sorted(zip(self._scores.times(plan, near), near, strict=True)))
            trial = self._scores.fitting(Score(timed[0][0], 0, plan, timed), self.value_ns)
            if trial is None:
                return
            warmup = trial.orders.warmup
            yield self._take(trial)

    def _reordered(self) -> Iterator[JudgedPlan]:
        """Yield improvements by free orders for the plans that may still be better, while the effort lasts."""
        effort = ORDER_EFFORT
        hopeful = sorted(self._hopeful.items(), key=lambda each: each[1])
        for (number, stages), bound_ns in hopeful:
            if bound_ns >= self.value_ns or effort <= 0 or self.stopped():
                return
            plan = single_pipeline(stages, number)
            if 2 * len(stages) * number > MOST_OPERATIONS:
                continue
            optimised = optimise_order(
                self.problem,
                plan,
                None,
                overlap=self.problem.rules.overlap_all_reduce,
                value_ns=self.value_ns,
                effort=effort,
                stopped=self.stopped,
            )
            effort -= optimised.spent
            if optimised.schedule is not None:
                overlap = self.problem.rules.overlap_all_reduce
                yield self._take(JudgedPlan("", plan, optimised.schedule, optimised.value_ns, overlap))


def _windows(stages: int) -> Iterator[tuple[int, int]]:
    """Yield (first, stop) of every window, narrow ones first."""
    for width in sorted({min(width, stages) for width in (1, *WIDTHS)}):
        for low in range(stages - width + 1):
            yield low, low + width


def _near(warmup: Vector, batches: int) -> Iterator[Vector]:
    """Yield warm-ups near one.

    They have up to two micro-batches more or less on one stage, one more on all up to it, or one less from it on.
    """
    for s in range(len(warmup)):
        for change in (1, -1, 2, -2):
            yield _clamped((*warmup[:s], warmup[s] + change, *warmup[s + 1 :]), batches)
        yield _clamped((*(k + 1 for k in warmup[: s + 1]), *warmup[s + 1 :]), batches)
        yield _clamped((*warmup[:s], *(k - 1 for k in warmup[s:])), batches)


def _clamped(warmup: Vector, batches: int) -> Vector:
    """Clamp warm-ups to 1 to ``batches``, and raise each to the warm-up of the stage after it."""
    depths: list[int] = []
    for k in reversed(warmup):
        depths.append(min(max(1, k, *depths[-1:]), batches))
    return tuple(reversed(depths))
