"""Schedule ``eager``: the order of 1F1B without a flush, its period against a self-timed run, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from problems import chain, make_problem, warmup_orders

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Pattern
from penstock.solvers.model.unroll import unroll
from penstock.solvers.model.update_rules import UpdateRule, weight_copies
from penstock.solvers.schedules.periodic.eager import bytes_needed, eager, fitted_depth, noam, period_ns, stage_works
from penstock.solvers.verify.verifier import verify

ROUNDS = 400


def drawn(seed: int, turns: bool = False) -> tuple[Problem, Allocation]:
    """Draw a private network of plain delays and two to five stages; one may have replicas that work in turn."""
    draw = np.random.default_rng(seed)
    stages = int(draw.integers(2, 6))
    problem = make_problem(
        draw.integers(5, 40, stages).tolist(),
        draw.integers(5, 60, stages).tolist(),
        draw.integers(0, 30, stages - 1).tolist(),
        update_ns=draw.integers(0, 9, stages).tolist(),
        nodes=(stages + 2,),
        channel="none",
        global_batch_size=int(draw.integers(stages, 9)),
    )
    wide = int(draw.integers(stages)) if turns else -1
    groups, device = [], 0
    for s in range(stages):
        width = int(draw.integers(2, 4)) if s == wide else 1
        groups.append((1, list(range(device, device + width))))
        device += width
    return problem, chain(groups, problem.global_batch_size, dispatch="round_robin" if turns else "rows")


def drawn_depth(seed: int, allocation: Allocation) -> list[int]:
    draw = np.random.default_rng(seed + 1000)
    return sorted(draw.integers(1, 8, len(allocation.stages)).tolist(), reverse=True)


def one_row(pattern: Pattern, stage: int, count: int) -> list[tuple[int, int]]:
    """List (kind, micro-batch) of a stage's operations by nominal start, for micro-batches below ``count``."""
    listed = []
    for operation in pattern.operations:
        if operation.stage == stage:
            for m in range(count):
                listed.append(((m + operation.shift) * pattern.period_ns + operation.start_ns, operation.kind, m))
    return [(kind, m) for _start, kind, m in sorted(listed)]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_one_forward_and_one_backward_in_turn(seed: int) -> None:
    problem, allocation = drawn(seed)
    depth = drawn_depth(seed, allocation)
    pattern = eager(problem, allocation, depth=depth)
    wanted = warmup_orders(chain([(1, [s]) for s in range(len(depth))], 60), depth)
    for s, row in enumerate(wanted.rows):
        row_of_pattern = one_row(pattern, s, 60)
        assert row_of_pattern[:100] == [(int(kind), int(m)) for kind, _s, m in row.operations[:100]]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("turns", [False, True])
def test_every_start_waits_for_what_it_needs(seed: int, turns: bool) -> None:
    """The pattern as a periodic schedule: inputs have arrived, and one replica runs one operation at a time."""
    problem, allocation = drawn(seed, turns)
    depth = (
        fitted_depth(problem, allocation, "weight_stashing", noam(allocation))
        if turns
        else drawn_depth(seed, allocation)
    )
    pattern = eager(problem, allocation, depth=depth)
    works = stage_works(problem, allocation, "weight_stashing")
    start = {(o.kind, o.stage): o.shift * pattern.period_ns + o.start_ns for o in pattern.operations}
    last = len(works) - 1
    for s, work in enumerate(works):
        if s > 0:
            assert start[FORWARD, s] >= start[FORWARD, s - 1] + works[s - 1].forward_ns + works[s - 1].out_ns
        if s < last:
            assert start[BACKWARD, s] >= start[BACKWARD, s + 1] + works[s + 1].backward_ns + work.back_ns
        assert start[BACKWARD, s] >= start[FORWARD, s] + work.forward_ns
        for turn in range(work.turns):
            busy = sorted(
                (start[kind, s] + m * pattern.period_ns, duration)
                for kind, duration in ((FORWARD, work.forward_ns), (BACKWARD, work.backward_ns))
                for m in range(turn, 60, work.turns)
            )
            assert all(a + length <= b for (a, length), (b, _) in pairwise(busy))


def self_timed(problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule) -> list[int]:
    """Return the ends of the first stage's backwards when every row runs as early as it can.

    Transfers are plain delays without contention.
    """
    many = chain_of(allocation, ROUNDS)
    rows = unroll(problem, many, pattern, rule).orders.rows
    works = stage_works(problem, allocation, rule)
    last = len(works) - 1
    end: dict[tuple[int, int, int], int] = {}
    place, clock = [0] * len(rows), [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while place[r] < len(row.operations):
                kind, s, m = (int(v) for v in row.operations[place[r]])
                ready = 0
                if kind == STEP:
                    clock[r] += int(problem.update_ns[s + 1] - problem.update_ns[s])
                    place[r] += 1
                    continue
                if kind == FORWARD and s > 0:
                    ready = end.get((FORWARD, s - 1, m), -1) + works[s - 1].out_ns
                    if (FORWARD, s - 1, m) not in end:
                        break
                if kind == BACKWARD and s < last:
                    if (BACKWARD, s + 1, m) not in end:
                        break
                    ready = end[BACKWARD, s + 1, m] + works[s].back_ns
                duration = works[s].forward_ns if kind == FORWARD else works[s].backward_ns
                clock[r] = end[kind, s, m] = max(clock[r], ready) + duration
                place[r] += 1
                moved = True
    assert all(place[r] == len(row.operations) for r, row in enumerate(rows))
    return [end[BACKWARD, 0, m] for m in range(ROUNDS)]


def chain_of(allocation: Allocation, number: int) -> Allocation:
    return Allocation((Pipeline(allocation.stages, (0, number - 1)),), number)


@pytest.mark.parametrize("seed", range(30))
def test_the_period_is_what_a_self_timed_run_settles_at(seed: int) -> None:
    """The largest cycle ratio, rounded up, against the mean over 240 micro-batches (240 is a multiple of 1 to 6)."""
    problem, allocation = drawn(seed)
    depth = drawn_depth(seed, allocation)
    works = stage_works(problem, allocation, "weight_stashing")
    pattern = eager(problem, allocation, depth=depth)
    ends = self_timed(problem, allocation, pattern, "weight_stashing")
    measured = (ends[390] - ends[150]) / 240
    assert period_ns(works, depth) - 1 < measured + 0.5
    assert measured <= period_ns(works, depth) + 0.5
    assert pattern.period_ns == period_ns(works, depth)


@pytest.mark.parametrize("seed", range(20))
def test_replicas_that_work_in_turn_do_not_deadlock_and_settle_at_the_period(seed: int) -> None:
    problem, allocation = drawn(seed, turns=True)
    problem = make_like(problem, update_ns=0)
    works = stage_works(problem, allocation, "double_buffered")
    depth = noam(allocation)
    pattern = eager(problem, chain_of(allocation, 40), update_rule="double_buffered", depth=depth)
    ends = self_timed(problem, allocation, pattern, "double_buffered")
    measured = (ends[390] - ends[150]) / 240
    assert measured == pytest.approx(period_ns(works, depth), abs=1)


def make_like(problem: Problem, **changes: Any) -> Problem:
    """Return the drawn problem again with other settings."""
    point = problem.measured["cpu"][0]
    return make_problem(
        point.forward_ns.tolist(),
        point.backward_ns.tolist(),
        problem.forward_bytes.tolist(),
        nodes=(problem.num_devices,),
        channel="none",
        global_batch_size=problem.global_batch_size,
        **changes,
    )


def test_noam_is_the_papers() -> None:
    """PipeDream section 3.2: a straight pipeline of 4 has 4, 3, 2, 1; figure 8's 2-1 configuration has two each."""
    assert noam(chain([(1, [s]) for s in range(4)], 8)) == (4, 3, 2, 1)
    two_one = Allocation((Pipeline((Stage(0, 0, (0, 1), "round_robin"), Stage(1, 1, (2,))), (0, 7)),), 8)
    assert noam(two_one) == (4, 1)
    rows = Allocation((Pipeline((Stage(0, 0, (0, 1)), Stage(1, 1, (2,))), (0, 7)),), 8)
    assert noam(rows) == (2, 1)


def test_noam_counts_whole_turns() -> None:
    """By hand: 6 devices from the first stage on, 5 of them from the second, which has 4: two turns."""
    allocation = chain([(1, [0]), (1, [1, 2, 3, 4]), (1, [5])], 8, dispatch="round_robin")
    assert noam(allocation) == (6, 8, 1)


def test_what_is_ahead_never_grows_along_the_pipeline() -> None:
    """By hand: with 5 micro-batches on the first stage the second's forwards are 4 ahead at most, one turn."""
    problem = make_problem([1] * 3, nodes=(6,))
    allocation = chain([(1, [0]), (1, [1, 2, 3, 4]), (1, [5])], 8, dispatch="round_robin")
    assert fitted_depth(problem, allocation, "weight_stashing", (5, 12, 9)) == (5, 8, 5)
    assert fitted_depth(problem, allocation, "weight_stashing", (4, 12, 9)) == (4, 4, 1)


def test_memory_clamps_the_depth_with_its_weight_versions() -> None:
    """By hand: parameters and gradients 20, each micro-batch in flight 5 + 10 for its version, but for the first."""
    problem = make_problem([1] * 4, parameter_bytes=10, stash_bytes=5, nodes=(4,), memory_bytes=56, count_buffers=False)
    allocation = chain([(1, [s]) for s in range(4)], 4)
    for depth, wanted in ((1, 25), (2, 40), (3, 55), (4, 70)):
        assert bytes_needed(problem, allocation, "weight_stashing", 0, depth) == wanted
    assert fitted_depth(problem, allocation, "weight_stashing", noam(allocation)) == (3, 3, 2, 1)
    assert bytes_needed(problem, allocation, "double_buffered", 0, 4) == 20 + 10 + 20
    assert fitted_depth(problem, allocation, "double_buffered", noam(allocation)) == (4, 3, 2, 1)
    assert weight_copies("weight_stashing", allocation, 0, 3) == 3


def test_two_versions_limit_what_is_in_flight() -> None:
    problem, allocation = make_problem([1] * 4, nodes=(4,), global_batch_size=2), chain([(1, [s]) for s in range(4)], 2)
    assert fitted_depth(problem, allocation, "double_buffered", noam(allocation)) == (3, 3, 2, 1)
    with pytest.raises(InvalidPlan, match="4 micro-batches in flight need a third weight version"):
        eager(problem, allocation, update_rule="double_buffered", depth=(4, 3, 2, 1))


def test_a_single_version_allows_one_turn_in_flight() -> None:
    """Under double-grouped updates the second half of the stages use the newest weights and keep no others."""
    problem, allocation = make_problem([1] * 5, nodes=(5,), global_batch_size=8), chain([(1, [s]) for s in range(5)], 8)
    assert fitted_depth(problem, allocation, "double_grouped", noam(allocation)) == (5, 4, 3, 1, 1)
    with pytest.raises(InvalidPlan, match="stage 3 keeps 2 micro-batches in flight, but stages of the second half"):
        eager(problem, allocation, update_rule="double_grouped", depth=(5, 4, 3, 2, 1))
    with pytest.raises(InvalidPlan, match="10 micro-batches in flight need a third weight version"):
        eager(problem, allocation, update_rule="double_grouped", depth=(10, 4, 3, 1, 1))


@pytest.mark.parametrize("seed", range(8))
def test_double_grouped_lines_verify_and_run_on_ranks(seed: int) -> None:
    """One to seven stages, replicas by rows and in turn: versions are there when used, no rank waits for ever."""
    draw = np.random.default_rng(seed)
    parts = [(1, [s]) for s in range(1 + seed % 7)]
    wide = int(draw.integers(0, len(parts)))
    parts[wide] = (1, [wide, len(parts)])
    allocation = chain(parts, int(draw.integers(3, 9)))
    if draw.random() < 0.5:
        stages = [replace(s, dispatch="round_robin") if s.replicas > 1 else s for s in allocation.stages]
        allocation = single_pipeline(tuple(stages), allocation.num_micro_batches)
    works = draw.integers(1, 50, len(parts)).tolist()
    problem = make_problem(
        works, boundary_bytes=draw.integers(1, 40, len(parts) - 1).tolist(), nodes=(8,), global_batch_size=16
    )
    pattern = eager(problem, allocation, update_rule="double_grouped")
    timeline = simulate(problem, allocation, pattern, update_rule="double_grouped")
    assert verify(problem, allocation, pattern, timeline, update_rule="double_grouped") == []
    programs = lower(problem, allocation, pattern, update_rule="double_grouped", batches=6)
    assert len(programs) == len(parts) + 1


def test_what_is_refused() -> None:
    problem, allocation = make_problem([1] * 3, nodes=(4,)), chain([(1, [s]) for s in range(3)], 4)
    with pytest.raises(InvalidPlan, match="stage 1 keeps 3 micro-batches in flight, but stage 0 sends too few"):
        eager(problem, allocation, depth=(2, 3, 1))
    with pytest.raises(InvalidPlan, match="3 numbers of at least 1"):
        eager(problem, allocation, depth=(2, 0, 1))
    with pytest.raises(InvalidPlan, match="not for 'synchronous'"):
        eager(problem, allocation, update_rule="synchronous")
    halves = Allocation((Pipeline(allocation.stages, (0, 1)), Pipeline(allocation.stages, (2, 3))), 4)
    with pytest.raises(UnsupportedRequest, match="the plan has 2"):
        eager(problem, halves)
    with pytest.raises(UnsupportedRequest, match="holds stages 0 and 1"):
        eager(problem, chain([(1, [0]), (2, [0])], 4))


@pytest.mark.parametrize("seed", range(6))
def test_turns_are_measured_whole(seed: int) -> None:
    """Under weight stashing a micro-batch's time does not depend on the global batch, also when 3 replicas share 4."""
    draw = np.random.default_rng(seed)
    stages = (Stage(0, 0, (0, 1, 2), "round_robin"), Stage(1, 1, (3,)), Stage(2, 2, (4, 5), "round_robin"))
    rates = {}
    forward, backward = draw.integers(500, 4_000, 3).tolist(), draw.integers(500, 6_000, 3).tolist()
    for number in (4, 12, 36):
        problem = make_problem(
            forward, backward, 300, [2_000, 500, 900], nodes=(6,), channel="full", global_batch_size=number
        )
        allocation = Allocation((Pipeline(stages, (0, number - 1)),), number)
        timeline = simulate(problem, allocation, eager(problem, allocation), update_rule="weight_stashing")
        rates[number] = timeline.time_per_global_batch_ns / number
    assert rates[12] == pytest.approx(rates[4], abs=1)
    assert rates[36] == pytest.approx(rates[4], abs=1)
