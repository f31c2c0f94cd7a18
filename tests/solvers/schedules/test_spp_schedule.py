"""SPP's execution order in closed form against the paper's queues (ALGORITHMS 3.3, Appendix C)."""

from __future__ import annotations

import numpy as np
import pytest
from problems import chain, make_problem

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.schedules.catalogue import SCHEDULES
from penstock.solvers.schedules.pipeline_execution import pipeline_execution, unclamped
from penstock.solvers.schedules.support.candidates import candidate_schedules


def by_queues(stages: int, batches: int) -> tuple[list[list[tuple[int, int]]], int]:
    """Run Algorithm 1, lines 1-8, on a snapshot of the queues per pass (R-14).

    Return each stage's order, and the number of passes.
    """
    blocks = 4 * stages - 3
    queues: dict[int, list[int]] = {j: [] for j in range(1, blocks + 2)}
    queues[1] = list(range(batches))
    orders: list[list[tuple[int, int]]] = [[] for _ in range(stages)]
    passes = 0
    while any(queues[j] for j in range(1, blocks + 1)):
        passes += 1
        for j in [j for j in range(1, blocks + 1) if queues[j]]:
            m = queues[j].pop(0)
            queues[j + 1].append(m)
            if j % 2 == 0:
                continue
            if j == 2 * stages - 1:
                orders[-1] += [(FORWARD, m), (BACKWARD, m)]
            elif j < 2 * stages - 1:
                orders[(j - 1) // 2].append((FORWARD, m))
            else:
                orders[(4 * stages - 3 - j) // 2].append((BACKWARD, m))
    return orders, passes


@pytest.mark.parametrize("stages", range(1, 7))
def test_the_closed_form_is_what_the_queues_give(stages: int) -> None:
    problem = make_problem([1] * stages, nodes=(6,))
    for batches in range(1, 30):
        expected, passes = by_queues(stages, batches)
        assert passes == batches + 4 * stages - 4
        allocation = chain([(1, [i]) for i in range(stages)], batches)
        rows = pipeline_execution(problem, allocation).rows
        assert [[(int(kind), int(m)) for kind, _, m in row.operations] for row in rows] == expected


def test_figure_4_takes_ten_cycles() -> None:
    assert by_queues(2, 6)[1] == 10


def test_worked_example() -> None:
    """ALGORITHMS 3.3: F = (2, 2), B = (4, 4), c = 1 each way, M = 4, A = (0, 3), in units of 1000 ns; by hand."""
    problem = make_problem(
        [1000, 2000],
        [2000, 4000],
        boundary_bytes=1000,
        parameter_bytes=[0, 3000],
        nodes=(3,),
        transfer="spp",
        global_batch_size=8,
        micro_batch_sizes=(2,),
        overlap_all_reduce=False,
    )
    allocation = chain([(1, [0]), (1, [1, 2])], 4)
    orders = pipeline_execution(problem, allocation)
    assert orders.warmup == (4, 1)
    timeline = simulate(problem, allocation, orders)
    assert timeline.time_per_global_batch_ns == 32_000
    first, second = (track.start_ns[:8] // 1000 for track in timeline.tracks)
    np.testing.assert_array_equal(first, [0, 2, 4, 6, 10, 16, 22, 28])
    np.testing.assert_array_equal(second, [3, 5, 9, 11, 15, 17, 21, 23])
    assert [(r.start_ns, r.end_ns) for r in timeline.reductions] == [(27_000, 30_000)]


def test_it_is_reached_by_its_name_and_as_a_policy() -> None:
    problem = make_problem([1] * 3, nodes=(3,))
    allocation = chain([(1, [0]), (1, [1]), (1, [2])], 20)
    assert unclamped(allocation) == (9, 5, 1)
    assert SCHEDULES["pe"].build(problem, allocation).warmup == (9, 5, 1)
    assert [candidate.warmup for candidate in candidate_schedules(problem, allocation, "pe", "best")] == [(9, 5, 1)]
    assert [candidate.warmup for candidate in candidate_schedules(problem, allocation, "early-backward", "pe")] == [
        (9, 5, 1)
    ]


def test_memory_clamps_it() -> None:
    problem = make_problem([1] * 3, stash_bytes=10, memory_bytes=[45, 100, 100], nodes=(3,))
    allocation = chain([(1, [0]), (1, [1]), (1, [2])], 20)
    assert pipeline_execution(problem, allocation).warmup == (4, 4, 1)
