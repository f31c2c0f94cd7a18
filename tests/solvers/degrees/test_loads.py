"""Loads of choices, computed without their problems, against the bounds of these problems."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from open_requests import open_request

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster, profile
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.degrees.contract import contract
from penstock.solvers.degrees.loads import Loads
from penstock.solvers.degrees.planned import planned_cells
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem

REQUESTS = 300


SHARDED = 300


def refusal(make: Callable[[Problem, Choice], object], problem: Problem, choice: Choice) -> str | None:
    try:
        make(problem, choice)
    except UnsupportedRequest as refused:
        return str(refused)
    return None


@pytest.mark.tier("nightly")
def test_no_load_is_above_the_bound_of_its_choice_and_the_same_choices_are_refused() -> None:
    looked_at = refused = 0
    requests = [open_request(seed) for seed in range(REQUESTS)]
    for seed, problem in enumerate([*requests, *(open_request(seed, sharded=True) for seed in range(SHARDED))]):
        loads = Loads(problem)
        for choice in problem.choices:
            why = refusal(contract, problem, choice)
            assert refusal(planned_cells, problem, choice) == why, f"seed {seed}, {choice}"
            if why is not None:
                refused += 1
                continue
            cells, contracted = planned_cells(problem, choice), contract(problem, choice)
            assert len(cells) == contracted.num_devices
            assert loads.least_ns(choice, cells) <= request_bound(contracted).bound_ns, f"seed {seed}, {choice}"
            looked_at += 1
    assert looked_at > REQUESTS
    assert refused > REQUESTS // 10


def test_a_load_without_collectives_is_all_but_the_updates_of_the_bound() -> None:
    problem = to_problem(
        PlanRequest(
            profile=profile("llama-3-8b"),
            topology=cluster("1x8xH100"),
            global_batch_size=64,
            degrees="auto",
            sharding="none",
        )
    )
    choice = problem.choices[0]
    assert choice.degrees == Degrees()
    bound_ns = request_bound(contract(problem, choice)).bound_ns
    assert 0.98 * bound_ns < Loads(problem).least_ns(choice, planned_cells(problem, choice)) <= bound_ns
