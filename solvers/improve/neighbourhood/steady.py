"""Local search over plans without a flush: cuts, replicas and how they are fed, devices, recomputation, micro-batches.

The search begins from the best plan and from even stages, and runs in rounds. A round is a walk: the plan with the most
promising period is judged and the periods of its small moves are computed. It ends after some plans in a row that were
no better than the best plan. The next rounds begin a few random moves away from the best plan. A plan's period is the
period of ``eager``'s pattern, from the cycles of its dependencies: periods order the plans and prove nothing.

All limits are counts and random draws use the request's seed: the same request gives the same plans.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import NamedTuple

from penstock.schemas.errors import PenstockError
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.improve.neighbourhood.moves import Stages, even_stages, moved, replaced
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.micro_batches import candidates, dapple_replicas
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.periodic.eager import (
    LONGEST_TURN,
    eager,
    fitted_depth,
    lacking_bytes,
    shortest_depths,
    turn_of,
    usual_depths,
)

DETOUR = 16
"""Plans that promise up to 1/16 more than the best plan takes are judged and passed through."""
FIRST_PATIENCE, PATIENCE = 32, 8
"""Judged plans without an improvement that end the first round, and another."""
IDLE_ROUNDS = 24
"""Rounds in a row without an improvement that end the search."""
KICKS = 4
"""The most random moves before a round."""
SCORED_NS, JUDGED_NS = 150_000, 6_000
"""Counted ns: for the period of a plan, per stage; for a judged plan, per forward and backward of a turn."""
SECOND = 1_000_000_000

Plan = tuple[int, Stages]
"""The number of micro-batches, and stages that share no devices."""


class Item(NamedTuple):
    """A plan to visit, the shortest first; a number breaks ties. ``depths``: the most promising ones."""

    promise_ns: int
    number: int
    plan: Plan
    depths: tuple[tuple[int, ...], ...]


def search(
    problem: Problem,
    rule: UpdateRule,
    effort: float,
    incumbent: Callable[[], JudgedPlan | None],
    stopped: Callable[[], bool],
) -> Iterator[tuple[Allocation, Pattern]]:
    """Yield plans under the rule that may be better than the incumbent; the caller judges each before the next.

    ``effort`` is about seconds of one core, but counted.
    """
    yield from IteratedLocalSearch(problem, rule, int(effort * SECOND), incumbent, stopped).run()


@dataclass
class IteratedLocalSearch:
    """The search of one request. ``effort`` in counted ns; ``_centre`` is the best plan that can be moved.

    ``_least_ns``: while no such plan exists, the least time that any plan has promised.
    """

    problem: Problem
    rule: UpdateRule
    effort: int
    incumbent: Callable[[], JudgedPlan | None]
    stopped: Callable[[], bool]
    _centre: Plan | None = None
    _least_ns: int = NEVER_NS
    _heap: list[Item] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _seen: set[Plan] = field(default_factory=set)

    def __post_init__(self) -> None:
        splits = candidates(self.problem, dapple_replicas(self.problem))
        self._batches = sorted({batch.num_micro_batches for batch in splits})

    def run(self) -> Iterator[tuple[Allocation, Pattern]]:
        """Yield the plans that promise to be better."""
        self._take()
        even = [(number, stages) for stages in self._even() for number in self._batches]
        begin = [*even, *self._around(self._centre)] if self._centre is not None else even
        yield from self._round(begin, FIRST_PATIENCE)
        draw, idle = random.Random(self.problem.seed), 0
        while self._centre is not None and idle < IDLE_ROUNDS and not self._enough:
            before = self._value_ns
            kicked = self._kicked(self._centre, draw)
            yield from self._round([kicked, *self._around(kicked)], PATIENCE)
            idle = 0 if self._value_ns < before else idle + 1

    @property
    def _enough(self) -> bool:
        return self.effort <= 0 or self.stopped()

    @property
    def _value_ns(self) -> int:
        best = self.incumbent()
        return NEVER_NS if best is None else best.value_ns

    def _take(self) -> None:
        """Begin from the incumbent, if it can be moved."""
        best = self.incumbent()
        if best is not None and best.update_rule == self.rule and _is_line(best.allocation):
            self._centre = best.allocation.num_micro_batches, best.allocation.stages

    def _even(self) -> Iterator[Stages]:
        """Yield even stages on all devices, on each kind's and on each node's; replicas by rows and in turn."""
        devices = self.problem.devices
        groups = [tuple(range(len(devices)))]
        groups += [tuple(d for d, each in enumerate(devices) if each.kind == kind) for kind in self._kinds()]
        groups += [tuple(node) for node in self.problem.nodes()]
        for group in dict.fromkeys(groups):
            for stages in even_stages(self.problem, group):
                yield stages
                yield _in_turn(stages)

    def _kinds(self) -> list[str]:
        return sorted({device.kind for device in self.problem.devices})

    def _round(self, plans: Iterable[Plan], patience: int) -> Iterator[tuple[Allocation, Pattern]]:
        """Walk from some plans until ``patience`` in a row were no better."""
        self._heap = []
        self._push(plans)
        left = patience
        while self._heap and left > 0 and not self._enough:
            item = heapq.heappop(self._heap)
            if item.promise_ns > self._horizon_ns:
                return
            before = self._value_ns
            if item.promise_ns <= before + before // DETOUR:
                yield from self._proposals(item)
            left -= 1
            if self._value_ns < before:
                self._take()
                left = patience
            self._push(self._around(item.plan))

    @property
    def _horizon_ns(self) -> int:
        """The largest time of a plan whose neighbours are searched: worse plans may lead to better ones."""
        known_ns = self._value_ns if self._centre is not None else max(self._value_ns, self._least_ns)
        return known_ns + known_ns // DETOUR

    def _proposals(self, item: Item) -> Iterator[tuple[Allocation, Pattern]]:
        number, stages = item.plan
        allocation = single_pipeline(stages, number)
        for depth in item.depths:
            self.effort -= JUDGED_NS * 2 * len(stages) * turn_of(allocation)
            try:
                pattern = eager(self.problem, allocation, update_rule=self.rule, depth=depth)
            except PenstockError:  # micro-batches in flight that two weight versions do not allow
                continue
            yield allocation, pattern

    def _push(self, plans: Iterable[Plan]) -> None:
        for plan in plans:
            if self._enough:
                return
            if plan in self._seen:
                continue
            self._seen.add(plan)
            if self._may_be(plan):
                item = self._item(plan)
                if item is not None and item.promise_ns <= self._horizon_ns:
                    heapq.heappush(self._heap, item)

    def _item(self, plan: Plan) -> Item | None:
        """Return the plan with the shortest period of its depths; None where it does not fit."""
        self.effort -= SCORED_NS * len(plan[1])
        problem, rule = self.problem, self.rule
        allocation = single_pipeline(plan[1], plan[0])
        one = fitted_depth(problem, allocation, rule, (1,) * len(plan[1]))
        depths = {one, *usual_depths(problem, allocation, rule)}
        if any(lacking_bytes(problem, allocation, rule, s, depth) for s, depth in enumerate(min(depths))):
            return None
        period, chosen = shortest_depths(problem, allocation, rule, depths)
        promise = period * plan[0]
        if self._centre is None:
            self._least_ns = min(self._least_ns, promise)
        return Item(promise, next(self._numbers), plan, tuple(chosen))

    def _may_be(self, plan: Plan) -> bool:
        """Return whether the micro-batches feed all replicas, turns are short enough, and pins are kept."""
        number, stages = plan
        rows = self.problem.global_batch_size // number
        fed = all(s.dispatch == "round_robin" or rows // s.replicas >= self.problem.min_slice for s in stages)
        turns = [s.replicas for s in stages if s.dispatch == "round_robin"]
        allocation = single_pipeline(stages, number)
        short = turn_of(allocation) <= max(LONGEST_TURN, number)
        complete = self.rule == "weight_stashing" or max(turns, default=1) <= number
        return fed and short and complete and broken_pin(self.problem, allocation) is None

    def _around(self, plan: Plan) -> Iterator[Plan]:
        """Yield a plan's small moves, the plan with replicas fed in another way, and with all micro-batch counts."""
        number, stages = plan
        for each in (*moved(self.problem, stages), *replaced(self.problem, stages)):
            yield number, _plain(each)
            yield number, _in_turn(each)
        for s, stage in enumerate(stages):
            if stage.replicas > 1:
                other = replace(stage, dispatch="rows" if stage.dispatch == "round_robin" else "round_robin")
                yield number, (*stages[:s], other, *stages[s + 1 :])
        for batches in self._batches:
            yield batches, stages

    def _kicked(self, plan: Plan, draw: random.Random) -> Plan:
        """Return the plan after some random moves; moves to invalid plans are left out."""
        for _ in range(draw.randint(2, KICKS)):
            near = [each for each in self._around(plan) if self._may_be(each)]
            self.effort -= SCORED_NS
            plan = draw.choice(near) if near else plan
        return plan


def _is_line(allocation: Allocation) -> bool:
    """Return whether a plan is one pipeline whose stages share no devices."""
    devices = [d for stage in allocation.stages for d in stage.devices]
    return len(allocation.pipelines) == 1 and len(set(devices)) == len(devices)


def _plain(stages: Stages) -> Stages:
    """Return the stages with dispatch by rows where a stage has one device, since it takes no turns."""
    return tuple(replace(stage, dispatch="rows") if stage.replicas == 1 else stage for stage in stages)


def _in_turn(stages: Stages) -> Stages:
    return tuple(replace(stage, dispatch="round_robin" if stage.replicas > 1 else "rows") for stage in stages)
