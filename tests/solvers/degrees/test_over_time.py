"""Bytes held over time: against plans in no more memory than they take, all paths of a row, and by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import plan_lists
import pytest
from open_requests import open_request
from plan_lists import plans_of
from problems import make_problem, with_just_enough_memory

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.over_time import OVER_TIME, Prices, over_time_bound
from penstock.solvers.bounds.schedule_bound import MEMORY, request_bound
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.problem import Measured, Problem
from penstock.solvers.model.result import REQUEST_SCOPE, Candidate
from penstock.solvers.solve.choices import Searched

REQUESTS = 1200
LISTED = 5
"""Plans of each choice."""


@pytest.fixture(autouse=True)
def _short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_lists, "MISSES", 4)
    monkeypatch.setattr(plan_lists, "MOVES", 2)


def in_no_more_memory(problem: Problem, plan: Candidate) -> Problem:
    """The problem on devices with just what the plan takes; those that it leaves idle have no room at all."""
    needed = with_just_enough_memory(problem, plan.timeline)
    idle = set(range(problem.num_devices)) - set(plan.timeline.uses)
    devices = tuple(
        replace(device, memory_bytes=device.context_bytes + problem.memory.headroom_bytes) if number in idle else device
        for number, device in enumerate(needed.devices)
    )
    return replace(problem, devices=devices, _costs=problem._costs)


def compared(seed: int) -> Counter[str]:
    """How many plans of a request's choices were looked at, and of how many the bound is above that of the load."""
    met: Counter[str] = Counter()
    problem = replace(open_request(seed, experts=seed % 2 == 1), update_rules=frozenset({"synchronous"}))
    for choice in problem.choices:
        try:
            cells = contract(problem, choice)
        except UnsupportedRequest:
            continue
        for plan in plans_of(cells, seed, LISTED):
            tight = in_no_more_memory(cells, plan)
            found = over_time_bound(tight)
            assert found is not None
            assert found.bound_ns <= plan.value_ns, f"seed {seed}, {choice}: {plan.allocation}"
            before = request_bound(tight)
            assert before.bound_ns <= plan.value_ns, f"seed {seed}, {choice}, first backward: {plan.allocation}"
            met["plans"] += 1
            met["binding"] += found.bound_ns > request_bound(tight, fits=False).bound_ns
            met["before the first backward"] += before.method == MEMORY
    return met


@pytest.mark.parametrize("part", range(12))
def test_no_plan_is_quicker_in_the_memory_that_it_takes(part: int) -> None:
    met: Counter[str] = Counter()
    for seed in range(part, REQUESTS, 12):
        met += compared(seed)
    assert met["plans"] > 2 * REQUESTS // 12
    assert met["binding"] > met["plans"] // 50
    assert met["before the first backward"] > met["plans"] // 200


def rows_of(problem: Problem, cheaper: tuple[int, ...]) -> Problem:
    """The problem with costs of slices of 1, 2, … rows, which take these hundredths of the time of rows alone."""
    (alone,) = problem.measured["cpu"]

    def times(values: np.ndarray, rows: int) -> np.ndarray:
        return np.asarray(values * rows * cheaper[rows - 1] // 100)

    points = tuple(
        Measured(
            rows,
            times(alone.forward_ns, rows),
            times(alone.backward_ns, rows),
            times(alone.weight_ns, rows),
            alone.stash_bytes * rows,
            alone.workspace_bytes,
        )
        for rows in range(1, len(cheaper) + 1)
    )
    return replace(problem, measured={"cpu": points}, linear=False, _costs={})


def one_layer(memory_bytes: int) -> Problem:
    """One layer on one device, ten samples that keep 10 bytes each: 30 ns alone, 40 ns for two at once."""
    problem = make_problem(
        [15],
        [15],
        stash_bytes=[10],
        parameter_bytes=[0],
        nodes=(1,),
        memory_bytes=[memory_bytes],
        global_batch_size=10,
        micro_batch_sizes=(),
        recompute="never",
        count_buffers=False,
    )
    return rows_of(problem, (100, 67))


def test_small_slices_are_all_that_has_room() -> None:
    roomy, tight = over_time_bound(one_layer(1000)), over_time_bound(one_layer(10))
    assert roomy is not None
    assert tight is not None
    # Alone a sample takes 30 ns. Of two at once each takes 20 ns, and both keep 20 bytes, twice the room, for 40 ns.
    assert 199 <= roomy.bound_ns <= 200
    assert 299 <= tight.bound_ns <= 300
    assert request_bound(one_layer(10), fits=False).bound_ns == 200
    assert tight.scope == REQUEST_SCOPE
    assert tight.covers.memory == {"fits"}
    assert over_time_bound(replace(one_layer(10), update_rules=frozenset({"weight_stashing"}))) is None


def drawn(seed: int) -> Problem:
    """Three layers on two devices, slices of up to three rows."""
    draw = np.random.default_rng(seed)
    problem = make_problem(
        draw.integers(10, 90, 3).tolist(),
        draw.integers(10, 90, 3).tolist(),
        stash_bytes=draw.integers(1, 60, 3).tolist(),
        parameter_bytes=draw.integers(0, 20, 3).tolist(),
        workspace_bytes=int(draw.integers(0, 9)),
        update_ns=int(draw.integers(0, 9)),
        nodes=(2,),
        memory_bytes=int(draw.integers(60, 400)),
        global_batch_size=int(draw.integers(3, 9)),
        micro_batch_sizes=(),
        recompute=str(draw.choice(["never", "auto"])),  # type: ignore[arg-type]
    )
    return rows_of(problem, (100, 80, 70))


def every_path(problem: Problem, price: float) -> float:
    """What a row costs at least, over all sizes in each layer and all layers that recompute, one by one."""
    least = float("inf")
    ways = (False, True) if problem.recompute == "auto" else (False,)
    gradients = np.diff(problem.trainable_bytes) * problem.memory.gradient_factor
    for sizes, again in product(product((1, 2, 3), repeat=3), product(ways, repeat=3)):
        work = area = 0.0
        for layer, size in enumerate(sizes):
            own = problem.costs("cpu", size)
            forward, backward, stash = (
                float(np.diff(each)[layer]) for each in (own.forward_ns, own.backward_ns, own.stash_bytes)
            )
            later = 0.0
            for other in range(layer + 1, 3):
                costs = problem.costs("cpu", sizes[other])
                there, back, weight = (
                    float(np.diff(each)[other]) for each in (costs.forward_ns, costs.backward_ns, costs.weight_ns)
                )
                later += there + max(0.0, back - weight - 1)
            work += (forward * (1 + again[layer]) + backward) / size
            area += (0 if again[layer] else stash) * (forward + later) / size + stash * backward / size
            area += (own.workspace_bytes[layer] * (forward + backward) + gradients[layer] * backward) / size
        least = min(least, work + price * area)
    return least


@pytest.mark.parametrize("seed", range(30))
def test_labels_find_the_cheapest_of_all_paths(seed: int) -> None:
    problem = drawn(seed)
    for price in (0.0, 0.0003, 0.002, 0.02):
        assert Prices(problem)._least_ns(price) == pytest.approx(every_path(problem, price), rel=1e-9)


def test_a_choice_asks_for_tighter_bounds_only_as_far_as_a_time_needs_them() -> None:
    problem = one_layer(10)
    each = Searched(problem, problem.choices[0] if problem.choices else None, 1, 100)  # type: ignore[arg-type]
    each.__dict__["problem"] = problem
    assert not each.is_below(100)
    assert each.by_load
    assert not each.is_below(250)
    assert each.bound.method == OVER_TIME
    assert each.tightest
