"""The bound of split backwards on stages apart: never above the optimum of any plan, and often equal to the least."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import make_problem
from split_plans import cabled_request, every_plan, optima, split_request

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.contiguous import stage_costs
from penstock.solvers.bounds.contiguous.least_bound import least_bound_ns
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.coverage import features_of_candidate
from penstock.solvers.bounds.schedule_bound import request_bound, split_apart_bound
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.solve import driver

pytestmark = pytest.mark.tier("ci")

EFFORT = 10**9


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("block", range(4))
def test_never_above_the_optimum_of_any_plan(block: int) -> None:
    """Every plan of tiny requests, its split backwards ordered by CP-SAT; a bound leaves none of them out."""
    equal = seen = 0
    for seed in range(16 * block, 16 * block + 16):
        problem = split_request(seed)
        space = Space.of(problem)
        if space.count() > 12:
            continue
        bound = least_bound_ns(problem, EFFORT, split=True)
        least = min((value for _plan, value in optima(problem, every_plan(space))), default=None)
        if least is not None:
            assert bound is not None
            assert bound <= least, seed
            equal += bound == least
            seen += 1
    assert equal > seen // 3


@pytest.mark.parametrize("seed", [359, 370, 479, 557, 722])
def test_idle_time_goes_with_the_quicker_size(seed: int) -> None:
    """Micro-batches of two sizes: idle time next to the work of both sizes is a bound too high for these requests."""
    problem = split_request(seed)
    bound = least_bound_ns(problem, EFFORT, split=True)
    assert bound is not None
    assert bound <= min(value for _plan, value in optima(problem, every_plan(Space.of(problem))))


def test_a_device_s_own_cable_carries_all_transfers_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages in the middle of three receive forwards and gradients over one cable: sometimes that raises the bound."""

    def none(*tables: np.ndarray) -> np.ndarray:
        return np.zeros_like(tables[3])

    monkeypatch.setattr(Links, "borders", [])  # what groups of devices carry proves the same here
    raised = 0
    for seed in range(24):
        problem = cabled_request(seed)
        bound = least_bound_ns(problem, EFFORT, split=True)
        with monkeypatch.context() as patched:
            patched.setattr(stage_costs, "carried_ns", none)
            without = least_bound_ns(problem, EFFORT, split=True)
        assert bound is not None
        assert without is not None
        assert bound >= without
        if bound > without:
            raised += 1
            assert bound <= min(value for _plan, value in optima(problem, every_plan(Space.of(problem)))), seed
    assert raised >= 2


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(40_000, 40_012))
def test_never_above_what_planners_find(seed: int) -> None:
    """Larger requests: zero-bubble orders, and whole backwards, which the bound covers as well."""
    problem = split_request(seed, 6, 4)
    bound = split_apart_bound(problem)
    for name in ("zero-bubble", "relax", "dapple", "gpipe"):
        try:
            best = driver.solve(problem, name, max_plans=12).best
        except UnsupportedRequest:
            continue
        if best is not None and bound is not None and features_of_candidate(problem, best) <= bound.covers:
            assert bound.bound_ns <= best.value_ns, name


@pytest.mark.tier("quick")
def test_weight_gradients_fill_a_line_of_stages_but_for_its_head() -> None:
    """Four equal layers on a slow network: only a line of stages is possible, of which the last one begins after 30."""
    problem = make_problem(
        [10] * 4,
        [20] * 4,
        0,
        10**6,
        weight_ns=[10] * 4,
        nodes=(1,) * 4,
        global_batch_size=8,
        channel="none",
    )
    bound = split_apart_bound(problem)
    assert bound is not None
    assert request_bound(problem).bound_ns == 240
    assert bound.bound_ns == 30 + 8 * 30
    assert "split" in bound.covers.backward
    whole = least_bound_ns(problem, EFFORT)
    assert whole == 8 * 30 + 3 * 30


def test_little_memory_leaves_no_weight_gradients_to_fill_with() -> None:
    """Two stages that hold one micro-batch each: 10 + 10 + 10 + 10 around, and its weight gradient, four times."""
    problem = make_problem(
        [10, 10],
        [20, 20],
        parameter_bytes=[0, 0],
        weight_ns=[10, 10],
        stash_bytes=10,
        nodes=(1, 1),
        memory_bytes=10,
        count_buffers=False,
        global_batch_size=4,
        channel="none",
    )
    alone = replace(problem, micro_batch_sizes=(1,))
    bound = least_bound_ns(alone, EFFORT, split=True)
    least = min(value for _plan, value in optima(alone, every_plan(Space.of(alone))))
    assert bound is not None
    assert 4 * 40 <= bound <= least
