"""Timelines of pipelines that share devices: the simulator's are good, and every kind of fault is reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from problems import make_problem
from random_plans import measured_run

from penstock.solvers.judge.shared_processor import parallel_pipelines, simulate_sharing
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Pattern
from penstock.solvers.model.timeline import Timeline, Transfers
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.verify.shared_processor import verify_sharing


def a_plan() -> tuple[Problem, Allocation, Orders, Timeline]:
    problem = make_problem(
        [10, 12],
        boundary_bytes=5,
        parameter_bytes=40,
        stash_bytes=7,
        update_ns=4,
        nodes=(2,),
        global_batch_size=3,
        memory_bytes=10_000,
    )
    problem = replace(problem, pipeline_run=measured_run(3, [(700_000,), (600_000,)]))
    allocation = parallel_pipelines((Stage(0, 0, (0,)), Stage(1, 1, (1,))), 2, 3)
    orders = advance_forward(problem, allocation)
    return problem, allocation, orders, simulate_sharing(problem, allocation, orders)


def shifted(timeline: Timeline, track: int, operation: int, start: int, end: int) -> Timeline:
    old = timeline.tracks[track]
    starts, ends = old.start_ns.copy(), old.end_ns.copy()
    starts[operation] += start
    ends[operation] += end
    changed = replace(old, start_ns=starts, end_ns=ends)
    return replace(timeline, tracks=(*timeline.tracks[:track], changed, *timeline.tracks[track + 1 :]))


def with_transfers(timeline: Timeline, change: Callable[[dict[str, np.ndarray]], None]) -> Timeline:
    sent = timeline.transfers
    columns = {name: getattr(sent, name).copy() for name in Transfers.__dataclass_fields__}
    change(columns)
    return replace(timeline, transfers=Transfers(**columns))


def _drop_first(columns: dict[str, np.ndarray]) -> None:
    for name, values in columns.items():
        columns[name] = values[1:]


def _leave_early(columns: dict[str, np.ndarray]) -> None:
    columns["start_ns"][0] -= 1
    columns["end_ns"][0] -= 1


def _arrive_late(columns: dict[str, np.ndarray]) -> None:
    columns["end_ns"][0] += 1


def _send_twice(columns: dict[str, np.ndarray]) -> None:
    for name, values in columns.items():
        columns[name] = np.append(values, values[-1])


def _use_at_once(columns: dict[str, np.ndarray]) -> None:
    """Let pipeline 1's first activation leave with pipeline 0's."""
    moved = np.flatnonzero((columns["stage"] == 2) & (columns["direction"] == 0))[0]
    for name in ("start_ns", "end_ns"):
        columns[name][moved] = columns[name][0]


def _as_stage(number: int) -> Callable[[dict[str, np.ndarray]], None]:
    def change(columns: dict[str, np.ndarray]) -> None:
        columns["stage"][0] = number

    return change


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        pytest.param(lambda t: shifted(t, 0, 0, 0, -1), "F0 of stage 0 ends at", id="had too little"),
        pytest.param(lambda t: shifted(t, 3, -1, 0, 2), "later than when it has had", id="had too much"),
        pytest.param(lambda t: shifted(t, 1, 0, -9, 0), "F0 of stage 1 starts before its input", id="too early"),
        pytest.param(lambda t: shifted(t, 0, 1, -3, 0), "starts before F0 of stage 0 ends", id="two at once in a row"),
        pytest.param(lambda t: shifted(t, 0, 0, -1, 0), "before time 0", id="before time 0"),
        pytest.param(lambda t: with_transfers(t, _drop_first), "does not travel", id="transfer missing"),
        pytest.param(lambda t: with_transfers(t, _leave_early), "leaves before it has been", id="leaves early"),
        pytest.param(lambda t: with_transfers(t, _arrive_late), "travels 6 ns instead of 5 ns", id="transfer too long"),
        pytest.param(lambda t: with_transfers(t, _send_twice), "in the timeline twice", id="transfer twice"),
        pytest.param(lambda t: with_transfers(t, _use_at_once), "Two transfers use the channel", id="channel shared"),
        pytest.param(lambda t: with_transfers(t, _as_stage(1)), "which nothing asks for", id="transfer to nowhere"),
        pytest.param(lambda t: replace(t, window_ns=(0, 1)), "the timeline says otherwise", id="window"),
        pytest.param(lambda t: replace(t, window_rounds=1), "the timeline says otherwise", id="batches"),
        pytest.param(
            lambda t: replace(t, time_per_global_batch_ns=t.time_per_global_batch_ns + 1), "per global batch", id="time"
        ),
        pytest.param(lambda t: replace(t, uses={0: t.uses[0]}), "other devices than the plan's", id="uses missing"),
        pytest.param(
            lambda t: replace(t, uses={**t.uses, 0: t.uses[0]._replace(busy_ns=1)}), "n0/0 computes", id="busy time"
        ),
        pytest.param(
            lambda t: replace(t, uses={**t.uses, 1: t.uses[1]._replace(memory=t.uses[0].memory._replace(versions=0))}),
            "states a peak of",
            id="peak",
        ),
        pytest.param(lambda t: replace(t, updates=t.updates[:3]), "Not every stage has one", id="step missing"),
        pytest.param(
            lambda t: replace(t, updates=(t.updates[0]._replace(end_ns=t.updates[0].end_ns - 1), *t.updates[1:])),
            "the step of stage 0 ends at",
            id="step too short",
        ),
        pytest.param(lambda t: replace(t, tracks=t.tracks[::-1]), "tracks are not the schedule's rows", id="tracks"),
    ],
)
def test_finds_each_fault_of_a_timeline(change: Callable[[Timeline], Timeline], sentence: str) -> None:
    problem, allocation, orders, timeline = a_plan()
    assert verify_sharing(problem, allocation, orders, timeline) == []
    assert any(sentence in fault for fault in verify_sharing(problem, allocation, orders, change(timeline)))


def test_finds_a_device_that_is_too_small() -> None:
    problem, allocation, orders, timeline = a_plan()
    small = replace(problem, devices=tuple(replace(device, memory_bytes=200) for device in problem.devices))
    assert any("but has 200" in fault for fault in verify_sharing(small, allocation, orders, timeline))


def test_finds_pipelines_and_rows_that_do_not_fit() -> None:
    problem, allocation, orders, timeline = a_plan()
    first = allocation.pipelines[0]
    moved = Pipeline((Stage(0, 0, (1,)), Stage(1, 1, (0,))), first.micro_batches)
    cases = [
        (Allocation((first, moved), 3), orders, "unlike pipeline 0"),
        (Allocation((first, Pipeline(first.stages, (3, 5))), 3), orders, "not a global batch of its own"),
        (parallel_pipelines((Stage(0, 1, (0, 1)),), 2, 3), orders, "has 2 devices"),
        (parallel_pipelines((Stage(0, 0, (0,)), Stage(1, 1, (0,))), 2, 3), orders, "two stages of the same pipeline"),
    ]
    twice = replace(orders.rows[1], operations=orders.rows[1].operations[[0, 0, *range(2, 6)]])
    cases.append((allocation, replace(orders, rows=(orders.rows[0], twice, *orders.rows[2:])), "Row 1 does not run F"))
    for plan, schedule, sentence in cases:
        assert any(sentence in fault for fault in verify_sharing(problem, plan, schedule, timeline)), sentence
    assert "periodic" in verify_sharing(problem, allocation, Pattern("p", 1, 1, ()), timeline)[0]
