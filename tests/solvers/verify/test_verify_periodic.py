"""The verifier on periodic plans: silent on the simulator's timelines, one sentence for each possible fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from problems import chain, early_backward, make_problem

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Orders, Pattern, PatternOperation, Row
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.unroll import Unrolled, unroll
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.verify import versions as verify_versions
from penstock.solvers.verify.verifier import verify
from penstock.solvers.verify.versions import check_versions


def _problem() -> Problem:
    return make_problem(
        [10, 12, 8],
        [20, 24, 16],
        boundary_bytes=6,
        parameter_bytes=40,
        stash_bytes=30,
        update_ns=3,
        nodes=(2, 1),
        global_batch_size=6,
        shared=True,
        memory_bytes=10_000,
    )


def _allocation() -> Allocation:
    """Return layers 0 and 1 on two replicas, layer 2 on one device; three micro-batches of two rows."""
    return chain([(2, [0, 1]), (1, [2])], 3)


def eager(stages: int, depth: int | None = None) -> Pattern:
    """Return one forward and one backward in turn; ``depth`` is in flight on the first stage (N by default)."""
    far = stages if depth is None else depth
    operations = []
    for s in range(stages):
        operations.append(PatternOperation(FORWARD, s, s, 0))
        operations.append(PatternOperation(BACKWARD, s, 2 * stages - s, max(0, far - s - 1)))
    return Pattern("eager", 2 * stages + 1, 1, tuple(operations))


RULES: tuple[UpdateRule, ...] = ("weight_stashing", "double_buffered")


def _good(rule: UpdateRule = "double_buffered") -> tuple[Problem, Allocation, Pattern, Timeline]:
    problem, allocation = _problem(), _allocation()
    return problem, allocation, eager(2), simulate(problem, allocation, eager(2), update_rule=rule)


@pytest.mark.parametrize("rule", RULES)
def test_a_good_plan_gives_no_sentence(rule: UpdateRule) -> None:
    assert verify(*_good(rule), update_rule=rule) == []


def _track(timeline: Timeline, lane: int, at: int, start: int, end: int) -> Timeline:
    tracks = list(timeline.tracks)
    starts, ends = tracks[lane].start_ns.copy(), tracks[lane].end_ns.copy()
    starts[at] += start
    ends[at] += end
    tracks[lane] = replace(tracks[lane], start_ns=starts, end_ns=ends)
    return replace(timeline, tracks=tuple(tracks))


def _step(timeline: Timeline, lane: int, number: int) -> int:
    """Return the place of an optimizer step in a row."""
    return int(np.flatnonzero(timeline.tracks[lane].operations[:, 0] == STEP)[number])


def _use(timeline: Timeline, **changes: object) -> Timeline:
    return replace(timeline, uses=timeline.uses | {2: timeline.uses[2]._replace(**changes)})


def _bucket(timeline: Timeline, number: int, by: int) -> Timeline:
    reductions = list(timeline.reductions)
    at = reductions[number]
    reductions[number] = at._replace(start_ns=at.start_ns + by, end_ns=at.end_ns + by)
    return replace(timeline, reductions=tuple(reductions))


TIMES: dict[str, tuple[Callable[[Timeline], Timeline], str]] = {
    "a bucket before its round's gradients": (
        lambda t: _bucket(t, 2, -10_000),
        "Bucket 0 of round 2 of stage 0 starts at",
    ),
    "a bucket before the one of the round before": (
        lambda t: replace(t, reductions=(t.reductions[0]._replace(end_ns=10**6), *t.reductions[1:])),
        "Bucket 0 of round 1 of stage 0 starts at",
    ),
    "a bucket too short": (
        lambda t: replace(t, reductions=(t.reductions[0]._replace(end_ns=t.reductions[0].start_ns), *t.reductions[1:])),
        "Bucket 0 of round 0 of stage 0 takes 0 ns",
    ),
    "a round that is not reduced": (lambda t: replace(t, reductions=t.reductions[:-1]), "Stage 0 reduces buckets"),
    "a step before its reduction": (
        lambda t: _bucket(t, 1, 10_000),
        "The optimizer step of round 1 of stage 0 on n0/0 starts before the round's gradients are reduced",
    ),
    "a step too short": (
        lambda t: _track(t, 1, _step(t, 1, 1), 0, -1),
        "the optimizer step after micro-batch 5 of stage 1 on n1/0 takes 2 ns instead of 3 ns",
    ),
    "a step that is not listed": (
        lambda t: replace(t, updates=t.updates[:-1]),
        "The updates listed for stage 1 are not the optimizer steps of its rows",
    ),
    "another window": (
        lambda t: replace(t, window_ns=(t.window_ns[0] + 1, t.window_ns[1])),
        "The timeline states a steady window",
    ),
    "another number of rounds": (
        lambda t: replace(t, window_rounds=t.window_rounds + 1),
        "The timeline states a steady window",
    ),
    "another time": (
        lambda t: replace(t, time_per_global_batch_ns=t.time_per_global_batch_ns - 1),
        "but its steady window gives",
    ),
    "another fill": (lambda t: replace(t, fill_ns=0), "states a fill of 0"),
    "another busy time": (
        lambda t: _use(t, busy_ns=t.uses[2].busy_ns - 1, idle_ns=t.uses[2].idle_ns + 1),
        f"computes for {3 * (16 + 32) + 3 - 1} ns; it is {3 * (16 + 32) + 3} ns",
    ),
    "no second version": (
        lambda t: _use(t, memory=t.uses[2].memory._replace(versions=0)),
        "states 0 bytes of weight versions on n1/0; it is 40 bytes",
    ),
    "another peak": (
        lambda t: _use(t, memory=t.uses[2].memory._replace(gradients=0)),
        "The timeline states a peak of",
    ),
    "another row": (
        lambda t: replace(
            t, tracks=(t.tracks[0], replace(t.tracks[1], operations=np.roll(t.tracks[1].operations, 1, axis=0)))
        ),
        "does not run the operations of its row in order",
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_wrong_times_are_said(name: str) -> None:
    problem, allocation, pattern, timeline = _good()
    change, sentence = TIMES[name]
    faults = verify(problem, allocation, pattern, change(timeline), update_rule="double_buffered")
    assert any(sentence in fault for fault in faults), faults


def test_memory_that_does_not_hold_the_versions_is_said() -> None:
    problem, allocation, pattern, timeline = _good()
    peak = timeline.uses[2].memory.total
    devices = (*problem.devices[:2], replace(problem.devices[2], memory_bytes=peak - 1))
    tight = replace(problem, devices=devices)
    faults = verify(tight, allocation, pattern, timeline, update_rule="double_buffered")
    assert len(faults) == 1
    assert faults[0].startswith(f"n1/0 needs {peak} bytes")


PATTERNS: dict[str, tuple[Pattern, str]] = {
    "no operations": (Pattern("odd", 1, 1, ()), "The pattern odd has no operations"),
    "a missing backward": (
        replace(eager(2), operations=eager(2).operations[:3]),
        "stage 1 exactly once for micro-batch 0 of its period (F 1, B 0, I 0, W 0, R 0)",
    ),
    "a forward twice": (
        replace(eager(2), operations=(*eager(2).operations, PatternOperation(FORWARD, 1, 1, 0))),
        "(F 2, B 1, I 0, W 0, R 0)",
    ),
    "an unknown stage": (eager(3), "names stage 2 of 2"),
    "an unknown micro-batch": (
        replace(eager(2), operations=(*eager(2).operations[:3], PatternOperation(BACKWARD, 1, 3, 0, 1))),
        "works on micro-batch 1 of 1 in a period",
    ),
    "a step": (
        replace(eager(2), operations=(*eager(2).operations, PatternOperation(STEP, 1, 3, 0))),
        f"has kind {STEP}",
    ),
    "far too deep": (eager(2, 10**7), "overlaps too many periods"),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_wrong_patterns_are_said(name: str) -> None:
    problem, allocation, _pattern, timeline = _good()
    pattern, sentence = PATTERNS[name]
    faults = verify(problem, allocation, pattern, timeline, update_rule="double_buffered")
    assert any(sentence in fault for fault in faults), faults


def test_schedules_of_another_update_rule_are_said() -> None:
    problem, allocation, pattern, timeline = _good()
    assert verify(problem, allocation, pattern, timeline) == [
        "Schedule eager is periodic: it has no flush, which synchronous updates need."
    ]
    flushed = early_backward(allocation)
    assert verify(problem, allocation, flushed, timeline, update_rule="double_buffered") == [
        "Schedule dapple-A is one flushed step; double_buffered updates need a periodic schedule."
    ]
    unrolled = unroll(problem, allocation, pattern, "double_buffered")
    assert "steps in its rows" in verify(unrolled.problem, unrolled.allocation, unrolled.orders, timeline)[0]
    turns = chain([(2, [0, 1]), (1, [2])], 1, dispatch="round_robin")
    assert verify(problem, turns, pattern, timeline, update_rule="double_buffered") == [
        "Stage 0 steps after every 1 micro-batches, but its 2 replicas take turns."
    ]
    two = Allocation(tuple(Pipeline((Stage(0, 2, (d,)),), (d, d)) for d in (0, 1)), 2)
    assert "one pipeline; this one has 2" in verify(problem, two, pattern, timeline, update_rule="double_buffered")[0]


@pytest.mark.parametrize(("depth", "batches"), list(product((2, 3, 4, 5), (1, 2, 3, 4))))
def test_two_versions_serve_one_micro_batch_more_than_a_global_batch_has(depth: int, batches: int) -> None:
    """MadPipe, section 3; 2BW: with two versions M >= in flight - 1 (ALGORITHMS 5.1)."""
    problem = make_problem([3, 3], nodes=(2,), global_batch_size=batches)
    allocation = chain([(1, [0]), (1, [1])], batches)
    timeline = simulate(problem, allocation, eager(2, depth), update_rule="double_buffered")
    faults = verify(problem, allocation, eager(2, depth), timeline, update_rule="double_buffered")
    assert (faults == []) == (batches >= depth - 1), faults
    assert all("weight version" in fault for fault in faults)


F, B, S = FORWARD, BACKWARD, STEP
ROWS: dict[str, tuple[UpdateRule, list[tuple[int, int]], str]] = {
    "good": ("double_buffered", [(F, 0), (B, 0), (S, 0), (F, 1), (B, 1), (S, 1)], ""),
    "a step missing": ("double_buffered", [(F, 0), (B, 0), (F, 1), (B, 1), (S, 1)], "does not step once, in order"),
    "a step twice": ("double_buffered", [(F, 0), (B, 0), (S, 0), (S, 0)], "does not step once, in order"),
    "a step too early": (
        "double_buffered",
        [(F, 0), (S, 0), (B, 0)],
        "Stage 1 on n0/0 makes gradients of round 0 after the step of round 0.",
    ),
    "a step too late": (
        "double_buffered",
        [(F, 0), (B, 0), (F, 1), (B, 1), (S, 0), (S, 1)],
        "Stage 1 on n0/0 makes gradients of round 1 before the step of round 0.",
    ),
    "a version not made yet": (
        "double_buffered",
        [(F, 0), (F, 1), (F, 2), (B, 0), (S, 0), (B, 1), (S, 1), (B, 2), (S, 2)],
        "Micro-batch 2 uses weight version 1 in stage 1 on n0/0, where only 0 steps have been made.",
    ),
    "one version where the delay is 0": (
        "double_grouped",
        [(F, 0), (F, 1), (B, 0), (S, 0), (B, 1), (S, 1)],
        "Micro-batch 1 uses weight version 1 in stage 1 on n0/0, where only 0 steps have been made.",
    ),
    "a version overwritten": (
        "double_grouped",
        [(B, 0), (S, 0), (F, 0)],
        "Micro-batch 0 uses weight version 0 in stage 1 on n0/0, which keeps 1 of 2.",
    ),
    "stashed versions": (
        "weight_stashing",
        [(F, 0), (F, 1), (B, 0), (S, 0), (F, 2), (B, 1), (S, 1), (F, 3), (B, 2), (S, 2), (B, 3), (S, 3)],
        "",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_steps_and_versions_are_checked_row_by_row(name: str) -> None:
    """The second of two stages, whose rounds are single micro-batches, on device 0."""
    rule, row, sentence = ROWS[name]
    total = 1 + max(m for _kind, m in row)
    problem = make_problem([1, 1], nodes=(2,), global_batch_size=total)
    allocation = chain([(1, [1]), (1, [0])], 1)
    operations = np.asarray([(kind, 1, m) for kind, m in row], dtype=np.int32)
    orders = Orders("odd", (Row((0,), operations),), update_every=(1, 1))
    run = Unrolled(problem, chain([(1, [1]), (1, [0])], total), orders, total, 0, 1, 1)
    faults = check_versions(["n0/0", "n0/1"], allocation, run, rule)
    assert (
        faults == [sentence]
        if sentence.endswith(".")
        else [sentence in fault for fault in faults] == [True] * bool(sentence)
    )


def test_more_stashed_versions_than_micro_batches_in_flight_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane is treated as if it kept one copy only."""
    problem, allocation, pattern, timeline = _good("weight_stashing")
    monkeypatch.setattr(verify_versions, "_most_in_flight", lambda _operations: 1)
    assert verify(problem, allocation, pattern, timeline, update_rule="weight_stashing") == [
        "2 weight versions are in use at once in stage 0 on n0/0, which keeps 1."
    ]
