"""The clock: known makespans, closed forms, the tie rule, reductions, updates, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from problems import as_operations, chain, early_backward, gpipe, make_network, make_problem, straight, warmup_orders

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.network import Network
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.model.timeline import Timeline

VECTORS = [
    # stages, micro-batches, forward, backward, transfer, channel, {schedule: (makespan, peaks in flight)}; quarters
    (3, 6, 4, 8, 0, "half", (96, [6, 6, 6]), (96, [3, 2, 1]), (96, [5, 3, 1])),
    (3, 6, 4, 8, 2, "half", (104, [6, 6, 6]), (116, [3, 2, 1]), (104, [5, 3, 1])),
    (3, 6, 4, 8, 2, "full", (104, [6, 6, 6]), (116, [3, 2, 1]), (104, [5, 3, 1])),
    (2, 8, 4, 4, 1, "full", (74, [8, 8]), (80, [2, 1]), (74, [3, 1])),
    (4, 8, 4, 8, 0, "full", (132, [8, 8, 8, 8]), (132, [4, 3, 2, 1]), (132, [7, 5, 3, 1])),
    (1, 3, 4, 8, 0, "half", (36, [3]), (36, [1]), (36, [1])),
    (4, 1, 4, 8, 2, "half", (60, [1, 1, 1, 1]), (60, [1, 1, 1, 1]), (60, [1, 1, 1, 1])),
]


@pytest.mark.parametrize("vector", VECTORS)
def test_known_makespans_and_peaks_in_flight(vector: tuple) -> None:
    stages, batches, forward, backward, carry, channel, *expected = vector
    problem = make_problem(
        [forward] * stages,
        [backward] * stages,
        carry,
        nodes=(1,) * stages,
        channel=channel,
        global_batch_size=batches,
        stash_bytes=10,
        count_buffers=False,
    )
    allocation = straight(problem, batches)
    orders = (gpipe(allocation), early_backward(allocation, "A"), early_backward(allocation, "B"))
    for order, (makespan, peaks) in zip(orders, expected, strict=True):
        timeline = simulate(problem, allocation, order)
        assert timeline.time_per_global_batch_ns == makespan
        assert [use.memory.activations // 10 for use in timeline.uses.values()] == peaks


@pytest.mark.parametrize(
    ("forward", "backward", "carry", "reduce", "policy", "makespan"),
    [
        ([10, 10, 10], [20, 20, 20], 5, [40, 0, 0], "B", 240),
        ([10, 10, 10], [20, 20, 20], 5, [40, 0, 0], "A", 260),
        ([30, 10], [60, 20], 5, [10, 90], "A", 380),
    ],
)
def test_the_worked_examples_of_dapple(
    forward: list[int], backward: list[int], carry: int, reduce: list[int], policy: str, makespan: int
) -> None:
    """ALGORITHMS 2.2, in tenths; a reduced stage has two replicas, whose larger slice is the one row."""
    replicas = [2 if size else 1 for size in reduce]
    problem = make_problem(
        forward, backward, carry, reduce, nodes=(sum(replicas),), global_batch_size=4, overlap_all_reduce=False
    )
    devices = iter(range(sum(replicas)))
    allocation = chain([(1, [next(devices) for _ in range(count)]) for count in replicas], 4)
    assert simulate(problem, allocation, early_backward(allocation, policy)).time_per_global_batch_ns == makespan


@pytest.mark.parametrize("seed", range(40))
def test_uniform_stages_without_communication_have_one_makespan(seed: int) -> None:
    rng = random.Random(seed)
    stages, batches = rng.randint(1, 6), rng.randint(1, 12)
    forward, backward = rng.randint(1, 30), rng.randint(1, 60)
    problem = make_problem(
        [forward] * stages, [backward] * stages, nodes=(stages,), global_batch_size=batches, shared=rng.random() < 0.5
    )
    allocation = straight(problem, batches)
    for orders in (gpipe(allocation), early_backward(allocation), early_backward(allocation, "B")):
        expected = (batches + stages - 1) * (forward + backward)
        assert simulate(problem, allocation, orders).time_per_global_batch_ns == expected


@pytest.mark.parametrize("seed", range(60))
def test_early_backward_against_gpipe(seed: int) -> None:
    """ALGORITHMS 2.7: never slower without communication; with full-duplex links policy B is not."""
    rng = random.Random(seed)
    stages, batches = rng.randint(1, 6), rng.randint(1, 12)
    forward, backward = ([rng.randint(1, 30) for _ in range(stages)] for _ in range(2))
    for carry in (0, rng.randint(1, 30)):
        problem = make_problem(forward, backward, carry, nodes=(stages,), global_batch_size=batches, channel="full")
        allocation = straight(problem, batches)
        slowest = makespan_ns(problem, allocation, gpipe(allocation))
        assert makespan_ns(problem, allocation, early_backward(allocation, "B")) <= slowest
        if carry == 0:
            assert makespan_ns(problem, allocation, early_backward(allocation, "A")) <= slowest


@pytest.mark.parametrize("seed", range(30))
def test_scaling_times_and_inverse_bandwidths_scales_the_makespan(seed: int) -> None:
    rng = random.Random(seed)
    stages, batches, factor = rng.randint(1, 5), rng.randint(1, 7), rng.randint(2, 9)
    forward = [rng.randint(1, 30) for _ in range(stages)]
    fixed = {
        "boundary_bytes": [rng.randint(0, 20) for _ in range(stages - 1)],
        "parameter_bytes": 6,
        "nodes": (2 * stages,),
        "global_batch_size": batches,
        "shared": rng.random() < 0.5,
        "channel": rng.choice(["half", "full", "none"]),
    }
    plain = make_problem(forward, **fixed)
    slow = make_problem([f * factor for f in forward], **fixed, inside_bytes_per_s=10**9)
    inside = tuple(each._replace(bandwidth_bytes_per_s=10**9) for each in plain.network.insides)
    plain = replace(plain, network=_with_inside(plain.network, inside))
    wide = tuple(each._replace(bandwidth_bytes_per_s=factor * 10**9) for each in plain.network.insides)
    plain_fast = replace(plain, network=_with_inside(plain.network, wide))
    bytes_scaled = replace(
        slow,
        forward_bytes=slow.forward_bytes * factor,
        backward_bytes=slow.backward_bytes * factor,
        trainable_bytes=slow.trainable_bytes * factor,
    )
    allocation = chain([(1, [2 * i, 2 * i + 1][: 1 + i % 2]) for i in range(stages)], batches)
    orders = early_backward(allocation, "B")
    assert makespan_ns(bytes_scaled, allocation, orders) == factor * makespan_ns(plain, allocation, orders)
    assert makespan_ns(plain_fast, allocation, orders) <= makespan_ns(plain, allocation, orders)


def _with_inside(network: Network, insides: tuple) -> Network:
    return Network(network.device_names, network.node_names, network.node_of, insides, network.cables)


def test_one_micro_batch_takes_its_path() -> None:
    problem = make_problem([3, 5, 7], [1, 2, 4], [10, 20], nodes=(1, 1, 1), global_batch_size=1)
    allocation = straight(problem, 1)
    for orders in (gpipe(allocation), early_backward(allocation)):
        assert simulate(problem, allocation, orders).time_per_global_batch_ns == 15 + 30 + 7 + 30


def test_one_stage_takes_its_work_and_its_all_reduce() -> None:
    problem = make_problem([5], parameter_bytes=100, nodes=(4,), global_batch_size=8, overlap_all_reduce=False)
    allocation = chain([(1, [0, 1, 2, 3])], 2)
    assert simulate(problem, allocation, gpipe(allocation)).time_per_global_batch_ns == 2 * 15 + 150


def test_nothing_travels_over_a_boundary_of_zero_bytes() -> None:
    problem = make_problem([5, 5], boundary_bytes=0, nodes=(1, 1), shared=True, global_batch_size=3)
    timeline = simulate(problem, straight(problem, 3), early_backward(straight(problem, 3)))
    assert timeline.transfers.stage.size == 0


def test_layers_of_zero_time_are_legal() -> None:
    problem = make_problem([0, 4, 0], [0, 8, 0], 2, nodes=(3,), channel="full", global_batch_size=3)
    allocation = straight(problem, 3)
    assert simulate(problem, allocation, early_backward(allocation)).time_per_global_batch_ns == 2 + 36 + 2


def test_buckets_overlap_the_last_backward() -> None:
    """ALGORITHMS 7.1: backward 10 per layer, all-reduce 30 and 5; 25 remain exposed, without overlap 35."""
    problem = make_problem([1, 1], [10, 10], 0, [5, 30], nodes=(2,), global_batch_size=2, bucket_bytes=1)
    allocation = chain([(2, [0, 1])], 1)
    work = 2 + 20
    timeline = simulate(problem, allocation, gpipe(allocation))
    assert timeline.time_per_global_batch_ns == work + 25
    assert [(r.start_ns, r.end_ns) for r in timeline.reductions] == [(12, 42), (42, 47)]
    assert simulate(problem, allocation, gpipe(allocation), overlap=False).time_per_global_batch_ns == work + 35
    assert makespan_ns(problem, allocation, gpipe(allocation), overlap=False) == work + 35


def test_updates_follow_the_operations_and_the_buckets() -> None:
    problem = make_problem(
        [1, 1], [10, 10], 0, [0, 30], update_ns=[4, 3], nodes=(3,), global_batch_size=2, overlap_all_reduce=False
    )
    allocation = chain([(1, [0]), (1, [1, 2])], 1)
    timeline = simulate(problem, allocation, gpipe(allocation))
    assert [(u.stage, u.start_ns, u.end_ns) for u in timeline.updates] == [(0, 33, 37), (1, 43, 46)]
    assert timeline.time_per_global_batch_ns == 46


def test_a_device_with_two_stages_updates_them_in_the_order_of_their_last_backwards() -> None:
    problem = make_problem([1, 1], [2, 2], update_ns=[4, 3], nodes=(1,), global_batch_size=1)
    allocation = chain([(1, [0]), (1, [0])], 1)
    row = [(FORWARD, 0, 0), (FORWARD, 1, 0), (BACKWARD, 1, 0), (BACKWARD, 0, 0)]
    timeline = simulate(problem, allocation, Orders("v", (Row((0,), as_operations(row)),)))
    assert [(u.stage, u.start_ns, u.end_ns) for u in timeline.updates] == [(0, 9, 13), (1, 6, 9)]


def test_of_transfers_ready_at_once_the_lower_stage_goes_first() -> None:
    """On one bus: stage 0's micro-batch 1 and stage 1's micro-batch 0 are both ready at 20."""
    problem = make_problem(
        [10, 6, 3], [3, 3, 3], [4, 3], nodes=(3,), form="bus", shared=True, global_batch_size=2, backward_bytes=2
    )
    allocation = straight(problem, 2)
    timeline = simulate(problem, allocation, gpipe(allocation))
    sent = timeline.transfers
    keys = np.stack([sent.start_ns, sent.stage, sent.direction, sent.micro_batch], axis=1).tolist()
    assert [tuple(key) for key in sorted(keys)][:4] == [(10, 0, 0, 0), (20, 0, 0, 1), (24, 1, 0, 0), (30, 1, 0, 1)]


def test_a_blocked_transfer_reserves_nothing() -> None:
    """Two routes out of node 0 share its cable; a transfer within node 1 overtakes one that waits for the cable."""
    network = make_network((2, 2), between_bytes_per_s=10**9)
    problem = make_problem([1, 1, 1, 1], [1, 1, 1, 1], [50, 2, 50], network=network, shared=True, global_batch_size=3)
    allocation = chain([(1, [0]), (1, [2]), (1, [3]), (1, [1])], 3)
    timeline = simulate(problem, allocation, gpipe(allocation))
    sent = timeline.transfers
    inner = sent.start_ns[(sent.stage == 1) & (sent.direction == 0)].tolist()
    assert inner == [52, 102, 152]
    outer = sent.start_ns[(sent.stage == 0) & (sent.direction == 0)].tolist()
    assert outer == [1, 51, 101]


def test_rows_of_two_sizes_take_their_own_times() -> None:
    problem = make_problem([10], [20], nodes=(1,), global_batch_size=5)
    timeline = simulate(problem, chain([(1, [0])], 3), gpipe(chain([(1, [0])], 3)))
    assert timeline.tracks[0].end_ns.tolist() == [20, 40, 50, 90, 130, 150]


def test_round_robin_replicas_take_whole_micro_batches_in_turn() -> None:
    problem = make_problem([10, 4], [20, 8], 3, nodes=(3,), global_batch_size=4, channel="full")
    stages = (Stage(0, 0, (0, 1), "round_robin"), Stage(1, 1, (2,)))
    allocation = single_pipeline(stages, 4)
    rows = [
        Row((d,), as_operations([(FORWARD, 0, d), (FORWARD, 0, d + 2), (BACKWARD, 0, d), (BACKWARD, 0, d + 2)]))
        for d in (0, 1)
    ]
    last = [(kind, 1, m) for m in range(4) for kind in (FORWARD, BACKWARD)]
    timeline = simulate(problem, allocation, Orders("turns", (*rows, Row((2,), as_operations(last)))))
    assert timeline.tracks[1].start_ns.tolist() == [0, 10, 40, 64]
    assert timeline.tracks[2].start_ns.tolist() == [13, 17, 25, 29, 37, 41, 49, 53]


def test_recomputation_costs_its_forward_within_the_backward_or_apart() -> None:
    problem = make_problem([5, 7], [20, 20], nodes=(1,), global_batch_size=1)
    allocation = single_pipeline((Stage(0, 1, (0,), recompute=((0, 0),)),), 1)
    together = Orders("b", (Row((0,), as_operations([(FORWARD, 0, 0), (BACKWARD, 0, 0)])),))
    apart = Orders("r", (Row((0,), as_operations([(FORWARD, 0, 0), (RECOMPUTE, 0, 0), (BACKWARD, 0, 0)])),))
    assert simulate(problem, allocation, together).tracks[0].end_ns.tolist() == [12, 57]
    assert simulate(problem, allocation, apart).tracks[0].end_ns.tolist() == [12, 17, 57]


def test_a_split_backward_hands_its_gradient_on_before_its_weights() -> None:
    problem = make_problem([5, 5], [9, 9], 2, weight_ns=[4, 4], nodes=(2,), global_batch_size=1)
    allocation = straight(problem, 1)
    rows = [Row((s,), as_operations([(FORWARD, s, 0), (INPUT, s, 0), (WEIGHT, s, 0)])) for s in (0, 1)]
    timeline = simulate(problem, allocation, Orders("zb", tuple(rows)))
    assert timeline.tracks[1].start_ns.tolist() == [7, 12, 17]
    assert timeline.tracks[0].start_ns.tolist() == [0, 19, 24]


def test_every_device_has_its_time_divided() -> None:
    problem = make_problem([4, 8], [8, 16], 6, nodes=(1, 1), global_batch_size=2)
    allocation = straight(problem, 2)
    timeline = simulate(problem, allocation, gpipe(allocation))
    assert timeline.time_per_global_batch_ns == 10 + 16 + 32 + 6 + 8
    assert timeline.fill_ns == 10
    assert timeline.drain_ns == 14
    first, second = timeline.uses[0], timeline.uses[1]
    assert (first.busy_ns, first.communication_ns, first.idle_ns) == (24, 20, 28)
    assert (second.busy_ns, second.communication_ns, second.idle_ns) == (48, 12, 12)
    assert timeline.bubble == pytest.approx(0.5)


def test_a_deadlock_names_both_devices_and_their_next_operations() -> None:
    problem = make_problem([1, 1], boundary_bytes=1, nodes=(1, 1), global_batch_size=2)
    allocation = straight(problem, 2)
    rows = (
        Row((0,), as_operations([(FORWARD, 0, 0), (BACKWARD, 0, 0), (FORWARD, 0, 1), (BACKWARD, 0, 1)])),
        Row((1,), as_operations([(FORWARD, 1, 0), (FORWARD, 1, 1), (BACKWARD, 1, 0), (BACKWARD, 1, 1)])),
    )
    for channel in ("half", "full"):
        variant = replace(problem, rules=replace(problem.rules, channel=channel))
        with pytest.raises(InvalidPlan) as caught:
            simulate(variant, allocation, Orders("stuck", rows))
        assert "n0/0 waits in B0 of stage 0 for B0 of stage 1" in str(caught.value)
        assert "n1/0 waits in F1 of stage 1 for F1 of stage 0" in str(caught.value)
        with pytest.raises(InvalidPlan, match="deadlocks"):
            makespan_ns(variant, allocation, Orders("stuck", rows))


F0, B0 = (FORWARD, 0, 0), (BACKWARD, 0, 0)


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([F0], "B0 of stage 0 is missing in the row of n0/0"),
        ([F0, F0, B0], "F0 of stage 0 is twice"),
        ([F0, B0, (INPUT, 0, 0)], "I0 of stage 0 is twice"),
        ([B0, F0], "B0 of stage 0 is out of order"),
        ([F0, (INPUT, 0, 0)], "W0 of stage 0 is missing"),
        ([F0, B0, (FORWARD, 0, 1)], "F1 of stage 0 is in the row of n0/0, whose devices do not run it"),
        ([F0, B0, (FORWARD, 1, 0)], "F0 of stage 1 is in the row of n0/0, whose devices do not run it"),
        ([F0, B0, (7, 0, 0)], "Operation kind 7 is in the row"),
        ([F0, B0, (FORWARD, -1, 0)], "whose devices do not run it"),
        ([], "F0 of stage 0 is missing"),
    ],
)
def test_rows_that_do_not_fit_are_refused(operations: list, message: str) -> None:
    problem = make_problem([1], nodes=(2,), global_batch_size=1)
    allocation = chain([(1, [0])], 1)
    with pytest.raises(InvalidPlan, match=message):
        simulate(problem, allocation, Orders("odd", (Row((0,), as_operations(operations)),)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (((0,),), "Device n0/1 holds stage 1, but schedule odd has no row"),
        (((0,), (1,), (2,)), "names n0/2, which holds no stage"),
        (((0,), (1,), (0,)), "Device n0/0 is in two rows"),
        (((0, 1),), "n0/0 holds stages \\[0\\], n0/1 holds \\[1\\]"),
    ],
)
def test_devices_in_wrong_rows_are_refused(rows: tuple, message: str) -> None:
    problem = make_problem([1, 1], nodes=(3,), global_batch_size=1)
    allocation = straight(problem, 1)
    odd_rows = tuple(Row(d, as_operations([(FORWARD, d[0], 0), (BACKWARD, d[0], 0)])) for d in rows)
    with pytest.raises(InvalidPlan, match=message):
        simulate(problem, allocation, Orders("odd", odd_rows))


def test_round_robin_replicas_may_not_share_a_row() -> None:
    problem = make_problem([1], nodes=(2,), global_batch_size=2)
    allocation = single_pipeline((Stage(0, 0, (0, 1), "round_robin"),), 2)
    with pytest.raises(InvalidPlan, match="takes micro-batches in turn"):
        simulate(problem, allocation, gpipe(allocation))


def test_devices_that_nothing_connects_are_refused() -> None:
    network = make_network((1, 1))
    apart = Network(network.device_names, network.node_names, network.node_of, network.insides, ())
    problem = make_problem([1, 1], boundary_bytes=1, network=apart, shared=True, global_batch_size=1)
    allocation = straight(problem, 1)
    with pytest.raises(InvalidPlan, match="Nothing connects the devices of stage 0 with those of stage 1"):
        simulate(problem, allocation, gpipe(allocation))
    assert makespan_ns(problem, allocation, gpipe(allocation)) == NEVER_NS


def test_judging_twice_gives_the_same() -> None:
    problem = make_problem([3, 4, 5], boundary_bytes=7, nodes=(3,), shared=True, global_batch_size=6)
    allocation = straight(problem, 6)
    one, two = (simulate(problem, allocation, early_backward(allocation)) for _ in range(2))
    assert _arrays(one) == _arrays(two)


def _arrays(timeline: Timeline) -> list:
    return [
        [(track.start_ns.tolist(), track.end_ns.tolist()) for track in timeline.tracks],
        [getattr(timeline.transfers, name).tolist() for name in ("stage", "direction", "micro_batch", "start_ns")],
        timeline.uses,
    ]


def test_an_event_run_and_an_in_order_run_agree_on_full_duplex_links() -> None:
    """A pair's full-duplex link in a shared network equals the private channel of its edge; another kernel runs it."""
    problem = make_problem([3, 4, 5], boundary_bytes=[7, 2], nodes=(3,), channel="full", global_batch_size=6)
    allocation = straight(problem, 6)
    orders = warmup_orders(allocation, [4, 2, 1])
    link = make_problem([3, 4, 5], boundary_bytes=[7, 2], nodes=(3,), shared=True, form="pairs", global_batch_size=6)
    one, two = simulate(problem, allocation, orders), simulate(link, allocation, orders)
    for a, b in zip(one.tracks, two.tracks, strict=True):
        np.testing.assert_array_equal(a.start_ns, b.start_ns)
