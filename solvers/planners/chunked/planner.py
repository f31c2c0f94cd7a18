"""Several parts of the model on each device, or backwards in two parts.

Planners ``interleaved``, ``zero-bubble`` and ``chimera`` try every depth, width, place and number of micro-batches that
chain and cluster allow, the shortest expected first, and hand the judge whole orders. Recomputation is an
operation of its own: of all stages where the request wants it, of those for which it is worth its time where memory
asks for it; or, inside backwards, of a layer's modules where these have costs of their own.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.bounds.feasibility import proof_of_infeasibility
from penstock.solvers.costs.buckets import stage_all_reduce_ns
from penstock.solvers.costs.memory import free_bytes, static_bytes
from penstock.solvers.costs.stage import stage_costs, stage_rows
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.grid.parts_in_turn import IN_A_V, LINE, Turns, laid_out
from penstock.solvers.grid.places import check_depth, layouts
from penstock.solvers.improve.selective import lighter
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch, candidates, most_rows
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Reason, Refusal
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.proposal import Proposal, in_order
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.catalogue import ScheduleRow, tried_with
from penstock.solvers.schedules.overtaking import found_overtaking, improved, room_of
from penstock.solvers.schedules.support.chained import Chained
from penstock.solvers.schedules.support.recomputed import recomputed, recomputing

DEPTH = Option("depth", 0, "devices of a pipeline; 0 tries each depth that chain and cluster allow", low=0)
CHUNKS = Option("chunks", 0, "parts of the model on each device; 0 tries 2 to 4", low=0)
SHAPE = Option(
    "shape",
    "all",
    "one part of the model on each device (line), or two, down the devices and back up (v)",
    choices=("all", "line", "v"),
)
PAIRS = Option("pairs", 0, "pipelines in each direction; 0 tries every number that goes into the depth", low=0)
INTERLEAVED = (DEPTH, CHUNKS)
CHIMERA = (DEPTH, PAIRS)
ZERO_BUBBLE = (DEPTH, SHAPE)
MOST_CHUNKS = 4
MAX_SHAPES = 24
MAX_OPERATIONS = 60_000
MAX_OVERTAKING = 3
OVERTAKING_OPERATIONS = 8_000
NEAR = 1.4
"""How much longer than the shortest shape is expected to take an order may take that is proposed before others."""


def interleaved_proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Interleaved 1F1B, and breadth first, of the most promising shapes.

    Raises ``UnsupportedRequest`` for fewer than two devices and for chains that are too short, ``InvalidDocument``
    for a depth or a number of chunks that is not possible.
    """
    problem = setting.problem
    asked = CHUNKS.of(options)
    if asked == 1:
        raise InvalidDocument(
            "option 'chunks' is 1, which does not interleave", remedy="2 or more, or planner 'dapple'"
        )
    turns = [Turns("loop", number) for number in ([asked] if asked else range(2, MOST_CHUNKS + 1))]
    ranked = _ranked(problem, DEPTH.of(options), lambda _ranks: turns, least=turns[0].number)
    rows = tried_with("interleaved", ("loop",))
    found = (each for allocation in ranked for row in rows for each in _proposed(problem, allocation, row))
    yield from _near_first(problem, ranked, found)


def zero_bubble_proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """The published orders of the most promising shapes, and for the first of each shape what ``overtaking`` finds.

    Raises as ``interleaved_proposals``.
    """
    problem = setting.problem
    turns = {"all": (LINE, IN_A_V), "line": (LINE,), "v": (IN_A_V,)}[SHAPE.of(options)]
    ranked = _ranked(problem, DEPTH.of(options), lambda _ranks: turns, least=turns[0].number)
    yield from _near_first(problem, ranked, _split(problem, ranked))


def _split(problem: Problem, ranked: Iterable[Allocation]) -> Iterator[Proposal]:
    """Proposals with split backwards: the published orders, and what ``overtaking`` finds of the first shapes."""
    left = {False: MAX_OVERTAKING, True: MAX_OVERTAKING}
    for allocation in ranked:
        v_shaped = len({stage.devices for stage in allocation.stages}) < len(allocation.stages)
        for row in tried_with("zero-bubble", ("v",) if v_shaped else ("line",)):
            yield from _proposed(problem, allocation, row)
        if left[v_shaped] and 3 * allocation.num_micro_batches * len(allocation.stages) <= OVERTAKING_OPERATIONS:
            left[v_shaped] -= 1
            yield from _overtaking(problem, allocation)


def chimera_proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Pipelines in both directions over the same devices, of the most promising shapes.

    Raises as ``interleaved_proposals``, and ``UnsupportedRequest`` where no depth goes with the number of pipelines.
    """
    problem = setting.problem
    asked = PAIRS.of(options)

    def turns(ranks: int) -> list[Turns]:
        return [Turns("both_ways", pairs) for pairs in ([asked] if asked else range(1, ranks // 2 + 1))]

    found = _ranked(problem, DEPTH.of(options), turns, least=1, step=2 * max(1, asked))
    if not found:
        raise UnsupportedRequest(
            f"no depth and number of micro-batches feed {2 * max(1, asked)} pipelines, half in each direction",
            remedy="pairs 1 and at least two micro-batches, or planner 'interleaved'",
        )
    for allocation in found:
        for row in tried_with("chimera", ("both_ways",)):
            yield from _proposed(problem, allocation, row, both=True)


def _ranked(
    problem: Problem,
    depth: int,
    turns: Callable[[int], Sequence[Turns]],
    least: int,
    step: int = 1,
) -> list[Allocation]:
    """Allocations of every depth, width, place and number of micro-batches, the shortest expected first.

    Those that have no room for parameters and states are left out if others have. ``MAX_SHAPES`` of them, of depths
    that are multiples of ``step``, and no more than ``MAX_OPERATIONS`` micro-batches × stages after the first. Raises
    ``UnsupportedRequest`` where pins leave none of them.
    """
    found: dict[Allocation, Batch] = {}
    for ranks in _depths(problem, depth, least, step):
        width = problem.num_devices // ranks
        for batch in _batches(problem, ranks, width):
            for layout in layouts(problem, ranks, width):
                for each in turns(ranks):
                    with suppress(UnsupportedRequest):  # a short chain, or pipelines that do not go into the depth
                        found.setdefault(laid_out(problem, batch, layout.places, each), batch)
    unpinned = [] if found or not problem.pins else _ranked(replace(problem, pins=()), depth, turns, least, step)
    if unpinned and proof_of_infeasibility(problem) is None:
        raise UnsupportedRequest(
            "no depth and number of parts places the model on the devices so that the pins are kept",
            remedy="fewer pinned layers, or a planner of one stage per device: 'dapple' or 'relax'",
        )
    kept: list[Allocation] = []
    spent = 0
    held = {each: batch for each, batch in found.items() if _holds_states(problem, each)}
    for allocation in _shortest(problem, held or found):
        spent += allocation.num_micro_batches * len(allocation.stages)
        if kept and spent > MAX_OPERATIONS:
            break
        kept.append(allocation)
    return kept


def _holds_states(problem: Problem, allocation: Allocation) -> bool:
    """Whether every rank has room for its parameters, gradients and optimizer states."""
    held: Counter[tuple[int, ...]] = Counter()
    for stage in allocation.stages:
        held[stage.devices] += static_bytes(problem, stage).total
    return all(size <= free_bytes(problem, devices) for devices, size in held.items())


def _shortest(problem: Problem, found: Mapping[Allocation, Batch]) -> list[Allocation]:
    """The first ``MAX_SHAPES`` by expected time, computed from the least work on until that alone is longer."""

    @cache
    def passes_ns(kind: str, rows: int) -> list[int]:
        return problem.costs(kind, rows).passes_ns.tolist()  # type: ignore[no-any-return]

    def least_ns(allocation: Allocation, batch: Batch) -> int:
        """Return what stages take on the kind of their first device, without codecs, transfers and all-reduces."""
        stages = allocation.stages
        sums = (passes_ns(problem.devices[s.devices[0]].kind, stage_rows(s, batch.most_rows)) for s in stages)
        return _busy_ns(allocation, [upto[s.last + 1] - upto[s.first] for upto, s in zip(sums, stages, strict=True)])

    work = [(least_ns(*each), number, each[0]) for number, each in enumerate(found.items())]
    best: list[tuple[int, int, Allocation]] = []
    for work_ns, number, allocation in sorted(work, key=lambda each: each[:2]):
        if len(best) == MAX_SHAPES and work_ns > best[-1][0]:
            break
        insort(best, (_expected_ns(problem, allocation), number, allocation))
        del best[MAX_SHAPES:]
    return [allocation for _time, _number, allocation in best]


def _depths(problem: Problem, asked: int, least: int, step: int) -> list[int]:
    """Numbers of ranks, multiples of ``step``, ``least`` parts on each."""
    blocks = problem.num_blocks
    most = min(problem.num_devices, blocks // least) // step * step
    fewest = max(2, step)
    if most < fewest:
        units = problem.units(fewest)
        kind = "this planner needs {} " + units + " and {} separable blocks of layers; there are {} and {}"
        raise Refusal(
            Reason(kind, (fewest, fewest * least, problem.num_devices, blocks)),
            remedy="planner 'dapple' or 'dp'",
        )
    check_depth(problem, "depth", asked, most, fewest, step)
    every = range(fewest, most + 1, step)
    return [asked] if asked else [ranks for ranks in every if _uses_all(problem, ranks, most, step)]


def _uses_all(problem: Problem, ranks: int, most: int, step: int) -> bool:
    """Whether more ranks would cost replicas: else they take its place."""
    width = problem.num_devices // ranks
    return ranks == most or problem.num_devices // (ranks + step) < width


def _batches(problem: Problem, ranks: int, width: int) -> list[Batch]:
    """Candidates that feed all replicas; where sizes are free, also with micro-batches in groups of ``ranks``."""
    found = dict.fromkeys(candidates(problem, (width,)))
    if not problem.micro_batch_sizes:
        for batch in list(found):
            number = -(-batch.num_micro_batches // ranks) * ranks
            if number <= problem.global_batch_size:
                whole = problem.global_batch_size
                found.setdefault(Batch(number, -(-whole // number), whole // number))
    return [batch for batch in found if batch.replicas_fed(problem.min_slice) >= width]


def _expected_ns(problem: Problem, allocation: Allocation) -> int:
    """Return how long the busiest rank works and waits, with the transfers' round trip and the longest all-reduce."""
    rows, numbers = most_rows(problem, allocation), range(len(allocation.stages))
    costs = [stage_costs(problem, stage, rows) for stage in allocation.stages]
    moves = (transfer(problem, allocation, s, rows, direction) for s in numbers for direction in (0, 1))
    way_ns = sum(move.duration_ns for move in moves if move)
    busy_ns = _busy_ns(allocation, [cost.forward_ns + cost.backward_ns for cost in costs], way_ns)
    return busy_ns + max(stage_all_reduce_ns(problem, stage) for stage in allocation.stages)


def _busy_ns(allocation: Allocation, passes_ns: Sequence[int], way_ns: int = 0) -> int:
    """Return the busiest rank's work, p - 1 waits for a part and a way, which several pipelines fill for each other.

    ``passes_ns``: a forward and a backward of each stage.
    """
    work: Counter[tuple[int, ...]] = Counter()
    for s, stage in enumerate(allocation.stages):
        work[stage.devices] += len(allocation.micro_batches(s)) * passes_ns[s]
    return max(work.values()) + ((len(work) - 1) * max(passes_ns) + way_ns) // len(allocation.pipelines)


def _near_first(problem: Problem, ranked: Sequence[Allocation], found: Iterable[Proposal]) -> Iterator[Proposal]:
    """The proposals that fit into memory, those that wait for it for long after the others; then those that do not.

    Of these, those that recompute come first: the judge finds a little more room than is counted here.
    """
    slow, unfit = [], []
    most_ns = NEAR * _expected_ns(problem, ranked[0]) if ranked else 0
    for each in found:
        assert isinstance(each.fixed, Orders)
        chained = Chained(problem, each.allocation)
        room = room_of(problem, each.allocation, chained.ranks)
        if not chained.fits(each.fixed, room):
            unfit.append(each)
        elif chained.overtaken(each.fixed, room, (), 0)[0] > most_ns:
            slow.append(each)
        else:
            yield each
    unfit.sort(key=lambda each: not any(stage.recomputes for stage in each.allocation.stages))
    yield from (*slow, *unfit)


def _proposed(problem: Problem, allocation: Allocation, row: ScheduleRow, both: bool = False) -> Iterator[Proposal]:
    """Yield the schedule's order, with recomputation where the request wants it or memory asks for it.

    ``both``: with recomputation even where the order fits without.
    """
    with suppress(UnsupportedRequest):  # too few micro-batches, or none that go into groups
        orders = row.orders(problem, allocation)
        if problem.recompute != "always":
            yield in_order(problem, allocation, orders)
            if problem.recompute == "never" or (not both and _fits(problem, allocation, orders)):
                return
        yield _recomputing(problem, allocation, orders)


def _overtaking(problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
    found = [] if problem.recompute == "always" else found_overtaking(problem, allocation)[:MAX_OVERTAKING]
    for each in found:
        yield in_order(problem, allocation, each.orders)
    if problem.recompute == "always" or (
        problem.recompute == "auto" and not any(_fits(problem, allocation, each.orders) for each in found)
    ):
        again = recomputing(allocation, found[0].orders if found else None)
        chained = Chained(problem, again)
        room = room_of(problem, again, chained.ranks)
        for each in found_overtaking(problem, again)[:MAX_OVERTAKING]:
            orders = recomputed(again, each.orders)
            yield in_order(problem, again, orders)
            if chained.fits(orders, room):
                yield in_order(problem, again, improved(chained, [orders], room)[0].orders)


def _fits(problem: Problem, allocation: Allocation, orders: Orders) -> bool:
    chained = Chained(problem, allocation)
    return chained.fits(orders, room_of(problem, allocation, chained.ranks))


def _recomputing(problem: Problem, allocation: Allocation, orders: Orders) -> Proposal:
    """The order with recomputation: of all stages where the request wants it, else where it is worth its time.

    Of a layer's modules where they have costs of their own and that is quicker (``lighter``).
    """
    again = recomputing(allocation, None if problem.recompute == "always" else orders)
    whole = recomputed(again, orders)
    overlap = problem.rules.overlap_all_reduce
    is_worth_it = problem.module_sets and _fits(problem, again, whole)
    found = lighter(problem, again, whole, overlap, lambda: False) if is_worth_it else None
    if found is None:
        return in_order(problem, again, whole)

    def time_ns(plan: tuple[Allocation, Orders]) -> int:
        return simulate(problem, *plan, overlap=overlap).time_per_global_batch_ns

    return in_order(problem, *min(found, (again, whole), key=time_ns))
