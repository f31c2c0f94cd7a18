"""Memory over time: curves worked out by hand, peaks that grow with the micro-batches in flight, the breakdown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import as_operations, chain, gpipe, make_problem, straight, warmup_orders

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.memory import fits
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.schedule import Orders, Pattern, PatternOperation, Row
from penstock.solvers.verify.verifier import verify


def _curve(timeline, device: int) -> list[tuple[int, int]]:
    times, sizes = timeline.memory_curve(device)
    assert times.dtype == sizes.dtype == np.int64
    return list(zip(times.tolist(), sizes.tolist(), strict=True))


@pytest.mark.parametrize("periodic", [False, True])
def test_a_step_needs_room_while_it_runs(periodic: bool) -> None:
    """Gradients of 10 bytes and a step that needs 500, of 2 ns, after 3 ns of computing; then nothing is left."""
    problem = make_problem(
        [1], [2], 0, 10, update_ns=2, update_workspace_bytes=500, nodes=(1,), global_batch_size=1, context_bytes=7
    )
    if periodic:
        allocation = chain([(1, [0])], 1)
        operations = (PatternOperation(FORWARD, 0, 0, 0), PatternOperation(BACKWARD, 0, 1, 0))
        steady = Pattern("steady", 5, 1, operations)
        timeline = simulate(problem, allocation, steady, update_rule="double_buffered")
        assert verify(problem, allocation, steady, timeline, update_rule="double_buffered") == []
    else:
        allocation = straight(problem, 1)
        timeline = simulate(problem, allocation, gpipe(allocation))
        assert _curve(timeline, 0) == [(0, 17), (1, 27), (3, 527), (5, 17)]
        assert verify(problem, allocation, gpipe(allocation), timeline) == []
        tight = replace(problem, devices=(replace(problem.devices[0], memory_bytes=526),))
        assert fits(problem, timeline)
        assert not fits(tight, timeline)
        faults = verify(tight, allocation, gpipe(allocation), timeline)
        assert any(" needs 527 " in fault for fault in faults), faults
    peak = timeline.uses[0].memory
    assert (peak.gradients, peak.workspace) == (10, 500)


def test_the_curve_of_two_stages_by_hand() -> None:
    """Activations of 6 bytes take 6 ns, gradients of 4 bytes 4 ns; parameters 100, context 7. Receives start at 0."""
    problem = make_problem(
        [10, 10],
        [20, 20],
        6,
        100,
        backward_bytes=4,
        stash_bytes=[30, 50],
        workspace_bytes=[3, 5],
        update_ns=2,
        nodes=(1, 1),
        context_bytes=7,
        state_factor=2,
        global_batch_size=1,
    )
    allocation = straight(problem, 1)
    timeline = simulate(problem, allocation, gpipe(allocation))
    base = 7 + 100 + 200
    assert _curve(timeline, 0) == [
        (0, base + 30 + 3 + 4),
        (10, base + 30 + 6 + 4),
        (16, base + 30 + 4),
        (50, base + 30 + 4 + 3 + 100),
        (70, base + 100),
        (72, base),
    ]
    assert _curve(timeline, 1) == [
        (0, base + 6),
        (16, base + 6 + 50 + 5),
        (26, base + 6 + 50 + 5 + 100),
        (46, base + 100 + 4),
        (48, base + 4),
        (50, base),
    ]
    peak = timeline.uses[1].memory
    assert peak._asdict() == {
        "parameters": 100,
        "gradients": 100,
        "optimizer": 200,
        "versions": 0,
        "activations": 50,
        "buffers": 6,
        "workspace": 5,
        "context": 7,
    }
    assert timeline.peak_memory_bytes == peak.total == base + 161


def test_without_buffers_only_stashes_count() -> None:
    problem = make_problem(
        [10, 10], [20, 20], 6, stash_bytes=30, nodes=(1, 1), global_batch_size=1, count_buffers=False
    )
    timeline = simulate(problem, straight(problem, 1), gpipe(straight(problem, 1)))
    assert _curve(timeline, 0) == [(0, 30), (72, 0)]
    assert _curve(timeline, 1) == [(0, 0), (16, 30), (46, 0)]


def test_a_split_backward_keeps_everything_until_its_weight_gradient() -> None:
    problem = make_problem(
        [10, 10], [20, 20], 6, stash_bytes=50, weight_ns=[8, 8], nodes=(1, 1), global_batch_size=1, channel="full"
    )
    rows = tuple(Row((s,), as_operations([(FORWARD, s, 0), (INPUT, s, 0), (WEIGHT, s, 0)])) for s in (0, 1))
    timeline = simulate(problem, straight(problem, 1), Orders("zb", rows))
    assert _curve(timeline, 1) == [(0, 6), (16, 56), (38, 62), (44, 56), (46, 0)]
    assert _curve(timeline, 0) == [(0, 56), (10, 62), (16, 56), (64, 0)]


def test_receives_count_from_their_posting_and_sends_until_they_have_passed() -> None:
    """Four forwards of 2 ns and messages of 6 ns to a stage that takes 10 ns for each.

    Its row is F0 to F3, B0 to B3: the first two receives are posted at the beginning, the third when F0 has ended at
    18, the fourth when F1 has ended at 28. Transfers start at 2, 8, 14 and 20; the last two pass from 18 and 28 on.
    """
    problem = make_problem(
        [2, 10], [10, 10], 6, backward_bytes=0, stash_bytes=0, nodes=(1, 1), global_batch_size=4, channel="full"
    )
    timeline = simulate(problem, straight(problem, 4), gpipe(straight(problem, 4)))
    assert timeline.transfers.start_ns.tolist() == [2, 8, 14, 20]
    assert _curve(timeline, 0) == [(0, 0), (2, 6), (4, 12), (6, 18), (14, 12), (24, 6), (34, 0)]
    assert _curve(timeline, 1) == [(0, 12), (18, 18), (28, 24), (58, 18), (68, 12), (78, 6), (88, 0)]


def test_a_recomputing_stage_keeps_its_input_also_where_buffers_do_not_count() -> None:
    """Forwards of 10 ns, backwards of 20 and the recomputation; stashes of 30 bytes, inputs of 6."""
    problem = make_problem(
        [10, 10], [20, 20], 6, stash_bytes=30, nodes=(1, 1), global_batch_size=1, count_buffers=False
    )
    stages = (Stage(0, 0, (0,), recompute=((0, 0),)), Stage(1, 1, (1,), recompute=((1, 1),)))
    allocation = single_pipeline(stages, 1)
    timeline = simulate(problem, allocation, gpipe(allocation))
    assert _curve(timeline, 1) == [(0, 0), (16, 6), (26, 36), (56, 0)]
    assert _curve(timeline, 0) == [(0, 0), (62, 30), (92, 0)]


def test_a_recomputing_stage_keeps_what_a_stage_of_its_device_hands_on() -> None:
    problem = make_problem([10, 10], [20, 20], 6, stash_bytes=[40, 30], nodes=(1,), global_batch_size=1)
    allocation = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (0,), recompute=((1, 1),))), 1)
    row = [(FORWARD, 0, 0), (FORWARD, 1, 0), (BACKWARD, 1, 0), (BACKWARD, 0, 0)]
    timeline = simulate(problem, allocation, Orders("v", (Row((0,), as_operations(row)),)))
    assert _curve(timeline, 0) == [(0, 40), (10, 46), (20, 76), (50, 40), (70, 0)]
    assert verify(problem, allocation, Orders("v", (Row((0,), as_operations(row)),)), timeline) == []


def test_recomputation_holds_what_it_rebuilds() -> None:
    """Layers of 40 and 30 bytes; the second is rebuilt from its input of 6 bytes."""
    problem = make_problem(
        [10, 10], [20, 20], 6, stash_bytes=[40, 30], workspace_bytes=[1, 2], nodes=(1,), global_batch_size=1
    )
    allocation = single_pipeline((Stage(0, 1, (0,), recompute=((1, 1),)),), 1)
    whole = Orders("b", (Row((0,), as_operations([(FORWARD, 0, 0), (BACKWARD, 0, 0)])),))
    assert _curve(simulate(problem, allocation, whole), 0) == [(0, 48), (20, 46 + 2 + 30), (70, 0)]
    apart = Orders("r", (Row((0,), as_operations([(FORWARD, 0, 0), (RECOMPUTE, 0, 0), (BACKWARD, 0, 0)])),))
    assert _curve(simulate(problem, allocation, apart), 0) == [(0, 48), (20, 46 + 30 + 2), (70, 0)]


@pytest.mark.parametrize("shared", [False, True])
def test_the_peak_grows_with_the_micro_batches_in_flight(shared: bool) -> None:
    problem = make_problem(
        [4, 5, 6], boundary_bytes=[3, 2], stash_bytes=20, nodes=(3,), global_batch_size=9, shared=shared
    )
    allocation = straight(problem, 9)
    peaks = []
    for ahead in range(1, 10):
        timeline = simulate(problem, allocation, warmup_orders(allocation, [ahead, 1, 1]))
        peaks.append(timeline.uses[0].memory.total)
        assert timeline.uses[0].memory.activations == 20 * ahead
    assert peaks == sorted(peaks)


def test_replicas_hold_their_slice_and_shard_their_states() -> None:
    problem = make_problem(
        [10], parameter_bytes=100, stash_bytes=10, nodes=(3,), global_batch_size=7, state_factor=2, shard_states=True
    )
    timeline = simulate(problem, chain([(1, [0, 1, 2])], 1), gpipe(chain([(1, [0, 1, 2])], 1)))
    assert timeline.uses[2].memory.activations == 30
    assert timeline.uses[2].memory.optimizer == 67
    assert timeline.uses[0].memory == timeline.uses[2].memory


def test_two_stages_on_one_device_share_its_memory_and_send_nothing() -> None:
    problem = make_problem([10, 10], [20, 20], 6, [100, 10], stash_bytes=[30, 50], nodes=(1,), global_batch_size=1)
    allocation = chain([(1, [0]), (1, [0])], 1)
    row = [(FORWARD, 0, 0), (FORWARD, 1, 0), (BACKWARD, 1, 0), (BACKWARD, 0, 0)]
    timeline = simulate(problem, allocation, Orders("v", (Row((0,), as_operations(row)),)))
    assert _curve(timeline, 0) == [(0, 140), (10, 190), (20, 200), (40, 250), (60, 110)]
