"""Advance forward propagation: its orders, Figure 7 of the AvgPipe paper, and algorithm 1."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import make_problem, straight

from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.schedules.advance_forward import advance_forward, advances, climb, in_flight
from penstock.solvers.schedules.early_backward import early_backward, policy_a, policy_b
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.solve.driver import solve


def uniform(stages: int, batches: int, forward: int, backward: int, transfer: int) -> tuple[Problem, Allocation]:
    """Build equal stages in a private full-duplex network, as in figure 7."""
    problem = make_problem(
        [forward] * stages,
        [backward] * stages,
        transfer,
        nodes=(stages,),
        global_batch_size=batches,
        channel="full",
        stash_bytes=1,
        count_buffers=False,
    )
    return problem, straight(problem, batches)


def stalls(timeline: Timeline) -> int:
    """Count the gaps between operations of a device, and the wait before the first one of each."""
    count = 0
    for track in timeline.tracks:
        times = [(0, 0), *zip(track.start_ns.tolist(), track.end_ns.tolist(), strict=True)]
        count += sum(b[0] > a[1] for a, b in pairwise(times))
    return count


def test_figure_7() -> None:
    """K 2, M 8, F = B = 1, transfers 0.25: AFAB and AFP take 18.5, 1F1B 20; stalls 2 and 9 (claims A1, A2)."""
    problem, allocation = uniform(2, 8, 4, 4, 1)
    results = {}
    for name, orders in {
        "afab": advance_forward(problem, allocation, afab=True),
        "1f1b": advance_forward(problem, allocation),
        "afp": advance_forward(problem, allocation, delta=1),
    }.items():
        timeline = simulate(problem, allocation, orders)
        results[name] = (timeline.time_per_global_batch_ns / 4, timeline.uses[0].memory.activations, stalls(timeline))
    assert results["afab"] == (18.5, 8, 2)
    assert results["1f1b"] == (20.0, 2, 9)
    assert results["afp"][:2] == (18.5, 3)


def orders_of(orders: Orders) -> list[list[list[int]]]:
    return [row.operations.tolist() for row in orders.rows]


@given(st.integers(1, 6), st.integers(1, 12))
def test_its_ends_are_1f1b_dapples_p_b_and_all_forwards_first(stages: int, batches: int) -> None:
    """δ = 0, K - 1 and ``afab``, operation by operation (claim A3)."""
    problem, allocation = uniform(stages, batches, 4, 4, 1)
    plain = early_backward(problem, allocation, warmup=policy_a(problem, allocation))
    assert orders_of(advance_forward(problem, allocation)) == orders_of(plain)
    deeper = early_backward(problem, allocation, warmup=policy_b(problem, allocation))
    assert orders_of(advance_forward(problem, allocation, delta=stages - 1)) == orders_of(deeper)
    assert orders_of(advance_forward(problem, allocation, afab=True)) == orders_of(gpipe(problem, allocation))


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 15))
def test_rows_are_the_papers_loop_with_its_last_backwards(stages: int, batches: int, delta: int) -> None:
    """F × adv, (F, B) × (M - adv), B × adv (R-29), the last stage with adv 0, in flight adv + 1."""
    problem, allocation = uniform(stages, batches, 4, 4, 1)
    orders = advance_forward(problem, allocation, delta=delta)
    for s, adv in enumerate(advances(allocation, delta)):
        kinds = [FORWARD] * adv + [FORWARD, BACKWARD] * (batches - adv) + [BACKWARD] * adv
        operations = orders.rows[s].operations
        assert operations[:, 0].tolist() == kinds
        for kind in (FORWARD, BACKWARD):
            assert operations[operations[:, 0] == kind, 2].tolist() == list(range(batches))
        flying = np.cumsum(np.where(operations[:, 0] == FORWARD, 1, -1)).max()
        assert flying == in_flight(allocation, delta)[s] == min(adv + 1, batches)
    assert advances(allocation, delta)[-1] == 0
    assert advances(allocation, delta)[0] == min(batches, (stages - 1 + delta) if stages > 1 else 0)


@pytest.mark.parametrize("transfer", [1, 3, 6, 10])
def test_six_stages_reach_the_time_of_all_forwards_first(transfer: int) -> None:
    """K 6, M 32, B = 2 F: AFAB's time is reached by δ = 3 to 5 (6.2); no δ is faster than AFAB or slower than 1F1B."""
    problem, allocation = uniform(6, 32, 10, 20, transfer)

    def time_ns(**how: int | bool) -> int:
        return simulate(problem, allocation, advance_forward(problem, allocation, **how)).time_per_global_batch_ns  # type: ignore[arg-type]

    afab = time_ns(afab=True)
    times = [time_ns(delta=delta) for delta in range(6)]
    assert times == sorted(times, reverse=True)
    assert min(times) == afab
    assert times.index(afab) <= 5


def test_without_transfers_or_with_one_micro_batch_all_are_equal() -> None:
    for batches, transfer in ((8, 0), (1, 5)):
        problem, allocation = uniform(3, batches, 10, 20, transfer)
        orders = [advance_forward(problem, allocation, delta=d) for d in range(3)]
        orders.append(advance_forward(problem, allocation, afab=True))
        assert len({simulate(problem, allocation, each).time_per_global_batch_ns for each in orders}) == 1


def test_parallel_pipelines_have_rows_of_their_own() -> None:
    problem, _ = uniform(2, 4, 4, 4, 1)
    allocation = parallel_pipelines((Stage(0, 0, (0,)), Stage(1, 1, (1,))), 2, 4)
    orders = advance_forward(problem, allocation, delta=1)
    assert [row.devices for row in orders.rows] == [(0,), (1,), (0,), (1,)]
    assert [set(row.operations[:, 1].tolist()) for row in orders.rows] == [{0}, {1}, {2}, {3}]
    assert orders.rows[0].operations[:, [0, 2]].tolist() == orders.rows[2].operations[:, [0, 2]].tolist()
    assert orders.warmup == (3, 1, 3, 1)


@pytest.mark.tier("ci")
def test_planners_of_flushed_steps_combine_with_it() -> None:
    """The best δ of a planner's plan is no slower than its 1F1B."""
    problem, _ = uniform(4, 12, 10, 20, 8)
    problem = replace(problem, micro_batch_sizes=(1,))
    times = {}
    for schedule in ("advance-forward", "early-backward"):
        result = solve(problem, "gpipe", schedule=schedule, options={"stages": 4})
        assert result.best is not None
        assert result.best.schedule.name == schedule
        times[schedule] = result.best.value_ns
    assert times["advance-forward"] <= times["early-backward"]


@pytest.mark.parametrize(
    ("times", "delta", "judged"),
    [
        pytest.param([20, 18, 17, 17, 10], 2, 4, id="stops when it is no longer faster"),
        pytest.param([20, 18, None], 1, 3, id="stops where memory ends"),
        pytest.param([20, 25], 0, 2, id="goes back when it is slower"),
        pytest.param([None], 0, 1, id="does not fit at all"),
    ],
)
def test_algorithm_1(times: list[int | None], delta: int, judged: int) -> None:
    assert climb(lambda d: times[d]) == (delta, judged)


def test_refuses_a_negative_delta() -> None:
    problem, allocation = uniform(2, 4, 4, 4, 1)
    with pytest.raises(InvalidDocument, match="delta -1 is negative"):
        advance_forward(problem, allocation, delta=-1)
