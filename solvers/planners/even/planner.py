"""``even``: equal stages one after the other, equally replicated on all devices, under 1F1B or interleaved 1F1B.

Every such layout is looked at: ranks, parts of the model on each, rows of a micro-batch, and as little recomputation
as memory needs: of whole layers of a part, or of the same modules of every layer. One that cannot fit, by what it
holds for certain, is left out; the others are simulated from the least bound on. These are the layouts that trainers
with degrees of parallelism run (Narayanan et al., SC 2021, section 3), and what a plan has to be better than.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import activation_bytes, free_bytes, static_bytes
from penstock.solvers.costs.stage import costs_alike, input_bytes, kept_alike, layers_alike, stage_costs, stage_rows
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Modules
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.proposal import Proposal, unreachable
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

    def times(self, number: int) -> Saved:
        """Return what it is of a number of layers."""
        return Saved(number * self.time_ns, number * self.freed_bytes)


class Rank(NamedTuple):
    """The kinds of a rank's stages, and the most that one of them may keep of each micro-batch, in bytes."""

    kinds: frozenset[int]
    most_bytes: int


class Layout(NamedTuple):
    """A plan that recomputes in one of the ways of even stages, by its number.

    Layouts are simulated in the order of their bound. Before one is asked what it has to recompute to fit, it ``fits``
    for all that is known, with as little as may be: no way takes less time.
    """

    bound_ns: int
    fits: bool
    number: int
    way: int
    even: Even

    @property
    def plan(self) -> Allocation:
        """The plan itself."""
        return self.even.plan(self.even.ways[self.way] if self.fits else 0)


@dataclass(frozen=True)
class Even:
    """Equal stages on equally many devices.

    ``span``: the layers that are alike, the last one excluded; ``held_bytes``: each stage's parameters and states.
    """

    problem: Problem
    stages: tuple[Stage, ...]
    batch: Batch
    parts: int
    span: tuple[int, int]
    held_bytes: tuple[int, ...]
    number: int

    @cached_property
    def plain(self) -> Layout:
        """The layout with the least recomputation, whether it fits or not."""
        return Layout(self.bound_ns(0), False, self.number, 0, self)

    @cached_property
    def fitting(self) -> Layout | None:
        """The layout with as little recomputation as may fit; None: none can."""
        return self.layout(0)

    def layout(self, least: int) -> Layout | None:
        """Return the layout with as little recomputation as may fit, from a number of ``ways`` on; None: none can."""
        if not self.holds_states:
            return None
        for number, way in enumerate(self.ways[least:], least):
            if self._may_fit(way):
                return Layout(self.bound_ns(way), True, self.number, number, self)
        return None

    def bound_ns(self, way: Way) -> int:
        """Return a bound on a plan's time: the busiest rank's work, or what ``whole_backwards_bound_ns`` says.

        Micro-batches are equal, and stages of equal costs are costed once.
        """
        costs = [
            stage_costs(self.problem, self._again(self.stages[first], way), self.batch.most_rows)
            for first in self._first_of(self._costed)
        ]
        each = [cost.forward_ns + cost.backward_ns + cost.recompute_ns for cost in costs]
        heads = [cost.forward_ns + cost.backward_ns for cost in costs]
        head, most_ns, number = 0, 0, self.batch.num_micro_batches
        for kind in self._costed:
            most_ns = max(most_ns, head + number * each[kind])
            head += heads[kind]
        if self.parts > 1:
            ranks = len(self.stages) // self.parts
            work = (sum(each[kind] for kind in self._costed[rank::ranks]) for rank in range(ranks))
            most_ns = max(most_ns, number * max(work))
        return most_ns

    @property
    def holds_states(self) -> bool:
        """Whether every rank can hold its parameters and states; if not, no way of recomputing helps."""
        return all(rank.most_bytes >= 0 for rank in self._room)

    def _may_fit(self, way: Way) -> bool:
        """Return whether every rank can hold its states, and the micro-batches in flight at its first backward."""
        rows = self.batch.most_rows
        firsts = (self.stages[first] for first in self._first_of(self._kept))
        kept = [activation_bytes(self.problem, self._again(stage, way), rows) for stage in firsts]
        return all(min(kept[kind] for kind in rank.kinds) <= rank.most_bytes for rank in self._room)

    @cached_property
    def _kept(self) -> list[int]:
        """The kind of each stage, by number; those of a kind keep the same, however they recompute."""
        return self._numbered(kept_alike)

    @cached_property
    def _costed(self) -> list[int]:
        """The kind of each stage, by number; those of a kind take the same time, however they recompute."""
        return self._numbered(costs_alike)

    def _numbered(self, alike: Callable[[Problem, frozenset[str], int], tuple[int, ...]]) -> list[int]:
        """Return a number for each stage, equal where its layers are alike, and those that may be recomputed."""
        known, found, ranks = dict[object, int](), [], len(self.stages) // self.parts
        kinds_of = [_kinds(self.problem, stage.devices) for stage in self.stages[:ranks]]
        for number, stage in enumerate(self.stages):
            kinds = kinds_of[number % ranks]
            layers = alike(self.problem, kinds, stage_rows(stage, self.batch.most_rows))[stage.first : stage.last + 1]
            inside = max(self.span[0] - stage.first, 0), min(self.span[1] - stage.first, len(layers))
            found.append(known.setdefault((kinds, inside, layers), len(known)))
        return found

    def _first_of(self, kinds: list[int]) -> list[int]:
        """Return the first stage of each kind."""
        return [kinds.index(kind) for kind in range(max(kinds) + 1)]

    @cached_property
    def _room(self) -> list[Rank]:
        """What each rank has for a micro-batch of its stage that keeps least, once its states are there."""
        places = len(self.stages) // self.parts
        number, found = self.batch.num_micro_batches, []
        for rank in range(places):
            own, later = self.stages[rank::places], places - rank - 1
            ahead = later if self.parts == 1 else 2 * later + (self.parts - 1) * places
            most = (free_bytes(self.problem, own[0].devices) - sum(self.held_bytes[rank::places])) // min(
                ahead + 1, number * self.parts
            )
            found.append(Rank(frozenset(self._kept[rank::places]), most))
        return found

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """Return how stages may recompute, from what takes least time on, as long as it keeps less."""
        longest = max(stage.last - stage.first + 1 for stage in self.stages)
        if self.problem.recompute != "auto":
            return (0,) if self.problem.recompute == "never" else (longest,)
        layers = tuple(range(longest + 1))
        if not self.problem.module_sets:
            return layers
        kinds = _kinds(self.problem, self.stages[0].devices)
        each = savings(self.problem, self.span[0], kinds, stage_rows(self.stages[0], self.batch.most_rows))
        saved: dict[Way, Saved] = {number: each[()].times(number) for number in layers}
        saved |= {modules: each[modules].times(longest) for modules in self.problem.module_sets}
        found: list[Way] = []
        for way in sorted(saved, key=lambda way: saved[way]):
            if not found or saved[way].freed_bytes > saved[found[-1]].freed_bytes:
                found.append(way)
        return tuple(found)

    def orders(self, plan: Allocation) -> Orders:
        """Return 1F1B, or interleaved 1F1B where ranks have several parts."""
        return order_of(self.problem, plan, "early-backward" if self.parts == 1 else "interleaved", _ranks(plan))

    def leanest(self) -> Allocation:
        """Return the plan that recomputes all layers, where the request allows that."""
        return self.plan(0 if self.problem.recompute == "never" else self.problem.num_layers)

    def plan(self, way: Way) -> Allocation:
        """Return the plan that recomputes in some way."""
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
    every = _listed(problem)
    found = Layouts(problem).quickest(problem)
    for trial in found:
        yield _proposal(problem, trial.allocation, trial.orders)
    if found:
        return
    if not every and problem.pins:  # the judge says which pin they break
        every = tuple(replace(each, problem=problem) for each in _every(replace(problem, pins=())))
    reachable = (even for even in reversed(every) if unreachable(problem, even.leanest()) is None)
    for even in reversed(list(islice(reachable, KEPT))):
        plan = even.leanest()
        with suppress(UnsupportedRequest):  # micro-batches that do not go into groups
            yield _proposal(problem, plan, even.orders(plan))


@lru_cache(maxsize=256)
def savings(problem: Problem, layer: int, kinds: frozenset[str], share: int) -> dict[Modules, Saved]:
    """Return what recomputing sets of modules of a layer, or all of it (), takes and frees of ``share`` rows on kinds.

    The layer's input is kept.
    """
    devices = tuple(next(d for d, device in enumerate(problem.devices) if device.kind == kind) for kind in kinds)
    plain, rows = Stage(layer, layer, devices), share * len(devices)
    costs, found = stage_costs(problem, plain, rows), {}
    for modules in ((), *problem.module_sets):
        again = replace(plain, modules=modules) if modules else replace(plain, recompute=((layer, layer),))
        own = stage_costs(problem, again, rows)
        freed = costs.kept_bytes - own.kept_bytes
        if again.recompute and problem.memory.count_buffers:
            freed -= input_bytes(problem, layer, share)
        found[modules] = Saved(own.recompute_ns, freed)
    return found


def least_layout_ns(problem: Problem) -> int | None:
    """Return a bound on all layouts that may fit, each with as little recomputation as that takes; None: none may."""
    least_ns = Layouts(problem).least_ns(NEVER_NS)
    return None if least_ns == NEVER_NS else least_ns


class Layouts:
    """All layouts of a problem, from the least bound on."""

    def __init__(self, problem: Problem) -> None:
        every = _listed(problem)
        if every and not every[-1].holds_states:  # of the most stages: then few can, and only these need a time
            every = tuple(even for even in every if even.holds_states)
        self._waiting = [even.plain for even in every]
        heapify(self._waiting)

    def least_ns(self, below_ns: int) -> int:
        """Return a bound on all layouts that may fit, each with as little recomputation as that takes.

        It is looked for as far as it is below a time; NEVER_NS where no layout may fit.
        """
        _bring_fitting(self._waiting, below_ns)
        return self._waiting[0].bound_ns if self._waiting else NEVER_NS

    def quickest(self, problem: Problem, below_ns: int = NEVER_NS, kept: int = KEPT) -> list[Trial]:
        """Return the quickest layouts that fit and take less than a time, at most ``kept``, the best first.

        They are simulated from the least bound on; one that does not fit makes the next. ``problem``: that of the
        layouts, or one that differs from it by how its nodes are joined, and not in the costs of its layers.
        """
        waiting = list(self._waiting)
        found: list[Trial] = []
        last_ns, spent = below_ns, 0
        while _bring_fitting(waiting, last_ns) and (spent <= MOST_OPERATIONS or not (found or below_ns < NEVER_NS)):
            layout = heappop(waiting)
            plan = layout.plan
            if unreachable(problem, plan) is not None:
                continue
            spent += len(plan.stages) * plan.num_micro_batches
            with suppress(UnsupportedRequest):
                outcome = judged(problem, plan, layout.even.orders(plan), last_ns)
                found = sorted([*found, *filter(None, [outcome.trial])], key=lambda each: each.value_ns)[:kept]
                last_ns = found[-1].value_ns if len(found) == kept else below_ns
                if outcome.short and (more := layout.even.layout(layout.way + 1)) is not None:
                    heappush(waiting, more)
        return found


def _bring_fitting(waiting: list[Layout], below_ns: int) -> bool:
    """Bring to the top of a heap the layout of least bound that may fit; return whether that is below a time."""
    while waiting and not waiting[0].fits and waiting[0].bound_ns < below_ns:
        fitting = heappop(waiting).even.fitting
        if fitting is not None:
            heappush(waiting, fitting)
    return bool(waiting) and waiting[0].bound_ns < below_ns


@lru_cache(maxsize=1)
def _listed(problem: Problem) -> tuple[Even, ...]:
    """Return all even stages."""
    return tuple(_every(problem))


def _proposal(problem: Problem, plan: Allocation, orders: Orders) -> Proposal:
    return Proposal(plan, (orders.name,), overlaps=(problem.rules.overlap_all_reduce,), fixed=orders)


@lru_cache(maxsize=4096)
def _kinds(problem: Problem, devices: tuple[int, ...]) -> frozenset[str]:
    return frozenset(problem.devices[d].kind for d in devices)


def _ranks(plan: Allocation) -> int:
    return len({stage.devices for stage in plan.stages})


def _every(problem: Problem) -> Iterator[Even]:
    """Yield ranks × parts × micro-batches."""
    first, blocks = layers_alike(problem)
    number = 0
    most = min(problem.num_devices, blocks + 2)
    for ranks in (each for each in range(1, most + 1) if problem.num_devices % each == 0):
        known: dict[int, tuple[tuple[Stage, ...], tuple[int, ...]]] = {}
        for batch in batches(problem, problem.num_devices // ranks):
            for parts in _parts(ranks, blocks, batch):
                if parts not in known:
                    stages = _stages(problem, first, blocks, ranks, parts)
                    known[parts] = stages, tuple(static_bytes(problem, stage).total for stage in stages)
                stages, held_bytes = known[parts]
                pinned = bool(problem.pins) and bool(stages)
                if pinned and broken_pin(problem, single_pipeline(stages, batch.num_micro_batches)) is not None:
                    continue
                if stages:
                    number += 1
                    yield Even(problem, stages, batch, parts, (first, first + blocks), held_bytes, number)


def _stages(problem: Problem, first: int, blocks: int, ranks: int, parts: int) -> tuple[Stage, ...]:
    """Return the stages of ranks with some parts each; none where a part would end where none may."""
    ends, width = _ends(problem, first, blocks, ranks * parts), problem.num_devices // ranks
    if ends is None:
        return ()
    places = [tuple(range(rank * width, (rank + 1) * width)) for rank in range(ranks)]
    return tuple(Stage(i, j - 1, places[s % ranks]) for s, (i, j) in enumerate(pairwise(ends)))


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
