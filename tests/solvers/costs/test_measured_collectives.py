"""Measured collectives: times by hand between, below and above the measured sizes, and the groups that use them."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from drawn_tables import with_table
from problems import make_network, make_problem

from penstock.solvers.costs.collectives import all_reduce_ns, group_of
from penstock.solvers.costs.infinity import FAR_NS, NEVER_NS
from penstock.solvers.costs.measured_collectives import measured_by_span
from penstock.solvers.costs.tables.device_line import affine_all_reduce
from penstock.solvers.degrees.contract import contract
from penstock.solvers.explanation.changes import with_network
from penstock.solvers.model.degrees import CellMeasured, Choice, Degrees, Operation, Variant
from penstock.solvers.model.problem import MeasuredCollective, Problem
from penstock.solvers.verify.reduction_times import reduction_ns

NODES = (4, 4)


def problem_with(*rows: tuple[Operation, int, int, int, int], all_reduce: str = "flat", form: str = "pairs") -> Problem:
    """Return two nodes of four devices, 1 ns per byte inside and between; each row is an entry of the document."""
    network = make_network(NODES, form=form)  # type: ignore[arg-type]
    problem = make_problem([10] * 4, network=network, parameter_bytes=100, all_reduce=all_reduce)
    return replace(problem, collectives=tuple(MeasuredCollective(*row) for row in rows))


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        pytest.param(1, 70, id="below the smallest: its time"),
        pytest.param(100, 70, id="the smallest"),
        pytest.param(101, 71, id="70 + 1 · 30 / 100, rounded up"),
        pytest.param(150, 85, id="halfway"),
        pytest.param(200, 100, id="measured"),
        pytest.param(300, 100, id="80 ns were measured at 300 bytes, but 200 take 100"),
        pytest.param(350, 150, id="from there to 200 ns at 400 bytes"),
        pytest.param(400, 200, id="the largest"),
        pytest.param(1000, 800, id="above it 1 ns per byte goes on"),
    ],
)
def test_times_are_linear_between_measured_sizes(size: int, expected: int) -> None:
    rows = [(100, 70), (400, 200), (300, 80), (200, 100)]
    problem = problem_with(*(("all_reduce", 4, 1, size, time) for size, time in rows))
    assert all_reduce_ns(problem, size, (0, 1, 2, 3)) == expected
    assert reduction_ns(problem, size, (0, 1, 2, 3)) == expected


def test_above_the_largest_the_last_growth_goes_on() -> None:
    """1 ns per byte from 100 to 200, and nothing more up to 300: from there on 1 ns per byte again."""
    problem = problem_with(*(("all_reduce", 2, 1, size, time) for size, time in [(100, 50), (200, 150), (300, 150)]))
    assert all_reduce_ns(problem, 310, (0, 1)) == 160
    alone = problem_with(("all_reduce", 2, 1, 100, 50))
    assert [all_reduce_ns(alone, size, (0, 1)) for size in (1, 100, 101, 300)] == [50, 50, 51, 150]


def test_an_all_reduce_is_its_two_halves_where_only_they_were_measured() -> None:
    halves = [("reduce_scatter", 4, 1, 100, 30), ("all_gather", 4, 1, 100, 20)]
    assert all_reduce_ns(problem_with(*halves), 200, (0, 1, 2, 3)) == 60 + 40  # type: ignore[arg-type]
    assert all_reduce_ns(problem_with(*halves, ("all_reduce", 4, 1, 100, 7)), 100, (0, 1, 2, 3)) == 7  # type: ignore[arg-type]
    assert all_reduce_ns(problem_with(halves[0]), 400, (0, 1, 2, 3)) == 2 * 3 * 100  # type: ignore[arg-type]


@pytest.mark.parametrize("all_reduce", ["flat", "hierarchical", "dapple"])
@pytest.mark.parametrize(
    ("devices", "span"),
    [((0, 1, 2, 3), (4, 1)), ((5, 6), (2, 1)), ((0, 4), (1, 2)), ((3, 7, 2, 6), (2, 2)), (tuple(range(8)), (4, 2))],
)
def test_groups_of_the_span_take_the_measured_time(
    devices: tuple[int, ...], span: tuple[int, int], all_reduce: str
) -> None:
    problem = problem_with(("all_reduce", *span, 100, 7), all_reduce=all_reduce)
    assert all_reduce_ns(problem, 100, devices) == reduction_ns(problem, 100, devices) == 7


@pytest.mark.parametrize("devices", [(0, 1, 4), (0, 1, 2), (0, 1), (0, 1, 2, 4)])
def test_other_groups_take_the_time_of_links(devices: tuple[int, ...]) -> None:
    """Groups that are spread unevenly, or have as many devices in another number of nodes."""
    rows: list[tuple[Operation, int, int, int, int]] = [("all_reduce", 1, 2, 100, 7), ("all_reduce", 2, 2, 100, 7)]
    rows += [("all_reduce", 1, 3, 100, 7), ("all_gather", 3, 1, 100, 7), ("all_reduce", 4, 1, 100, 7)]
    problem, plain = problem_with(*rows), problem_with()
    assert all_reduce_ns(problem, 100, devices) == all_reduce_ns(plain, 100, devices) > 7
    assert reduction_ns(problem, 100, devices) == all_reduce_ns(plain, 100, devices)


def test_what_nothing_connects_never_ends() -> None:
    matrix = np.array([[0, 10**9, 0], [10**9, 0, 10**9], [0, 10**9, 0]])
    network = replace(make_network((3,)), matrix_bytes_per_s=matrix)
    problem = replace(make_problem([1], network=network), collectives=(MeasuredCollective("all_reduce", 3, 1, 100, 7),))
    assert all_reduce_ns(problem, 100, (0, 1, 2)) >= NEVER_NS
    assert reduction_ns(problem, 100, (0, 1, 2)) >= NEVER_NS


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_to_all", "send"])
def test_collectives_inside_a_pass_are_counted_one_by_one(operation: Operation) -> None:
    """Three of 200 bytes together: 67 bytes each, 40 ns."""
    group = group_of(problem_with((operation, 4, 1, 50, 40), (operation, 4, 1, 67, 40)), (0, 1, 2, 3))
    assert group.time_ns(operation, 200, 3) == 3 * 40
    assert group.time_ns(operation, 0, 3) == 0


@pytest.mark.parametrize("all_reduce", ["flat", "hierarchical"])
def test_halves_follow_the_mode_of_all_reduces(all_reduce: str) -> None:
    group = group_of(problem_with(all_reduce=all_reduce), tuple(range(8)))
    inside, flat = Fraction(3 * 1000, 4), Fraction(7 * 1000, 8)
    half = inside + Fraction(1000, 2) if all_reduce == "hierarchical" else flat
    assert group.time_ns("all_gather", 1000) == group.time_ns("reduce_scatter", 1000) == half
    assert group.time_ns("all_reduce", 1000) == 2 * half
    assert group.time_ns("all_to_all", 1000) == flat


@pytest.mark.parametrize(("form", "expected"), [("pairs", 7), ("ports", 7), ("bus", 2 * 2 * 100 // 2)])
def test_lanes_take_the_measured_time_where_they_share_no_link(form: str, expected: int) -> None:
    """Two replicas of two GPUs in a node. On a bus, each lane has half of it."""
    sums, each = np.zeros(5, dtype=np.int64), np.zeros(4, dtype=np.int64)
    costs = CellMeasured(1, each, each, each, each, each, ((),) * 4)
    variant = Variant(Degrees(tensor=2), sums, sums, sums, sums, ((),) * 3, (), {"cpu": (costs,)})
    problem = replace(problem_with(("all_reduce", 2, 1, 100, 7), form=form), variants=(variant,))
    cells = contract(problem, Choice(Degrees(tensor=2)))
    assert all_reduce_ns(cells, 100, (0, 1)) == reduction_ns(cells, 100, (0, 1)) == expected


@pytest.mark.parametrize("seed", range(40))
def test_times_never_fall_and_bounds_are_below_them(seed: int) -> None:
    """Every operation of every span, in integers; a plain reading of the table in fractions gives the same."""
    rng = random.Random(seed)
    problem = with_table(make_problem([1], nodes=NODES), seed, 10**6 if seed % 2 else 300, 10 ** rng.randint(1, 8))
    for span, operations in measured_by_span(problem).items():
        devices = tuple(4 * node + place for node in range(span.nodes) for place in range(span.devices_per_node))
        sizes = sorted({rng.randrange(1, 3 * 10**6) for _ in range(30)} | set(range(1, 400, 7)))
        for operation, curves in operations:
            times = [sum(curve.time_ns(size) for curve in curves) for size in sizes]
            assert times == sorted(times)
            least = sum(curve.least_ns(np.array(sizes)) for curve in curves)
            assert (least <= times).all()
            assert (least + 2 * len(curves) + np.array(times) // 10**11 >= np.minimum(FAR_NS, times)).all()
            if operation == "all_reduce" and span.nodes <= 2:
                assert [reduction_ns(problem, size, devices) for size in sizes] == times


def test_changed_links_change_what_was_measured() -> None:
    """The operation takes 40 ns of latency and 60 ns of bytes; the minimum of its times is the latency."""
    rows: list[tuple[Operation, int, int, int, int]] = [("all_reduce", 4, 1, 8, 40), ("all_reduce", 4, 1, 100, 100)]
    problem = problem_with(*rows)
    for bandwidth, latency, expected in ((2, 1, 40 + 30), (1, 0, 60), (Fraction(1, 2), 1, 40 + 120)):
        changed = with_network(problem, Fraction(bandwidth), Fraction(latency))
        assert all_reduce_ns(changed, 100, (0, 1, 2, 3)) == expected
    assert all_reduce_ns(with_network(problem, Fraction(2), link="n0"), 100, (0, 1, 2, 3)) == 100


def test_the_line_of_searches_meets_one_byte_and_all_gradients() -> None:
    problem = problem_with(("all_reduce", 4, 1, 100, 70), ("all_reduce", 4, 1, 300, 90))
    line = affine_all_reduce(problem, (0, 1, 2, 3))
    assert line.time_ns(400) == pytest.approx(all_reduce_ns(problem, 400, (0, 1, 2, 3)), abs=1)
    assert line.time_ns(1) == pytest.approx(70, abs=1)
    assert ceil(line.ns_per_byte * 400) == 31
