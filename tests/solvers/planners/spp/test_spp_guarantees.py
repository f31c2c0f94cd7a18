"""SPP's Lemma 1, Lemma 2 and Theorem 1 on random instances against enumeration: no violation (ALGORITHMS 8: S1, S2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
import spp_theorems
from problems import chain, make_problem

from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, batch_of
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.spp.ordering import device_order, graph_of
from penstock.solvers.planners.spp.partition import search
from penstock.solvers.planners.spp.plans import found_of
from penstock.solvers.planners.spp.tables import chain_of, windows
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.pipeline_execution import pipeline_execution

INSTANCES = 200
MODEL: dict[str, Any] = {"transfer": "spp", "all_reduce": "flat", "overlap_all_reduce": False, "bucket_bytes": 2**60}


def random_problem(seed: int, largest_devices: int = 4) -> tuple[Problem, Batch]:
    """Draw 2 to 5 layers on 2 to ``largest_devices`` devices linked by a matrix, in SPP's model."""
    draw = np.random.default_rng(seed)
    layers, devices = int(draw.integers(2, 6)), int(draw.integers(2, largest_devices + 1))
    table = np.triu(draw.integers(1, 12, (devices, devices)) * 10**9, 1)
    nodes = tuple(f"n{d}" for d in range(devices))
    names = tuple(f"n{d}/0" for d in range(devices))
    network = Network(names, nodes, tuple(range(devices)), (None,) * devices, (), table + table.T)
    batches, rows = int(draw.integers(1, 7)), 12
    problem = make_problem(
        draw.integers(1_000, 60_000, layers).tolist(),
        draw.integers(1_000, 60_000, layers).tolist(),
        boundary_bytes=draw.integers(0, 200_000, layers - 1).tolist(),
        backward_bytes=draw.integers(0, 200_000, layers - 1).tolist(),
        parameter_bytes=draw.integers(0, 6_000_000, layers).tolist(),
        network=network,
        global_batch_size=rows * batches,
        micro_batch_sizes=(rows,),
        **MODEL,
    )
    return problem, batch_of(problem, rows)


def all_plans(problem: Problem, batch: Batch) -> Iterator[Allocation]:
    """Yield every partition into stages on every ordered choice of devices; replicas of a stage in ascending order."""
    layers, devices = problem.num_layers, problem.num_devices
    for total in range(1, devices + 1):
        for order in permutations(range(devices), total):
            for stages in range(1, min(layers, total) + 1):
                for joints in combinations(range(1, total), stages - 1):
                    groups = [order[i:j] for i, j in zip((0, *joints), (*joints, total), strict=True)]
                    if any(list(group) != sorted(group) for group in groups):
                        continue
                    for cuts in combinations(range(1, layers), stages - 1):
                        ends = zip((0, *cuts), (*cuts, layers), groups, strict=True)
                        parts = tuple(Stage(first, end - 1, devices) for first, end, devices in ends)
                        yield single_pipeline(parts, batch.num_micro_batches)


def by_spp(problem: Problem, batch: Batch) -> tuple[int, int]:
    """Run Algorithm 3 on the recursive order; return W of PRM, and the makespan of its best plan under PE."""
    line = windows(problem, device_order(graph_of(problem)))
    devices = problem.num_devices
    table = chain_of(problem, line, batch, range(1, devices + 1), min(devices, problem.num_layers), unused=True)
    plans = [
        found_of(problem, line, batch, partition.parts[0]).allocation
        for partition in search(table, min(devices, problem.num_layers)).values()
    ]
    times = [makespan_ns(problem, plan, pipeline_execution(problem, plan)) for plan in plans]
    return min(spp_theorems.slowest_ns(problem, plan) for plan in plans), min(times)


@pytest.mark.tier("nightly")
def test_no_violation_of_lemma_2_and_theorem_1() -> None:
    tightest = 0.0
    for seed in range(INSTANCES):
        problem, batch = random_problem(seed, 4 if seed % 10 == 0 else 3)
        smallest, value = by_spp(problem, batch)
        phi, ratio = spp_theorems.spread(problem, batch), spp_theorems.theorem_1(problem, batch)
        assert phi is not None
        assert ratio is not None
        slowest = sorted(
            ((spp_theorems.slowest_ns(problem, plan), n, plan) for n, plan in enumerate(all_plans(problem, batch)))
        )
        best = slowest[0][0]
        assert smallest <= (1 + phi) * best + 10, seed
        tightest = max(tightest, smallest / float((1 + phi) * best))
        plans = [plan for _, _, plan in slowest[:20]]
        least = min(makespan_ns(problem, plan, pipeline_execution(problem, plan)) for plan in plans)
        assert value < ratio * min(least, value), seed
    assert tightest > 0.5


@pytest.mark.parametrize("block", range(4))
def test_no_violation_of_lemma_1(block: int) -> None:
    """Random plans in PE's order; the least of DAPPLE's and GPipe's is no proof, but W is below all of them."""
    closest = 0.0
    for seed in range(block * 75, block * 75 + 75):
        draw = np.random.default_rng(seed)
        stages = int(draw.integers(1, 6))
        replicas = draw.integers(1, 3, stages)
        total = int(replicas.sum())
        batches = int(draw.integers(1, 21))
        problem = make_problem(
            draw.integers(100, 3000, stages).tolist(),
            draw.integers(100, 5000, stages).tolist(),
            boundary_bytes=(draw.integers(0, 4000, stages - 1) * draw.integers(0, 2, stages - 1)).tolist(),
            parameter_bytes=(draw.integers(0, 20_000, stages) * draw.integers(0, 2, stages)).tolist(),
            nodes=(total,),
            global_batch_size=2 * batches,
            micro_batch_sizes=(2,),
            **MODEL,
        )
        ends = np.cumsum(replicas)
        plan = chain([(1, range(e - r, e)) for r, e in zip(replicas, ends, strict=True)], batches)
        value = makespan_ns(problem, plan, pipeline_execution(problem, plan))
        assert spp_theorems.slowest_ns(problem, plan) <= value <= spp_theorems.lemma_1_ns(problem, plan), seed
        closest = max(closest, value / spp_theorems.lemma_1_ns(problem, plan))
        for orders in (early_backward(problem, plan), gpipe(problem, plan)):
            assert spp_theorems.slowest_ns(problem, plan) <= makespan_ns(problem, plan, orders)
    assert closest > 0.9


def test_lemma_1_is_reached() -> None:
    """One stage: (M + 0) C and its all-reduce; by hand."""
    problem = make_problem(
        [10], [20], parameter_bytes=4_000, nodes=(2,), global_batch_size=6, micro_batch_sizes=(2,), **MODEL
    )
    plan = chain([(1, [0, 1])], 3)
    assert spp_theorems.lemma_1_ns(problem, plan) == 3 * 30 + 4_000
    assert makespan_ns(problem, plan, pipeline_execution(problem, plan)) == 3 * 30 + 4_000


def test_phi_by_hand() -> None:
    """p_max = 60 ns, d_max = 2000 B, b from 1 to 2 GB/s, Gamma = 150 / 3 ns; without the second cut p_max = 120 ns."""
    table = np.asarray([[0, 2, 1], [2, 0, 1], [1, 1, 0]]) * 10**9
    network = Network(("a", "b", "c"), ("n",), (0,) * 3, (None,), (), table)
    problem = make_problem([10, 20, 20], boundary_bytes=[10, 1000], network=network, global_batch_size=1, **MODEL)
    batch = batch_of(problem, 1)
    assert spp_theorems.spread(problem, batch) == Fraction(2000 * 3, 150) * Fraction(1, 2)
    joined = replace(problem, cuttable=np.asarray([True, False]))
    assert spp_theorems.spread(joined, batch) == Fraction(120 * 2 * 3, 150) * Fraction(1, 2)
    assert spp_theorems.theorem_1(joined, batch) == 10 * Fraction(17, 5)
    apart = replace(problem, network=replace(network, matrix_bytes_per_s=table * np.asarray([[1, 1, 0]] * 3)))
    assert spp_theorems.spread(apart, batch) is None
