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
from functools import cached_property, lru_cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, islice, pairwise
from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import activation_bytes, free_bytes, static_bytes
from penstock.solvers.costs.stage import input_bytes, kept_alike, layers_alike, stage_costs, stage_rows
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

    @cached_property
    def plain(self) -> Layout:
        """The layout with the least recomputation, whether it fits or not."""
        plan = self._plan(0)
        return Layout(least_ns(self.problem, plan), False, self.number, 0, plan, self)

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
                plan = self._plan(way)
                return Layout(least_ns(self.problem, plan), True, self.number, number, plan, self)
        return None

    @property
    def holds_states(self) -> bool:
        """Whether every rank can hold its parameters and states; if not, no way of recomputing helps."""
        return all(rank.most_bytes >= 0 for rank in self._room)

    def _may_fit(self, way: Way) -> bool:
        """Return whether every rank can hold its states, and the micro-batches in flight at its first backward."""
        kept = [activation_bytes(self.problem, self._again(stage, way), self.batch.most_rows) for stage in self._kinds]
        return all(min(kept[kind] for kind in rank.kinds) <= rank.most_bytes for rank in self._room)

    @cached_property
    def _kind_of(self) -> list[int]:
        """The kind of each stage, by number; those of a kind keep the same, however they recompute."""
        rows, known = self.batch.most_rows, dict[object, int]()
        found = []
        for stage in self.stages:
            kinds = frozenset(self.problem.devices[d].kind for d in stage.devices)
            layers = kept_alike(self.problem, kinds, stage_rows(stage, rows))[stage.first : stage.last + 1]
            alike = max(self.span[0] - stage.first, 0), min(self.span[1] - stage.first, len(layers))
            found.append(known.setdefault((kinds, alike, layers), len(known)))
        return found

    @cached_property
    def _kinds(self) -> list[Stage]:
        """The first stage of each kind."""
        return [self.stages[self._kind_of.index(kind)] for kind in range(max(self._kind_of) + 1)]

    @cached_property
    def _room(self) -> list[Rank]:
        """What each rank has for a micro-batch of its stage that keeps least, once its states are there."""
        places = len({stage.devices for stage in self.stages})
        number, found = self.batch.num_micro_batches, []
        for rank in range(places):
            own, later = self.stages[rank::places], places - rank - 1
            ahead = later if self.parts == 1 else 2 * later + (self.parts - 1) * places
            held = sum(static_bytes(self.problem, stage).total for stage in own)
            most = (free_bytes(self.problem, own[0].devices) - held) // min(ahead + 1, number * self.parts)
            found.append(Rank(frozenset(self._kind_of[rank::places]), most))
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
        kinds = frozenset(self.problem.devices[d].kind for d in self.stages[0].devices)
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
    every = _listed(problem)
    found = _quickest(problem, every)
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
    waiting = _waiting(_listed(problem))
    return heappop(waiting).bound_ns if _has_fitting(waiting) else None


@lru_cache(maxsize=1)
def _listed(problem: Problem) -> tuple[Even, ...]:
    """Return all even stages."""
    return tuple(_every(problem))


def _waiting(every: tuple[Even, ...]) -> list[Layout]:
    """Return a heap of layouts, none of which has been asked whether it fits.

    Where the last one, of the most stages, cannot hold its states, few can: only these are asked for their times.
    """
    if every and not every[-1].holds_states:
        every = tuple(even for even in every if even.holds_states)
    waiting = [even.plain for even in every]
    heapify(waiting)
    return waiting


def _has_fitting(waiting: list[Layout]) -> bool:
    """Bring to the top the layout of least bound that may fit, if there is one."""
    while waiting and not waiting[0].fits:
        fitting = heappop(waiting).even.fitting
        if fitting is not None:
            heappush(waiting, fitting)
    return bool(waiting)


def _proposal(problem: Problem, plan: Allocation, orders: Orders) -> Proposal:
    return Proposal(plan, (orders.name,), overlaps=(problem.rules.overlap_all_reduce,), fixed=orders)


def _quickest(problem: Problem, every: tuple[Even, ...]) -> list[Trial]:
    """Return the quickest layouts that fit, simulated from the least bound on; one that does not makes the next."""
    waiting = _waiting(every)
    found: list[Trial] = []
    spent = 0
    while _has_fitting(waiting):
        layout = heappop(waiting)
        last_ns = found[KEPT - 1].value_ns if len(found) >= KEPT else NEVER_NS
        if layout.bound_ns >= last_ns or (found and spent > MOST_OPERATIONS):
            break
        if unreachable(problem, layout.plan) is not None:
            continue
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
                if broken_pin(problem, plain) is None:
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


def least_ns(problem: Problem, plan: Allocation) -> int:
    """Return a bound on the plan's time: the busiest rank's work, or what ``whole_backwards_bound_ns`` says."""
    work: dict[tuple[int, ...], int] = {}
    for stage in plan.stages:
        cost = stage_costs(problem, stage, most_rows(problem, plan))
        each = cost.forward_ns + cost.backward_ns + cost.recompute_ns
        work[stage.devices] = work.get(stage.devices, 0) + plan.num_micro_batches * each
    return max(max(work.values()), whole_backwards_bound_ns(problem, plan))
