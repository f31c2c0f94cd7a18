"""``uniform``: the best plan that another trainer can express (``within.Within``).

All stages have the same number of replicas, ranks count through the devices stage after stage, all micro-batches are
equal, and the order is one of the trainer's. Shapes (ranks, replicas, parts on each rank, micro-batches) are tried by
the least time that they take. Each is cut so that the busiest rank has little to do, and recomputes no more than memory
needs. The best shapes are cut again as long as the simulator finds that better. Where a shape has few cuts, all of them
are simulated; where the cluster is small, so are all orders of its nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations, permutations, product
from math import comb
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.shortages import shortage_of
from penstock.solvers.costs.tables.stage_table import cut_places, static_sums
from penstock.solvers.grid.block_partition import moved_cuts, smallest_largest, smallest_largest_on
from penstock.solvers.grid.parts_in_turn import in_turn
from penstock.solvers.grid.places import Places, even_shapes, least_pass_ns
from penstock.solvers.model.allocation import Allocation, single_pipeline, stages_on
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.options import Option
from penstock.solvers.model.pins import broken_pin, centre, last_ends
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.trainer_limits import Recomputing, Within
from penstock.solvers.planners.proposal import Proposal, in_order, proposed, unreachable
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.catalogue import schedule_row
from penstock.solvers.schedules.support.fitting_orders import Judged, judged
from penstock.solvers.schedules.trainer_orders import chunks_of, order_of, ranks_of_stages

TRANSFORMER = Option(
    "transformer",
    "",
    "with a target: which layers are the trainer's transformer layers, FIRST-LAST; else by their names",
)
OPTIONS = (TRANSFORMER,)
SMALL = 4
"""Limit on the devices of a cluster all of whose worlds are tried."""
MOST_CHUNKS = 12
LEAST_SHAPES, EFFORT = 16, 320
"""Limits for each schedule: the least number of shapes that are simulated, and the plans after which it ends."""
AS_A_PLAN = 2000
"""The number of passes of a micro-batch through a stage that cost as much as one more plan."""
EVERY = 150
"""Limit on the cuts of a shape that are all simulated."""
MOVED, MOVES = 3, 90
"""Limits for each schedule: the shapes that are cut again, and the effort for each."""


class RankShape(NamedTuple):
    """A shape: rank r is on ``places[r]``; ``rank_of``: the rank of each part, ``chunks`` of them on each rank.

    ``expected_ns``: the approximate time of an even cut; no cut takes less than ``least_ns``.
    """

    expected_ns: int
    least_ns: int
    places: Places
    chunks: int
    rank_of: list[int]
    batch: Batch


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield ever better plans of each schedule. Raises ``UnsupportedRequest`` without a target, and for codecs."""
    problem = setting.problem
    if problem.within is None:
        raise UnsupportedRequest(
            "planner 'uniform' makes plans that another trainer can express; the request names no target",
            remedy="target: megatron, torchtitan or deepspeed (--target), or planner 'auto'",
        )
    for name in problem.within.schedules:
        search = ShapeSearch(setting, problem.within, name)
        yield from search.run()
        if search.best is None and search.unpinned is not None:
            yield search.proposal(search.unpinned)


class ShapeSearch:
    """The plans of one schedule.

    ``best``: the best plan so far, ``trials``: the best plan of every shape, ``nearest``: the number of proposals that
    do not fit. ``unpinned``: the last plan that breaks a pin. Ranks are numbered through nodes, so devices cannot be
    exchanged.
    """

    def __init__(self, setting: Setting, within: Within, schedule: str) -> None:
        problem, self.deadline = setting.problem, setting.deadline
        self.problem, self.within, self.schedule = problem, within, schedule
        self.row = schedule_row(schedule)
        cuts = np.asarray(within.cuts, dtype=bool) & problem.cuttable
        cuts.setflags(write=False)
        self.cut = replace(problem, cuttable=cuts)
        self.best: JudgedPlan | None = None
        self.trials: list[tuple[int, RankShape, JudgedPlan]] = []
        self.effort = 0.0
        self.nearest = 0
        self.unpinned: Allocation | None = None

    def run(self) -> Iterator[Proposal]:
        """Yield the best plan after every shape; if no plan fits, yield a shape's nearest attempt."""
        for number, shape in enumerate(sorted(self._shapes())):
            if self.deadline.passed or (number >= LEAST_SHAPES and self.effort > EFFORT):
                break
            if self.best is None or shape.least_ns < self.best.value_ns:
                yield from self._tried(shape, self._cuts(shape))
        for _value, shape, trial in sorted(self.trials, key=lambda each: each[0])[:MOVED]:
            yield from self._moved(shape, trial)

    def _tried(self, shape: RankShape, allocations: Iterable[Allocation]) -> Iterator[Proposal]:
        best: JudgedPlan | None = None
        for allocation in allocations:
            if self.deadline.passed:
                return
            if broken_pin(self.problem, allocation) is not None:
                self.unpinned = allocation
                continue
            if unreachable(self.problem, allocation) is not None:
                yield self.proposal(allocation)
                return
            trial = self._fitted(allocation, NEVER_NS if best is None else best.value_ns)
            if isinstance(trial, Allocation):
                if self.best is None and self.nearest < LEAST_SHAPES:
                    self.nearest += 1
                    yield self.proposal(trial)
            elif trial is not None:
                best = trial
        if best is not None:
            self.trials.append((best.value_ns, shape, replace(best, simulated=None)))
            yield from self._better(best)

    def _better(self, trial: JudgedPlan) -> Iterator[Proposal]:
        if self.best is None or trial.value_ns < self.best.value_ns:
            self.best = trial
        yield proposed(self.best)

    def proposal(self, allocation: Allocation) -> Proposal:
        """Return a plan in the schedule's usual order."""
        return in_order(self.problem, allocation, self._order(allocation))

    def _fitted(self, allocation: Allocation, below_ns: int) -> JudgedPlan | Allocation | None:
        """Return the quickest plan that fits, if it is quick enough; the leanest plan where none fits.

        Recomputing more layers one by one takes more time and less memory, so the first number that fits is searched by
        halves. Where layers are recomputed, single modules of every stage are tried instead.
        """
        ways = [way for way in self.within.ways(allocation.stages) if self._allowed(way)]
        tried = [recomputing(self.within, allocation, way) for way in ways]
        single = [plan for way, plan in zip(ways, tried, strict=True) if way.method != "uniform"]
        trials: JudgedPlan | None = None
        least, most = 0, len(single) - 1
        while least <= most:
            middle = least if trials is None and least == 0 else (least + most) // 2
            outcome = self._judged(single[middle], below_ns)
            if outcome.plan is not None:
                trials, most = outcome.plan, middle - 1
            elif outcome.short is None:  # too slow, and more recomputation would be slower
                return trials
            else:
                least = middle + 1
        for plan in tried[len(single) :] if trials is None else ():
            outcome = self._judged(plan, below_ns)
            if outcome.plan is not None or outcome.short is None:
                trials = outcome.plan
                break
        if trials is None or any(stage.recomputes for stage in trials.allocation.stages):
            trials = self._modules_instead(allocation, below_ns if trials is None else trials.value_ns) or trials
        return trials or (tried[-1] if tried else None)

    def _modules_instead(self, plain: Allocation, below_ns: int) -> JudgedPlan | None:
        """Return the quickest plan that recomputes the same modules in every stage."""
        best: JudgedPlan | None = None
        for modules in self.problem.module_sets:
            plan = plain.having(replace(stage, modules=modules) for stage in plain.stages)
            best = self._judged(plan, below_ns if best is None else best.value_ns).plan or best
        return best

    def _judged(self, plan: Allocation, below_ns: int) -> Judged:
        """Simulate a plan and return the outcome.

        Nothing is simulated where the micro-batches that are certainly in flight do not fit.
        """
        count, number = len(plan.stages), plan.num_micro_batches
        short = shortage_of(self.problem, plan, self.row.trained_in_flight(count, number))
        if short is not None:
            return Judged(NEVER_NS, short=short)
        self.effort += 1 + count * number / AS_A_PLAN
        return judged(self.problem, plan, self._order(plan), below_ns)

    def _order(self, plan: Allocation) -> Orders:
        ranks = len({stage.devices for stage in plan.stages})
        group = self.within.group(ranks, plan.num_micro_batches)
        return order_of(self.problem, plan, self.schedule, group)

    def _allowed(self, way: Recomputing) -> bool:
        wanted = self.problem.recompute
        return wanted == "auto" or way.method == ("none" if wanted == "never" else "uniform")

    def _shapes(self) -> Iterator[RankShape]:
        blocks = self.cut.num_blocks
        for world in worlds(self.problem):
            for places, batch in even_shapes(self.problem, world, blocks):
                if self.schedule not in self.within.runs(len(places)):
                    continue
                for chunks in self._chunks(len(places), blocks, batch.num_micro_batches):
                    rank_of = ranks_of_stages(self.schedule, len(places), chunks)
                    yield RankShape(*self._times_ns(places, chunks, batch), places, chunks, rank_of, batch)

    def _chunks(self, ranks: int, blocks: int, micro_batches: int) -> Iterable[int]:
        trials = chunks_of(self.schedule, min(MOST_CHUNKS, blocks // ranks))
        if self.row.grouped and self.within.group(ranks, micro_batches) is None:
            return ()
        return trials if ranks > 1 or 1 in trials else ()

    def _times_ns(self, places: Places, chunks: int, batch: Batch) -> tuple[int, int]:
        """Return all layers' work shared evenly by the ranks, in ns.

        First with filling, draining and the all-reduce, then without.
        """
        rows = batch.most_rows // len(places[0])
        whole = least_pass_ns(self.problem, chain.from_iterable(places), rows)
        ranks, number = len(places), batch.num_micro_batches
        filled = whole * (number * chunks + ranks - 1) // (ranks * chunks)
        size = int(self.problem.owned_bytes[-1]) // ranks
        return filled + all_reduce_ns(self.problem, size, places[0]), whole * number // ranks

    def _cuts(self, shape: RankShape) -> Iterator[Allocation]:
        """Yield the even cut by time, the even cut by parameters, and a cut that keeps the pins.

        Where the cuts are few, yield all of them.
        """
        parts = len(shape.rank_of)
        places = [int(i) for i in np.flatnonzero(self.cut.cuttable)]
        if comb(len(places), parts - 1) <= EVERY:
            for chosen in combinations(places, parts - 1):
                yield self._allocation(shape, [0, *(i + 1 for i in chosen), self.problem.num_layers])
            return
        with suppress(UnsupportedRequest):  # the chain is too short
            yield in_turn(self.cut, shape.batch, shape.places, shape.rank_of)
            sizes = np.diff(static_sums(self.problem).parameters)
            yield self._allocation(shape, smallest_largest(sizes, parts, self.cut.cuttable))
        kept = self._kept_cut(shape) if self.problem.pins else None
        if kept is not None:
            yield self._allocation(shape, kept)

    def _kept_cut(self, shape: RankShape) -> list[int] | None:
        """Return the cut with the shortest longest part whose parts the devices of their ranks may hold."""
        ends = [last_ends(self.problem, shape.places[rank]) for rank in shape.rank_of]
        return smallest_largest_on([np.diff(self.problem.sample_ns)] * len(ends), self.cut.cuttable, ends)

    def _allocation(self, shape: RankShape, bounds: Sequence[int]) -> Allocation:
        stages = stages_on([shape.places[rank] for rank in shape.rank_of], bounds)
        return single_pipeline(stages, shape.batch.num_micro_batches)

    def _moved(self, shape: RankShape, trial: JudgedPlan) -> Iterator[Proposal]:
        """Move one cut, or neighbouring ones together, by one place, as long as that helps."""
        places = cut_places(self.cut).tolist()
        cuts = [places.index(stage.first) for stage in trial.allocation.stages] + [len(places) - 1]
        enough = self.effort + MOVES
        if comb(len(places) - 2, len(cuts) - 2) <= EVERY:
            return
        moved = True
        while moved:
            moved = False
            for near in moved_cuts(cuts):
                if self.effort > enough or self.deadline.passed:
                    return
                plan = self._allocation(shape, [places[cut] for cut in near])
                if broken_pin(self.problem, plan) is not None:
                    continue
                other = self._fitted(plan, trial.value_ns)
                if isinstance(other, JudgedPlan):
                    cuts, trial, moved = near, other, True
                    yield from self._better(other)
                    break


def recomputing(within: Within, allocation: Allocation, how: Recomputing) -> Allocation:
    """Return the allocation with all stages recomputing that way."""
    return allocation.having(replace(stage, recompute=within.segments(stage, how)) for stage in allocation.stages)


def worlds(problem: Problem) -> list[tuple[int, ...]]:
    """Return lists of devices in the order of ranks: of each node the first ones, in their order.

    In a small cluster all such lists. Otherwise whole nodes: all, some less, half, and so on. Where nodes differ, also
    with the quickest first and last. With pins, the nodes are also in every order if they are few, otherwise in the
    order of the layers that the pins name.
    """
    nodes = problem.nodes()
    if problem.num_devices <= SMALL:
        rank_orders = []
        for count in range(1, len(nodes) + 1):
            for chosen in permutations(nodes, count):
                for sizes in product(*(range(1, len(node) + 1) for node in chosen)):
                    rank_orders.append(tuple(d for node, size in zip(chosen, sizes, strict=True) for d in node[:size]))
        return rank_orders
    if len(nodes) == 1:
        return [nodes[0][:count] for count in _fewer(len(nodes[0]))]
    orders = [nodes]
    if len({device.kind for device in problem.devices}) > 1:
        quick = tuple(sorted(nodes, key=lambda node: _forward_ns(problem, node)))
        orders += [quick, quick[::-1]]
    if problem.pins:
        by_layers = tuple(sorted(nodes, key=lambda node: sum(centre(problem, device) for device in node) / len(node)))
        orders += [by_layers] if len(nodes) > SMALL else [*permutations(nodes)]
    rank_orders = [tuple(d for node in order[:count] for d in node) for order in orders for count in _fewer(len(nodes))]
    return list(dict.fromkeys([*rank_orders, *(nodes[0][:count] for count in _fewer(len(nodes[0])))]))


def _forward_ns(problem: Problem, node: Sequence[int]) -> int:
    return max(int(problem.costs(problem.devices[d].kind, 1).forward_ns[-1]) for d in node)


def _fewer(count: int) -> list[int]:
    """Return all, up to three less, and halves."""
    numbers = {number for number in range(count, count - 4, -1) if number > 0}
    half = count // 2
    while half:
        numbers.add(half)
        half //= 2
    return sorted(numbers, reverse=True)
