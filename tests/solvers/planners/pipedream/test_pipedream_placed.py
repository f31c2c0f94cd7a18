"""PipeDream's program on placed devices against every partition and replication, by the simulator's cost functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from math import inf
from typing import Any

import numpy as np
import pytest
from problems import make_problem

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.stage import stage_costs, update_ns
from penstock.solvers.costs.tables.device_line import device_order
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.grid.device_row import DeviceRow, replica_counts
from penstock.solvers.grid.row_partition import Settings, placed
from penstock.solvers.grid.slice_costs import Layers
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, batch_of
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.update_rules import micro_batches_per_update
from penstock.solvers.schedules.periodic.eager import bytes_needed

ROUNDING_NS = 8
"""Tolerance: a line through two probes, and one rounding per part of a load."""


def drawn(seed: int, **changes: Any) -> Problem:
    draw = np.random.default_rng(seed)
    count = int(draw.integers(1, 7))
    settings: dict[str, Any] = {
        "boundary_bytes": draw.integers(0, 900_000, count - 1).tolist(),
        "parameter_bytes": draw.integers(0, 3_000_000, count).tolist(),
        "stash_bytes": draw.integers(0, 400_000, count).tolist(),
        "workspace_bytes": draw.integers(0, 100_000, count).tolist(),
        "update_ns": draw.integers(0, 50_000, count).tolist(),
        "nodes": (2, 2) if seed % 2 else (2, 1),
        "inside_bytes_per_s": 8 * 10**9,
        "between_bytes_per_s": 10**9,
        "latency_ns": 1_000,
        "global_batch_size": 16,
        "micro_batch_sizes": (4,),
        "state_factor": 2,
        "shard_states": bool(seed % 3),
        "channel": "full" if seed % 2 else "half",
        "cuttable": (draw.random(count - 1) < 0.8).tolist(),
        "memory_bytes": 2**40 if seed % 4 else int(draw.integers(20_000_000, 60_000_000)),
    }
    return make_problem(draw.integers(100_000, 3_000_000, count).tolist(), **(settings | changes))


def allocations(problem: Problem, batch: Batch, settings: Settings) -> Iterator[Allocation]:
    """Yield every contiguous partition on every front of the row."""
    layers, row = problem.num_layers, device_order(problem)
    for stages in range(1, min(layers, len(row)) + 1):
        for cuts in combinations(range(1, layers), stages - 1):
            if not all(problem.cuttable[c - 1] for c in cuts):
                continue
            for shares in combinations(range(1, len(row) + 1), stages):
                widths = [b - a for a, b in pairwise((0, *shares))]
                if not settings.turns and max(widths) > batch.replicas_fed(problem.min_slice):
                    continue
                if settings.straight and max(widths) > 1:
                    continue
                parts = []
                bounds = zip(pairwise((0, *cuts, layers)), pairwise((0, *shares)), strict=True)
                for (i, j), (low, high) in bounds:
                    turns = settings.turns and high - low > 1
                    again = ((i, j - 1),) if settings.recompute else ()
                    parts.append(Stage(i, j - 1, row[low:high], "round_robin" if turns else "rows", again))
                yield single_pipeline(tuple(parts), batch.num_micro_batches)


def load_of(problem: Problem, allocation: Allocation, batch: Batch, settings: Settings) -> float:
    """Return the largest load per micro-batch; infinite where NOAM's micro-batches do not fit."""
    worst = 0
    behind = problem.num_devices
    for number, stage in enumerate(allocation.stages):
        room = min(problem.capacity_bytes(d) for d in stage.devices)
        noam = -(-behind // stage.replicas)
        turns = stage.replicas if settings.turns else 1
        depth = turns if settings.lenient else noam * turns
        if bytes_needed(problem, allocation, settings.update_rule, number, depth) > room:
            return inf
        behind -= stage.replicas
        costs = stage_costs(problem, stage, batch.most_rows)
        time = costs.forward_ns + costs.backward_ns + costs.recompute_ns
        every = micro_batches_per_update(settings.update_rule, stage, allocation.num_micro_batches)
        size = int(problem.trainable_bytes[stage.last + 1] - problem.trainable_bytes[stage.first])
        step = update_ns(problem, stage) + all_reduce_ns(problem, size, stage.devices)
        worst = max(worst, -(-time // turns) + -(-step // every))
        if number:
            ways = [transfer(problem, allocation, number - 1 + way, batch.most_rows, way) for way in (0, 1)]
            times = [0 if way is None else way.duration_ns for way in ways]
            together = not problem.rules.shared and problem.rules.channel == "half"
            worst = max(worst, sum(times) if together else max(times))
    return worst


CASES = [
    Settings(),
    Settings(straight=True),
    Settings("weight_stashing"),
    Settings("weight_stashing", turns=True),
    Settings("double_buffered"),
    Settings(recompute=True),
    Settings("weight_stashing", lenient=True),
]


@pytest.mark.parametrize("settings", CASES)
def test_it_finds_the_best_of_all_partitions(settings: Settings) -> None:
    for seed in range(24):
        problem = drawn(seed, latency_ns=0)
        batch = batch_of(problem, 4)
        plans = placed(problem, DeviceRow(problem, device_order(problem)), Layers(problem), batch, settings)
        best = min(load_of(problem, each, batch, settings) for each in allocations(problem, batch, settings))
        if not plans:
            assert best == inf
            continue
        assert abs(plans[0].value_ns - best) <= ROUNDING_NS
        for plan in plans:
            assert abs(load_of(problem, plan.allocation, batch, settings) - plan.value_ns) <= ROUNDING_NS


@pytest.mark.parametrize("settings", [Settings(), Settings("weight_stashing", turns=True)])
def test_it_finds_the_best_of_all_partitions_that_keep_the_pins(settings: Settings) -> None:
    none = 0
    for seed in range(24):
        draw = np.random.default_rng(seed)
        problem = drawn(seed, latency_ns=0)
        first = int(draw.integers(0, problem.num_layers))
        holders = frozenset(int(d) for d in draw.choice(problem.num_devices, 2, replace=False))
        problem = replace(problem, pins=(Pin(first, int(draw.integers(first, problem.num_layers)), holders),))
        batch = batch_of(problem, 4)
        row = DeviceRow(problem, device_order(problem), keeping=True)
        plans = placed(problem, row, Layers(problem), batch, settings)
        every = allocations(problem, batch, settings)
        kept = [load_of(problem, each, batch, settings) for each in every if broken_pin(problem, each) is None]
        best = min(kept, default=inf)
        assert all(broken_pin(problem, plan.allocation) is None for plan in plans)
        assert (not plans) == (best == inf)
        none += not plans
        assert not plans or abs(plans[0].value_ns - best) <= ROUNDING_NS
    assert 0 < none < 16


def test_kinds_of_devices_cost_what_they_do() -> None:
    """Two kinds: the stage on the devices of both takes the slower one's time."""
    for seed in range(8):
        problem = drawn(2 * seed + 1, kinds=["fast", "fast", "cpu", "cpu"], speed={"fast": 3.0}, latency_ns=0)
        batch = batch_of(problem, 4)
        plans = placed(problem, DeviceRow(problem, device_order(problem)), Layers(problem), batch, Settings())
        best = min(load_of(problem, each, batch, Settings()) for each in allocations(problem, batch, Settings()))
        assert abs(plans[0].value_ns - best) <= ROUNDING_NS


def test_sets_that_look_alike_are_probed_once_and_cost_the_same() -> None:
    """Every entry of the row's tables, on nodes of which two are alike, against the simulator's functions."""
    problem = drawn(1, nodes=(3, 2, 3), latency_ns=700, transfer="nic", shared=True)
    row = DeviceRow(problem, device_order(problem))
    for p in range(8):
        for r, count in enumerate(row.replicas.tolist()):
            if p + count > 8:
                assert row.kinds[p, r] < 0
                continue
            size = 10**9
            exact = all_reduce_ns(problem, size, tuple(range(p, p + count)))
            assert abs(size * row.reduce_slope[p, r] + row.reduce_fixed[p, r] - exact) <= 4
            for before, other in enumerate(row.replicas.tolist()):
                if other > p:
                    assert np.isinf(row.hop_slope[p, before, r])
                    continue
                pair = (
                    Stage(0, 0, tuple(range(p - other, p))),
                    Stage(1, problem.num_layers - 1, tuple(range(p, p + count))),
                )
                sent = transfer(problem, single_pipeline(pair, 1), 0, 840, 0)
                assert sent is not None
                assert (
                    abs(sent.bytes * row.hop_slope[p, before, r] + row.hop_fixed[p, before, r] - sent.duration_ns) <= 4
                )


def test_large_clusters_try_fewer_replica_counts() -> None:
    assert replica_counts(make_problem([1], nodes=(4, 4))) == tuple(range(1, 9))
    assert replica_counts(make_problem([1], nodes=(6,) * 6)) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 35, 36)


def test_what_nothing_connects_is_left_out() -> None:
    problem = make_problem([10, 10], boundary_bytes=5, parameter_bytes=5, nodes=(1, 1), between_bytes_per_s=0)
    batch = batch_of(problem, 2)
    plans = placed(problem, DeviceRow(problem, (0, 1)), Layers(problem), batch, Settings())
    assert {len(plan.allocation.stages) for plan in plans} == {1}
    assert {plan.allocation.stages[0].replicas for plan in plans} == {1}
