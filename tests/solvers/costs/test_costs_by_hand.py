"""Time and memory of plans, worked out by hand from the formulas: no code is shared with the simulator.

The reference simulator and the simulator use the same costs; these numbers are from the comments above them. One byte
takes one nanosecond at 10^9 bytes per second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from problems import as_operations, chain, early_backward, gpipe, make_network, make_problem, straight

from penstock.schemas.program import BACKWARD, FORWARD, RECOMPUTE
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.network import Cable
from penstock.solvers.model.problem import CodecSpeed, Problem
from penstock.solvers.model.schedule import Orders, Row


def time_of(problem: Problem, allocation: Allocation) -> int:
    """Return the time of all forwards, then all backwards."""
    return simulate(problem, allocation, gpipe(allocation)).time_per_global_batch_ns


# Stage times


def test_a_stage_takes_its_layers_once_per_sample_and_one_update() -> None:
    """A sample takes 3 + 4 forwards and 5 + 7 back: 19. 3 micro-batches of 2 samples take 3 x 38; updates 2 + 6."""
    problem = make_problem([3, 4], [5, 7], update_ns=[2, 6], global_batch_size=6, micro_batch_sizes=(2,))
    assert time_of(problem, chain([(2, [0])], 3)) == 3 * 2 * 19 + 8


def test_the_largest_slice_and_the_slowest_replica_set_the_time() -> None:
    """5 rows on 2 replicas are slices of 3 and 2. A row takes 30 ns on "cpu", 30 / 2 on "fast" devices."""
    for kinds, expected in ((["cpu", "cpu"], 3 * 30), (["fast", "fast"], 3 * 15), (["fast", "cpu"], 3 * 30)):
        problem = make_problem([10], nodes=(2,), kinds=kinds, speed={"fast": 2.0}, global_batch_size=5)
        assert time_of(problem, chain([(1, [0, 1])], 1)) == expected


def test_times_are_rounded_up_where_rows_were_not_measured() -> None:
    """Measured 10 ns for 4 rows: 3 rows take 7.5 forwards and 15 back, so 8 + 15."""
    problem = make_problem([10], [20], nodes=(1,), measured_rows=4, global_batch_size=3)
    assert time_of(problem, chain([(1, [0])], 1)) == 8 + 15


def test_recomputation_repeats_the_forward_of_its_segment() -> None:
    """F 4 + 6, B 10 + 12, again 6 of the second layer, apart or within the backward: 38 for each of 2 samples."""
    problem = make_problem([4, 6], [10, 12], nodes=(1,), global_batch_size=2)
    allocation = single_pipeline((Stage(0, 1, (0,), recompute=((1, 1),)),), 2)
    assert time_of(problem, allocation) == 2 * 38
    row = [(FORWARD, 0, 0), (FORWARD, 0, 1), *((kind, 0, m) for m in (0, 1) for kind in (RECOMPUTE, BACKWARD))]
    apart = simulate(problem, allocation, Orders("apart", (Row((0,), as_operations(row)),)))
    assert apart.time_per_global_batch_ns == 2 * 38


def test_replicas_that_share_the_optimizer_step_a_part_each() -> None:
    """F 10 and B 20; updates of 2 + 5: 7 on each of 3 replicas, or 7 / 3 rounded up. A stage of one device steps all.

    In a GPU group 4 of the step are spent on sums among its GPUs, which are not divided: 4 + 3 / 3.
    """
    base: dict[str, Any] = {"update_ns": [2, 5], "nodes": (3,), "global_batch_size": 3, "micro_batch_sizes": (3,)}
    for shard, expected in ((False, 7), (True, 3)):
        problem = make_problem([4, 6], shard_states=shard, **base)
        assert time_of(problem, chain([(2, [0, 1, 2])], 1)) == 30 + expected
        assert time_of(problem, chain([(2, [0])], 1)) == 90 + 7
    cells = replace(problem, step_collectives_ns=np.array([0, 1, 4]))
    assert time_of(cells, chain([(2, [0, 1, 2])], 1)) == 30 + 5


# Transfers


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 3 samples x 7 bytes at 10^9 bytes/s: 21 ns.
        pytest.param({}, 21, id="madpipe"),
        # At 2 x 10^9 bytes/s 10.5 ns, rounded up.
        pytest.param({"between_bytes_per_s": 2 * 10**9}, 11, id="rounded up"),
        # Two cables of 5 ns latency, and the slowest of the resources on the way, 21 ns.
        pytest.param({"transfer": "nic", "latency_ns": 5}, 2 * 5 + 21, id="nic with latency"),
        # In one node: a latency of 5 ns once, at 3 x 10^9 bytes/s.
        pytest.param(
            {"transfer": "nic", "latency_ns": 5, "nodes": (2,), "inside_bytes_per_s": 3 * 10**9}, 5 + 7, id="inside"
        ),
    ],
)
def test_a_transfer_takes_its_bytes_over_the_bandwidth(settings: dict[str, Any], expected: int) -> None:
    """F 2 + 2, B 4 + 4 for each of 3 samples in one micro-batch, and the message there and the gradient back."""
    base: dict[str, Any] = {"nodes": (1, 1), "global_batch_size": 3, "micro_batch_sizes": (3,)}
    problem = make_problem([2, 2], boundary_bytes=7, **(base | settings))
    assert time_of(problem, straight(problem, 1)) == 3 * 12 + 2 * expected


@pytest.mark.parametrize(
    ("transfer", "expected"),
    [
        # SPP: 12 bytes over k k' = 4 links of the narrowest bandwidth: 3.
        pytest.param("spp", 3, id="spp"),
        # MadPipe: 12 bytes over one link.
        pytest.param("madpipe", 12, id="madpipe"),
        # DAPPLE: all sources are in another node than the targets, so all 12 bytes go through its slowest link.
        pytest.param("dapple", 12, id="dapple"),
        # Slices of 2 of 4 rows: device 0 sends 6 bytes to 2, device 1 to 3, both through one network card per node: 12.
        pytest.param("nic", 12, id="nic"),
    ],
)
def test_transfers_between_replicas(transfer: str, expected: int) -> None:
    """4 rows of 3 bytes; each replica computes 2 rows: F 2 x 1 + 2 x 1, B 2 x 2 + 2 x 2."""
    problem = make_problem(
        [1, 1], boundary_bytes=3, nodes=(2, 2), global_batch_size=4, micro_batch_sizes=(4,), transfer=transfer
    )
    assert time_of(problem, chain([(1, [0, 1]), (1, [2, 3])], 1)) == 12 + 2 * expected


# All-reduces


@pytest.mark.parametrize(
    ("settings", "devices", "expected"),
    [
        # Flat ring, 2 (k - 1) / k of 600 bytes: k = 2 in a node at 3 bytes/ns.
        pytest.param({"all_reduce": "flat"}, 2, 200, id="flat in a node"),
        # k = 4 over the cables of 1 byte/ns: 2 x 3 / 4 x 600.
        pytest.param({"all_reduce": "flat"}, 4, 900, id="flat across nodes"),
        # Rings of 2 in each node, 600 / 3, then of 2 nodes over the cables, 600 / 1.
        pytest.param({"all_reduce": "hierarchical"}, 4, 200 + 600, id="hierarchical"),
        # 2 (k - 1) steps of latency 1 in a node, and of 2 cables between nodes: 2 + 2 x 2.
        pytest.param({"all_reduce": "hierarchical", "latency_ns": 1}, 4, 200 + 2 + 600 + 4, id="with latency"),
        # Flat with latency: 6 steps, each as long as the slowest, which passes 2 cables.
        pytest.param({"all_reduce": "flat", "latency_ns": 1}, 4, 900 + 6 * 2, id="flat with latency"),
    ],
)
def test_an_all_reduce_follows_the_last_backward(settings: dict[str, Any], devices: int, expected: int) -> None:
    """One stage of one layer, one row for each replica: F 10, B 20, then the sum of 600 bytes, then 7 of update."""
    base: dict[str, Any] = {"parameter_bytes": 600, "update_ns": 7, "nodes": (2, 2), "global_batch_size": devices}
    problem = make_problem([10], inside_bytes_per_s=3 * 10**9, micro_batch_sizes=(devices,), **(base | settings))
    assert time_of(problem, chain([(1, list(range(devices)))], 1)) == 30 + expected + 7


def test_devices_with_cables_of_their_own_reduce_side_by_side() -> None:
    """Two nodes of two devices, each with its cable: rings of 2 inside, 600 / 3, then two rings of 300 bytes at 1."""
    plain = make_network((2, 2), inside_bytes_per_s=3 * 10**9)
    network = replace(plain, cables=tuple(Cable(name, "switch", 10**9, 0, True) for name in plain.device_names))
    problem = make_problem(
        [10], None, 0, 600, network=network, global_batch_size=4, micro_batch_sizes=(4,), all_reduce="hierarchical"
    )
    assert time_of(problem, chain([(1, [0, 1, 2, 3])], 1)) == 30 + 200 + 300


def test_buckets_overlap_the_rest_of_the_backward() -> None:
    """B 20 of layer 1, then 20 of layer 0. The 100 bytes of layer 1 (2 x 1 / 2 of them: 100 ns) leave 20 ns earlier."""
    base: dict[str, Any] = {"parameter_bytes": 100, "nodes": (2,), "global_batch_size": 2, "micro_batch_sizes": (2,)}
    for overlap, expected in ((True, 20 + 40 + 200 - 20), (False, 20 + 40 + 200)):
        problem = make_problem([10, 10], bucket_bytes=100, overlap_all_reduce=overlap, **base)
        assert time_of(problem, chain([(2, [0, 1])], 1)) == expected


def test_messages_pass_between_the_pieces_of_a_large_bucket() -> None:
    """F 20, message 60, F 20, B 40 until 140; from 120 on 400 bytes are summed on the same bus, 400 ns.

    In one piece until 520, then the message 60 and B 40. In four the message waits until 220 and is there at 280, and
    the sum ends 60 later than it would.
    """
    base: dict[str, Any] = {"nodes": (3,), "form": "bus", "global_batch_size": 2, "micro_batch_sizes": (2,)}
    for bucket_bytes, pieces, expected in ((201, 1, 520 + 60 + 40), (100, 4, 120 + 400 + 60)):
        problem = make_problem([10] * 3, None, 30, [0, 0, 400], shared=True, bucket_bytes=bucket_bytes, **base)
        plan = chain([(1, [0]), (2, [1, 2])], 1)
        timeline = simulate(problem, plan, gpipe(plan))
        assert timeline.time_per_global_batch_ns == expected
        assert [each.end_ns - each.start_ns for each in timeline.reductions] == [400 // pieces] * pieces


# Codecs


def test_an_encoded_message_is_half_as_long_and_is_converted_on_both_sides() -> None:
    """One tensor of 400 bytes: a message of 200 + 5; 400 bytes take 100 ns to encode and 50 to decode.

    F 10 and encoding, 205 on the way, decoding and F 10, B 20 and encoding, 205 back, decoding and B 20.
    """
    problem = make_problem([10, 10], boundary_bytes=400, nodes=(1, 1), global_batch_size=1)
    speeds = {"cpu": CodecSpeed(4 * 10**9, 8 * 10**9)}
    problem = replace(problem, codec=True, codec_speeds=speeds, encodable=((400, 1),))
    plain = straight(problem, 1)
    assert time_of(problem, plain) == 60 + 2 * 400
    first, second = plain.stages
    coded = single_pipeline((replace(first, coded=(False, True)), replace(second, coded=(True, False))), 1)
    assert time_of(problem, coded) == 60 + 2 * (205 + 100 + 50)


# Memory


def peak_of(problem: Problem, allocation: Allocation, device: int, orders: Orders | None = None) -> dict[str, int]:
    """Return the parts of the peak that are not 0."""
    memory = simulate(problem, allocation, orders or gpipe(allocation)).uses[device].memory
    return {name: size for name, size in memory._asdict().items() if size}


def test_memory_of_one_stage() -> None:
    """3 micro-batches in flight of 2 samples x (5 + 6) bytes of stash; the larger workspace, of 2 samples.

    The weights are 100 + 40 of parameters, of which 60 + 40 are trained. They have gradients once and two optimizer
    states. The context takes 9.
    """
    problem = make_problem(
        [1, 1],
        parameter_bytes=[100, 40],
        trainable_bytes=[60, 40],
        stash_bytes=[5, 6],
        workspace_bytes=[3, 8],
        nodes=(1,),
        state_factor=2,
        context_bytes=9,
        global_batch_size=6,
        micro_batch_sizes=(2,),
    )
    allocation = chain([(2, [0])], 3)
    parts = {"parameters": 140, "gradients": 100, "optimizer": 200, "workspace": 16, "context": 9}
    parts["activations"] = 3 * 22
    assert peak_of(problem, allocation, 0) == parts
    assert peak_of(problem, allocation, 0, early_backward(allocation)) == parts | {"activations": 22}


def test_optimizer_states_are_divided_over_replicas_rounded_up() -> None:
    """Two states of 50 bytes on 3 replicas: 100 / 3, rounded up; without sharding 100 on each."""
    for shard, states in ((True, 34), (False, 100)):
        problem = make_problem(
            [1], parameter_bytes=50, state_factor=2, shard_states=shard, nodes=(3,), global_batch_size=3
        )
        assert peak_of(problem, chain([(1, [0, 1, 2])], 1), 0)["optimizer"] == states


def test_recomputation_keeps_the_input_of_its_segment_and_rebuilds_one_micro_batch() -> None:
    """Stash 30 + 50; layer 1 is recomputed from the 7 bytes before it: 2 x (30 + 7), and 50 while one is redone."""
    problem = make_problem([1, 1], boundary_bytes=7, stash_bytes=[30, 50], nodes=(1,), global_batch_size=2)
    plain, again = (single_pipeline((Stage(0, 1, (0,), recompute=part),), 2) for part in ((), ((1, 1),)))
    assert peak_of(problem, plain, 0) == {"activations": 2 * 80}
    assert peak_of(problem, again, 0) == {"activations": 2 * 37, "workspace": 50}


def test_buffers_of_what_is_received_and_sent_by_the_nanosecond() -> None:
    """Two devices, two micro-batches, a stash of 3 bytes, 10 bytes forwards in 10 ns, gradients of 4 bytes in 4 ns.

    Device 0 runs F0 0-1, F1 1-2, B0 31-36, B1 36-41; device 1 F0 11-12, F1 21-22, B0 22-27, B1 27-32. A receive is
    posted before the operation ahead of the one that needs it; what is sent stays until it has arrived.
    """
    problem = make_problem(
        [1, 1], [5, 5], boundary_bytes=10, backward_bytes=4, stash_bytes=3, nodes=(1, 1), global_batch_size=2
    )
    allocation = straight(problem, 2)
    timeline = simulate(problem, allocation, gpipe(allocation))
    curves = [dict(zip(*(part.tolist() for part in timeline.memory_curve(d)), strict=True)) for d in (0, 1)]
    assert curves[0] == {
        0: 3 + 4,  # F0's stash, and memory for its gradient
        1: 7 + 3 + 10,  # F0 is sent, F1 begins
        2: 20 + 10 + 4,  # F1 waits for the channel; memory for its gradient
        11: 34 - 10,
        21: 24 - 10,
        36: 14 - 3 - 4,  # B0 has ended
        41: 0,
    }
    assert curves[1] == {
        0: 2 * 10,  # both inputs are posted
        11: 20 + 3,
        21: 23 + 3,
        27: 26 - 3 - 10 + 4,  # B0 has ended, and its gradient is sent
        31: 17 - 4,
        32: 13 - 3 - 10 + 4,
        36: 0,
    }


def test_tied_parameters_are_copied_where_another_stage_uses_them() -> None:
    """40 of the 100 bytes of layer 0 are also layer 2's: layer 2's device holds 60 other bytes and a copy."""
    problem = make_problem(
        [1] * 3, None, 0, [100, 10, 60], nodes=(3,), global_batch_size=1, shared_parameters=(("w", (0, 2), 40),)
    )
    allocation = straight(problem, 1)
    assert [peak_of(problem, allocation, d)["parameters"] for d in range(3)] == [100, 10, 100]
    together = chain([(3, [0])], 1)
    assert peak_of(problem, together, 0)["parameters"] == 170
