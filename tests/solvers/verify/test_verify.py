"""The verifier is silent on the simulator's timelines, and reports each way in which a plan can be wrong."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from problems import as_operations, chain, early_backward, gpipe, make_network, make_problem, straight

import penstock.solvers.verify.verifier
from penstock.schemas.amounts import amount, exact
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.verify.verifier import verify


def _problem(**changes: object) -> Problem:
    settings: dict = {
        "boundary_bytes": 6,
        "parameter_bytes": 40,
        "stash_bytes": 30,
        "update_ns": 3,
        "nodes": (2, 1),
        "global_batch_size": 6,
        "shared": True,
        "memory_bytes": 10_000,
    }
    return make_problem([10, 12, 8], [20, 24, 16], **(settings | changes))


def _allocation() -> Allocation:
    """Return layers 0 and 1 on two replicas, layer 2 on one device; three micro-batches of two rows."""
    return chain([(2, [0, 1]), (1, [2])], 3)


def _good() -> tuple[Problem, Allocation, Orders, Timeline]:
    problem, allocation = _problem(), _allocation()
    orders = early_backward(allocation)
    return problem, allocation, orders, simulate(problem, allocation, orders)


def test_a_good_plan_gives_no_sentence() -> None:
    assert verify(*_good()) == []


def _shifted(values: np.ndarray, at: int, by: int) -> np.ndarray:
    changed = values.copy()
    changed[at] += by
    return changed


def _track(timeline: Timeline, lane: int, **changes: object) -> Timeline:
    tracks = list(timeline.tracks)
    tracks[lane] = replace(tracks[lane], **changes)
    return replace(timeline, tracks=tuple(tracks))


def _moved(timeline: Timeline, lane: int, at: int, by: int) -> Timeline:
    track = timeline.tracks[lane]
    start, end = _shifted(track.start_ns, at, by), _shifted(track.end_ns, at, by)
    return _track(timeline, lane, start_ns=start, end_ns=end)


def _sent(timeline: Timeline, at: int, start: int, end: int) -> Timeline:
    sent = timeline.transfers
    changed = replace(sent, start_ns=_shifted(sent.start_ns, at, start), end_ns=_shifted(sent.end_ns, at, end))
    return replace(timeline, transfers=changed)


def _without_transfer(timeline: Timeline) -> Timeline:
    sent = timeline.transfers
    columns = (sent.stage, sent.direction, sent.micro_batch, sent.start_ns, sent.end_ns)
    return replace(timeline, transfers=type(sent)(*(column[1:] for column in columns)))


def _use(timeline: Timeline, **changes: object) -> Timeline:
    return replace(timeline, uses=timeline.uses | {2: timeline.uses[2]._replace(**changes)})


TIMES: dict[str, tuple[Callable[[Timeline], Timeline], str]] = {
    "two operations at once": (lambda t: _moved(t, 0, 1, -5), "before F0 of stage 0 ends"),
    "a wrong duration": (
        lambda t: _track(t, 0, end_ns=_shifted(t.tracks[0].end_ns, 0, -2)),
        "F0 of stage 0 on n0/0 takes 20 ns instead of 22 ns",
    ),
    "before time 0": (lambda t: _moved(t, 0, 0, -3), "before time 0"),
    "before its input": (lambda t: _moved(t, 1, 0, -3), "F0 of stage 1 on n1/0 starts before its input has arrived"),
    "a gradient too early": (lambda t: _moved(t, 0, 2, -1), "B0 of stage 0 on n0/0 starts before its input"),
    "a transfer too early": (lambda t: _sent(t, 0, -1, -1), "leaves before it has been computed"),
    "a transfer too short": (lambda t: _sent(t, 0, 0, -1), "for micro-batch 0 takes 11 ns instead of 12 ns"),
    "no transfer": (_without_transfer, "travels 0 times for micro-batch 0, not 1 times"),
    "a bucket too early": (
        lambda t: replace(t, reductions=(t.reductions[0]._replace(start_ns=0, end_ns=80),)),
        "Bucket 0 of stage 0 starts at 0 ns, before it is ready",
    ),
    "a bucket too short": (
        lambda t: replace(t, reductions=(t.reductions[0]._replace(end_ns=t.reductions[0].start_ns + 1),)),
        "Bucket 0 of stage 0 takes 1 ns",
    ),
    "no bucket": (lambda t: replace(t, reductions=()), "Stage 0 reduces buckets [] instead of 1"),
    "an update too early": (
        lambda t: replace(t, updates=(t.updates[0]._replace(start_ns=0, end_ns=6), t.updates[1])),
        "The optimizer step of stage 0 on n0/0 starts too early",
    ),
    "an update too short": (
        lambda t: replace(t, updates=(t.updates[0], t.updates[1]._replace(end_ns=t.updates[1].start_ns))),
        "The optimizer step of stage 1 on n1/0 has a wrong duration",
    ),
    "no update": (lambda t: replace(t, updates=t.updates[:1]), "Stage 1 has 0 optimizer steps on 1 rows"),
    "a wrong makespan": (
        lambda t: replace(t, time_per_global_batch_ns=t.time_per_global_batch_ns - 1),
        "but the last thing ends at",
    ),
    "times that do not add up": (lambda t: _use(t, busy_ns=0), "do not add up to"),
    "a wrong busy time": (
        lambda t: _use(t, busy_ns=t.uses[2].busy_ns - 1, idle_ns=t.uses[2].idle_ns + 1),
        f"states that n1/0 computes for {3 * (16 + 32) + 3 - 1} ns; it is {3 * (16 + 32) + 3} ns",
    ),
    "a wrong window": (lambda t: replace(t, window_ns=(1, t.window_ns[1])), "states the window (1, "),
    "a wrong fill": (lambda t: replace(t, fill_ns=t.fill_ns + 1), "states a fill of"),
    "a wrong drain": (lambda t: replace(t, drain_ns=t.drain_ns + 1), "states a fill of"),
    "versions that nobody keeps": (
        lambda t: _use(t, memory=t.uses[2].memory._replace(versions=1)),
        "states 1 bytes of weight versions on n1/0; it is 0 bytes",
    ),
    "a wrong peak": (
        lambda t: _use(t, memory=t.uses[2].memory._replace(activations=0)),
        "The timeline states a peak of",
    ),
    "another row": (
        lambda t: _track(t, 0, operations=t.tracks[0].operations[::-1]),
        "does not run the operations of its row in order",
    ),
    "other devices": (lambda t: _track(t, 0, devices=(0,)), "tracks are not the schedule's rows"),
}


@pytest.mark.parametrize("name", TIMES)
def test_wrong_times_are_said(name: str) -> None:
    problem, allocation, orders, timeline = _good()
    change, sentence = TIMES[name]
    faults = verify(problem, allocation, orders, change(timeline))
    assert any(sentence in fault for fault in faults), faults


def test_two_transfers_on_one_link_are_said() -> None:
    for changes, name in (({}, "n0→switch"), ({"shared": False}, "the channel of stages 0 and 1")):
        problem, allocation = _problem(**changes, boundary_bytes=60), _allocation()
        orders = gpipe(allocation)
        timeline = simulate(problem, allocation, orders)
        assert verify(problem, allocation, orders, timeline) == []
        faults = verify(problem, allocation, orders, _sent(timeline, 1, -1, -1))
        assert any(f"Two transfers use {name}" in fault for fault in faults), faults


def test_a_bucket_on_a_busy_link_is_said() -> None:
    problem, allocation = _problem(form="bus"), chain([(2, [0]), (1, [1, 2])], 3)
    orders = early_backward(allocation)
    timeline = simulate(problem, allocation, orders)
    assert verify(problem, allocation, orders, timeline) == []
    sent = timeline.transfers
    bucket = timeline.reductions[0]
    late = int(sent.end_ns.max()) - bucket.start_ns
    moved = bucket._replace(start_ns=bucket.start_ns + late - 1, end_ns=bucket.end_ns + late - 1)
    faults = verify(problem, allocation, orders, replace(timeline, reductions=(moved,)))
    assert any("Two transfers use" in fault for fault in faults), faults


def test_memory_that_does_not_suffice_names_the_device_and_the_bytes() -> None:
    problem, allocation, orders, timeline = _good()
    needed = timeline.uses[2].memory.total
    devices = (*problem.devices[:2], replace(problem.devices[2], memory_bytes=needed + 9))
    rules = replace(problem.memory, headroom_bytes=10)
    tight = replace(problem, devices=devices, memory=rules)
    assert any(
        fault.startswith(f"n1/0 needs {exact(needed)} at ")
        and fault.endswith(f"but has {exact(needed - 1)} ({amount(needed + 9)} less 10 B of headroom).")
        for fault in verify(tight, allocation, orders, timeline)
    )
    enough = replace(problem, devices=devices, memory=replace(rules, headroom_bytes=9))
    assert verify(enough, allocation, orders, timeline) == []


STAGES = {
    "a gap": ((Stage(0, 0, (0,)), Stage(2, 2, (1,))), "a stage holds layers 2 to 2, but layer 1 is the next"),
    "an overlap": ((Stage(0, 1, (0,)), Stage(1, 2, (1,))), "a stage holds layers 1 to 2, but layer 2 is the next"),
    "missing layers": ((Stage(0, 1, (0,)),), "holds 2 layers of 3"),
    "no device": ((Stage(0, 2, ()),), "Stage 0 has no device"),
    "an unknown device": ((Stage(0, 2, (7,)),), "Stage 0 names device 7, but there are 3"),
    "a device twice": ((Stage(0, 2, (1, 1)),), "Stage 0 names a device twice"),
    "a foreign segment": (
        (Stage(0, 1, (0,), recompute=((1, 2),)), Stage(2, 2, (1,))),
        "recomputes layers 1 to 2, which is no segment of it",
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_wrong_stages_are_said(name: str) -> None:
    stages, sentence = STAGES[name]
    problem, _, orders, timeline = _good()
    faults = verify(problem, single_pipeline(stages, 3), orders, timeline)
    assert any(sentence in fault for fault in faults), faults


def test_a_cut_where_the_profile_allows_none_is_said() -> None:
    problem = _problem(cuttable=[True, False])
    _p, allocation, orders, timeline = _good()
    faults = verify(problem, allocation, orders, timeline)
    assert faults == ["Pipeline 0 is cut after layer layer1, where the profile allows no cut."]


def test_micro_batches_that_do_not_tile_are_said() -> None:
    problem, allocation, orders, timeline = _good()
    stages = allocation.stages
    short = Allocation((Pipeline(stages, (0, 1)),), 3)
    assert verify(problem, short, orders, timeline) == ["The pipelines take 2 micro-batches of 3."]
    late = Allocation((Pipeline(stages, (1, 2)),), 3)
    assert "takes micro-batches 1 to 2, but 0 is the next" in verify(problem, late, orders, timeline)[0]
    many = single_pipeline(stages, 7)
    assert verify(problem, many, orders, timeline) == ["7 micro-batches cannot be made of 6 samples."]


F0, B0 = (FORWARD, 0, 0), (BACKWARD, 0, 0)
ROWS = {
    "no backward": ([F0], "F 1, B 0"),
    "a forward twice": ([F0, F0, B0], "F 2, B 1"),
    "a weight without its input": ([F0, B0, (WEIGHT, 0, 0)], "I 0, W 1"),
    "both backwards": ([F0, B0, (INPUT, 0, 0), (WEIGHT, 0, 0)], "B 1, I 1"),
    "a foreign stage": ([F0, B0, (FORWARD, 1, 0)], "Stage 1 is in the row of n0/0, which does not hold it"),
    "a strange kind": ([F0, B0, (9, 0, 0)], "has kind 9"),
}


@pytest.mark.parametrize("name", ROWS)
def test_wrong_rows_are_said(name: str) -> None:
    operations, sentence = ROWS[name]
    problem = make_problem([1], nodes=(2,), global_batch_size=1)
    allocation = chain([(1, [0])], 1)
    timeline = simulate(problem, allocation, gpipe(allocation))
    faults = verify(problem, allocation, Orders("odd", (Row((0,), as_operations(operations)),)), timeline)
    assert any(sentence in fault for fault in faults), faults


def test_devices_in_wrong_rows_are_said() -> None:
    problem, allocation, orders, timeline = _good()
    first, second = orders.rows
    cases = {
        "Device n1/0 holds a stage, but is in no row.": (first,),
        "Device n0/0 is in 2 rows.": (first, second, first),
        "share a row, but hold different stages": (replace(first, devices=(0, 2)), replace(second, devices=(1,))),
        "Device 9 of a row does not exist.": (replace(first, devices=(0, 9)), second),
    }
    for sentence, rows in cases.items():
        faults = verify(problem, allocation, Orders("odd", rows), timeline)
        assert any(sentence in fault for fault in faults), faults
    spare = make_problem([1], nodes=(2,), global_batch_size=1)
    alone = chain([(1, [0])], 1)
    rows = (*gpipe(alone).rows, Row((1,), as_operations([])))
    assert verify(spare, alone, Orders("odd", rows), timeline) == ["Device n0/1 holds no stage, but is in a row."]


def test_the_order_within_a_lane_is_checked() -> None:
    problem = make_problem([4], [8], nodes=(1,), global_batch_size=1, weight_ns=[3])
    allocation = single_pipeline((Stage(0, 0, (0,), recompute=((0, 0),)),), 1)
    operations = [(FORWARD, 0, 0), (RECOMPUTE, 0, 0), (INPUT, 0, 0), (WEIGHT, 0, 0)]
    timeline = simulate(problem, allocation, Orders("zb", (Row((0,), as_operations(operations)),)))
    for order in ([0, 2, 1, 3], [1, 0, 2, 3], [0, 1, 3, 2]):
        swapped = as_operations([operations[i] for i in order])
        times = np.cumsum([0, *(int(d) for d in (timeline.tracks[0].end_ns - timeline.tracks[0].start_ns)[order])])
        track = replace(timeline.tracks[0], operations=swapped, start_ns=times[:-1], end_ns=times[1:])
        orders = Orders("zb", (Row((0,), swapped),))
        faults = verify(problem, allocation, orders, replace(timeline, tracks=(track,)))
        assert any("starts before its" in fault for fault in faults), (order, faults)


def test_devices_that_nothing_connects_are_said() -> None:
    network = make_network((2, 1))
    apart = Network(network.device_names, network.node_names, network.node_of, network.insides, ())
    _, allocation, orders, timeline = _good()
    faults = verify(_problem(network=apart), allocation, orders, timeline)
    assert "Nothing connects the devices of stage 0 with those of stage 1." in faults
    spread = chain([(3, [0, 2])], 3)
    problem = _problem()
    judged = simulate(problem, spread, gpipe(spread))
    faults = verify(_problem(network=apart), spread, gpipe(spread), judged)
    assert "Nothing connects the replicas of stage 0." in faults


def test_an_overlap_that_was_not_asked_for_is_said() -> None:
    problem = _problem(bucket_bytes=1)
    allocation = _allocation()
    orders = gpipe(allocation)
    timeline = simulate(problem, allocation, orders)
    assert verify(problem, allocation, orders, timeline) == []
    assert any("before it is ready" in fault for fault in verify(problem, allocation, orders, timeline, overlap=False))
    apart = simulate(problem, allocation, orders, overlap=False)
    assert verify(problem, allocation, orders, apart, overlap=False) == []


def test_the_verifier_shares_no_code_with_the_judge() -> None:
    folder = Path(penstock.solvers.verify.verifier.__file__).parent
    modules = {path.stem for path in folder.glob("verify*.py")}
    allowed = {"allocation", "batching", "costs", "memory", "problem", "schedule", "timeline", "utilisation"}
    allowed |= {"update_rules", "unroll"} | modules
    for name in modules:
        tree = ast.parse((folder / f"{name}.py").read_text())
        imports = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        parts = {module.rsplit(".", 1)[1] for module in imports if module.startswith("penstock.solvers.")}
        assert parts <= allowed


def test_straight_plans_of_every_network_verify() -> None:
    for changes in ({"shared": False, "channel": c} for c in ("half", "full", "none")):
        problem = _problem(**changes, nodes=(3,))
        allocation = straight(problem, 4)
        for orders in (gpipe(allocation), early_backward(allocation), early_backward(allocation, "B")):
            assert verify(problem, allocation, orders, simulate(problem, allocation, orders)) == []
