"""Periodic plans: steady states by hand and by closed forms, steps and reductions in the rows, memory with versions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from problems import as_operations, chain, early_backward, make_problem, straight

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT
from penstock.solvers.judge.lanes import make_lanes
from penstock.solvers.judge.operation_tables import cost_tables
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP, Orders, Pattern, PatternOperation, Row
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import PERIODIC_RULES, UpdateRule

RULES = sorted(PERIODIC_RULES)


def _pattern(period: int, starts: Sequence[tuple[int, int, int]]) -> Pattern:
    """Build a pattern of one micro-batch per period from (kind, stage, start of micro-batch 0)."""
    operations = tuple(PatternOperation(kind, s, t % period, t // period) for kind, s, t in starts)
    return Pattern("steady", period, 1, operations)


def _one_forward_one_backward(stages: int, forward: int, backward: int) -> Pattern:
    """Build the pattern of uniform stages without transfers: stage s is S - s micro-batches ahead."""
    down = [(FORWARD, s, s * forward) for s in range(stages)]
    up = [(BACKWARD, s, stages * forward + (stages - 1 - s) * backward) for s in range(stages)]
    return _pattern(forward + backward, [*down, *up])


def _judge(problem: Problem, allocation: Allocation, pattern: Pattern, rule: UpdateRule) -> Timeline:
    timeline = simulate(problem, allocation, pattern, update_rule=rule)
    time = timeline.time_per_global_batch_ns
    assert makespan_ns(problem, allocation, pattern, update_rule=rule) == time
    assert all(sum(use[:3]) == time and min(use[:3]) >= 0 for use in timeline.uses.values())
    return timeline


@pytest.mark.parametrize("rule", RULES)
def test_two_stages_by_hand(rule: UpdateRule) -> None:
    """F = 1, B = 2: a micro-batch every 3, nobody idle; every round is like the one before."""
    problem = make_problem([1, 1], nodes=(2,), global_batch_size=4)
    timeline = _judge(problem, straight(problem, 4), _one_forward_one_backward(2, 1, 2), rule)
    assert timeline.time_per_global_batch_ns == 12
    assert (timeline.rounds, timeline.window_rounds) == (17, 1)
    first, last = timeline.window_ns
    assert last - first == 12
    assert timeline.bubble == 0
    assert [track.start_ns[:3].tolist() for track in timeline.tracks] == [[0, 1, 4], [1, 2, 4]]


@pytest.mark.parametrize("seed", range(40))
def test_two_buffers_have_no_bubble(seed: int) -> None:
    """PipeDream-2BW with M >= N (ALGORITHMS 5.2): uniform stages without transfers are never idle."""
    rng = random.Random(seed)
    stages = rng.randint(1, 6)
    batches, forward, backward = stages + rng.randint(0, 4), rng.randint(1, 30), rng.randint(1, 60)
    update = rng.choice([0, rng.randint(1, 50)])
    problem = make_problem(
        [forward] * stages, [backward] * stages, nodes=(stages,), global_batch_size=batches, update_ns=update
    )
    pattern = _one_forward_one_backward(stages, forward, backward)
    timeline = _judge(problem, straight(problem, batches), pattern, "double_buffered")
    load = batches * (forward + backward) + update
    if update == 0 or stages == 1:
        assert timeline.time_per_global_batch_ns == load
        assert timeline.bubble == 0
    assert timeline.time_per_global_batch_ns >= load
    assert {use.busy_ns for use in timeline.uses.values()} == {load}


@pytest.mark.parametrize(("rule", "steps"), [("double_buffered", 1), ("double_grouped", 1), ("weight_stashing", 5)])
def test_a_step_takes_its_time(rule: UpdateRule, steps: int) -> None:
    """One stage, 5 micro-batches of 3, an update of 7 once a global batch or after each micro-batch."""
    problem = make_problem([1], [2], update_ns=7, nodes=(1,), global_batch_size=5)
    timeline = _judge(problem, straight(problem, 5), _one_forward_one_backward(1, 1, 2), rule)
    assert timeline.time_per_global_batch_ns == 15 + 7 * steps
    assert timeline.uses[0].busy_ns == 15 + 7 * steps
    assert len(timeline.updates) == timeline.rounds * steps
    track = timeline.tracks[0]
    stepping = track.operations[:, 0] == STEP
    assert [u.start_ns for u in timeline.updates] == track.start_ns[stepping].tolist()
    assert [u.end_ns for u in timeline.updates] == track.end_ns[stepping].tolist()


@pytest.mark.parametrize(
    ("rule", "overlap", "time"),
    [
        ("weight_stashing", False, 3 * (4 + 10 + 40 + 7)),
        ("double_buffered", False, 3 * (4 + 10) + (40 - 4) + 7),
        ("double_grouped", False, 3 * (4 + 10) + (40 - 4) + 7),
        ("weight_stashing", True, 3 * (4 + 10 + 40 - 5 + 7)),
        ("double_buffered", True, 3 * (4 + 10) + (40 - 5 - 4) + 7),
    ],
)
def test_a_reduction_takes_what_nothing_hides(rule: UpdateRule, overlap: bool, time: int) -> None:
    """Two replicas, 3 micro-batches of F = 4 and B = 10, two buckets of 20 bytes each.

    Each bucket takes 20; the first is ready 5 before the backward ends when it may overlap. With two versions the
    next forward runs meanwhile. A pipeline of one stage is all of the first group of double grouped.
    """
    problem = make_problem(
        [2, 2],
        [5, 5],
        parameter_bytes=20,
        bucket_bytes=20,
        update_ns=[3, 4],
        nodes=(2,),
        global_batch_size=6,
        measured_rows=1,
        overlap_all_reduce=overlap,
    )
    allocation = chain([(2, [0, 1])], 3)
    timeline = _judge(problem, allocation, _one_forward_one_backward(1, 4, 10), rule)
    assert timeline.time_per_global_batch_ns == time
    per_round = 2 * (3 if rule == "weight_stashing" else 1)
    assert [r.bucket for r in timeline.reductions] == list(range(per_round * timeline.rounds))
    assert len({r.stage for r in timeline.reductions}) == 1


@pytest.mark.parametrize("channel", ["half", "full", "none"])
def test_replicas_that_take_turns_reduce_once_a_turn(channel: str) -> None:
    """PipeDream, 2 replicas in turn: two micro-batches in F + B + R + U; each keeps one version."""
    problem = make_problem(
        [4], [10], parameter_bytes=20, update_ns=7, nodes=(2,), global_batch_size=4, channel=channel, stash_bytes=3
    )
    allocation = single_pipeline((Stage(0, 0, (0, 1), "round_robin"),), 4)
    pattern = _pattern(7, [(FORWARD, 0, 0), (BACKWARD, 0, 4)])
    timeline = _judge(replace(problem), allocation, pattern, "weight_stashing")
    assert timeline.time_per_global_batch_ns == 2 * (4 + 10 - 0 + 20 + 7)
    assert {use.busy_ns for use in timeline.uses.values()} == {2 * (4 + 10 + 7)}
    assert timeline.uses[0].memory.versions == 0


VECTORS = [
    # period, groups, start and shift of F, start and shift of B: ALGORITHMS 4.1, four stages of F = 1, B = 2
    (3, [4, 3, 2, 1], [0, 1, 2, 0], [0, 0, 0, 1], [1, 2, 0, 1], [3, 2, 2, 1]),
    (6, [2, 2, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0], [4, 2, 0, 4], [1, 1, 1, 0]),
    (9, [2, 1, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0], [1, 8, 6, 4], [1, 0, 0, 0]),
    (12, [1, 1, 1, 1], [0, 1, 2, 3], [0, 0, 0, 0], [10, 8, 6, 4], [0, 0, 0, 0]),
]


@pytest.mark.parametrize("vector", VECTORS)
def test_the_patterns_of_madpipe(vector: tuple) -> None:
    """The printed patterns reach their periods, keep their number of activations and two versions of the weights."""
    period, groups, *columns = vector
    operations = [
        PatternOperation(kind, s, columns[2 * i][s], columns[2 * i + 1][s])
        for i, kind in enumerate((FORWARD, BACKWARD))
        for s in range(4)
    ]
    problem = make_problem(
        [1] * 4, nodes=(4,), global_batch_size=4, stash_bytes=10, parameter_bytes=5, count_buffers=False
    )
    pattern = Pattern("1F1B*", period, 1, tuple(operations))
    timeline = _judge(problem, straight(problem, 4), pattern, "double_buffered")
    assert timeline.time_per_global_batch_ns == 4 * period
    assert [timeline.uses[s].memory.activations for s in range(4)] == [10 * g for g in groups]
    assert {use.memory.versions for use in timeline.uses.values()} == {5}
    stashing = simulate(problem, straight(problem, 4), pattern, update_rule="weight_stashing")
    assert [stashing.uses[s].memory.versions for s in range(4)] == [5 * (g - 1) for g in groups]


@pytest.mark.parametrize("seed", range(60))
def test_1f1b_star_reaches_its_period(seed: int) -> None:
    """Contiguous stages with transfers on private half-duplex links (ALGORITHMS 4.1): T, and g stashes on each stage.

    The judge starts everything as early as it can, so it may beat T where T is more than the order needs.
    """
    rng = random.Random(seed)
    stages = rng.randint(1, 5)
    forward, backward = ([rng.randint(1, 9) for _ in range(stages)] for _ in range(2))
    carry = [rng.randint(1, 4) for _ in range(stages - 1)]
    loads = [f + b for f, b in zip(forward, backward, strict=True)]
    tightest = max(loads + [2 * c for c in carry])
    period = tightest + rng.choice([0, 0, rng.randint(0, 20)])
    problem = make_problem(
        forward,
        backward,
        carry,
        nodes=(stages,),
        global_batch_size=12,
        channel="half",
        stash_bytes=10,
        count_buffers=False,
    )
    pattern, groups = _one_f_one_b_star(forward, backward, carry, period)
    timeline = _judge(problem, straight(problem, 12), pattern, "double_buffered")
    assert 12 * tightest <= timeline.time_per_global_batch_ns <= 12 * period
    assert [timeline.uses[s].memory.activations for s in range(stages)] == [10 * g for g in groups]


@pytest.mark.parametrize(("period", "groups"), [(16, [3, 2, 1]), (20, [3, 2, 1]), (30, [2, 1, 1]), (42, [1, 1, 1])])
def test_the_chain_of_madpipe_with_transfers(period: int, groups: list[int]) -> None:
    """Loads 2, 4 and 3 with transfers of 1 and 0.5 between them, in quarters, and the printed groups."""
    problem = make_problem(
        [3, 5, 4], [5, 11, 8], [2, 1], nodes=(3,), global_batch_size=6, stash_bytes=10, channel="half"
    )
    pattern, in_flight = _one_f_one_b_star([3, 5, 4], [5, 11, 8], [2, 1], period)
    assert in_flight == groups
    timeline = _judge(problem, straight(problem, 6), pattern, "double_buffered")
    assert timeline.time_per_global_batch_ns <= 6 * period
    assert [timeline.uses[s].memory.activations for s in range(3)] == [10 * g for g in groups]
    if period in (16, 42):
        assert timeline.time_per_global_batch_ns == 6 * period, "the largest load; one micro-batch at a time"


def _one_f_one_b_star(
    forward: list[int], backward: list[int], carry: list[int], period: int
) -> tuple[Pattern, list[int]]:
    """Place the chain of stages and channels in groups, from the last stage backwards (ALGORITHMS 4.1)."""
    chained = [(forward[0], backward[0])]
    for c, f, b in zip(carry, forward[1:], backward[1:], strict=True):
        chained += [(c, c), (f, b)]
    groups, used, group = [0] * len(chained), 0, 1
    for i in range(len(chained) - 1, -1, -1):
        if used + sum(chained[i]) > period:
            used, group = 0, group + 1
        used += sum(chained[i])
        groups[i] = group
    begins, t = [], 0
    for f, _b in chained:
        begins.append(t)
        t += f
    operations = []
    for i in range(0, len(chained), 2):
        members = [k for k in range(len(chained)) if groups[k] == groups[i]]
        behind = begins[members[-1]] + chained[members[-1]][0] + sum(chained[k][1] for k in members if k > i)
        shift = groups[i] - 1 + behind // period
        operations.append(PatternOperation(FORWARD, i // 2, begins[i] % period, begins[i] // period))
        operations.append(PatternOperation(BACKWARD, i // 2, behind % period, shift))
    return Pattern("1F1B*", period, 1, tuple(operations)), groups[::2]


@pytest.mark.parametrize("seed", range(60))
def test_the_size_of_the_global_batch_does_not_matter_where_every_micro_batch_steps(seed: int) -> None:
    """Some patterns repeat only after several micro-batches; a cut-off repetition would show in one of the sizes."""
    rng = random.Random(seed)
    stages = rng.randint(2, 5)
    forward, backward = ([rng.randint(1, 9) for _ in range(stages)] for _ in range(2))
    problem = make_problem(
        forward,
        backward,
        [rng.randint(1, 9) for _ in range(stages - 1)],
        nodes=(stages,),
        global_batch_size=12,
        shared=rng.random() < 0.5,
        form="bus",
    )
    pattern = _one_forward_one_backward(stages, 1, rng.randint(1, 3))
    times = []
    for batches in (1, 4, 12):
        wide = replace(problem, global_batch_size=batches)
        times.append(_judge(wide, straight(wide, batches), pattern, "weight_stashing").time_per_global_batch_ns)
    for batches, time in zip((1, 4), times, strict=False):
        copies = 12 // batches
        assert copies * (time - 1) < times[2] <= copies * time


@pytest.mark.parametrize("seed", range(30))
def test_scaling_all_times_scales_the_answer(seed: int) -> None:
    rng = random.Random(seed)
    stages, batches, factor = rng.randint(1, 4), rng.randint(2, 6), rng.randint(2, 9)
    forward, backward = ([rng.randint(1, 30) for _ in range(stages)] for _ in range(2))
    carry, parameters, update = rng.randint(0, 20), 6, rng.randint(0, 9)
    groups = [(1, [2 * s, 2 * s + 1] if rng.random() < 0.5 else [2 * s]) for s in range(stages)]
    fixed = {"nodes": (2 * stages,), "shared": rng.random() < 0.5, "channel": rng.choice(["half", "full", "none"])}
    rule = rng.choice(RULES)
    times = []
    for c in (1, factor):
        problem = make_problem(
            [f * c for f in forward],
            [b * c for b in backward],
            carry * c,
            parameters * c,
            update_ns=update * c,
            global_batch_size=2 * batches,
            **fixed,
        )
        pattern = _one_forward_one_backward(stages, 2 * c, 3 * c)
        timeline = _judge(problem, chain(groups, batches), pattern, rule)
        times.append(timeline.window_ns[1] - timeline.window_ns[0])
    assert times[1] == factor * times[0]


@pytest.mark.parametrize("rule", RULES)
def test_event_runs_and_in_order_runs_agree(rule: UpdateRule) -> None:
    """A pair's full-duplex link in a shared network equals the private channel of its edge; another kernel runs it."""
    fixed = {"boundary_bytes": [7, 2], "nodes": (3,), "global_batch_size": 6, "update_ns": 5}
    private = make_problem([3, 4, 5], channel="full", **fixed)
    shared = make_problem([3, 4, 5], shared=True, form="pairs", **fixed)
    pattern = _one_forward_one_backward(3, 5, 10)
    one, two = (_judge(problem, straight(problem, 6), pattern, rule) for problem in (private, shared))
    assert one.window_ns == two.window_ns
    for a, b in zip(one.tracks, two.tracks, strict=True):
        np.testing.assert_array_equal(a.start_ns, b.start_ns)


def test_gradients_come_and_go_with_each_round() -> None:
    """F = 4, B = 10, step 7 after each micro-batch: gradients from the backward's start to the end of the step."""
    problem = make_problem([4], [10], parameter_bytes=20, update_ns=7, nodes=(1,), global_batch_size=2, state_factor=2)
    timeline = _judge(problem, straight(problem, 2), _one_forward_one_backward(1, 4, 10), "weight_stashing")
    expected = [(0, 60)]
    for k in range(2 * timeline.rounds):
        expected += [(21 * k + 4, 80), (21 * k + 21, 60)]
    times, sizes = timeline.memory_curve(0)
    assert list(zip(times.tolist(), sizes.tolist(), strict=True)) == expected


def test_only_the_first_group_of_double_grouped_keeps_a_second_version() -> None:
    problem = make_problem([1] * 4, parameter_bytes=[1, 2, 3, 4], nodes=(4,), global_batch_size=4)
    pattern = _one_forward_one_backward(4, 1, 2)
    timeline = _judge(problem, straight(problem, 4), pattern, "double_grouped")
    assert [timeline.uses[s].memory.versions for s in range(4)] == [1, 2, 0, 0]


def test_rules_and_schedules_have_to_fit() -> None:
    problem = make_problem([1, 1], nodes=(4,), global_batch_size=2)
    allocation, pattern = straight(problem, 2), _one_forward_one_backward(2, 1, 2)
    for judge in (simulate, makespan_ns):
        with pytest.raises(InvalidPlan, match="is periodic, but update rule synchronous needs a flush"):
            judge(problem, allocation, pattern)
        with pytest.raises(InvalidPlan, match="one flushed step, but update rule weight_stashing needs a periodic"):
            judge(problem, allocation, early_backward(allocation), update_rule="weight_stashing")
        pipelines = tuple(Pipeline((Stage(0, 1, (d,)),), (d, d)) for d in (0, 1))
        with pytest.raises(UnsupportedRequest, match="2 pipelines under update rule double_buffered"):
            judge(problem, Allocation(pipelines, 2), pattern, update_rule="double_buffered")


def test_missing_operations_are_named() -> None:
    problem = make_problem([1, 1], nodes=(2,), global_batch_size=2)
    pattern = _pattern(3, [(FORWARD, 0, 0), (FORWARD, 1, 1), (BACKWARD, 1, 2)])
    with pytest.raises(InvalidPlan, match="Pattern steady has no backward of stage 0 for micro-batch 0 of its period"):
        simulate(problem, straight(problem, 2), pattern, update_rule="double_buffered")


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1), (STEP, 1)], "after micro-batch 3 is missing"),
        ([(FORWARD, 0), (BACKWARD, 0), (STEP, 0), (FORWARD, 1), (BACKWARD, 1)], "micro-batch 0 is out of order"),
        ([(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (STEP, 1), (BACKWARD, 1)], "micro-batch 1 is out of order"),
        ([(FORWARD, 0), (INPUT, 0), (FORWARD, 1), (BACKWARD, 1), (STEP, 1), (WEIGHT, 0)], "micro-batch 1 is out of"),
        ([(FORWARD, 0), (FORWARD, 1), (FORWARD, 2), (BACKWARD, 2)], "B2 of stage 0 is out of order"),
        ([(FORWARD, 0), (BACKWARD, 0), (FORWARD, 1), (BACKWARD, 1), (STEP, 1), (STEP, 1)], "1 is out of order"),
        ([(FORWARD, 0), (STEP, 4)], "after micro-batch 4 is in the row of n0/0, whose devices do not run it"),
        ([(STEP + 1, 0)], "Operation kind 6 is in the row"),
    ],
)
def test_steps_stand_behind_their_round(operations: list[tuple[int, int]], message: str) -> None:
    """Rows with steps of one stage that steps after every second of four micro-batches."""
    problem = make_problem([1], nodes=(1,), global_batch_size=4)
    allocation = straight(problem, 4)
    seen = {m for kind, m in operations if kind == FORWARD}
    rest = [(kind, m) for m in range(4) if m not in seen for kind in (FORWARD, BACKWARD)]
    row = Row((0,), as_operations([(kind, 0, m) for kind, m in [*operations, *rest]]))
    tables = cost_tables(problem, allocation, True, (2,))
    with pytest.raises(InvalidPlan, match=message):
        make_lanes(tables, Orders("test", (row,), update_every=(2,)))


def test_a_step_that_waits_for_ever_is_explained() -> None:
    """Replica 0 steps before F2, so it waits for replica 1's B1, which stage 1 runs after F2."""
    problem = make_problem([1, 1], parameter_bytes=1, nodes=(3,), global_batch_size=2)
    allocation = single_pipeline((Stage(0, 0, (0, 1), "round_robin"), Stage(1, 1, (2,))), 2)
    pattern = _pattern(10, [(FORWARD, 0, 0), (FORWARD, 1, 1), (BACKWARD, 1, 15), (BACKWARD, 0, 16)])
    with pytest.raises(InvalidPlan) as refused:
        simulate(problem, allocation, pattern, update_rule="weight_stashing")
    assert "n0/0 waits in the optimizer step of stage 0 for its reduction after micro-batch 1" in str(refused.value)
    assert "while n0/1 waits in B1 of stage 0 for B1 of stage 1" in str(refused.value)
