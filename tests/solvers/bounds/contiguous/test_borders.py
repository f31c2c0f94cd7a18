"""Bounds by the cables around nodes and groups of nodes, which stages share: never above the time of any plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import pytest
from bordered_requests import (
    GIGABYTE,
    Cables,
    bordered_request,
    carried,
    label_bound_ns,
    line,
    network_of,
    pairs,
    plans_below,
    plans_of,
    star,
)
from problems import make_problem

from penstock.solvers.bounds.contiguous.border_bound import far_samples
from penstock.solvers.bounds.contiguous.borders import Border, borders_of
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.transfer import row_pairs
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.contiguous_bound.planner import MILLION, Relaxation
from penstock.solvers.planners.exact.chain_tables import WHOLE_BACKWARDS

HIGHER = {20: (845, 1364), 79: (574, 708), 94: (281, 790), 178: (1013, 1458), 313: (553, 1296), 341: (38, 46)}
"""Requests with the bounds of labels and of cables: around nodes, around switches, with stages across nodes."""


@pytest.mark.cases(2)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("block", range(15))
def test_no_plan_is_below(block: int) -> None:
    """Every plan of 20 requests, from a time far below any plan on; CP-SAT where the plan's bound is lower."""
    for seed in range(20 * block, 20 * block + 20):
        space = Space.of(bordered_request(seed))
        for batch in space.batches if space.count() < 500 else ():
            label_ns = label_bound_ns(space.problem, batch)
            if label_ns < NEVER_NS:
                time_ns = carried(space.problem, batch, label_ns // 8 + 1)
                assert not plans_below(space, batch, time_ns), seed


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", HIGHER)
def test_cables_prove_more_than_the_label_search(seed: int) -> None:
    space = Space.of(bordered_request(seed))
    bounds = [(label_bound_ns(space.problem, each), carried(space.problem, each)) for each in space.batches]
    assert HIGHER[seed] in bounds
    for batch, (_label_ns, time_ns) in zip(space.batches, bounds, strict=True):
        assert not plans_below(space, batch, time_ns)


def _line_of_six(nodes: Sequence[int], cables: Cables, full: bool) -> Problem:
    """Build six equal layers, one for each of six devices, 20 bytes over each cut in either direction."""
    network = network_of(nodes, cables, full=full)
    kept = {"parameter_bytes": 1000, "memory_bytes": 2150, "global_batch_size": 8}
    return make_problem([1] * 6, [1] * 6, [20] * 5, network=network, shared=True, transfer="nic", **kept)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(
    ("nodes", "cables"),
    [((2, 2, 2), star((2, 2, 2), [GIGABYTE])), ((1,) * 6, pairs((1,) * 6, 20 * GIGABYTE, GIGABYTE))],
    ids=["nodes", "switches"],
)
def test_a_node_in_the_middle_carries_both_of_its_cuts(nodes: Sequence[int], cables: Cables) -> None:
    """By hand: the second group carries 8 × 4 × 20 bytes over one cable, after two forwards and before two backwards.

    In four runs, three cuts make 8 × 3 × 40 × 2 bytes on three cables, after one forward and before one backward.
    """
    half, full = (_line_of_six(nodes, cables, each) for each in (False, True))
    assert [carried(each, Space.of(each).batches[0], 300) for each in (half, full)] == [644, 326]
    search = Relaxation(half, 30 * MILLION)
    list(search.run())
    assert search.bound_ns == 644
    assert search.value_ns <= 1.05 * 644


def _split_by_rows(nodes: Sequence[int], layers: int, kept_bytes: int, rows: int) -> tuple[int, int, int]:
    """Return the bounds of labels and of cables, and the least time of a plan, for stages of one layer.

    Each stage needs as many devices as its micro-batches have rows.
    """
    problem = make_problem(
        [10] * layers,
        boundary_bytes=1,
        parameter_bytes=kept_bytes,
        stash_bytes=1000,
        memory_bytes=2 * kept_bytes + 1500,
        count_buffers=False,
        network=network_of(nodes, star(nodes, [GIGABYTE])),
        global_batch_size=2 * rows,
        micro_batch_sizes=(rows,),
        shared=True,
        transfer="nic",
    )
    space = Space.of(problem)
    (batch,) = space.batches
    plans = [schedule_bound(problem, plan, WHOLE_BACKWARDS).bound_ns for plan in plans_of(space, batch)]
    return label_bound_ns(problem, batch), carried(problem, batch), min(plans)


def test_of_three_stages_on_two_devices_two_nodes_of_three_hold_one_each() -> None:
    """The third stage is on both nodes, and sums 5,000 bytes over their cables, which takes as many ns."""
    label_ns, time_ns, least = _split_by_rows((3, 3), 3, 5000, 2)
    assert label_ns < 1000
    assert 5000 < time_ns <= least < 1.02 * time_ns


def test_all_reduces_of_two_stages_across_three_nodes_share_a_cable() -> None:
    """Each stage sums 2 × 2 ÷ 3 of 3,000 bytes over the cables of two of the three nodes or more: 16,000 ns in all."""
    label_ns, time_ns, least = _split_by_rows((2, 2, 2), 2, 3000, 3)
    assert label_ns < 4300
    assert 4 * 4000 / 3 < time_ns <= least


@pytest.mark.parametrize("rows", range(2, 7))
def test_what_leaves_a_node_for_a_stage_across_nodes(rows: int) -> None:
    """The rows that leave a node for a stage across both of two nodes of three: never fewer than the bound says."""
    for size in range(1, 4):
        run, rest, least = Stage(0, 0, tuple(range(size))), range(size, 6), rows
        for devices in chain.from_iterable(combinations(rest, r) for r in range(2, min(rows, 6 - size) + 1)):
            if devices[-1] >= 3:
                passed = row_pairs(run, Stage(1, 1, devices), rows)
                least = min(least, sum(count for _u, v, count in passed if v >= 3))
        bound = far_samples(((rows, 1),), 3, min(rows, 6))[size - 1]
        assert bound <= least
        assert bound == least or rows not in (2, 6)  # else the largest slices count as all that are near


def test_groups_of_a_star_of_a_tree_and_of_a_line() -> None:
    """The devices that are together, and the width of the cables that leave them."""
    nodes = (2, 1, 3, 1)
    assert _borders(nodes, star(nodes, [5, 7])) == [Border(nodes, (5, 7, 5, 7), True, 5, True)]
    assert _borders(nodes, pairs(nodes, 7, 4)) == [
        Border(nodes, (7, 7, 7, 7), True, 7, True),
        Border((3, 4), (4, 4), True, 4, False),
    ]
    by_node, by_branch = _borders(nodes, line(nodes, 5))
    assert by_node == Border(nodes, (5, 10, 10, 5), True, 5, True)
    assert sorted(zip(by_branch.sizes, by_branch.widths, strict=True)) == [(1, 10), (2, 5), (4, 5)]


def test_cables_of_devices_and_lanes_count_together() -> None:
    """Two devices with separate cables to two switches; a switch's devices are no group, since nodes join them."""
    cables = [(f"n{i}/{j}", f"s{j}", 6) for i in range(2) for j in range(2)]
    assert _borders((2, 2), [*cables, ("s0", "s1", 3)], lanes=3) == [Border((2, 2), (12, 12), True, 2, True)]


def test_nothing_is_shared_in_private_networks() -> None:
    assert borders_of(make_problem([1, 1], nodes=(1, 1), shared=False)) == []
    assert borders_of(make_problem([1, 1], nodes=(2,), shared=True, transfer="nic")) == []


def _borders(nodes: Sequence[int], cables: Cables, lanes: int = 1) -> list[Border]:
    network = network_of(nodes, cables, lanes=lanes)
    return borders_of(make_problem([1, 1], network=network, shared=True, transfer="nic"))
