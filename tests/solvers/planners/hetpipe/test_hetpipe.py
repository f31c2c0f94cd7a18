"""HetPipe: groupings by hand, partitions against enumeration, and simulated plans of several pipelines."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, pairwise, permutations, product
from math import inf
from typing import Any

import numpy as np
import pytest
from problems import make_problem

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Status
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.hetpipe.partitions import HOLDS, Hold, Partitions, groupings, orders, shares
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.solve.driver import judged, solve

pytestmark = pytest.mark.tier("ci")

MIXED: dict[str, Any] = {"kinds": ["fast", "fast", "cpu", "cpu"], "speed": {"fast": 2.0}}


def drawn(seed: int, **changes: Any) -> Problem:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(3, 8))
    settings: dict[str, Any] = {
        "boundary_bytes": draw.integers(0, 900_000, count - 1).tolist(),
        "parameter_bytes": draw.integers(0, 3_000_000, count).tolist(),
        "stash_bytes": draw.integers(0, 400_000, count).tolist(),
        "nodes": (2, 2),
        "inside_bytes_per_s": 8 * 10**9,
        "between_bytes_per_s": 10**9,
        "global_batch_size": 16,
        "micro_batch_sizes": (2,),
        "recompute": "auto",
        "shared": bool(seed % 2),
        "transfer": "nic" if seed % 4 else "madpipe",
        "latency_ns": 700,
    }
    return make_problem(draw.integers(100_000, 3_000_000, count).tolist(), **(settings | changes))


@pytest.mark.tier("quick")
def test_workers_of_neighbours_of_all_nodes_and_of_pairs() -> None:
    """HetPipe section 8's NP, ED and HD, by hand."""
    two = make_problem([1] * 4, nodes=(2, 2))
    assert list(groupings(two, "node")) == [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))]
    assert list(groupings(two, "equal")) == [((0, 2), (1, 3))]
    assert list(groupings(two, "hybrid")) == []
    speed = {"a": 1.5, "b": 4.0, "c": 2.0, "d": 3.0}
    four = make_problem([600], nodes=(1, 1, 1, 1), kinds=list(speed), speed=speed)
    assert list(groupings(four, "node")) == [((0, 1), (2, 3)), ((0,), (1,), (2,), (3,))]
    assert list(groupings(four, "hybrid")) == [((1, 0), (3, 2))]
    assert list(groupings(make_problem([1], nodes=(3, 1)), "equal")) == []
    assert next(groupings(make_problem([1], nodes=(4, 2)), "node")) == ((0, 1), (2, 3), (4, 5))


@pytest.mark.tier("quick")
def test_orders_differ_in_their_kinds() -> None:
    problem = make_problem([1], nodes=(4,), **MIXED)
    wanted = {tuple("fast" if d < 2 else "cpu" for d in order) for order in permutations(range(4))}
    all_orders = orders(problem, (0, 1, 2, 3))
    assert len(all_orders) == len(wanted) == 6
    assert {tuple(problem.devices[d].kind for d in order) for order in all_orders} == wanted
    ten = make_problem([1], nodes=(10,), kinds=["cpu"] * 5 + ["fast"] * 5, speed={"fast": 2.0})
    assert orders(ten, tuple(range(10))) == [(5, 6, 7, 8, 9, 0, 1, 2, 3, 4), tuple(range(10))]


@pytest.mark.tier("quick")
def test_micro_batches_go_where_they_are_done_first() -> None:
    for seed in range(50):
        draw = np.random.default_rng(seed)
        loads = draw.integers(1, 20, int(draw.integers(1, 4))).tolist()
        number = int(draw.integers(len(loads), 9))
        numbers = shares(loads, number)
        every = [each for each in product(range(1, number + 1), repeat=len(loads)) if sum(each) == number]
        assert sum(numbers) == number
        assert max(n * load for n, load in zip(numbers, loads, strict=True)) == min(
            max(n * load for n, load in zip(each, loads, strict=True)) for each in every
        )


def enumerated(problem: Problem, tried: Iterable[tuple[int, ...]], hold: Hold) -> float:
    """Return the best load over every partition and order that memory allows.

    A load is a stage's computation with the messages that it receives and sends.
    """
    batch = batch_of(problem, 2)
    best: float = inf
    for order in tried:
        for cuts in combinations(range(1, problem.num_layers), len(order) - 1):
            bounds = (0, *cuts, problem.num_layers)
            stages = tuple(Stage(i, j - 1, (d,)) for (i, j), d in zip(pairwise(bounds), order, strict=True))
            allocation = single_pipeline(stages, batch.num_micro_batches)
            in_flight = [{"all": len(order) - number, "one": 1, "any": 0}[hold] for number in range(len(order))]
            fits = [micro_batches_that_fit(problem, stage, batch.most_rows) for stage in stages]
            if all(fit >= wanted for fit, wanted in zip(fits, in_flight, strict=True)):
                best = min(best, max(load_of(problem, allocation, s) for s in range(len(stages))))
    return best


def load_of(problem: Problem, allocation: Allocation, s: int) -> int:
    rows = batch_of(problem, 2).most_rows
    costs = stage_costs(problem, allocation.stages[s], rows)
    last = len(allocation.stages) - 1
    passing = [(s, 0), (s + 1, 1)] * (s < last) + [(s, 1), (s - 1, 0)] * (s > 0)
    hops = [transfer(problem, allocation, sender, rows, way) for sender, way in passing]
    return costs.forward_ns + costs.backward_ns + sum(hop.duration_ns for hop in hops if hop)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("hold", HOLDS)
@pytest.mark.parametrize("changes", [{}, MIXED], ids=["equal", "mixed"])
def test_a_workers_partition_is_the_best_of_all(hold: Hold, changes: dict[str, Any]) -> None:
    """Devices 0 of one node, 2 and 3 of the other: where kinds differ every order is tried, else the given order."""
    devices = (0, 2, 3)
    infeasible = 0
    for seed in range(24):
        memory = 2**40 if seed % 3 else [9_000_000, 12_000_000, 6_000_000, 7_000_000]
        problem = drawn(seed, recompute="never", memory_bytes=memory, **changes)
        worker = Partitions(problem).worker(devices, batch_of(problem, 2), hold)
        best = enumerated(problem, permutations(devices) if changes else [devices], hold)
        assert (inf if worker is None else worker.load_ns) == best
        infeasible += worker is None
    assert (infeasible > 0) == (hold != "any")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("changes", [{}, MIXED, {"nodes": (2, 1, 1)}, {"memory_bytes": 14_000_000}])
def test_plans_have_two_workers_and_lose_no_micro_batch(seed: int, changes: dict[str, Any]) -> None:
    problem = drawn(seed, **changes)
    result = solve(problem, "hetpipe")
    if result.best is None:
        assert result.status in (Status.INFEASIBLE, Status.NONE_FOUND)
        assert result.shortage is not None
        return
    pipelines = result.best.allocation.pipelines
    assert len(pipelines) >= 2
    assert all(stage.replicas == 1 for pipeline in pipelines for stage in pipeline.stages)
    covered = [m for pipeline in pipelines for m in range(pipeline.micro_batches[0], pipeline.micro_batches[1] + 1)]
    assert covered == list(range(result.best.allocation.num_micro_batches))
    used = [d for stage in result.best.allocation.stages for d in stage.devices]
    assert len(used) == len(set(used))


def best_of(problem: Problem, workers: tuple[tuple[int, ...], ...], rows: int) -> JudgedPlan | None:
    """Return the partitions of these workers with micro-batches of so many rows, under the best warm-up."""
    plans = (Partitions(problem).allocation(workers, batch_of(problem, rows), hold) for hold in HOLDS)
    allocation = next(each for each in plans if each is not None)
    overlaps = (problem.rules.overlap_all_reduce,)
    return judged(problem, "hetpipe", [Proposal(allocation, ("early-backward",), "best", overlaps)]).best


def test_the_faster_worker_gets_more_micro_batches() -> None:
    """By hand: a node twice as fast as the other takes 4 of 6 micro-batches."""
    problem = make_problem([600] * 4, nodes=(2, 2), micro_batch_sizes=(1,), global_batch_size=6, **MIXED)
    best = best_of(problem, ((0, 1), (2, 3)), 1)
    assert best is not None
    assert [pipeline.micro_batches for pipeline in best.allocation.pipelines] == [(0, 3), (4, 5)]


def test_spreading_equally_makes_workers_alike() -> None:
    problem = drawn(2, **MIXED)
    best = solve(problem, "hetpipe", options={"workers": "equal"}).best
    assert best is not None
    kinds = [[problem.devices[s.devices[0]].kind for s in pipeline.stages] for pipeline in best.allocation.pipelines]
    assert kinds[0] == kinds[1]
    assert set(kinds[0]) == {"cpu", "fast"}


def test_workers_of_one_device_are_data_parallel() -> None:
    """Four micro-batches of two rows on a device each take as long as one of eight rows on four replicas."""
    for seed in range(4):
        problem = drawn(seed, global_batch_size=8, micro_batch_sizes=(2,), bucket_bytes=1_000_000)
        ours = best_of(problem, tuple((device,) for device in range(problem.num_devices)), 2)
        whole = drawn(seed, global_batch_size=8, micro_batch_sizes=(8,), bucket_bytes=1_000_000)
        theirs = solve(whole, "dp", options={"overlap": "yes"}).best
        assert ours is not None
        assert theirs is not None
        assert ours.value_ns == theirs.value_ns


def test_fewer_micro_batches_in_flight_where_memory_is_short() -> None:
    """Stashes of 3 MB on devices of 7: two of the four micro-batches that P_A would keep on the first device."""
    problem = make_problem(
        [1_000_000] * 4,
        stash_bytes=3_000_000,
        nodes=(4, 4),
        memory_bytes=7_000_000,
        micro_batch_sizes=(1,),
        global_batch_size=16,
    )
    best = best_of(problem, ((0, 1, 2, 3), (4, 5, 6, 7)), 1)
    assert best is not None
    assert isinstance(best.schedule, Orders)
    assert max(best.schedule.warmup) == 2


def test_what_is_refused() -> None:
    with pytest.raises(UnsupportedRequest, match="there is one node, with 4 devices") as refused:
        solve(make_problem([1] * 4, nodes=(4,)), "hetpipe")
    assert refused.value.remedy is not None
    assert "pipedream" in refused.value.remedy
    with pytest.raises(InvalidDocument, match="workers 'hybrid' cannot form virtual workers of equal size") as wrong:
        solve(make_problem([1] * 6, nodes=(2, 2, 2)), "hetpipe", options={"workers": "hybrid"})
    assert wrong.value.remedy == "workers 'best'"
    with pytest.raises(UnsupportedRequest, match="2 or more virtual workers; a global batch has at most 1"):
        solve(make_problem([1] * 4, nodes=(2, 2), global_batch_size=1), "hetpipe")
