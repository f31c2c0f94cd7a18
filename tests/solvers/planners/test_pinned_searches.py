"""Pins inside searches: cuts of several parts on a rank, HetPipe's workers, a target's ranks; against enumeration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from problems import make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.grid.parts_in_turn import IN_A_V, Turns, both_ways, laid_out
from penstock.solvers.grid.pinned_cuts import keeping_pins, pinned_bounds
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.options import checked
from penstock.solvers.model.pins import broken_pin, devices_allowed, moved
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.result import Status
from penstock.solvers.model.trainer_limits import Span, Within
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.hetpipe.partitions import Partitions
from penstock.solvers.planners.many_devices.device_line import line_of
from penstock.solvers.planners.many_devices.stage_costs import Pieces
from penstock.solvers.planners.setting import Setting
from penstock.solvers.planners.trainer.planner import RankShape, ShapeSearch
from penstock.solvers.schedules.trainer_orders import ranks_of_stages
from penstock.solvers.solve.driver import solve

pytestmark = pytest.mark.tier("ci")


def drawn(seed: int, layers: int = 6, **changes: object) -> Problem:
    """Draw layers on four devices in two nodes, and one or two pins."""
    draw = np.random.default_rng(seed)
    times = draw.integers(5, 60, layers).tolist()
    problem = make_problem(times, nodes=(2, 2), boundary_bytes=1, global_batch_size=8, **changes)  # type: ignore[arg-type]
    pins = []
    for _ in range(int(draw.integers(1, 3))):
        first = int(draw.integers(0, layers))
        last = int(draw.integers(first, layers))
        holders = draw.choice(4, int(draw.integers(1, 4)), replace=False)
        pins.append(Pin(first, last, frozenset(int(d) for d in holders)))
    return replace(problem, pins=tuple(pins))


def cuts(problem: Problem, parts: int) -> Iterator[tuple[int, ...]]:
    places = [at + 1 for at in range(problem.num_layers - 1) if problem.cuttable[at]]
    yield from ((0, *chosen, problem.num_layers) for chosen in combinations(places, parts - 1))


def kept(problem: Problem, bounds: tuple[int, ...], devices: list[tuple[int, ...]]) -> bool:
    stages = (Stage(low, high - 1, group) for (low, high), group in zip(pairwise(bounds), devices, strict=True))
    return broken_pin(problem, single_pipeline(tuple(stages), 4)) is None


def busiest(problem: Problem, bounds: tuple[int, ...], rank_of: tuple[int, ...]) -> int:
    costs = problem.costs(problem.devices[0].kind, 1)
    upto = costs.forward_ns + costs.backward_ns
    work = [0] * len(rank_of)
    for rank, (low, high) in zip(rank_of, pairwise(bounds), strict=True):
        work[rank] += int(upto[high] - upto[low])
    return max(work)


@pytest.mark.cases(2)
@pytest.mark.tier("quick")
@pytest.mark.parametrize(
    ("rank_of", "width"), [((0, 1, 0, 1), 1), ((0, 1, 1, 0), 1), ((0, 1, 1, 0), 2), ((0, 1, 2, 3), 1), ((0, 0), 3)]
)
def test_the_best_cut_that_devices_can_keep_is_found(rank_of: tuple[int, ...], width: int) -> None:
    """Every cut with every choice of devices for each rank; the search has no result only where no cut is possible."""
    possible = 0
    for seed in range(40):
        problem = drawn(seed)
        best = None
        for bounds in cuts(problem, len(rank_of)):
            for order in permutations(range(4), width * (max(rank_of) + 1)):
                homes = [tuple(sorted(order[rank * width : (rank + 1) * width])) for rank in rank_of]
                if kept(problem, bounds, homes):
                    value = busiest(problem, bounds, rank_of)
                    best = value if best is None else min(best, value)
        result = pinned_bounds(problem, rank_of, width)
        assert (result is None) == (best is None), seed
        if result is not None:
            possible += 1
            assert busiest(problem, result, rank_of) == best, seed
            places = [tuple(range(rank * width, (rank + 1) * width)) for rank in rank_of]
            parts = zip(pairwise(result), places, strict=True)
            stages = tuple(Stage(low, high - 1, homes) for (low, high), homes in parts)
            placed = moved(problem, single_pipeline(stages, 4))
            assert placed is not None, seed
            assert broken_pin(problem, placed) is None, seed
    assert 5 < possible < 40


@pytest.mark.tier("quick")
def test_parts_on_the_same_devices_are_cut_so_that_pins_hold() -> None:
    """The even cut of a loop has layers 0–1 and 4–5 on one device; only 0 and 4–7 may be together."""
    problem = make_problem([10] * 8, nodes=(2,), boundary_bytes=1, global_batch_size=4)
    problem = replace(problem, pins=(Pin(0, 0, frozenset({1})), Pin(1, 3, frozenset({0}))))
    batch, places = batch_of(problem, 1), [(0,), (1,)]
    for allocation in (laid_out(problem, batch, places, turns) for turns in (Turns("loop", 2), IN_A_V)):
        assert broken_pin(problem, allocation) is None
        assert len(allocation.stages) == 4
    unkept = laid_out(replace(problem, pins=()), batch, places, Turns("loop", 2))
    assert moved(problem, unkept) is None
    with pytest.raises(UnsupportedRequest, match="layers 0–0 on n0/1"):
        both_ways(problem, batch, places, 1)
    assert keeping_pins(replace(problem, pins=()), unkept, [0, 1, 0, 1], 1) is unkept


LOOP, V = (1, 0, 1, 0), (1, 0, 0, 1)
"""The devices that the layers are pinned to: 0, 1 to 3, 4, 5 to 7."""


@pytest.mark.parametrize(
    ("planner", "options", "possible", "impossible"),
    [("interleaved", {"depth": 2, "chunks": 2}, LOOP, V), ("zero-bubble", {"depth": 2, "shape": "v"}, V, LOOP)],
)
def test_planners_of_several_parts_find_what_exchanging_devices_does_not(
    planner: str, options: dict[str, object], possible: tuple[int, ...], impossible: tuple[int, ...]
) -> None:
    """A loop and a V of four uneven parts; impossible pins are refused and named."""
    problem = make_problem([10] * 8, nodes=(2,), boundary_bytes=1, global_batch_size=4)
    spans = [(0, 0), (1, 3), (4, 4), (5, 7)]
    pinned = {
        place: replace(problem, pins=tuple(Pin(*span, frozenset({d})) for span, d in zip(spans, place, strict=True)))
        for place in (possible, impossible)
    }
    result = solve(pinned[possible], planner, options=options)
    assert result.best is not None
    assert [stage.devices for stage in result.best.allocation.stages] == [(device,) for device in possible]
    with pytest.raises(UnsupportedRequest, match="keeps the pins"):
        solve(pinned[impossible], planner, options=options)


def test_a_proven_request_is_infeasible_whoever_is_asked() -> None:
    problem = make_problem([10] * 4, nodes=(1, 1), boundary_bytes=1, global_batch_size=4)
    problem = replace(problem, pins=(Pin(0, 2, frozenset({0})), Pin(1, 1, frozenset({1}))))
    for planner in ("interleaved", "zero-bubble", "hetpipe"):
        assert solve(problem, planner).status is Status.INFEASIBLE, planner
    single = replace(problem, pins=(Pin(1, 1, frozenset({1})),))
    with pytest.raises(UnsupportedRequest, match=r"pins let only n1/0 hold layer 1"):
        solve(single, "hetpipe")


@pytest.mark.tier("quick")
def test_a_workers_partition_keeps_the_pins_and_is_the_best_of_those() -> None:
    """Two kinds on devices 0, 2 and 3, every order of them, every cut; the largest load of a stage."""
    none = some = 0
    devices = (0, 2, 3)
    for seed in range(40):
        problem = drawn(seed, layers=5, kinds=["fast", "fast", "cpu", "cpu"], speed={"fast": 2.0}, shared=True)
        problem = replace(problem, forward_bytes=np.zeros(4, np.int64), backward_bytes=np.zeros(4, np.int64))
        loads = []
        for order in permutations(devices):
            for bounds in cuts(problem, 3):
                if kept(problem, bounds, [(d,) for d in order]):
                    loads.append(max(_load(problem, d, *part) for d, part in zip(order, pairwise(bounds), strict=True)))
        worker = Partitions(problem).worker(devices, batch_of(problem, 2), "any")
        assert (None if worker is None else worker.load_ns) == min(loads, default=None), seed
        none, some = none + (worker is None), some + (worker is not None)
        if worker is not None:
            assert broken_pin(problem, single_pipeline(worker.stages, 4)) is None
    assert none > 5
    assert some > 5


def _load(problem: Problem, device: int, low: int, high: int) -> int:
    costs = problem.costs(problem.devices[device].kind, 2)
    return int(costs.forward_ns[high] - costs.forward_ns[low] + costs.backward_ns[high] - costs.backward_ns[low])


@pytest.mark.parametrize("schedule", ["early-backward", "interleaved"])
def test_a_targets_ranks_get_the_shortest_longest_part_that_their_devices_may_hold(schedule: str) -> None:
    limits = Within("megatron", (schedule,), False, (), False, Span(0, 7), (True,) * 7)
    places, chunks = ((0,), (1,)), 2 if schedule == "interleaved" else 1
    rank_of = ranks_of_stages(schedule, 2, chunks)
    none = 0
    for seed in range(40):
        problem = replace(drawn(seed, layers=8), within=limits)
        shape = RankShape(0, 0, places, chunks, rank_of, batch_of(problem, 2))
        cut = ShapeSearch(Setting(problem), limits, schedule)._kept_cut(shape)
        homes = [places[rank] for rank in rank_of]
        values = [_longest(problem, bounds) for bounds in cuts(problem, len(rank_of)) if kept(problem, bounds, homes)]
        assert (None if cut is None else _longest(problem, tuple(cut))) == min(values, default=None), seed
        none += cut is None
    assert 0 < none < 40


def _longest(problem: Problem, bounds: tuple[int, ...]) -> int:
    return busiest(problem, bounds, tuple(range(len(bounds) - 1)))


def test_a_targets_plan_begins_in_the_node_that_the_first_layers_are_pinned_to() -> None:
    """Node 1's devices have to hold the first layers; ranks count through nodes in the order of the stages."""
    limits = Within("deepspeed", ("early-backward",), False, (), False, Span(0, 7), (True,) * 7)
    problem = make_problem([10] * 8, nodes=(4, 4), boundary_bytes=1, global_batch_size=8)
    problem = replace(problem, within=limits, pins=(Pin(0, 3, frozenset({4, 5, 6, 7})), Pin(4, 7, frozenset(range(4)))))
    result = solve(problem, "uniform")
    assert result.best is not None
    assert broken_pin(problem, result.best.allocation) is None
    assert result.best.allocation.stages[0].devices[0] == 4


@pytest.mark.parametrize("planner", ["wpipe", "pipedream-2bw"])
def test_grouped_updates_are_cut_for_the_pins(planner: str) -> None:
    """Too many folded lines to list, and the even cut has pinned and other layers in one part."""
    rule: UpdateRule = "double_grouped" if planner == "wpipe" else "double_buffered"
    problem = make_problem(
        [10] * 14, nodes=(1, 1, 1, 1), boundary_bytes=1, global_batch_size=16, micro_batch_sizes=(2,)
    )
    pins = (Pin(0, 2, frozenset({0})), Pin(11, 13, frozenset({1})))
    problem = replace(problem, pins=pins, update_rules=frozenset({rule}))
    folds = 2 if planner == "wpipe" else 1
    proposals = PLANNERS[planner].proposals
    assert proposals is not None
    plans = [each.allocation for each in proposals(Setting(problem), checked(planner, PLANNERS[planner].options, {}))]
    depths = {len(allocation.stages) // folds for allocation in plans}
    assert 4 in depths
    assert all(broken_pin(problem, allocation) is None for allocation in plans)
    result = solve(problem, planner)
    assert result.best is not None
    assert broken_pin(problem, result.best.allocation) is None


@pytest.mark.tier("quick")
def test_runs_of_layers_are_on_no_more_devices_than_may_hold_them() -> None:
    """``spread`` and ``relax``, which use numbers of devices only, against a separate count of the devices allowed."""
    closed = 0
    for seed in range(12):
        problem = drawn(seed, layers=8, micro_batch_sizes=(8,))
        pieces = Pieces(problem, batch_of(problem, 8), line_of(problem))
        depth = np.ones(problem.num_layers, dtype=np.int64)
        for k, replicas in enumerate(pieces.replicas.tolist()):
            fits = pieces.band(k, problem.num_layers, depth).fits
            for first in range(problem.num_layers):
                for stop in range(first + 1, problem.num_layers + 1):
                    touched = [pin.devices for pin in problem.pins if pin.first < stop and first <= pin.last]
                    number = sum(all(d in group for group in touched) for d in range(problem.num_devices))
                    assert devices_allowed(problem)[first, stop] == number
                    assert fits[first, stop - first - 1] == (number >= replicas)
                    closed += number < replicas
    assert closed > 100


@pytest.mark.parametrize("planner", ["gpipe", "model-parallel"])
def test_a_line_is_cut_for_the_pins_with_as_many_stages(planner: str) -> None:
    """The even cut of two stages has layer 4 behind it; the pins need it with the layers before."""
    problem = make_problem([10] * 8, nodes=(2,), boundary_bytes=1, global_batch_size=4)
    problem = replace(problem, pins=(Pin(0, 4, frozenset({1})), Pin(5, 7, frozenset({0}))))
    proposals = PLANNERS[planner].proposals
    assert proposals is not None
    options = checked(planner, PLANNERS[planner].options, {"stages": 2})
    allocations = [each.allocation for each in proposals(Setting(problem), options)]
    assert allocations
    for allocation in allocations:
        assert [(s.first, s.last, s.devices) for s in allocation.stages] == [(0, 4, (1,)), (5, 7, (0,))]
