"""Schedules: GPipe in both orders, early backward with any K-vector, naive model parallelism (ALGORITHMS 2.6-2.8)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import as_operations, chain, make_problem, straight, warmup_orders

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import parse_row, print_row
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import (
    ACR_THRESHOLD,
    activation_communication_ratio,
    by_acr,
    depths,
    early_backward,
    fitted,
    policy_a,
    policy_b,
)
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.model_parallel import model_parallel
from penstock.solvers.verify.verifier import verify


def texts(orders: Orders) -> list[str]:
    """Print each row's operations, without the home stage."""
    return [print_row([tuple(op) for op in row.operations.tolist()], int(row.operations[0, 1])) for row in orders.rows]


def plain(text: str) -> np.ndarray:
    return as_operations(parse_row(text, 0))


def uniform(stages: int, batches: int, **kw: object) -> tuple[Problem, Allocation]:
    problem = make_problem([1] * stages, nodes=(stages,), global_batch_size=batches, **kw)  # type: ignore[arg-type]
    return problem, straight(problem, batches)


def test_gpipe_runs_backwards_in_either_order() -> None:
    problem, allocation = uniform(2, 3)
    assert [row.operations.tolist() for row in gpipe(problem, allocation).rows] == [
        [[0, s, 0], [0, s, 1], [0, s, 2], [1, s, 0], [1, s, 1], [1, s, 2]] for s in (0, 1)
    ]
    last_first = gpipe(problem, allocation, backward="lifo")
    assert last_first.name == "gpipe-lifo"
    assert np.array_equal(last_first.rows[0].operations, plain("F0 F1 F2 B2 B1 B0"))


def test_early_backward_by_hand() -> None:
    """ALGORITHMS 2.6, S = 3, M = 5, P_A: K = 3, 2, 1."""
    problem, allocation = uniform(3, 5)
    orders = early_backward(problem, allocation)
    assert orders.warmup == (3, 2, 1)
    assert np.array_equal(orders.rows[0].operations, plain("F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"))
    assert np.array_equal(orders.rows[2].operations[:, [0, 2]], plain("F0 B0 F1 B1 F2 B2 F3 B3 F4 B4")[:, [0, 2]])


@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_rows_are_those_of_the_definition(stages: int, batches: int, data: st.DataObject) -> None:
    """order(i) = F0..F_{K-1}, then B_b and F_{K+b} while there are any, for every K-vector that does not grow."""
    problem, allocation = uniform(stages, batches)
    vector = sorted(data.draw(st.lists(st.integers(1, 15), min_size=stages, max_size=stages)), reverse=True)
    schedule = early_backward(problem, allocation, warmup=vector)
    for ours, theirs in zip(schedule.rows, warmup_orders(allocation, vector).rows, strict=True):
        assert ours.devices == theirs.devices
        assert np.array_equal(ours.operations, theirs.operations)


def test_model_parallelism_has_one_micro_batch_at_a_time() -> None:
    problem, allocation = uniform(3, 4)
    orders = model_parallel(problem, allocation)
    assert makespan_ns(problem, allocation, orders) == 4 * 3 * (1 + 2)
    assert texts(orders)[0] == print_row(parse_row("F0 B0 F1 B1 F2 B2 F3 B3", 0), 0)


def test_a_vector_that_grows_is_a_deadlock_and_refused() -> None:
    problem, allocation = uniform(2, 4)
    with pytest.raises(InvalidPlan, match="stage 1 warms up with 3 forwards, but stage 0 sends only 2"):
        early_backward(problem, allocation, warmup=(2, 3))
    with pytest.raises(InvalidPlan, match="2 numbers"):
        early_backward(problem, allocation, warmup=(2, 0))
    assert early_backward(problem, allocation, warmup=(9, 9)).warmup == (4, 4)


def test_two_stages_on_a_device_are_refused() -> None:
    problem, _ = uniform(2, 4)
    with pytest.raises(UnsupportedRequest, match=r"'n0/0' holds stages 0 and 1"):
        gpipe(problem, chain([(1, [0]), (1, [0])], 4))


def test_clamping_example() -> None:
    """ALGORITHMS 2.6: S = 4, M = 8, at most 3 in flight: 48 by P_A, 61 by P_B, 33 unclamped."""
    problem, allocation = uniform(4, 8)
    tight = make_problem([1] * 4, nodes=(4,), global_batch_size=8, memory_bytes=30, stash_bytes=10, count_buffers=False)
    vectors = policy_a(tight, allocation), policy_b(tight, allocation)
    assert vectors == ((3, 3, 2, 1), (3, 3, 3, 1))
    values = [makespan_ns(tight, allocation, early_backward(tight, allocation, warmup=v)) for v in vectors]
    assert values == [48, 61]
    for policy in (policy_a, policy_b):
        orders = early_backward(problem, allocation, warmup=policy(problem, allocation))
        assert makespan_ns(problem, allocation, orders) == 33


def test_memory_of_an_early_stage_clamps_the_later_ones() -> None:
    problem = make_problem(
        [1] * 4, nodes=(4,), global_batch_size=8, memory_bytes=[20, 90, 90, 90], stash_bytes=10, count_buffers=False
    )
    allocation = straight(problem, 8)
    assert policy_b(problem, allocation) == (2, 2, 2, 1)
    assert fitted(problem, allocation, (8, 8, 8, 8)) == (2, 2, 2, 2)


@settings(max_examples=60)
@given(st.integers(1, 5), st.integers(1, 10), st.integers(1, 9), st.integers(0, 9))
def test_uniform_stages_without_transfers(stages: int, batches: int, forward: int, backward: int) -> None:
    """D1: P_A, P_B and GPipe all take (M + S - 1)(F + B)."""
    problem = make_problem([forward] * stages, [backward] * stages, nodes=(stages,), global_batch_size=batches)
    allocation = straight(problem, batches)
    expected = (batches + stages - 1) * (forward + backward)
    for vector in (policy_a(problem, allocation), policy_b(problem, allocation)):
        assert makespan_ns(problem, allocation, early_backward(problem, allocation, warmup=vector)) == expected
    assert makespan_ns(problem, allocation, gpipe(problem, allocation)) == expected


@settings(max_examples=60)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 10))
def test_unequal_stages_without_transfers(forward: list[int], batches: int) -> None:
    """ALGORITHMS 2.7: neither policy is slower than GPipe."""
    problem = make_problem(forward, nodes=(len(forward),), global_batch_size=batches)
    allocation = straight(problem, batches)
    slowest = makespan_ns(problem, allocation, gpipe(problem, allocation))
    for vector in (policy_a(problem, allocation), policy_b(problem, allocation)):
        assert makespan_ns(problem, allocation, early_backward(problem, allocation, warmup=vector)) <= slowest


@pytest.mark.parametrize("batches", [3, 6, 12])
def test_peak_in_flight_does_not_depend_on_the_batches(batches: int) -> None:
    """D2: the stash at the peak is K_i micro-batches' for early backward, all of them for GPipe."""
    problem, allocation = uniform(3, batches, stash_bytes=10, count_buffers=False)
    for policy, expected in ((policy_a, [3, 2, 1]), (policy_b, [5, 3, 1])):
        orders = early_backward(problem, allocation, warmup=policy(problem, allocation))
        uses = simulate(problem, allocation, orders).uses
        assert [uses[d].memory.activations for d in range(3)] == [10 * min(k, batches) for k in expected]
    uses = simulate(problem, allocation, gpipe(problem, allocation)).uses
    assert [uses[d].memory.activations for d in range(3)] == [10 * batches] * 3


def test_communication_ratio_chooses_the_policy() -> None:
    """R-9: mean (c_f + c_b) over mean (F + B): 2 × 12 / 300 = 0.08 takes P_B, a nanosecond less P_A."""
    for size, chosen in ((12, policy_b), (11, policy_a)):
        problem = make_problem([100] * 3, boundary_bytes=size, nodes=(3,), global_batch_size=8)
        allocation = straight(problem, 8)
        ratio = activation_communication_ratio(problem, allocation)
        assert ratio == pytest.approx(2 * size / 300)
        assert (ratio >= ACR_THRESHOLD) == (chosen is policy_b)
        assert by_acr(problem, allocation) == chosen(problem, allocation)
    assert activation_communication_ratio(problem, chain([(3, [0])], 8)) == 0.0


def test_round_robin_replicas_take_turns() -> None:
    """A stage of two replicas before one: the stage's order, each replica with its own micro-batches."""
    problem = make_problem([4, 2], nodes=(3,), global_batch_size=6, boundary_bytes=1)
    stages = (Stage(0, 0, (0, 1), "round_robin"), Stage(1, 1, (2,)))
    allocation = Allocation((Pipeline(stages, (0, 5)),), 6)
    assert depths(allocation) == (3, 1)
    orders = early_backward(problem, allocation)
    assert [row.devices for row in orders.rows] == [(0,), (1,), (2,)]
    assert np.array_equal(orders.rows[0].operations, plain("F0 F2 B0 F4 B2 B4"))
    assert np.array_equal(orders.rows[1].operations, plain("F1 F3 B1 F5 B3 B5"))
    timeline = simulate(problem, allocation, orders)
    assert verify(problem, allocation, orders, timeline) == []


@settings(max_examples=40)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.integers(1, 9), st.integers(1, 4))
def test_round_robin_never_deadlocks(replicas: list[int], batches: int, first: int) -> None:
    devices = iter(range(sum(replicas)))
    stages = tuple(
        Stage(i, i, tuple(next(devices) for _ in range(r)), "round_robin" if r > 1 else "rows")
        for i, r in enumerate(replicas)
    )
    allocation = Allocation((Pipeline(stages, (0, batches - 1)),), batches)
    problem = make_problem([3] * len(replicas), nodes=(sum(replicas),), global_batch_size=batches, boundary_bytes=2)
    vectors = [fitted(problem, allocation, [first] * len(replicas)), policy_a(problem, allocation)]
    for vector in vectors:
        orders = early_backward(problem, allocation, warmup=vector)
        assert verify(problem, allocation, orders, simulate(problem, allocation, orders)) == []


def test_rows_belong_to_the_micro_batches_of_their_pipeline() -> None:
    pipelines = (Pipeline((Stage(0, 1, (0,)),), (0, 2)), Pipeline((Stage(0, 1, (1,)),), (3, 4)))
    problem = make_problem([1, 1], nodes=(2,), global_batch_size=5)
    orders = gpipe(problem, Allocation(pipelines, 5))
    assert np.array_equal(orders.rows[1].operations[:, 2], [3, 4, 3, 4])


def test_large_schedules_are_built_with_arrays() -> None:
    """1,024 stages × 4,096 micro-batches: 8.4 million operations, one row per stage."""
    problem = make_problem([1] * 1024, nodes=(1024,), global_batch_size=4096)
    allocation = straight(problem, 4096)
    orders = early_backward(problem, allocation)
    assert len(orders.rows) == 1024
    assert sum(len(row.operations) for row in orders.rows) == 2 * 1024 * 4096
    assert orders.rows[0].operations.dtype == np.int32
