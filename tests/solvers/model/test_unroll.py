"""Unrolled patterns: rows and steps by hand, and against a reference on random patterns."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from problems import chain, make_problem, straight

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, RECOMPUTE, WEIGHT
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.schedule import STEP, Pattern, PatternOperation
from penstock.solvers.model.unroll import unroll
from penstock.solvers.model.update_rules import UpdateRule, group_of, version_used

RULES: tuple[UpdateRule, ...] = ("weight_stashing", "double_buffered", "double_grouped")


def _text(operations: np.ndarray) -> str:
    return " ".join(f"{(*KINDS, 'S')[kind]}{m}" for kind, _stage, m in operations.tolist())


def _one_forward_one_backward() -> Pattern:
    """Return two stages, F = 1, B = 2; the first is two micro-batches ahead."""
    return Pattern(
        "1f1b",
        3,
        1,
        (
            PatternOperation(FORWARD, 0, 0, 0),
            PatternOperation(FORWARD, 1, 1, 0),
            PatternOperation(BACKWARD, 1, 2, 0),
            PatternOperation(BACKWARD, 0, 1, 1),
        ),
    )


@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        ("weight_stashing", "F0 F1 B0 S0 F2 B1 S1 F3 B2 S2 F4", "F0 B0 S0 F1 B1 S1 F2 B2 S2 F3"),
        ("double_buffered", "F0 F1 B0 F2 B1 F3 S1 B2 F4 B3 F5 S3", "F0 B0 F1 B1 F2 S1 B2 F3 B3 F4 S3"),
        ("double_grouped", "F0 F1 B0 F2 B1 F3 S1 B2 F4 B3 F5 S3", "F0 B0 F1 B1 S1 F2 B2 F3 B3 S3 F4"),
    ],
)
def test_steps_by_hand(rule: UpdateRule, first: str, second: str) -> None:
    """Two micro-batches make a global batch; the second group of double grouped uses the newest version."""
    problem = make_problem([1, 1], nodes=(2,), global_batch_size=2)
    rows = unroll(problem, straight(problem, 2), _one_forward_one_backward(), rule).orders.rows
    assert _text(rows[0].operations).startswith(first)
    assert _text(rows[1].operations).startswith(second)


def test_what_is_unrolled() -> None:
    """5 samples in 2 micro-batches: all count as the larger. The pattern is one round deep; 24 rounds are 48."""
    problem = make_problem([1, 1], nodes=(2,), global_batch_size=5)
    allocation, pattern = straight(problem, 2), _one_forward_one_backward()
    run = unroll(problem, allocation, pattern, "double_buffered")
    assert (run.first, run.last, run.rounds) == (3, 27, 29)
    assert run.allocation.num_micro_batches == 58
    assert run.problem.global_batch_size == 58 * 3
    assert run.orders.update_every == (2, 2)
    assert unroll(problem, allocation, pattern, "weight_stashing").orders.update_every == (1, 1)
    for row in run.orders.rows:
        assert np.bincount(row.operations[:, 0], minlength=STEP + 1).tolist() == [58, 58, 0, 0, 0, 29]


@pytest.mark.parametrize(("batches", "numbers"), [(2, (9, 33, 38)), (8, (3, 9, 11)), (100, (3, 5, 7))])
def test_how_long_is_judged(batches: int, numbers: tuple[int, int, int]) -> None:
    """7 periods are 4, 1 and 1 global batches; 48 micro-batches are 24, 6 and 1."""
    problem = make_problem([1], nodes=(1,), global_batch_size=batches)
    pattern = Pattern("deep", 3, 1, (PatternOperation(FORWARD, 0, 0, 0), PatternOperation(BACKWARD, 0, 1, 6)))
    run = unroll(problem, straight(problem, batches), pattern, "double_buffered")
    assert (run.first, run.last, run.rounds) == numbers


def test_what_is_measured_is_whole_turns() -> None:
    problem = make_problem([1, 1], nodes=(4,), global_batch_size=4)
    allocation = chain([(1, [0, 1, 2]), (1, [3])], 4, dispatch="round_robin")
    run = unroll(problem, allocation, _one_forward_one_backward(), "weight_stashing")
    assert run.whole == 3
    assert (run.last - run.first) % 3 == 0
    assert run.orders.update_every == (3, 1)


def test_the_same_pattern_is_unrolled_once() -> None:
    problem = make_problem([1, 1], nodes=(2,), global_batch_size=2)
    allocation = straight(problem, 2)
    one = unroll(problem, allocation, _one_forward_one_backward(), "double_buffered")
    assert unroll(problem, allocation, _one_forward_one_backward(), "double_buffered") is one
    assert unroll(problem, allocation, _one_forward_one_backward(), "weight_stashing") is not one


def test_what_is_refused() -> None:
    problem = make_problem([1, 1], nodes=(4,), global_batch_size=2)
    with pytest.raises(InvalidPlan, match="names stage 1, but the plan has 1 stages"):
        unroll(problem, chain([(2, [0])], 2), _one_forward_one_backward(), "double_buffered")
    with pytest.raises(InvalidPlan, match="Pattern none has no forward of stage 0"):
        unroll(problem, straight(problem, 2), Pattern("none", 1, 1, ()), "double_buffered")
    turns = chain([(1, [0, 1, 2]), (1, [3])], 2, dispatch="round_robin")
    with pytest.raises(InvalidPlan, match="Stage 0 steps after every 2 micro-batches, but its 3 replicas") as refused:
        unroll(problem, turns, _one_forward_one_backward(), "double_buffered")
    assert "at least 3 micro-batches" in str(refused.value)


@pytest.mark.parametrize("seed", range(20))
def test_rows_equal_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    rule = rng.choice(RULES)
    stages, device = [], 0
    for s in range(rng.randint(1, 4)):
        replicas = rng.choice([1, 1, 2, 3])
        group = stages[0].devices if stages and rng.random() < 0.2 else tuple(range(device, device + replicas))
        device += replicas
        stages.append(Stage(s, s, group, rng.choice(["rows", "round_robin"])))
    allocation = single_pipeline(tuple(stages), rng.randint(3, 6))
    problem = make_problem([1] * len(stages), nodes=(device,), global_batch_size=allocation.num_micro_batches)
    pattern = _random_pattern(rng, len(stages))
    run = unroll(problem, allocation, pattern, rule)
    present: set[int] = set()
    for row in run.orders.rows:
        present |= set(row.devices)
        for d in row.devices:
            expected, in_order = _plain_row(run.allocation, pattern, rule, run.orders.update_every, d)
            if in_order:
                assert [tuple(op) for op in row.operations.tolist()] == expected
            else:
                with pytest.raises(
                    InvalidPlan, match="the gradients of a round have to run between the previous step and its step"
                ):
                    simulate(problem, allocation, pattern, update_rule=rule)
    assert present == {d for stage in stages for d in stage.devices}
    assert sum(len(row.devices) for row in run.orders.rows) == len(present)


def _random_pattern(rng: random.Random, stages: int) -> Pattern:
    period, count = rng.randint(1, 30), rng.choice([1, 1, 2])
    operations = []
    for m in range(count):
        t = m * period // count
        for kind, order in ((FORWARD, range(stages)), (BACKWARD, reversed(range(stages)))):
            for s in order:
                split = kind == BACKWARD and rng.random() < 0.3
                for each in (INPUT, WEIGHT) if split else (kind,):
                    operations.append(PatternOperation(each, s, t % period, t // period, m))
                    t += rng.randint(0, 9)
    return Pattern("random", period, count, tuple(operations))


def _plain_row(
    allocation: Allocation, pattern: Pattern, rule: UpdateRule, every: tuple[int, ...], device: int
) -> tuple[list[tuple[int, int, int]], bool]:
    """Return one device's row, in which a stage's step is due once a round's gradients are done.

    The second result is whether rounds do not mix.
    """
    left: dict[tuple[int, int], int] = defaultdict(int)
    row = []
    for _start, _place, m, kind, s in sorted(_listed(pattern, allocation.num_micro_batches)):
        stage = allocation.stages[s]
        turn = stage.dispatch == "rows" or stage.devices[m % stage.replicas] == device
        if device in stage.devices and turn:
            row.append((kind, s, m))
            left[s, m // every[s]] += kind not in (FORWARD, RECOMPUTE)
    gradients = [(s, m // every[s]) for kind, s, m in row if kind not in (FORWARD, RECOMPUTE)]
    in_order = sorted(gradients) == sorted(gradients, key=lambda each: each[0])
    due: dict[int, int] = {}
    operations = []
    for kind, s, m in row:
        if s in due and _needs_step(allocation, rule, kind, s, m // every[s], due[s]):
            operations.append((STEP, s, (due.pop(s) + 1) * every[s] - 1))
        operations.append((kind, s, m))
        if kind not in (FORWARD, RECOMPUTE):
            left[s, m // every[s]] -= 1
            if left[s, m // every[s]] == 0 and (m // every[s] + 1) * every[s] <= allocation.num_micro_batches:
                due[s] = m // every[s]
    return operations + [(STEP, s, (t + 1) * every[s] - 1) for s, t in sorted(due.items())], in_order


def _listed(pattern: Pattern, total: int) -> list[tuple[int, int, int, int, int]]:
    count = pattern.micro_batches_per_period
    return [
        ((m // count + op.shift) * pattern.period_ns + op.start_ns, place, m, op.kind, op.stage)
        for place, op in enumerate(pattern.operations)
        for m in range(op.micro_batch, total, count)
    ]


def _needs_step(allocation: Allocation, rule: UpdateRule, kind: int, s: int, update_round: int, due: int) -> bool:
    if kind == RECOMPUTE:
        return False
    if kind != FORWARD:
        return update_round > due
    used = version_used(rule, group_of(allocation, s), update_round)
    return used is None or used > due
