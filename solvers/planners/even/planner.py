"""``even``: equal stages one after the other, equally replicated on all devices, under 1F1B or interleaved 1F1B.

Stages have equally many of the layers that are alike. In a model where most layers differ, such as a model whose layers
were measured one by one, stages take nearly equal time.

The planner enumerates every such layout: ranks, parts of the model on each, rows of a micro-batch, and as little
recomputation as memory needs, of whole layers of a part or of the same modules of every layer. Layouts that certainly
exceed memory are left out; the others are simulated from the least bound on. These are the layouts that trainers with
degrees of parallelism run (Narayanan et al., SC 2021, section 3), and the baseline that other plans have to beat.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, islice, pairwise
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.race import Race
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.stage import input_bytes, layers_alike, stage_costs, stage_rows
from penstock.solvers.costs.tables.cut import Cut, Way
from penstock.solvers.grid.block_partition import smallest_largest
from penstock.solvers.grid.places import Places, even_shapes
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline, stages_on
from penstock.solvers.model.degrees import Modules
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem, per_problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.proposal import Proposal, in_order, proposed, unreachable
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.support.fitting_orders import judged
from penstock.solvers.schedules.trainer_orders import order_of

KEPT = 3
"""Number of layouts that are proposed, the quickest first."""
MOST_OPERATIONS = 400_000
"""Limit on micro-batches × stages of all layouts that are simulated, after the first."""


Saved = tuple[int, int]
"""The time of recomputation in ns, and the bytes that it frees of a micro-batch's stash."""


class EvenLayout(NamedTuple):
    """A plan that recomputes in one of the ways of even stages, by its number: an alternative of a race.

    At first it has as little recomputation as the request allows, so no way takes less time; whether it ``fits`` is not
    checked yet. ``raised`` then finds the recomputation that it needs to fit.
    """

    least_ns: int
    fits: bool
    number: int
    way: int
    even: Even

    def raised(self, _below_ns: float) -> EvenLayout | None:
        """Return the layout with as little recomputation as may fit, or None if no recomputation suffices."""
        return self if self.fits else self.even.layout(0)

    @property
    def plan(self) -> Allocation:
        """The plan of this layout."""
        return self.even.plan(self.even.ways[self.way] if self.fits else 0)


@dataclass(frozen=True, eq=False)
class Even:
    """Equal stages on equally many devices with a batch."""

    cut: Cut
    batch: Batch
    number: int

    @property
    def problem(self) -> Problem:
        """The problem of these stages."""
        return self.cut.problem

    @cached_property
    def plain(self) -> EvenLayout:
        """The layout with the least recomputation, whether it fits or not."""
        return EvenLayout(self.bound_ns(0), False, self.number, 0, self)

    def layout(self, least: int) -> EvenLayout | None:
        """Return the layout with the first recomputation of ``ways``, from number ``least``, that may fit, or None."""
        if not self.holds_states:
            return None
        for number, way in enumerate(self.ways[least:], least):
            if self._may_fit(way):
                return EvenLayout(self.bound_ns(way), True, self.number, number, self)
        return None

    def bound_ns(self, way: Way) -> int:
        """Return a bound on a plan's time: the busiest rank's work, or the bound of ``whole_backwards_bound_ns``.

        Micro-batches are equal.
        """
        heads, again = self.cut.pass_ns(self._share, way)
        each, number = heads + again, self.batch.num_micro_batches
        most_ns = int((np.cumsum(heads) - heads + number * each).max())
        if self.cut.parts > 1:
            most_ns = max(most_ns, number * int(self._by_rank(each).sum(axis=0).max()))
        return most_ns

    @property
    def holds_states(self) -> bool:
        """True if every rank can hold its parameters and states; if not, no way of recomputing helps."""
        return int(self.cut.room_bytes.min()) >= 0

    def _may_fit(self, way: Way) -> bool:
        """Return whether every rank can hold its states, and the micro-batches in flight at its first backward.

        Each micro-batch counts as if it belonged to the rank's stage that keeps least.
        """
        least = self._by_rank(self.cut.kept_bytes(self._share, way)).min(axis=0)
        return bool((least <= self._most_bytes).all())

    @cached_property
    def _most_bytes(self) -> np.ndarray:
        """The memory that each rank has for a micro-batch, (R,), beside its states."""
        ranks, parts = self.cut.ranks, self.cut.parts
        later = np.arange(ranks)[::-1]
        ahead = later if parts == 1 else 2 * later + (parts - 1) * ranks
        return np.asarray(self.cut.room_bytes // np.minimum(ahead + 1, self.batch.num_micro_batches * parts))

    def _by_rank(self, of_stages: np.ndarray) -> np.ndarray:
        """Return an array of stages by part and rank, (parts, R)."""
        return of_stages.reshape(self.cut.parts, -1)

    @property
    def _share(self) -> int:
        """The rows of a micro-batch that the busiest device of each stage computes."""
        return stage_rows(self.cut.stages[0], self.batch.most_rows)

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """The ways in which stages may recompute, the quickest first; each keeps less than the one before."""
        longest = self.cut.longest
        if self.problem.recompute != "auto":
            return (0,) if self.problem.recompute == "never" else (longest,)
        layers = tuple(range(longest + 1))
        if not self.problem.module_sets:
            return layers
        kinds = frozenset(self.problem.devices[d].kind for d in self.cut.stages[0].devices)
        each = savings(self.problem, self.cut.typical, kinds, self._share)
        saved: dict[Way, Saved] = {number: (number * each[()][0], number * each[()][1]) for number in layers}
        saved |= {way: (longest * each[way][0], longest * each[way][1]) for way in self.problem.module_sets}
        frontier: list[Way] = []
        for way in sorted(saved, key=lambda way: saved[way]):
            if not frontier or saved[way][1] > saved[frontier[-1]][1]:
                frontier.append(way)
        return tuple(frontier)

    def orders(self, plan: Allocation) -> Orders:
        """Return 1F1B, or interleaved 1F1B where ranks have several parts."""
        return order_of(self.problem, plan, "early-backward" if self.cut.parts == 1 else "interleaved", self.cut.ranks)

    def leanest(self) -> Allocation:
        """Return the plan that recomputes all layers, where the request allows that."""
        return self.plan(0 if self.problem.recompute == "never" else self.problem.num_layers)

    def plan(self, way: Way) -> Allocation:
        """Return the plan that recomputes in some way."""
        stages = tuple(self._again(stage, way) for stage in self.cut.stages)
        return single_pipeline(stages, self.batch.num_micro_batches)

    def _again(self, stage: Stage, way: Way) -> Stage:
        """Return the stage with modules, or its first layers of the span recomputing, each from its own input."""
        if not isinstance(way, int):
            return replace(stage, modules=way)
        if self.problem.recompute == "always":
            return stage.whole
        low, stop = max(stage.first, self.cut.span[0]), min(stage.last + 1, self.cut.span[1])
        return replace(stage, recompute=tuple((layer, layer) for layer in range(low, min(stop, low + way))))


def proposals(setting: Setting, _options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the quickest even layouts that fit, the best first; where no layout fits, some that lack the least."""
    problem = setting.problem
    every = _listed(problem)
    quickest = Layouts(problem).quickest(problem)
    for trial in quickest:
        yield proposed(trial)
    if quickest:
        return
    if not every and problem.pins:  # the simulator says which pin they break
        every = tuple(
            replace(each, cut=replace(each.cut, problem=problem)) for each in _every(replace(problem, pins=()))
        )
    reachable = (even for even in reversed(every) if unreachable(problem, even.leanest()) is None)
    for even in reversed(list(islice(reachable, KEPT))):
        plan = even.leanest()
        with suppress(UnsupportedRequest):  # micro-batches that do not go into groups
            yield in_order(problem, plan, even.orders(plan))


@per_problem
def savings(problem: Problem, layer: int, kinds: frozenset[str], share: int) -> dict[Modules, Saved]:
    """Return the time and the freed memory of recomputing each set of modules of a layer, or all of it: ().

    Both are for ``share`` rows on devices of these kinds. The layer's input is kept.
    """
    devices = tuple(next(d for d, device in enumerate(problem.devices) if device.kind == kind) for kind in kinds)
    plain, rows = Stage(layer, layer, devices), share * len(devices)
    costs, saved = stage_costs(problem, plain, rows), {}
    for modules in ((), *problem.module_sets):
        again = replace(plain, modules=modules) if modules else replace(plain, recompute=((layer, layer),))
        again_costs = stage_costs(problem, again, rows)
        freed = costs.kept_bytes - again_costs.kept_bytes
        if again.recompute and problem.memory.count_buffers:
            freed -= input_bytes(problem, layer, share)
        saved[modules] = again_costs.recompute_ns, freed
    return saved


class Layouts:
    """All layouts of a problem, from the least bound on."""

    def __init__(self, problem: Problem) -> None:
        every = _listed(problem)
        if every and not every[-1].holds_states:  # the last has the most stages: if it cannot, few can, and need a time
            every = tuple(even for even in every if even.holds_states)
        self._race = Race((even.plain for even in every), attrgetter("least_ns", "fits", "number", "way"))

    def least_ns(self, below_ns: float = NEVER_NS) -> int:
        """Return a bound on all layouts that may fit, each with as little recomputation as it needs to fit.

        The search ends at ``below_ns``. NEVER_NS if no layout may fit.
        """
        return self._race.least_ns(below_ns)

    def quickest(self, problem: Problem, below_ns: int = NEVER_NS, kept: int = KEPT) -> list[JudgedPlan]:
        """Return the quickest layouts that fit and take less than a time, at most ``kept``, the best first.

        They are simulated from the least bound on; one that does not fit brings in the next. ``problem``: the problem
        of the layouts, or a problem that differs only by how its nodes are joined, not in the costs of its layers.
        """
        race, spent = self._race.copy(), 0
        best: list[JudgedPlan] = []

        def limit_ns(_layout: EvenLayout) -> int:
            return best[-1].value_ns if len(best) == kept else below_ns

        while spent <= MOST_OPERATIONS or not (best or below_ns < NEVER_NS):
            layout = race.next_below(limit_ns)
            if layout is None:
                break
            plan = layout.plan
            if unreachable(problem, plan) is not None:
                continue
            spent += len(plan.stages) * plan.num_micro_batches
            with suppress(UnsupportedRequest):
                outcome = judged(problem, plan, layout.even.orders(plan), limit_ns(layout))
                best = sorted([*best, *filter(None, [outcome.plan])], key=lambda each: each.value_ns)[:kept]
                if outcome.short and (more := layout.even.layout(layout.way + 1)) is not None:
                    race.enter(more)
        return best


@lru_cache(maxsize=1)
def _listed(problem: Problem) -> tuple[Even, ...]:
    """Return all even stages."""
    return tuple(_every(problem))


class Blocks(NamedTuple):
    """The layers that stages share out: the ``alike`` ones, or all where most differ; ``most``: stages."""

    first: int
    stop: int
    most: int
    alike: bool

    @classmethod
    def of(cls, problem: Problem) -> Blocks:
        """Return the longest run of layers that are alike, or all layers if that run has fewer than half of them."""
        first, number = layers_alike(problem)
        if 2 * number >= problem.num_layers:
            return cls(first, first + number, number + 2, alike=True)
        return cls(0, problem.num_layers, problem.num_blocks, alike=False)

    def divide(self, ranks: int, parts: int) -> bool:
        """Return whether each rank may have this number of parts.

        Parts must be equal, whether the ends count as layers or not. Where layers differ, the number must be a power of
        two.
        """
        if not self.alike:
            return parts.bit_count() == 1
        stages = ranks * parts
        return (self.stop - self.first) % stages == 0 or self.most % stages == 0


def _every(problem: Problem) -> Iterator[Even]:
    """Yield the even stages for ranks × parts × micro-batches."""
    blocks = Blocks.of(problem)
    number = 0
    cuts: dict[tuple[int, int], Cut | None] = {}
    for places, batch in even_shapes(problem, range(problem.num_devices), blocks.most):
        for parts in _parts(len(places), blocks, batch):
            key = len(places), parts
            if key not in cuts:
                cuts[key] = _cut(problem, blocks, places, parts)
            cut = cuts[key]
            if cut is None:
                continue
            if problem.pins and broken_pin(problem, single_pipeline(cut.stages, batch.num_micro_batches)):
                continue
            number += 1
            yield Even(cut, batch, number)


def _cut(problem: Problem, blocks: Blocks, places: Places, parts: int) -> Cut | None:
    """Return the stages of ranks with some parts each, or None if a part would end where no stage may."""
    ends = _ends(problem, blocks, len(places) * parts)
    if ends is None:
        return None
    return Cut(problem, stages_on(places * parts, ends), parts, (blocks.first, blocks.stop))


def _parts(ranks: int, blocks: Blocks, batch: Batch) -> Iterator[int]:
    """Yield the numbers of parts that a rank may have.

    For replicas of the whole model, several parts save memory in a single micro-batch: a part's gradients come when its
    activations go.
    """
    yield 1
    numbers = batch.num_micro_batches
    if numbers % ranks == 0 if ranks > 1 else numbers == 1:
        yield from (parts for parts in range(2, blocks.most // ranks + 1) if blocks.divide(ranks, parts))


def _ends(problem: Problem, blocks: Blocks, number: int) -> list[int] | None:
    """Return where parts begin and the model ends, or None if a part would end where no stage may.

    Parts are equal runs of the layers that are alike, and the first and last part have the other layers too. Where the
    layers do not divide, both ends count as one layer each, or else the first parts have one more layer. If layers
    differ, the longest part takes as little time as possible.
    """
    if not blocks.alike:
        return smallest_largest(np.diff(problem.sample_ns), number, problem.cuttable)
    layers = blocks.stop - blocks.first
    if layers % number and blocks.most % number == 0 and number > 1:
        each = blocks.most // number
        sizes = [each - 1, *[each] * (number - 2), each - 1]
    else:
        sizes = [layers // number + (part < layers % number) for part in range(number)]
    ends = [blocks.first + size for size in accumulate(sizes, initial=0)]
    ends[0], ends[-1] = 0, problem.num_layers
    cuts = [end - 1 for end in ends[1:-1]]
    filled = all(i < j for i, j in pairwise(ends))
    return ends if filled and bool(problem.cuttable[cuts].all()) else None
