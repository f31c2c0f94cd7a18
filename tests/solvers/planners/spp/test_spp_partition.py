"""PRM by thresholds: against enumeration per number of stages, a reference of its kernel, the simulator's costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from problems import make_problem
from spp_theorems import slowest_ns

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.network import Network
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.planners.spp import partition as prm
from penstock.solvers.planners.spp.partition import (
    ReplicatedPart,
    ThresholdSearch,
    pruned_replicas,
    search,
    stages_that_fit,
)
from penstock.solvers.planners.spp.prm_kernel import LONGEST_NS, ChainArrays, possible
from penstock.solvers.planners.spp.tables import Depth, chain_of, windows

ROUNDING_NS = 2
TOLERANCE_NS = 4 * ROUNDING_NS
PAPER: dict[str, Any] = {"transfer": "spp", "overlap_all_reduce": False}


def random_problem(seed: int, layers: int = 6, devices: int = 5, **changes: Any) -> Problem:
    """Draw unequal layers on one server per device, linked by a matrix of few bandwidths."""
    draw = np.random.default_rng(seed)
    table = np.triu(draw.choice([10**9, 4 * 10**9, 10**10], (devices, devices)), 1)
    names = tuple(f"n{d}/0" for d in range(devices))
    nodes = tuple(f"n{d}" for d in range(devices))
    network = Network(names, nodes, tuple(range(devices)), (None,) * devices, (), table + table.T)
    settings: dict[str, Any] = {
        "boundary_bytes": (draw.integers(0, 3, layers - 1) * 100_000).tolist(),
        "parameter_bytes": draw.integers(0, 6_000_000, layers).tolist(),
        "stash_bytes": draw.integers(0, 1_000_000, layers).tolist(),
        "network": network,
        "global_batch_size": 24,
        "micro_batch_sizes": (8,),
        **PAPER,
    }
    return make_problem(draw.integers(10_000, 3_000_000, layers).tolist(), **(settings | changes))


def chain_for(problem: Problem, most: int, replicas: tuple[int, ...] = (), **more: Any) -> ChainArrays:
    batch = batch_of(problem, problem.micro_batch_sizes[0])
    counts = replicas or tuple(range(1, problem.num_devices + 1))
    return chain_of(
        problem, windows(problem, range(problem.num_devices)), batch, counts, most, **({"unused": False} | more)
    )


def every_plan(problem: Problem, stages: int, unused: bool) -> Iterator[tuple[ReplicatedPart, ...]]:
    """Yield all partitions into so many stages on consecutive devices."""
    cuts = [i + 1 for i in range(problem.num_layers - 1) if problem.cuttable[i]]
    devices = problem.num_devices
    for total in range(stages if unused else devices, devices + 1):
        for places in combinations(cuts, stages - 1):
            ends = (*places, problem.num_layers)
            for joints in combinations(range(1, total), stages - 1):
                stops = (*joints, total)
                yield tuple(
                    ReplicatedPart(0 if s == 0 else ends[s - 1], ends[s], stops[s] - (0 if s == 0 else stops[s - 1]), 0)
                    for s in range(stages)
                )


def as_allocation(problem: Problem, parts: tuple[ReplicatedPart, ...]) -> Any:
    place, stages = 0, []
    for part in parts:
        again = ((part.first, part.end - 1),) if part.way or problem.recompute == "always" else ()
        stages.append(Stage(part.first, part.end - 1, tuple(range(place, place + part.replicas)), recompute=again))
        place += part.replicas
    return single_pipeline(tuple(stages), batch_of(problem, problem.micro_batch_sizes[0]).num_micro_batches)


def by_enumeration(problem: Problem, stages: int, unused: bool = False) -> int | None:
    return min(
        (slowest_ns(problem, as_allocation(problem, p)) for p in every_plan(problem, stages, unused)), default=None
    )


def test_worked_example() -> None:
    """ALGORITHMS 3.2, in units of 10^9 ns: W = 24, 12.4, 12.4, 12 for 1 … 4 stages."""
    table = np.asarray([[0, 10, 1, 1], [10, 0, 1, 1], [1, 1, 0, 10], [1, 1, 10, 0]]) * 10**6
    network = Network(("a", "b", "c", "d"), ("n",), (0,) * 4, (None,), (), table)
    problem = make_problem(
        [10**9] * 4,
        network=network,
        boundary_bytes=10**6 // 2,
        parameter_bytes=2 * 10**6,
        global_batch_size=16,
        micro_batch_sizes=(4,),
        **PAPER,
    )
    problem = replace(problem, forward_bytes=problem.forward_bytes // 4, backward_bytes=problem.backward_bytes // 4)
    problem = replace(problem, measured={"cpu": (replace(problem.measured["cpu"][0], rows=4),)})
    partitions = search(chain_for(problem, 4), 4)
    assert {xi: partition.value_ns for xi, partition in partitions.items()} == {
        1: 24 * 10**9,
        2: 12_400_000_000,
        3: 12_400_000_000,
        4: 12 * 10**9,
    }


VARIANTS: list[dict[str, Any]] = [
    {},
    {"cuttable": [True, False, True, True, False]},
    {"transfer": "madpipe", "channel": "full"},
    {"transfer": "nic"},
    {"global_batch_size": 23},
    {"kinds": ["cpu", "slow", "slow", "cpu", "slow"], "speed": {"slow": 0.4}},
    {"recompute": "always"},
    {"shared": True, "transfer": "nic", "network": None, "nodes": (2, 3), "inside_bytes_per_s": 8 * 10**9},
]


@pytest.mark.cases(15)
@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_every_number_of_stages_has_its_optimum(seed: int, changes: dict[str, Any], unused: bool) -> None:
    """S4: the smallest W, for each xi, over all partitions and splits of the order, by the simulator's costs."""
    problem = random_problem(seed, **changes)
    partitions = search(chain_for(problem, 5, unused=unused), 5)
    for stages in range(1, 6):
        expected = by_enumeration(problem, stages, unused)
        if expected is None:
            assert stages not in partitions
            continue
        partition = partitions[stages]
        assert partition.exact
        best = slowest_ns(problem, as_allocation(problem, partition.parts[0]))
        if problem.rules.channel == "full" or problem.rules.shared:  # a channel counts its slower direction only
            assert partition.value_ns <= expected + TOLERANCE_NS
        elif problem.global_batch_size % 8 == 0:
            assert abs(partition.value_ns - expected) <= TOLERANCE_NS
            assert abs(best - partition.value_ns) <= TOLERANCE_NS
        else:  # transfers of uneven micro-batches are shared out evenly
            assert expected * 0.98 <= partition.value_ns <= expected + 10


def test_every_number_of_stages_has_its_optimum_of_those_that_keep_the_pins() -> None:
    none = some = 0
    for seed in range(16):
        draw = np.random.default_rng(seed)
        problem = random_problem(seed)
        first = int(draw.integers(0, problem.num_layers))
        holders = frozenset(int(d) for d in draw.choice(problem.num_devices, 3, replace=False))
        problem = replace(problem, pins=(Pin(first, int(draw.integers(first, problem.num_layers)), holders),))
        line = windows(problem, range(problem.num_devices), keeping=True)
        batch = batch_of(problem, problem.micro_batch_sizes[0])
        partitions = search(chain_of(problem, line, batch, range(1, problem.num_devices + 1), 5, unused=True), 5)
        for stages in range(1, 6):
            plans = (as_allocation(problem, parts) for parts in every_plan(problem, stages, True))
            kept = [slowest_ns(problem, each) for each in plans if broken_pin(problem, each) is None]
            assert (stages in partitions) == bool(kept), (seed, stages)
            if kept:
                assert broken_pin(problem, as_allocation(problem, partitions[stages].parts[0])) is None
                assert abs(partitions[stages].value_ns - min(kept)) <= TOLERANCE_NS
            none, some = none + (not kept), some + bool(kept)
    assert none > 10
    assert some > 10


def shown_by_recursion(chain: ChainArrays, most_ns: int, most_stages: int) -> list[set[int]]:
    """Return the possible numbers of stages by the first stage's replica count: the kernel in plain recursion."""
    devices, counts = chain.stage_of.shape
    layers = chain.least_ns.size - 1
    depth_of = [
        next(g for g in range(len(chain.depth_bits)) if int(chain.depth_bits[g, p // 64]) >> p % 64 & 1)
        for p in range(most_stages)
    ]

    @cache
    def fits(c: int, after: int, first: int, end: int) -> bool:
        return any(
            chain.spent_ns[k, c, end] - chain.spent_ns[k, c, first] + chain.lag_ns[c] <= most_ns
            and end <= chain.fits[k, depth_of[after], c, first]
            for k in range(len(chain.spent_ns))
        )

    @cache
    def stages(i: int, a: int, first: int) -> frozenset[int]:
        c, j = int(chain.stage_of[i, a]), i + int(chain.replicas[a])
        if c < 0:
            return frozenset()
        shown = {1} if (j == devices or chain.unused) and fits(c, 0, first, layers) else set()
        for end in range(first + 1, layers):
            for q in range(counts if j < devices and chain.cut[end] else 0):
                if chain.stage_of[j, q] < 0:
                    continue
                sent = chain.moved[end] * chain.rate[i, a, q] + chain.hop_ns[i, a, q] if chain.moved[end] else 0
                if sent <= most_ns:
                    shown |= {n + 1 for n in stages(j, q, end) if n < most_stages and fits(c, n, first, end)}
        return frozenset(shown)

    return [set(stages(0, a, 0)) for a in range(counts)]


@pytest.mark.tier("ci")
@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_is_its_reference(seed: int, memory: bool) -> None:
    problem = random_problem(seed, 7, 6, memory_bytes=12_000_000 + 1_000_000 * seed, recompute="auto")
    depths = (Depth(0, 1), Depth(1, 2), Depth(3, 3), Depth(6, 3)) if memory else ()
    replicas = ((1, 2, 3, 4, 5, 6), (1, 2, 4), (2, 3))[seed % 3]
    chain = chain_for(problem, 6, replicas, unused=seed % 2 == 0, depths=depths)
    state = ThresholdSearch(chain, 6)
    whole = int(chain.least_ns[-1])
    for most_ns in [whole // 7, whole // 5, whole // 4, whole // 3, whole // 2, whole, 3 * whole]:
        words = possible(chain, state._masks, most_ns)
        assert words == 1
        table = state._masks.table[0, 0, :, 0]
        got = [{k + 1 for k in range(6) if int(table[a]) >> k & 1} for a in range(len(replicas))]
        assert got == shown_by_recursion(chain, most_ns, 6)


@pytest.mark.parametrize("replicas", [(1,), (1, 2)])
def test_beyond_one_word_of_stages(replicas: tuple[int, ...]) -> None:
    """Up to 80 stages on 80 devices without traffic, by plain recursion over stages, devices and layers."""
    layers, devices = 82, 80
    changes: dict[str, Any] = {"boundary_bytes": 0, "parameter_bytes": 0, "nodes": (devices,), "network": None}
    problem = random_problem(3, layers, devices, **changes)
    partitions = search(chain_for(problem, devices, replicas, unused=True), devices)
    assert sorted(partitions) == list(range(1, devices + 1))
    total = {
        r: 3 * (problem.costs("cpu", 8 // r).forward_ns + problem.costs("cpu", 8 // r).backward_ns) for r in replicas
    }
    block = {
        r: np.where(np.tri(layers + 1, k=-1, dtype=bool).T, t[None, :] - t[:, None], 2**60) for r, t in total.items()
    }
    best = np.full((devices + 1, layers + 1), 2**60)
    best[:, 0] = 0
    for stages in range(1, devices + 1):
        after = np.full_like(best, 2**60)
        for r in replicas:
            for i in range(r, devices + 1):
                after[i] = np.minimum(after[i], np.maximum(best[i - r][:, None], block[r]).min(axis=0))
        best = after
        assert partitions[stages].value_ns == best[:, -1].min(), stages
        for parts in partitions[stages].parts:
            assert max(block[p.replicas][p.first, p.end] for p in parts) >= partitions[stages].value_ns
            assert sum(p.replicas for p in parts) <= devices


def test_a_limit_leaves_out_what_cannot_win() -> None:
    problem = random_problem(1)
    chain = chain_for(problem, 5)
    everything = search(chain, 5)
    values = sorted(partition.value_ns for partition in everything.values())
    limited = search(chain, 5, values[1])
    assert {xi: p.value_ns for xi, p in limited.items()} == {
        xi: p.value_ns for xi, p in everything.items() if p.value_ns <= values[1]
    }
    assert search(chain, 5, values[0] - 1) == {}
    assert len(search(chain, 5, LONGEST_NS, lambda _parts: values[0])) >= 1


def test_when_the_sweeps_run_out_every_floor_still_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(5, 12, 8)
    exact = search(chain_for(problem, 8), 8)
    monkeypatch.setattr(prm, "SWEEP_WORK", 4_000)
    monkeypatch.setattr(prm, "EXACT_WORK", 1_000)
    rough = search(chain_for(problem, 8), 8)
    assert any(not partition.exact for partition in rough.values())
    assert min(p.value_ns for p in rough.values()) == min(p.value_ns for p in exact.values())
    for stages, partition in rough.items():
        assert partition.floor_ns < exact[stages].value_ns <= partition.value_ns


@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
@pytest.mark.parametrize("seed", range(8))
def test_stages_hold_what_their_depth_asks_for(seed: int, recompute: str) -> None:
    """O-2: with n stages after it a stage holds min(n + 1, M) micro-batches, by the simulator's rule."""
    problem = random_problem(
        seed, memory_bytes=[16_000_000, 30_000_000, 20_000_000, 25_000_000, 18_000_000], recompute=recompute,
        count_buffers=False, shared_parameters=(("tied", (0, 5), 1_000_000),), state_factor=1,
        shard_states=seed % 2 == 0,
    )  # fmt: skip
    depths = tuple(Depth(after, min(after + 1, 3)) for after in range(5))
    partitions = search(chain_for(problem, 5, depths=depths), 5)
    for stages in range(1, 6):
        best = None
        for parts in every_plan(problem, stages, False):
            for ways in np.ndindex(*(2 if recompute == "auto" else 1,) * stages):
                plan = as_allocation(problem, tuple(p._replace(way=int(w)) for p, w in zip(parts, ways, strict=True)))
                limits = [micro_batches_that_fit(problem, stage, 8) for stage in plan.stages]
                if all(h >= min(stages - n, 3) for n, h in enumerate(limits)):
                    value = slowest_ns(problem, plan)
                    best = value if best is None else min(best, value)
        if best is None:
            assert stages not in partitions
        else:
            assert abs(partitions[stages].value_ns - best) <= TOLERANCE_NS


@pytest.mark.parametrize("changes", [{}, {"all_reduce": "hierarchical"}, {"all_reduce": "dapple"}, {"latency_ns": 500}])
def test_classes_cost_what_the_judge_says(changes: dict[str, Any]) -> None:
    """Stage times and all-reduces of every window, and transfers between neighbouring windows in every mode."""
    for transfer_mode, shared in (("nic", True), ("spp", False), ("madpipe", False), ("dapple", False)):
        problem = random_problem(
            2, network=None, nodes=(2, 3), inside_bytes_per_s=7 * 10**9, transfer=transfer_mode, shared=shared,
            channel="half", full_duplex=False, bucket_bytes=2**40, **changes,
        )  # fmt: skip
        chain = chain_for(problem, 5)
        for i, a in np.ndindex(*chain.stage_of.shape):
            if chain.stage_of[i, a] < 0:
                assert i + chain.replicas[a] > 5
                continue
            c, r = chain.stage_of[i, a], int(chain.replicas[a])
            first = Stage(1, 3, tuple(range(i, i + r)))
            costs = stage_costs(problem, first, 8)
            size = int(problem.trainable_bytes[4] - problem.trainable_bytes[1])
            expected = 3 * (costs.forward_ns + costs.backward_ns) + all_reduce_ns(problem, size, first.devices)
            assert abs(chain.spent_ns[0, c, 4] - chain.spent_ns[0, c, 1] + chain.lag_ns[c] - expected) <= ROUNDING_NS
            for q in range(5):
                if i + r + chain.replicas[q] > 5 or not problem.forward_bytes[3]:
                    continue
                after = Stage(4, 5, tuple(range(i + r, i + r + int(chain.replicas[q]))))
                plan = single_pipeline((Stage(0, 0, (4,)), first, after), 3)
                sent = [transfer(problem, plan, s, 8, direction) for s, direction in ((1, 0), (2, 1))]
                moved = 3 * sum(each.duration_ns for each in sent if each is not None)
                got = chain.moved[4] * chain.rate[i, a, q] + chain.hop_ns[i, a, q]
                assert abs(got - moved) <= 6


def test_replica_sets() -> None:
    problem = make_problem([1], nodes=(12,) * 20)
    assert pruned_replicas(problem) == (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40, 48, 56, 64, 128, 192, 240)
    assert stages_that_fit(500, 1024, 30) == 256
    assert stages_that_fit(6, 4, 4) == 4


def test_same_input_same_plans() -> None:
    chain = chain_for(random_problem(7), 5)
    first, second = (search(chain, 5) for _ in range(2))
    assert first == second
    assert [p.parts for p in first.values()] == [p.parts for p in second.values()]
