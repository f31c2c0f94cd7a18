"""Chimera: the order of ALGORITHMS' appendix, the paper's bubbles and peaks, and its planner."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
from problems import make_problem, straight

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.program import KINDS
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.grid.parts_in_turn import both_ways
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.schedules.chimera import chimera
from penstock.solvers.schedules.support.recomputed import recomputed
from penstock.solvers.solve.driver import solve
from penstock.solvers.verify.verifier import verify

SHAPES = [(2, 1), (4, 1), (6, 1), (8, 1), (12, 1), (4, 2), (8, 2), (12, 2), (6, 3), (12, 3), (8, 4)]


def both(depth: int, number: int, pairs: int = 1, **more: object) -> tuple[Problem, Allocation]:
    """Build one layer a stage, F = 100, one byte of stash."""
    settings: dict[str, object] = {"backward_ns": [100] * depth, "stash_bytes": 1, "channel": "none"}
    problem = make_problem(
        [100] * depth,
        nodes=(depth,),
        global_batch_size=number,
        **(settings | more),  # type: ignore[arg-type]
    )
    return problem, both_ways(problem, batch_of(problem, 1), [(d,) for d in range(depth)], pairs)


def judged(problem: Problem, allocation: Allocation) -> Timeline:
    orders = chimera(problem, allocation)
    timeline = simulate(problem, allocation, orders)
    assert verify(problem, allocation, orders, timeline) == []
    assert schedule_bound(problem, allocation, orders).bound_ns <= timeline.time_per_global_batch_ns
    return timeline


def test_the_order_of_the_appendix() -> None:
    """ALGORITHMS, appendix C: D = 4, N = 4; 0 and 1 go down, 2 and 3 up."""
    problem, allocation = both(4, 4)
    texts = [
        " ".join(f"{KINDS[kind]}{m}@{s % 4}" for kind, s, m in row.operations.tolist())
        for row in chimera(problem, allocation).rows
    ]
    assert texts == [
        "F0@0 F1@0 F2@3 B2@3 F3@3 B3@3 B0@0 B1@0",
        "F0@1 F2@2 F1@1 F3@2 B2@2 B0@1 B3@2 B1@1",
        "F2@1 F0@2 F3@1 F1@2 B0@2 B2@1 B1@2 B3@1",
        "F2@0 F3@0 F0@3 B0@3 F1@3 B1@3 B2@0 B3@0",
    ]


@pytest.mark.parametrize("units", [1, 2, 4])
@pytest.mark.parametrize(("depth", "pairs"), SHAPES)
def test_bubbles_and_peaks_of_the_paper(depth: int, pairs: int, units: int) -> None:
    """Equal times: D / f - 2 of bubble; at most D micro-batches on a device, for f = 1 the least has D / 2 + 1."""
    problem, allocation = both(depth, depth * units, pairs)
    timeline = judged(problem, allocation)
    assert timeline.time_per_global_batch_ns == (2 * depth * units + depth // pairs - 2) * 100
    assert {use.idle_ns for use in timeline.uses.values()} == {(depth // pairs - 2) * 100}
    peaks = [use.memory.activations for use in timeline.uses.values()]
    assert max(peaks) == depth
    assert pairs > 1 or min(peaks) == depth // 2 + 1


@pytest.mark.parametrize(("depth", "slots"), [(4, 16), (6, 26), (8, 36)])
def test_backwards_of_twice_a_forward(depth: int, slots: int) -> None:
    """The paper's C_f F + C_b B: D of one and 2 D - 2 of the other on the longest way."""
    problem, allocation = both(depth, depth, backward_ns=[200] * depth)
    assert slots == depth + 2 * (2 * depth - 2)
    assert judged(problem, allocation).time_per_global_batch_ns == slots * 100


@pytest.mark.parametrize("number", [3, 5, 7, 13])
def test_any_number_of_micro_batches(number: int) -> None:
    """Micro-batches are shared among the pipelines, and the first ones take one more; the verifier checks the rest."""
    problem, allocation = both(4, number, boundary_bytes=30, parameter_bytes=50, update_ns=7, shared=True)
    shares = [last - first + 1 for first, last in (pipeline.micro_batches for pipeline in allocation.pipelines)]
    assert shares == [number - number // 2, number // 2]
    timeline = judged(problem, allocation)
    copies = sorted({each.stage for each in timeline.reductions})
    assert copies == [0, 1, 2, 3], "each stage is reduced with its copy, under the lower number"
    assert all(use.memory.parameters == 2 * 50 for use in timeline.uses.values())


def test_recomputation_is_an_operation_of_its_own() -> None:
    problem, allocation = both(4, 8, stash_bytes=100, boundary_bytes=1)
    plain = chimera(problem, allocation)
    pipelines = tuple(
        replace(each, stages=tuple(replace(s, recompute=((s.first, s.last),)) for s in each.stages))
        for each in allocation.pipelines
    )
    again = Allocation(pipelines, 8)
    orders = recomputed(again, plain)
    timeline = simulate(problem, again, orders)
    assert verify(problem, again, orders, timeline) == []
    assert timeline.peak_memory_bytes < simulate(problem, allocation, plain).peak_memory_bytes


def test_parts_that_meet_on_a_device_are_even_together() -> None:
    """Devices 0 and 3 hold stages 0 and 3, devices 1 and 2 the others; by all cuts."""
    loads = [10, 20, 30, 20, 10, 30]
    problem = make_problem(loads, nodes=(4,), global_batch_size=4)
    allocation = both_ways(problem, batch_of(problem, 1), [(d,) for d in range(4)], 1)
    cuts = [[(s.first, s.last) for s in pipeline.stages] for pipeline in allocation.pipelines]
    assert cuts[0] == cuts[1]
    sums = [sum(loads[first : last + 1]) for first, last in cuts[0]]
    least = min(
        max(sum(loads[:a]) + sum(loads[c:]), sum(loads[a:c])) for a, _b, c in combinations(range(1, len(loads)), 3)
    )
    assert max(sums[0] + sums[3], sums[1] + sums[2]) == least
    assert [stage.devices for stage in allocation.stages] == [(d,) for d in (0, 1, 2, 3, 3, 2, 1, 0)]


def test_allocations_of_another_shape_are_refused() -> None:
    problem = make_problem([100] * 4, nodes=(4,), global_batch_size=4)
    with pytest.raises(UnsupportedRequest, match="needs two pipelines or more"):
        chimera(problem, straight(problem, 4))
    for depth, pairs in ((3, 1), (4, 4)):
        with pytest.raises(UnsupportedRequest, match="need at least"):
            both_ways(problem, batch_of(problem, 1), [(d,) for d in range(depth)], pairs)


@pytest.mark.tier("ci")
def test_the_planner_takes_fewer_bubbles_than_one_direction() -> None:
    """16 equal layers on 4 devices, 4 micro-batches, B = F: the paper's 2 N + D - 2 against 2 (N + D - 1)."""
    problem = make_problem([100] * 16, [100] * 16, nodes=(4,), global_batch_size=4, micro_batch_sizes=(1,))
    best = solve(problem, "chimera", options={"depth": 4, "pairs": 1}).best
    one_way = solve(problem, "gpipe", options={"stages": 4}).best
    assert best is not None
    assert one_way is not None
    assert (best.value_ns, one_way.value_ns) == (10 * 400, 14 * 400)
    free = solve(problem, "chimera").best
    assert free is not None
    assert free.value_ns == 8 * 400, "two pipelines each way, D / f - 2 = 0"


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"depth": 3}, InvalidDocument, "is 3 devices in a pipeline"),
        ({"pairs": 3}, UnsupportedRequest, "this planner needs 6 devices"),
        ({"pairs": 2}, UnsupportedRequest, "allow 4 pipelines"),
    ],
)
def test_what_the_planner_cannot_take(options: dict[str, object], error: type[Exception], message: str) -> None:
    problem = make_problem([100] * 8, nodes=(5,), global_batch_size=3, micro_batch_sizes=(1,))
    with pytest.raises(error, match=message):
        solve(problem, "chimera", options=options)
