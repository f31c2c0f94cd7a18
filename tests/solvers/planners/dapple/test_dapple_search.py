"""The memoised search against its reference, against enumeration, and against the simulator's cost functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dapple_reference import Plain
from problems import make_problem

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.memory import micro_batches_that_fit, static_bytes
from penstock.solvers.costs.tables.transfer_kernel import transfer_rate
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, batch_of
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.dapple import cost_kernel as dapple_costs
from penstock.solvers.planners.dapple.search import Rules, SearchResult, search, straight
from penstock.solvers.planners.dapple.tables import PlacementTables, layers, shape

ROUNDING_NS = 2_000


def random_problem(seed: int, count: int = 6, nodes: tuple[int, ...] = (2, 2), **changes: Any) -> Problem:
    draw = np.random.default_rng(seed)
    settings: dict[str, Any] = {
        "boundary_bytes": draw.integers(0, 400_000, count - 1).tolist(),
        "parameter_bytes": draw.integers(0, 6_000_000, count).tolist(),
        "stash_bytes": draw.integers(0, 1_000_000, count).tolist(),
        "nodes": nodes,
        "inside_bytes_per_s": 8 * 10**9,
        "between_bytes_per_s": 10**9,
        "transfer": "nic",
        "global_batch_size": 24,
        "bucket_bytes": 4_000_000,
    }
    return make_problem(draw.integers(100_000, 3_000_000, count).tolist(), **(settings | changes))


def best(result: SearchResult) -> int | None:
    return result.plans[0].latency_ns if result.plans else None


def same(a: int | None, b: int | None) -> bool:
    return a is b is None or (a is not None and b is not None and abs(a - b) <= ROUNDING_NS)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"shared": True},
    {"shared": True, "full_duplex": False},
    {"transfer": "dapple", "all_reduce": "dapple"},
    {"transfer": "spp", "channel": "full"},
    {"transfer": "madpipe", "channel": "none", "all_reduce": "hierarchical"},
    {"overlap_all_reduce": False, "latency_ns": 20_000},
    {"memory_bytes": 9_000_000},
    {"memory_bytes": 14_000_000, "recompute": "auto", "state_factor": 2, "shard_states": True},
    {"memory_bytes": 20_000_000, "recompute": "always", "workspace_bytes": 100_000, "count_buffers": False},
    {"nodes": (3, 1), "min_slice": 2},
    {"nodes": (1, 1, 1, 1), "cuttable": [True, False, True, True, False]},
    {"kinds": ["fast", "fast", "cpu", "cpu"], "speed": {"fast": 1.7}},
]


@pytest.mark.cases(3)
@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: " ".join(changes) or "plain")
@pytest.mark.parametrize("paper", [False, True], ids=["bounds", "paper"])
def test_kernel_finds_what_the_reference_finds(changes: dict[str, Any], paper: bool) -> None:
    for seed in range(3):
        problem = random_problem(seed, **changes)
        base = shape(problem)
        for size in (4, 12):
            batch, rules = batch_of(problem, size), Rules(paper=paper)
            assert same(best(search(problem, batch, rules, base)), Plain(problem, batch, rules, base).memoised())


@pytest.mark.cases(5)
@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: " ".join(changes) or "plain")
def test_search_against_all_plans_that_the_policies_reach(changes: dict[str, Any]) -> None:
    """With one prefix per entry never better than enumeration, and mostly equal; with a wide beam always equal."""
    equal = 0
    for seed in range(4):
        problem = random_problem(
            seed, count=5, **(changes | ({"cuttable": [True, False, True, True]} if "cuttable" in changes else {}))
        )
        base = shape(problem)
        batch = batch_of(problem, 4)
        everything = Plain(problem, batch, Rules(), base).exhaustive()
        one, wide = (search(problem, batch, Rules(beam=beam), base) for beam in (1, 64))
        assert wide.exact
        assert same(best(wide), everything)
        latency_ns = best(one)
        assert (latency_ns is None) == (everything is None)
        assert latency_ns is None or everything is None or latency_ns >= everything - ROUNDING_NS
        equal += same(latency_ns, everything)
    assert equal >= 3


@pytest.mark.cases(1)
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("nodes", [(4, 4), (2, 2, 2), (8, 8)])
def test_pruning_changes_no_value(nodes: tuple[int, ...], beam: int) -> None:
    for seed in range(4):
        problem = random_problem(seed, count=14, nodes=nodes, global_batch_size=64)
        base = shape(problem)
        for micro_batches in (2, 8, 16):
            batch = batch_of(problem, 64 // micro_batches)
            pruned, full = (search(problem, batch, Rules(prune=p, beam=beam), base) for p in (True, False))
            assert best(pruned) == best(full)
            value = best(full)
            assert value is not None
            limited = search(problem, batch, Rules(beam=beam, limit_ns=value + 1), base)
            assert best(limited) == value
            assert not search(problem, batch, Rules(beam=beam, limit_ns=value), base).plans


def test_straight_plans_are_searched_exactly() -> None:
    for seed in range(4):
        problem = random_problem(seed, count=8, nodes=(2, 2), global_batch_size=16)
        base = shape(problem, (1,))
        batch = batch_of(problem, 2)
        result = straight(problem, batch, Rules(), base)
        assert result.exact
        single = replace(problem, min_slice=batch.least_rows)
        assert same(best(result), Plain(single, batch, Rules(), base).exhaustive())
        assert all(stage.replicas == 1 for plan in result.plans for stage in plan.allocation.stages)


@pytest.mark.parametrize("changes", [VARIANTS[0], VARIANTS[7], VARIANTS[8], VARIANTS[9]], ids=str)
def test_a_given_number_of_stages_is_searched_with_its_memory(changes: dict[str, Any]) -> None:
    """Stage i holds min(S - i, M) micro-batches, as P_A requires."""
    for seed in range(3):
        problem = random_problem(seed, **changes)
        base = shape(problem)
        batch = batch_of(problem, 6)
        for total in (1, 2, 3, 4):
            rules = Rules(total_stages=total)
            result = search(problem, batch, rules, base)
            assert same(best(result), Plain(problem, batch, rules, base).memoised())
            for plan in result.plans:
                stages = plan.allocation.stages
                assert len(stages) == total
                for i, stage in enumerate(stages):
                    again = () if problem.recompute == "never" else ((stage.first, stage.last),)
                    either = [replace(stage, recompute=()), replace(stage, recompute=again)]
                    flying = min(total - i, batch.num_micro_batches)
                    assert max(micro_batches_that_fit(problem, s, batch.most_rows) for s in either) >= flying


def test_data_parallelism_is_among_the_plans() -> None:
    """j = 0 of formula (4) (R-6): without boundaries worth crossing all devices form one stage."""
    problem = random_problem(1, boundary_bytes=10**9, parameter_bytes=1000)
    result = search(problem, batch_of(problem, 24))
    assert [stage.devices for stage in result.plans[0].allocation.stages] == [(0, 1, 2, 3)]


def test_every_two_stage_plan_of_the_policies_is_tried() -> None:
    problem = random_problem(2, count=7)
    base = shape(problem)
    batch = batch_of(problem, 6)
    rules = Rules(total_stages=2)
    assert same(best(search(problem, batch, rules, base)), Plain(problem, batch, rules, base).exhaustive())


def test_the_paper_leaves_no_device_over() -> None:
    """Three layers that nothing can split among replicas leave a fourth device over."""
    problem = random_problem(0, count=3, global_batch_size=2, micro_batch_sizes=(1,))
    batch = batch_of(problem, 1)
    assert search(problem, batch, Rules()).plans
    assert not search(problem, batch, Rules(paper=True)).plans


def test_one_device_is_one_stage() -> None:
    problem = random_problem(0, nodes=(1,))
    plans = search(problem, batch_of(problem, 4)).plans
    assert [len(plan.allocation.stages) for plan in plans] == [1]


def test_devices_that_nothing_connects_share_no_plan() -> None:
    problem = random_problem(0)
    apart = replace(problem, network=replace(problem.network, cables=problem.network.cables[:1]))
    for plan in search(apart, batch_of(apart, 6)).plans:
        used = {apart.devices[d].node for stage in plan.allocation.stages for d in stage.devices}
        assert len(used) == 1


def test_stage_tables_are_the_memory_model() -> None:
    """The memory test is ``micro_batches_that_fit >= 1``: buffers, tied weights and sharded states included."""
    problem = random_problem(
        3, workspace_bytes=50_000, state_factor=2, shard_states=True, shared_parameters=(("w", (1, 4), 700_000),)
    )
    batch = batch_of(problem, 12)
    base = shape(problem)
    for room in range(2_000_000, 60_000_000, 3_000_000):
        for recompute in ("never", "auto", "always"):
            sized = replace(
                problem, recompute=recompute, devices=tuple(replace(d, memory_bytes=room) for d in problem.devices)
            )
            for i, j, replicas in ((0, 3, 1), (2, 6, 2), (4, 5, 3), (0, 6, 4)):
                code = _fits(sized, base, batch, i, j, replicas)
                plain = Stage(i, j - 1, tuple(range(replicas)))
                again = replace(plain, recompute=((i, j - 1),))
                fits = [micro_batches_that_fit(sized, s, batch.most_rows) >= 1 for s in (plain, again)]
                wanted = {"never": fits[0] * 1, "always": fits[1] * 2, "auto": 1 if fits[0] else fits[1] * 2}[recompute]
                assert code == wanted


def _fits(problem: Problem, base: PlacementTables, batch: Batch, i: int, j: int, replicas: int) -> int:
    from penstock.solvers.planners.dapple.search import _settings

    table = layers(problem, base, batch)
    settings = _settings(problem, batch, Rules(), 4, True)
    share = table.share_of[replicas]
    widest = table.workspace_bytes[:, share, i:j].max(axis=1)
    room = problem.devices[0].memory_bytes
    return int(dapple_costs.stage_times(table, settings, i, j, replicas, 1, room, widest, 1)[2])


def test_static_bytes_of_tied_weights() -> None:
    problem = random_problem(3, state_factor=2, shared_parameters=(("w", (1, 4), 700_000),))
    base = shape(problem)
    for i in range(6):
        for j in range(i + 1, 7):
            whole = static_bytes(problem, Stage(i, j - 1, (0,))).total
            assert base.fixed_bytes[i, j] + base.state_bytes[i, j] == whole


@pytest.mark.parametrize("form", ["pairs", "ports", "bus"])
@pytest.mark.parametrize(
    "changes", [{"shared": True}, {"transfer": "spp"}, {"transfer": "dapple"}, {"transfer": "madpipe"}]
)
def test_hops_are_the_transfers_of_the_cost_model(form: Any, changes: dict[str, Any]) -> None:
    problem = random_problem(5, nodes=(4, 4), form=form, latency_ns=300, boundary_bytes=250_001, **changes)
    rows = 12
    base = shape(problem)
    mode = 0 if problem.rules.shared else {"nic": 0, "spp": 1, "madpipe": 2, "dapple": 3}[problem.rules.transfer]
    load = np.zeros(len(base.routes.bandwidth), dtype=np.int64)
    for source, target in (((0,), (1,)), ((0, 1, 2), (3, 4)), ((0, 4), (1, 2, 5)), ((0, 1, 2, 3), (4, 5, 6, 7))):
        pair = single_pipeline((Stage(0, 2, source), Stage(3, 5, target)), 2)
        expected = transfer(problem, pair, 0, rows, 0)
        assert expected is not None
        rate, lag = transfer_rate(
            base.routes, base.places.node_of, mode, rows, np.array(source), len(source), np.array(target), len(target),
            load, np.empty_like(load),
        )  # fmt: skip
        assert 0 <= dapple_costs.moved(rate, lag, 250_001) - expected.duration_ns <= 2
        assert not load.any()


@pytest.mark.parametrize("mode", ["flat", "hierarchical", "dapple"])
def test_all_reduce_rates_are_those_of_the_cost_model(mode: Any) -> None:
    problem = random_problem(5, nodes=(3, 3), all_reduce=mode, latency_ns=500)
    base = shape(problem)
    for t, source in enumerate(base.geometry.source.tolist()):
        used = base.geometry.states[source]
        take = base.geometry.take[t]
        devices = [d for n, node in enumerate(problem.nodes()) for d in node[used[n] : used[n] + take[n]]]
        for size in (1, 12_345, 3_999_999):
            rate, fixed = base.placed.reduce_ns_per_byte[t], base.placed.reduce_fixed_ns[t]
            kernel_ns = dapple_costs.reduced(rate, fixed, size, 0, 4_000_000, False)
            assert abs(kernel_ns - all_reduce_ns(problem, size, devices)) <= 4


@pytest.mark.parametrize("value", [0.1, 1.0, 2.5, 3e9 + 0.25, 1e15 / 3])
def test_rounding_is_never_below(value: float) -> None:
    assert value <= dapple_costs.rounded_up(value) <= value + 2


def test_large_clusters_search_fewer_replica_counts() -> None:
    problem = random_problem(0, count=10, nodes=(8,) * 16, global_batch_size=512)
    base = shape(problem)
    assert base.restricted
    plans = search(problem, batch_of(problem, 256), None, base).plans
    assert plans
    assert {d for stage in plans[0].allocation.stages for d in stage.devices} <= set(range(128))
