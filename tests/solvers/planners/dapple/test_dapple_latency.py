"""DAPPLE's latency: the worked examples of ALGORITHMS 2.2, edge cases of 2.8, and its guarantee for simulated times."""

from __future__ import annotations

import numpy as np
import pytest
from dapple_latency import latency
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import make_problem, straight

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.planners.dapple.latency_kernel import C, push
from penstock.solvers.schedules.early_backward import early_backward, policy_a, policy_b

# The vectors count in halves, so all numbers are doubled.
VECTORS = [
    pytest.param([2], [4], [10], 4, 0, 34, 34, id="one-stage"),
    pytest.param([2, 1, 2, 1, 2], [4, 1, 4, 1, 4], [8, 0, 0, 0, 0], 4, 4, 48, 48, id="worked-example-1"),
    pytest.param([6, 1, 2], [12, 1, 4], [2, 0, 18], 4, 0, 77, 77, id="worked-example-2"),
]


@pytest.mark.parametrize(("forward", "backward", "reduce", "count", "pivot", "value", "largest"), VECTORS)
def test_vectors(
    forward: list[int],
    backward: list[int],
    reduce: list[int],
    count: int,
    pivot: int,
    value: int,
    largest: int,
) -> None:
    """Formulas (1) to (3) on lines of stages, times doubled so that they are integers (ALGORITHMS 2.1, R-4)."""
    result = latency(forward, backward, reduce, count, pivot="formula")
    assert (result.pivot, result.value_ns) == (pivot, value)
    assert result.value_ns == result.warmup_ns + result.steady_ns + result.ending_ns
    assert latency(forward, backward, reduce, count).value_ns == largest


def test_formula_3_keeps_the_later_stage_on_a_tie() -> None:
    assert latency([1, 1], [2, 2], [0, 0], 5, pivot="formula").pivot == 1


def test_formula_3_steps_back_only_past_what_lies_between() -> None:
    """By hand: T_st = (8, 2, 6); 8 is not larger than 6 + (1 + 1), 9 would be."""
    assert latency([3, 1, 2], [5, 1, 4], [0, 0, 0], 2, pivot="formula").pivot == 2
    assert latency([4, 1, 2], [5, 1, 4], [0, 0, 0], 2, pivot="formula").pivot == 0


def test_one_micro_batch_is_the_way_there_and_back() -> None:
    assert latency([1, 2, 3], [4, 5, 6], [0, 0, 0], 1).value_ns == 21


def test_full_duplex_channel_is_loaded_by_its_busier_direction() -> None:
    """ALGORITHMS 2.2: F = B = (1, 1), c = 2 each way, M = 10: the half-duplex 42 is no bound where 26 is reached."""
    times = ([1, 2, 1], [1, 2, 1], [0, 0, 0], 10)
    marks = [False, True, False]
    assert latency(*times, network=marks, channel="half").value_ns == 42
    assert latency(*times, network=marks, channel="full").value_ns == 26
    assert latency(*times, network=marks, channel="none").value_ns == 26
    slow = ([1, 9, 1], [1, 2, 1], [0, 0, 0], 10)
    assert latency(*slow, network=marks, channel="full").value_ns == 10 + 9 * 9 + 3
    assert latency(*slow, network=marks, channel="none").value_ns == 11 + 9 * 2 + 4


STAGES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90), st.integers(0, 300)), min_size=1, max_size=7)


@given(STAGES, st.integers(1, 20))
def test_labels_give_the_latency(stages: list[tuple[int, int, int]], count: int) -> None:
    """The kernel's four numbers, stage by stage, end at the corrected latency over all pivots."""
    label = (0, 0, -NEVER_NS, 0)
    for f, b, a in stages:
        label = push(label, f, b, a, (count - 1) * (f + b), True)
    forward, backward, reduce = (list(column) for column in zip(*stages, strict=True))
    assert label[C] == latency(forward, backward, reduce, count).value_ns


@given(STAGES, st.integers(1, 20), st.integers(2, 9))
def test_scaling_all_times_scales_the_latency(stages: list[tuple[int, int, int]], count: int, factor: int) -> None:
    forward, backward, reduce = (list(column) for column in zip(*stages, strict=True))
    larger = ([factor * x for x in column] for column in (forward, backward, reduce))
    assert latency(*larger, count).value_ns == factor * latency(forward, backward, reduce, count).value_ns


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_latency_is_a_lower_bound_of_the_judge(seed: int) -> None:
    """ALGORITHMS 2.7: over all pivots, half-duplex channels, without all-reduce; either policy."""
    draw = np.random.default_rng(seed)
    count, batches = int(draw.integers(2, 5)), int(draw.integers(1, 17))
    forward = draw.integers(1, 30, count).tolist()
    problem = make_problem(
        forward, boundary_bytes=draw.integers(0, 40, count - 1).tolist(), nodes=(count,), global_batch_size=batches
    )
    allocation = straight(problem, batches)
    line: list[tuple[int, int]] = []
    for i, f in enumerate(forward):
        line.append((f, 2 * f))
        if i < count - 1:
            line.append((int(problem.forward_bytes[i]), int(problem.backward_bytes[i])))
    estimate = latency([f for f, _ in line], [b for _, b in line], [0] * len(line), batches).value_ns
    for policy in (policy_a, policy_b):
        orders = early_backward(problem, allocation, warmup=policy(problem, allocation))
        assert estimate <= makespan_ns(problem, allocation, orders)
