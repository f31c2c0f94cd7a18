"""``even``: equal stages one after the other, equally replicated on all devices, under 1F1B or interleaved 1F1B.

Every such layout is looked at: ranks, parts of the model on each, rows of a micro-batch, and as little recomputation
as memory needs: of whole layers of a part, or of the same modules of every layer. One that cannot fit, by what it
holds for certain, is left out; the others are simulated from the least bound on. These are the layouts that trainers
with degrees of parallelism run (Narayanan et al., SC 2021, section 3), and what a plan has to be better than.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import activation_bytes, free_bytes, static_bytes
from penstock.solvers.costs.stage import input_bytes, layers_alike, stage_costs, stage_rows
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Modules
from penstock.solvers.model.micro_batches import Batch, most_rows
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.proposal import Proposal, unreachable, whole_backwards_bound_ns
from penstock.solvers.planners.trainer.planner import batches
from penstock.solvers.schedules.support.fitting import Trial, judged
from penstock.solvers.schedules.trainer_orders import order_of

KEPT = 3
"""Layouts that are proposed, the quickest first."""
MOST_OPERATIONS = 400_000
"""Micro-batches × stages of all layouts that are simulated, after the first."""


Way = int | Modules
"""How stages recompute: a number of their first layers that are alike, or these modules of every layer."""


class Saved(NamedTuple):
    """What recomputation takes, and what it frees of a micro-batch's stash."""

    time_ns: int
    freed_bytes: int


class Layout(NamedTuple):
    """A plan that recomputes in one of the ways of even stages, by its number.

    Layouts are simulated in the order of their bound.
    """

    bound_ns: int
    number: int
    way: int
    plan: Allocation
    even: Even


@dataclass(frozen=True)
class Even:
    """Equal stages on equally many devices; ``span``: the layers that are alike, the last one excluded."""

    problem: Problem
    stages: tuple[Stage, ...]
    batch: Batch
    parts: int
    span: tuple[int, int]
    number: int

    def layout(self, least: int) -> Layout | None:
        """Return the layout with as little recomputation as may fit, from a number of ``ways`` on; None: none can."""
        for number, way in enumerate(self.ways[least:], least):
            plan = self._plan(way)
            if may_fit(self.problem, plan):
                return Layout(least_ns(self.problem, plan), self.number, number, plan, self)
        return None

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Return how stages may recompute, from what takes least time on, as long as it keeps less."""
        longest = max(stage.last - stage.first + 1 for stage in self.stages)
        if self.problem.recompute != "auto":
            return (0,) if self.problem.recompute == "never" else (longest,)
        layers = tuple(range(longest + 1))
        if not self.problem.module_sets:
            return layers
        one = self._saved(replace(self._layer, recompute=((self.span[0], self.span[0]),)))
        saved: dict[Way, Saved] = {number: Saved(number * one.time_ns, number * one.freed_bytes) for number in layers}
        for modules in self.problem.module_sets:
            each = self._saved(replace(self._layer, modules=modules))
            saved[modules] = Saved(longest * each.time_ns, longest * each.freed_bytes)
        found: list[Way] = []
        for way in sorted(saved, key=lambda way: saved[way]):
            if not found or saved[way].freed_bytes > saved[found[-1]].freed_bytes:
                found.append(way)
        return tuple(found)

    @property
    def _layer(self) -> Stage:
        """The first of the layers that are alike, alone."""
        return Stage(self.span[0], self.span[0], self.stages[0].devices)

    def _saved(self, again: Stage) -> Saved:
        """Return what recomputing one layer takes and frees, its input kept."""
        costs, plain = (stage_costs(self.problem, each, self.batch.most_rows) for each in (again, again.plain))
        freed = plain.kept_bytes - costs.kept_bytes
        if again.recompute and self.problem.memory.count_buffers:
            freed -= input_bytes(self.problem, again.first, stage_rows(again, self.batch.most_rows))
        return Saved(costs.recompute_ns, freed)

    def orders(self, plan: Allocation) -> Orders:
        """Return 1F1B, or interleaved 1F1B where ranks have several parts."""
        return order_of(self.problem, plan, "early-backward" if self.parts == 1 else "interleaved", _ranks(plan))

    def leanest(self) -> Allocation:
        """Return the plan that recomputes all layers, where the request allows that."""
        return self._plan(0 if self.problem.recompute == "never" else self.problem.num_layers)

    def _plan(self, way: Way) -> Allocation:
        return single_pipeline(tuple(self._again(stage, way) for stage in self.stages), self.batch.num_micro_batches)

    def _again(self, stage: Stage, way: Way) -> Stage:
        """Return the stage with modules, or its first layers of the span recomputing, each from its own input."""
        if not isinstance(way, int):
            return replace(stage, modules=way)
        if self.problem.recompute == "always":
            return replace(stage, recompute=((stage.first, stage.last),))
        low, stop = max(stage.first, self.span[0]), min(stage.last + 1, self.span[1])
        return replace(stage, recompute=tuple((layer, layer) for layer in range(low, min(stop, low + way))))


def proposals(problem: Problem, _options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the quickest even layouts that fit, the best first; where none does, some that lack the least."""
    every = list(_every(problem))
    if not every and problem.pins:  # the judge says which pin they break
        every = [replace(each, problem=problem) for each in _every(replace(problem, pins=()))]
    found = _quickest(problem, [layout for even in every if (layout := even.layout(0)) is not None])
    for trial in found:
        yield _proposal(problem, trial.allocation, trial.orders)
    for even in every[-KEPT:] if not found else ():
        plan = even.leanest()
        with suppress(UnsupportedRequest):  # micro-batches that do not go into groups
            yield _proposal(problem, plan, even.orders(plan))


def _proposal(problem: Problem, plan: Allocation, orders: Orders) -> Proposal:
    return Proposal(plan, (orders.name,), overlaps=(problem.rules.overlap_all_reduce,), fixed=orders)


def _quickest(problem: Problem, waiting: list[Layout]) -> list[Trial]:
    """Return the quickest layouts that fit, simulated from the least bound on; one that does not makes the next."""
    heapify(waiting)
    found: list[Trial] = []
    spent = 0
    while waiting:
        layout = heappop(waiting)
        last_ns = found[KEPT - 1].value_ns if len(found) >= KEPT else NEVER_NS
        if layout.bound_ns >= last_ns or (found and spent > MOST_OPERATIONS):
            break
        spent += len(layout.plan.stages) * layout.plan.num_micro_batches
        with suppress(UnsupportedRequest):
            outcome = judged(problem, layout.plan, layout.even.orders(layout.plan), last_ns)
            found = sorted([*found, *filter(None, [outcome.trial])], key=lambda each: each.value_ns)[:KEPT]
            if outcome.short and (more := layout.even.layout(layout.way + 1)) is not None:
                heappush(waiting, more)
    return found


def _ranks(plan: Allocation) -> int:
    return len({stage.devices for stage in plan.stages})


def _every(problem: Problem) -> Iterator[Even]:
    """Yield ranks × parts × micro-batches."""
    first, blocks = layers_alike(problem)
    number = 0
    most = min(problem.num_devices, blocks + 2)
    for ranks in (each for each in range(1, most + 1) if problem.num_devices % each == 0):
        width = problem.num_devices // ranks
        places = [tuple(range(rank * width, (rank + 1) * width)) for rank in range(ranks)]
        for batch in batches(problem, width):
            for parts in _parts(ranks, blocks, batch):
                ends = _ends(problem, first, blocks, ranks * parts)
                if ends is None:
                    continue
                stages = tuple(Stage(i, j - 1, places[s % ranks]) for s, (i, j) in enumerate(pairwise(ends)))
                plain = single_pipeline(stages, batch.num_micro_batches)
                if broken_pin(problem, plain) is None and unreachable(problem, plain) is None:
                    number += 1
                    yield Even(problem, stages, batch, parts, (first, first + blocks), number)


def _parts(ranks: int, blocks: int, batch: Batch) -> Iterator[int]:
    """Yield how many parts a rank may have: several where they are equal, whether ends count as layers or not.

    Of replicas of the whole model, several save memory in a single micro-batch: a part's gradients come when its
    activations go.
    """
    yield 1
    numbers = batch.num_micro_batches
    if numbers % ranks == 0 if ranks > 1 else numbers == 1:
        for parts in range(2, (blocks + 2) // ranks + 1):
            if blocks % (ranks * parts) == 0 or (blocks + 2) % (ranks * parts) == 0:
                yield parts


def _ends(problem: Problem, first: int, blocks: int, number: int) -> list[int] | None:
    """Return where parts begin and the model ends: equal runs of the layers that are alike, the rest with the ends.

    Where they do not divide, both ends count as one layer each, or else the first parts have one more. None: a part
    would end where none may.
    """
    if blocks % number and (blocks + 2) % number == 0 and number > 1:
        each = (blocks + 2) // number
        sizes = [each - 1, *[each] * (number - 2), each - 1]
    else:
        sizes = [blocks // number + (part < blocks % number) for part in range(number)]
    ends = [first + layers for layers in accumulate(sizes, initial=0)]
    ends[0], ends[-1] = 0, problem.num_layers
    cuts = [end - 1 for end in ends[1:-1]]
    filled = all(i < j for i, j in pairwise(ends))
    return ends if filled and bool(problem.cuttable[cuts].all()) else None


def may_fit(problem: Problem, plan: Allocation) -> bool:
    """Return whether every rank can hold its states, and the micro-batches in flight at its first backward."""
    ranks, number = _ranks(plan), plan.num_micro_batches
    parts = len(plan.stages) // ranks
    for rank in range(ranks):
        own = plan.stages[rank::ranks]
        ahead = ranks - rank - 1 if parts == 1 else 2 * (ranks - rank - 1) + (parts - 1) * ranks
        held = sum(static_bytes(problem, stage).total for stage in own)
        kept = [activation_bytes(problem, stage, most_rows(problem, plan)) for stage in own]
        if held + min(ahead + 1, number * parts) * min(kept) > free_bytes(problem, own[0].devices):
            return False
    return True


def least_ns(problem: Problem, plan: Allocation) -> int:
    """Return a bound on the plan's time: the busiest rank's work, or what ``whole_backwards_bound_ns`` says."""
    work: dict[tuple[int, ...], int] = {}
    for stage in plan.stages:
        cost = stage_costs(problem, stage, most_rows(problem, plan))
        each = cost.forward_ns + cost.backward_ns + cost.recompute_ns
        work[stage.devices] = work.get(stage.devices, 0) + plan.num_micro_batches * each
    return max(max(work.values()), whole_backwards_bound_ns(problem, plan))
