"""Explanations as documents: the sides of a comparison, and the change that helps most."""

from __future__ import annotations

import pytest
from problems import early_backward, make_problem, straight

from penstock.convert.explanations import most_helpful, to_layout
from penstock.solvers.explanation.binding import Sensitivity
from penstock.solvers.explanation.other_layout import Layout, compare_layout
from penstock.solvers.explanation.what_if import Row
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan


def request(forward_ns: int = 10) -> Problem:
    """Build two layers, each of which takes three times the forward per device for each of two micro-batches."""
    return make_problem([forward_ns] * 2, boundary_bytes=5, parameter_bytes=10, nodes=(2,), global_batch_size=2)


def planned(problem: Problem) -> JudgedPlan:
    plan = straight(problem, 2)
    orders = early_backward(plan)
    return JudgedPlan.of("test", plan, orders, simulate(problem, plan, orders))


def test_a_side_has_what_its_path_waits_for() -> None:
    """Two stages: 5 bytes at 1 GB/s there and back. One stage on two replicas: 2 × 1 ÷ 2 of 20 bytes are summed."""
    ours = planned(request())
    compared = to_layout(request(), ours, compare_layout(request(), ours, Layout((), replicas=(2,))))
    assert compared.theirs is not None
    assert (compared.ours.transfers_ns, compared.ours.all_reduces_ns) == (5 + 5, 0)
    assert (compared.theirs.transfers_ns, compared.theirs.all_reduces_ns) == (0, 20)


def changed(name: str, forward_ns: int | None) -> Row:
    return Row(name, name, "re-timed", None if forward_ns is None else planned(request(forward_ns)), 0, 0)


@pytest.mark.parametrize(
    ("times", "link_ns", "begin"),
    [
        pytest.param({"bandwidth=2": 5, "memory=2": 8}, 99, "bandwidth=2", id="the-least-time-of-two"),
        pytest.param({"memory=2": None, "bandwidth=2": 8}, 99, "bandwidth=2", id="one-does-not-fit"),
        pytest.param({"bandwidth=2": 8}, 10, "a faster link", id="a-link-helps-more"),
        pytest.param({"kind=H100": 1}, 99, "", id="not-a-realistic-change"),
        pytest.param({"bandwidth=2": 10, "memory=2": 12}, 999, "", id="none-is-better"),
        pytest.param({}, 999, "", id="nothing-was-changed"),
    ],
)
def test_the_change_that_helps_most_is_named(times: dict[str, int | None], link_ns: int, begin: str) -> None:
    plan = planned(request())
    rows = [changed(name, forward_ns) for name, forward_ns in times.items()]
    sensitivities = [
        Sensitivity("link", "a faster link", link_ns, "re-timed"),
        Sensitivity("latency", "no latency", 1, "re-timed"),
    ]
    least_ns = min([link_ns, *(row.plan.value_ns for row in rows if row.plan is not None)])
    sentence = most_helpful(plan, rows, sensitivities)
    assert sentence.startswith(begin)
    assert sentence.endswith(f": {100 * (1 - least_ns / plan.value_ns):.1f} % less time") == (begin != "")
