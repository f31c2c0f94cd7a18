"""The joint optimum over partition, replication, placement and schedule: SOLVERS F.

Every plan of a small space (``grid/enumeration.py``) has a proven bound (BOUNDS section 2). The usual orders are
simulated by rising bound until no bound is below the best plan. Then CP-SAT (ALGORITHMS 7.8) optimises the orders that
remain open.

Recomputation: a stage that holds all micro-batches under any order gains nothing by it; of the other stages every
subset recomputes.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, count
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.shortages import shortage_of, surely_fits
from penstock.solvers.grid.enumeration import Placement, Space
from penstock.solvers.improve.order import OptimisedOrder, optimise_order
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.planners.exact.chain_tables import WHOLE_BACKWARDS, ChainTables
from penstock.solvers.planners.proposal import unreachable
from penstock.solvers.schedules.support.fitting_orders import best_order

EFFORT = 1.0
"""The effort of optimising the order of one plan."""
PIECE = 64
"""The number of plans that are simulated between two yields."""


class Improvement(NamedTuple):
    """An improvement, and the bound on every plan of the space that is proven by then."""

    plan: JudgedPlan
    bound_ns: int


class OpenPlan(NamedTuple):
    """A plan that may be better than the best: its bound, a number that breaks ties, and the allocation."""

    bound_ns: int
    number: int
    allocation: Allocation


@dataclass(frozen=True, eq=False)
class Block:
    """Plans of one number of micro-batches and one number of stages: from ``start`` on, placement by placement."""

    start: int
    batch: Batch
    partitions: np.ndarray
    placements: list[Placement]


@dataclass
class BestFirstSearch:
    """Best-first search by bounds.

    ``effort`` remains for optimising orders; ``open``: bounds of unproven plans.
    """

    space: Space
    effort: float
    best: JudgedPlan | None = None
    open: list[int] = field(default_factory=list)

    @property
    def value_ns(self) -> int:
        """The time of the best plan."""
        return NEVER_NS if self.best is None else self.best.value_ns

    def run(self) -> Iterator[Improvement | None]:
        """Yield every improvement, and at last the best plan with all that could be proven.

        Yields None after every counted piece of work, so that the caller can stop.
        """
        survivors: list[OpenPlan] = []
        yield from self._judge_all(survivors)
        survivors.sort()
        yield from self._optimise_all(survivors)
        if self.best is not None:
            yield Improvement(self.best, min([self.best.value_ns, *self.open]))

    def _judge_all(self, survivors: list[OpenPlan]) -> Iterator[Improvement | None]:
        """Simulate plans by rising bound; put a plan into ``survivors`` if its best order is above its bound."""
        bounds, blocks = self._bounds()
        ahead = np.argsort(bounds, kind="stable")
        refined: list[OpenPlan] = []
        at, number = 0, 0
        for turn in count(1):
            if turn % PIECE == 0:
                yield None
            following = int(bounds[ahead[at]]) if at < len(ahead) else NEVER_NS
            if min([following, *(item.bound_ns for item in refined[:1])]) >= self.value_ns:
                return
            if not refined or following < refined[0].bound_ns:
                for allocation in self._variants(self._allocation(int(ahead[at]), blocks)):
                    bound_ns = schedule_bound(self.space.problem, allocation, WHOLE_BACKWARDS).bound_ns
                    heapq.heappush(refined, OpenPlan(max(following, bound_ns), number, allocation))
                    number += 1
                at += 1
                continue
            item = heapq.heappop(refined)
            trial = self._judge(item.allocation)
            if trial is None or trial.value_ns > item.bound_ns:
                survivors.append(item)
            if trial is not None:
                rest = (each.bound_ns for each in (*refined[:1], *survivors))
                yield Improvement(trial, min([trial.value_ns, following, *rest]))

    def _judge(self, allocation: Allocation) -> JudgedPlan | None:
        trial = best_order(self.space.problem, allocation, self.value_ns).plan
        if trial is not None:
            self.best = trial
        return trial

    def _bounds(self) -> tuple[np.ndarray, list[Block]]:
        """Return the bound of every plan, and the blocks in which to look the plan up."""
        space, blocks, parts, start = self.space, [], [], 0
        partitions = [space.partitions(s) for s in range(1, space.most_stages + 1)]
        placements = [list(space.placements(s)) for s in range(1, space.most_stages + 1)]
        for batch in space.batches:
            tables = ChainTables(space, batch)
            most = batch.replicas_fed(space.problem.min_slice)
            for cuts, all_places in zip(partitions, placements, strict=True):
                fed = [places for places in all_places if max(map(len, places)) <= most]
                blocks.append(Block(start, batch, cuts, fed))
                parts.append(tables.bounds(cuts, fed).ravel())
                start += parts[-1].size
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts]), blocks

    def _allocation(self, index: int, blocks: list[Block]) -> Allocation:
        block = blocks[bisect_right([b.start for b in blocks], index) - 1]
        place, cut = divmod(index - block.start, len(block.partitions))
        return self.space.allocation(block.batch, block.partitions[cut], block.placements[place])

    def _variants(self, allocation: Allocation) -> Iterator[Allocation]:
        """Yield a plan for each subset of stages that gain by recomputing, where its first micro-batch fits."""
        problem, stages = self.space.problem, allocation.stages
        if unreachable(problem, allocation) is not None or broken_pin(problem, allocation) is not None:
            return
        always = problem.recompute == "always"
        free = [] if problem.recompute != "auto" else [s for s in stages if not surely_fits(problem, allocation, s)]
        for number in range(len(free) + 1):
            for chosen in combinations(free, number):
                variant = allocation.having(s.whole if always or s in chosen else s for s in stages)
                if shortage_of(problem, variant, (1,) * len(stages)) is None:
                    yield variant

    def _optimise_all(self, survivors: list[OpenPlan]) -> Iterator[Improvement | None]:
        """Run CP-SAT for every plan that may still be better, the most promising first."""
        for at, item in enumerate(survivors):
            if item.bound_ns >= self.value_ns:
                return
            if self.effort <= 0:
                self.open.append(item.bound_ns)
                return
            yield None
            optimised = self._optimise_order(item)
            bound_ns = max(item.bound_ns, optimised.bound.bound_ns)
            if bound_ns < optimised.value_ns:
                self.open.append(bound_ns)
            if optimised.schedule is not None:
                overlap = self.space.problem.rules.overlap_all_reduce
                self.best = JudgedPlan("", item.allocation, optimised.schedule, optimised.value_ns, overlap)
                rest = (each.bound_ns for each in survivors[at + 1 :])
                yield Improvement(self.best, min([optimised.value_ns, *self.open, *rest]))

    def _optimise_order(self, item: OpenPlan) -> OptimisedOrder:
        problem, effort = self.space.problem, min(EFFORT, self.effort)
        overlap = problem.rules.overlap_all_reduce
        optimised = optimise_order(
            problem, item.allocation, None, overlap=overlap, value_ns=self.value_ns, effort=effort
        )
        self.effort -= optimised.spent
        return optimised
