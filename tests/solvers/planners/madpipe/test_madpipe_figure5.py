"""MadPipe's figure 5: the order on the special processor decides its memory peak, between (a) and (b)."""

from __future__ import annotations

import pytest
from problems import make_problem

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.schedule import Pattern, PatternOperation
from penstock.solvers.verify.verifier import verify

A_I, A_J = 100, 70


def peak(order: str, g_i: int, g_j: int) -> int:
    """Return the steady peak of the processor with layers i and j, simulated; the layer between them is on another.

    Layer j is a period behind: h_i = 0, h_j = 1. Of layer l, g_l batches are in flight right after its forward.
    """
    problem = make_problem(
        [10] * 3, stash_bytes=[A_I, 1, A_J], nodes=(2,), global_batch_size=6, count_buffers=False, gradient_factor=0
    )
    allocation = single_pipeline((Stage(0, 0, (0,)), Stage(1, 1, (1,)), Stage(2, 2, (0,))), 6)
    special = {
        "a": [(FORWARD, 0, 0), (FORWARD, 2, 1), (BACKWARD, 2, g_j), (BACKWARD, 0, g_i - 1)],
        "b": [(FORWARD, 0, 0), (BACKWARD, 0, g_i - 1), (FORWARD, 2, 1), (BACKWARD, 2, g_j)],
    }[order]
    operations = [PatternOperation(kind, s, 25 * place, shift) for place, (kind, s, shift) in enumerate(special)]
    operations += [PatternOperation(FORWARD, 1, 30, 0), PatternOperation(BACKWARD, 1, 90, g_j)]
    pattern = Pattern(f"figure-5{order}", 100, 1, tuple(operations))
    timeline = simulate(problem, allocation, pattern, update_rule="double_buffered")
    assert verify(problem, allocation, pattern, timeline, update_rule="double_buffered") == []
    return timeline.uses[0].memory.total


@pytest.mark.parametrize(("g_i", "g_j"), [(3, 1), (4, 1), (4, 2), (5, 2), (5, 3), (6, 4)])
def test_the_peaks_of_both_orders(g_i: int, g_j: int) -> None:
    """(a) all forwards, then all backwards: g_i a_i + g_j a_j. (b) each backward behind its forward: the larger of
    g_i a_i + (g_j - 1) a_j and (g_i - 1) a_i + g_j a_j.
    """
    assert peak("a", g_i, g_j) == g_i * A_I + g_j * A_J
    assert peak("b", g_i, g_j) == max(g_i * A_I + (g_j - 1) * A_J, (g_i - 1) * A_I + g_j * A_J)
