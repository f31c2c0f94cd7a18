"""Transfer, all-reduce, stage and memory costs: ALGORITHMS 1.4–1.8, by hand, and the properties of 1.9."""

import random
from dataclasses import replace
from fractions import Fraction

import pytest

from penstock.convert import to_problem
from penstock.schemas.request import PlanRequest
from penstock.solvers.costs.buckets import buckets, leads_ns
from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.memory import activation_bytes, micro_batches_that_fit, static_bytes
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.transfer import row_pairs, transfer, transfer_ns
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.problem import Problem

SECOND = 1_000_000_000


def a_problem(nodes: int = 2, per_node: int = 2, sample_bytes: int = 12, **changes: object) -> Problem:
    """Build 4 layers: forward 10, backward 20, stash 100, 1,000 parameter bytes; 300 B/s in nodes, 10 B/s between."""
    layer = {"forward_ns": 10, "backward_ns": 20, "stash_bytes": 100, "workspace_bytes": 7}
    cut = [{"name": "x", "bytes_per_sample": sample_bytes, "gradient_bytes_per_sample": sample_bytes}]
    request = {
        "profile": {
            "name": "m",
            "layers": [{"name": f"l{i}", "parameter_bytes": 1000, "update_ns": 5} for i in range(4)],
            "boundaries": [cut] * 3,
            "measurements": [{"device_kind": "V100", "micro_batch_size": 1, "layers": [layer] * 4}],
            "source": {"method": "imported", "expected_error": 0.1},
        },
        "topology": {
            "name": "c",
            "uniform": {
                "nodes": nodes,
                "devices_per_node": per_node,
                "kind": "V100",
                "memory_bytes": 100_000,
                "fabric": {"bandwidth_bytes_per_s": 300},
                "nic": {"bandwidth_bytes_per_s": 10},
            },
        },
        "global_batch_size": 24,
    }
    return to_problem(PlanRequest.parse(request | changes))


@pytest.mark.parametrize(
    ("size", "bandwidth", "expected"),
    [(0, 0, 0), (1, 1, SECOND), (1, 3, 333_333_334), (9_300_000_000, 1, 9_300_000_000 * SECOND)],
)
def test_bytes_become_time_rounded_up(size: int, bandwidth: int, expected: int) -> None:
    assert transfer_ns(size, bandwidth) == expected


def duration(problem: Problem, source: tuple[int, ...], target: tuple[int, ...], rows: int = 4) -> int:
    moved = transfer(problem, single_pipeline((Stage(0, 1, source), Stage(2, 3, target)), 6), 0, rows, 0)
    return 0 if moved is None else moved.duration_ns


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        pytest.param((0,), (2,), Fraction(48, 10), id="one to one over the NICs"),
        pytest.param((0,), (1,), Fraction(48, 300), id="one to one inside"),
        pytest.param((0, 1), (2, 3), Fraction(48, 10), id="both slices share the two NICs"),
        pytest.param((0, 2), (1, 3), Fraction(24, 300), id="pairwise inside each node"),
        pytest.param((0, 1), (1, 2), Fraction(24, 10), id="what crosses is the slice of rows 2 and 3"),
        pytest.param((0, 1), (0, 1), 0, id="same devices, nothing travels"),
    ],
)
def test_nic_transfer(source: tuple[int, ...], target: tuple[int, ...], expected: Fraction) -> None:
    assert duration(a_problem(), source, target) == expected * SECOND


@pytest.mark.parametrize(
    ("mode", "source", "target", "expected"),
    [
        pytest.param("spp", (0, 1), (2, 3), Fraction(48, 4 * 10), id="size / (k k' min b)"),
        pytest.param("madpipe", (0,), (2,), Fraction(48, 10), id="size / beta"),
        pytest.param("dapple", (0, 1), (2, 3), Fraction(48, 10), id="all sources outside the target's server"),
        pytest.param("dapple", (0, 2), (3,), Fraction(24, 10), id="half of the sources outside"),
        pytest.param("dapple", (0,), (1,), Fraction(48, 300), id="inside"),
    ],
)
def test_the_papers_modes(mode: str, source: tuple[int, ...], target: tuple[int, ...], expected: Fraction) -> None:
    problem = a_problem(network={"sharing": "private", "transfer": mode})
    assert duration(problem, source, target) == expected * SECOND


def test_spp_one_to_one_is_madpipe_and_nic_is_never_below_spp_across_servers() -> None:
    rng = random.Random(3)
    problems = {m: a_problem(3, 4, network={"sharing": "private", "transfer": m}) for m in ("spp", "madpipe", "nic")}
    assert duration(problems["spp"], (0,), (5,)) == duration(problems["madpipe"], (0,), (5,))
    for _ in range(200):
        devices = rng.sample(range(12), rng.randint(2, 12))
        split = rng.randint(1, len(devices) - 1)
        source, target = tuple(devices[:split]), tuple(devices[split:])
        rows = len(source) * len(target)
        if {d // 4 for d in source} & {d // 4 for d in target}:
            continue
        assert duration(problems["nic"], source, target, rows) >= duration(problems["spp"], source, target, rows)


def test_rows_of_all_pairs_tile_the_micro_batch() -> None:
    for k in range(1, 6):
        for other in range(1, 6):
            for rows in range(1, 12):
                source, target = Stage(0, 0, tuple(range(k))), Stage(1, 1, tuple(range(10, 10 + other)))
                pairs = row_pairs(source, target, rows)
                assert sum(count for _, _, count in pairs) == rows
                assert all(count > 0 for _, _, count in pairs), "a replica without rows sends and receives nothing"
                assert len({(u, v) for u, v, _ in pairs}) == len(pairs)


@pytest.mark.parametrize(
    ("devices", "mode", "expected"),
    [
        pytest.param((0,), "flat", Fraction(0), id="one device"),
        pytest.param((0, 1), "flat", Fraction(600, 300), id="inside: 2 (k-1)/k size/b"),
        pytest.param((0, 2), "hierarchical", Fraction(600, 10), id="one per node: flat"),
        pytest.param((0, 1, 2, 3), "flat", Fraction(900, 10), id="flat across nodes"),
        pytest.param((0, 1, 2, 3), "hierarchical", Fraction(600, 300) + Fraction(600, 10), id="inside, then across"),
        pytest.param((0, 1, 2, 3), "dapple", Fraction(900, 10), id="DAPPLE's code across servers"),
    ],
)
def test_all_reduce(devices: tuple[int, ...], mode: str, expected: Fraction) -> None:
    assert all_reduce_ns(a_problem(network={"all_reduce": mode}), 600, devices) == expected * SECOND


def test_dapples_all_reduce_inside_a_server_uses_several_rings() -> None:
    problem = a_problem(1, 4, network={"all_reduce": "dapple"})
    assert all_reduce_ns(problem, 600, (0, 1, 2, 3)) == Fraction(900, 300 * 2) * SECOND


def test_all_reduce_grows_with_size_and_towards_twice_the_transfer() -> None:
    problem = a_problem(1, 64, network={"all_reduce": "flat"})
    times = [all_reduce_ns(problem, size, (0, 1, 2)) for size in range(0, 5000, 100)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)
    ratio = all_reduce_ns(problem, 3000, tuple(range(64))) / transfer_ns(3000, 300)
    assert 1.9 < ratio < 2


def test_buckets_leave_as_the_backward_passes_their_layers() -> None:
    problem = a_problem(network={"bucket_bytes": 2000})
    stage = Stage(0, 3, (0, 1))
    all_buckets = buckets(problem, stage)
    assert [(b.first, b.last, b.bytes) for b in all_buckets] == [(2, 3, 2000), (0, 1, 2000)]
    assert [lead for lead, _weight in leads_ns(problem, stage, 2, all_buckets)] == [40, 0]
    assert all(b.resources for b in all_buckets)
    assert buckets(problem, Stage(0, 3, (0,))) == ()
    late = replace(problem, rules=replace(problem.rules, overlap_all_reduce=False))
    assert leads_ns(late, stage, 2, buckets(late, stage)) == [(0, 0), (0, 0)]


def test_pieces_share_the_bytes_and_the_time_of_a_bucket() -> None:
    """Layers of 1,000 bytes each: no piece below twice the wanted size, 16 at most, and none in a private network."""
    for wanted, count in ((501, 1), (500, 2), (300, 3), (63, 15), (1, 16)):
        problem = a_problem(network={"bucket_bytes": wanted})
        whole = a_problem(network={"bucket_bytes": wanted, "sharing": "private"})
        shared, private = (buckets(each, Stage(0, 3, (0, 1, 2))) for each in (problem, whole))
        assert (len(shared), len(private)) == (4 * count, 4)
        for k, bucket in enumerate(private):
            pieces = shared[k * count : (k + 1) * count]
            assert {(each.first, each.last) for each in pieces} == {bucket[:2]}
            for name in ("bytes", "duration_ns"):
                sizes = [getattr(each, name) for each in pieces]
                assert sum(sizes) == getattr(bucket, name)
                assert max(sizes) - min(sizes) <= 1


def test_recomputation_keeps_the_input_and_repeats_the_forward() -> None:
    problem = a_problem()
    plain = stage_costs(problem, Stage(1, 2, (0,)), 3)
    assert plain == (60, 120, 60, 0, 600, 21)
    full = stage_costs(problem, Stage(1, 2, (0,), recompute=((1, 2),)), 3)
    assert full == (60, 120, 60, 60, 0, 621)
    part = stage_costs(problem, Stage(1, 2, (0,), recompute=((2, 2),)), 3)
    assert part == (60, 120, 60, 30, 300 + 36, 321)
    assert activation_bytes(problem, Stage(1, 2, (0,), recompute=((1, 2),)), 3) == 36


def test_memory_of_a_stage() -> None:
    problem = a_problem()
    assert static_bytes(problem, Stage(0, 1, (0,))) == (2000, 2000, 4000)
    sharded = a_problem(memory={"optimizer_sharding": "over_replicas"})
    assert static_bytes(sharded, Stage(0, 1, (0, 1, 2))) == (2000, 2000, 1334)


def test_micro_batches_that_fit() -> None:
    """By hand: free 100,000 - 8,000 static, transient 28 workspace and 192 buffers; 800 per micro-batch of 4 rows."""
    problem = a_problem()
    stage = Stage(0, 1, (0,))
    assert micro_batches_that_fit(problem, stage, 4) == (100_000 - 8_000 - 28 - 96) // 800
    tight = a_problem(memory={"headroom_bytes": 100_000})
    assert micro_batches_that_fit(tight, stage, 4) == 0


def test_tied_weights_count_once_and_again_where_they_are_copied() -> None:
    problem = replace(a_problem(), shared_parameters=(("tied", (0, 3), 400),))
    assert static_bytes(problem, Stage(0, 3, (0,))).parameters == 4000
    assert static_bytes(problem, Stage(0, 1, (0,))).parameters == 2000
    assert static_bytes(problem, Stage(2, 3, (0,))).parameters == 2400
