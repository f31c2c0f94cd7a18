"""Planners with several parts of the model on each device, or with backwards in two parts.

Planners ``interleaved``, ``zero-bubble`` and ``chimera`` try every depth, width, place and number of micro-batches that
chain and cluster allow, the shortest expected first, and hand whole orders to the simulator. Recomputation is a
separate operation: of all stages where the request requires it, otherwise of the stages for which it is worth its time
where memory runs short. Inside backwards it can recompute single modules of a layer, if these have separate costs.
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
"""The ratio of an order's time to the shortest expected time, up to which it is proposed before others."""


def interleaved_proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield interleaved 1F1B, and breadth first, of the most promising shapes.

    Raises ``UnsupportedRequest`` for fewer than two devices and for chains that are too short, ``InvalidDocument``
    for a depth or a number of chunks that is not possible.
    """
    problem = setting.problem
    chunks = CHUNKS.of(options)
    if chunks == 1:
        raise InvalidDocument(
            "option 'chunks' is 1, which does not interleave", remedy="2 or more, or planner 'dapple'"
        )
    turns = [Turns("loop", number) for number in ([chunks] if chunks else range(2, MOST_CHUNKS + 1))]
    ranked = _ranked(problem, DEPTH.of(options), lambda _ranks: turns, least=turns[0].number)
    rows = tried_with("interleaved", ("loop",))
    proposed = (each for allocation in ranked for row in rows for each in _proposed(problem, allocation, row))
    yield from _near_first(problem, ranked, proposed)


def zero_bubble_proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield published orders of the most promising shapes, and orders of ``overtaking`` for the first of each shape.

    Raises as ``interleaved_proposals``.
    """
    problem = setting.problem
    turns = {"all": (LINE, IN_A_V), "line": (LINE,), "v": (IN_A_V,)}[SHAPE.of(options)]
    ranked = _ranked(problem, DEPTH.of(options), lambda _ranks: turns, least=turns[0].number)
    yield from _near_first(problem, ranked, _split(problem, ranked))


def _split(problem: Problem, ranked: Iterable[Allocation]) -> Iterator[Proposal]:
    """Yield proposals with split backwards: the published orders, and orders of ``overtaking`` for the first shapes."""
    left = {False: MAX_OVERTAKING, True: MAX_OVERTAKING}
    for allocation in ranked:
        v_shaped = len({stage.devices for stage in allocation.stages}) < len(allocation.stages)
        for row in tried_with("zero-bubble", ("v",) if v_shaped else ("line",)):
            yield from _proposed(problem, allocation, row)
        if left[v_shaped] and 3 * allocation.num_micro_batches * len(allocation.stages) <= OVERTAKING_OPERATIONS:
            left[v_shaped] -= 1
            yield from _overtaking(problem, allocation)


def chimera_proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield pipelines in both directions over the same devices, of the most promising shapes.

    Raises as ``interleaved_proposals``, and ``UnsupportedRequest`` where no depth goes with the number of pipelines.
    """
    problem = setting.problem
    fixed = PAIRS.of(options)

    def turns(ranks: int) -> list[Turns]:
        return [Turns("both_ways", pairs) for pairs in ([fixed] if fixed else range(1, ranks // 2 + 1))]

    ranked = _ranked(problem, DEPTH.of(options), turns, least=1, step=2 * max(1, fixed))
    if not ranked:
        raise UnsupportedRequest(
            f"no depth and number of micro-batches allow {2 * max(1, fixed)} pipelines, half in each direction",
            remedy="pairs 1 and at least two micro-batches, or planner 'interleaved'",
        )
    for allocation in ranked:
        for row in tried_with("chimera", ("both_ways",)):
            yield from _proposed(problem, allocation, row, both=True)


def _ranked(
    problem: Problem,
    depth: int,
    turns: Callable[[int], Sequence[Turns]],
    least: int,
    step: int = 1,
) -> list[Allocation]:
    """Return allocations of every depth, width, place and number of micro-batches, the shortest expected first.

    Allocations without enough memory for parameters and states are left out, if others have it. At most ``MAX_SHAPES``
    remain, with depths that are multiples of ``step``, and no more than ``MAX_OPERATIONS`` micro-batches × stages after
    the first. Raises ``UnsupportedRequest`` where pins leave no allocation.
    """
    batch_of: dict[Allocation, Batch] = {}
    for ranks in _depths(problem, depth, least, step):
        width = problem.num_devices // ranks
        for batch in _batches(problem, ranks, width):
            for layout in layouts(problem, ranks, width):
                for each in turns(ranks):
                    with suppress(UnsupportedRequest):  # a short chain, or pipelines that do not go into the depth
                        batch_of.setdefault(laid_out(problem, batch, layout.places, each), batch)
    unpinned = [] if batch_of or not problem.pins else _ranked(replace(problem, pins=()), depth, turns, least, step)
    if unpinned and proof_of_infeasibility(problem) is None:
        raise UnsupportedRequest(
            "no depth and number of parts keeps the pins",
            remedy="fewer pinned layers, or a planner of one stage per device: 'dapple' or 'relax'",
        )
    kept: list[Allocation] = []
    spent = 0
    roomy = {each: batch for each, batch in batch_of.items() if _holds_states(problem, each)}
    for allocation in _shortest(problem, roomy or batch_of):
        spent += allocation.num_micro_batches * len(allocation.stages)
        if kept and spent > MAX_OPERATIONS:
            break
        kept.append(allocation)
    return kept


def _holds_states(problem: Problem, allocation: Allocation) -> bool:
    """Return whether every rank has enough memory for its parameters, gradients and optimizer states."""
    state_bytes: Counter[tuple[int, ...]] = Counter()
    for stage in allocation.stages:
        state_bytes[stage.devices] += static_bytes(problem, stage).total
    return all(size <= free_bytes(problem, devices) for devices, size in state_bytes.items())


def _shortest(problem: Problem, batch_of: Mapping[Allocation, Batch]) -> list[Allocation]:
    """Return the first ``MAX_SHAPES`` allocations by expected time.

    Expected times are computed from the least work on, until that work alone takes longer.
    """

    @cache
    def passes_ns(kind: str, rows: int) -> list[int]:
        return problem.costs(kind, rows).passes_ns.tolist()  # type: ignore[no-any-return]

    def least_ns(allocation: Allocation, batch: Batch) -> int:
        """Return the time of stages on the kind of their first device, without codecs, transfers, all-reduces."""
        stages = allocation.stages
        sums = (passes_ns(problem.devices[s.devices[0]].kind, stage_rows(s, batch.most_rows)) for s in stages)
        return _busy_ns(allocation, [upto[s.last + 1] - upto[s.first] for upto, s in zip(sums, stages, strict=True)])

    work = [(least_ns(*each), number, each[0]) for number, each in enumerate(batch_of.items())]
    best: list[tuple[int, int, Allocation]] = []
    for work_ns, number, allocation in sorted(work, key=lambda each: each[:2]):
        if len(best) == MAX_SHAPES and work_ns > best[-1][0]:
            break
        insort(best, (_expected_ns(problem, allocation), number, allocation))
        del best[MAX_SHAPES:]
    return [allocation for _time, _number, allocation in best]


def _depths(problem: Problem, requested: int, least: int, step: int) -> list[int]:
    """Return the possible numbers of ranks: multiples of ``step``, with ``least`` parts on each rank."""
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
    check_depth(problem, "depth", requested, most, fewest, step)
    every = range(fewest, most + 1, step)
    return [requested] if requested else [ranks for ranks in every if _uses_all(problem, ranks, most, step)]


def _uses_all(problem: Problem, ranks: int, most: int, step: int) -> bool:
    """Return whether more ranks would cost replicas; otherwise more ranks are tried instead."""
    width = problem.num_devices // ranks
    return ranks == most or problem.num_devices // (ranks + step) < width


def _batches(problem: Problem, ranks: int, width: int) -> list[Batch]:
    """Return candidates that feed all replicas.

    Where sizes are free, some have micro-batches in groups of ``ranks``.
    """
    batches = dict.fromkeys(candidates(problem, (width,)))
    if not problem.micro_batch_sizes:
        for batch in list(batches):
            number = -(-batch.num_micro_batches // ranks) * ranks
            if number <= problem.global_batch_size:
                whole = problem.global_batch_size
                batches.setdefault(Batch(number, -(-whole // number), whole // number))
    return [batch for batch in batches if batch.replicas_fed(problem.min_slice) >= width]


def _expected_ns(problem: Problem, allocation: Allocation) -> int:
    """Return the busiest rank's time of work and waits, with the round trip and the longest all-reduce."""
    rows, numbers = most_rows(problem, allocation), range(len(allocation.stages))
    costs = [stage_costs(problem, stage, rows) for stage in allocation.stages]
    moves = (transfer(problem, allocation, s, rows, direction) for s in numbers for direction in (0, 1))
    way_ns = sum(move.duration_ns for move in moves if move)
    busy_ns = _busy_ns(allocation, [cost.forward_ns + cost.backward_ns for cost in costs], way_ns)
    return busy_ns + max(stage_all_reduce_ns(problem, stage) for stage in allocation.stages)


def _busy_ns(allocation: Allocation, passes_ns: Sequence[int], way_ns: int = 0) -> int:
    """Return the busiest rank's work and its waits: p - 1 parts of the model and a round trip.

    Several pipelines fill each other's waits. ``passes_ns``: a forward and a backward of each stage.
    """
    work: Counter[tuple[int, ...]] = Counter()
    for s, stage in enumerate(allocation.stages):
        work[stage.devices] += len(allocation.micro_batches(s)) * passes_ns[s]
    return max(work.values()) + ((len(work) - 1) * max(passes_ns) + way_ns) // len(allocation.pipelines)


def _near_first(problem: Problem, ranked: Sequence[Allocation], proposed: Iterable[Proposal]) -> Iterator[Proposal]:
    """Yield proposals that fit into memory, then proposals that wait long for it, then proposals that do not fit.

    Of the proposals that do not fit, recomputing ones come first: the simulator finds a little more free memory than is
    counted here.
    """
    slow, unfit = [], []
    most_ns = NEAR * _expected_ns(problem, ranked[0]) if ranked else 0
    for each in proposed:
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
    """Yield the schedule's order, with recomputation where the request requires it or memory runs short.

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
    overtaking = [] if problem.recompute == "always" else found_overtaking(problem, allocation)[:MAX_OVERTAKING]
    for each in overtaking:
        yield in_order(problem, allocation, each.orders)
    if problem.recompute == "always" or (
        problem.recompute == "auto" and not any(_fits(problem, allocation, each.orders) for each in overtaking)
    ):
        again = recomputing(allocation, overtaking[0].orders if overtaking else None)
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
    """Return the order with recomputation: of all stages if the request requires it, else where it is worth its time.

    Single modules of a layer are recomputed where these have separate costs and that is quicker (``lighter``).
    """
    again = recomputing(allocation, None if problem.recompute == "always" else orders)
    whole = recomputed(again, orders)
    overlap = problem.rules.overlap_all_reduce
    is_worth_it = problem.module_sets and _fits(problem, again, whole)
    by_modules = lighter(problem, again, whole, overlap, lambda: False) if is_worth_it else None
    if by_modules is None:
        return in_order(problem, again, whole)

    def time_ns(plan: tuple[Allocation, Orders]) -> int:
        return simulate(problem, *plan, overlap=overlap).time_per_global_batch_ns

    return in_order(problem, *min(by_modules, (again, whole), key=time_ns))
