"""Requests that leave degrees open get plans as good as the same requests with any choice named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from open_requests import open_request

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.problem import Problem
from penstock.solvers.solve import choices


def best_ns(problem: Problem, effort: str) -> int | None:
    try:
        best = choices.solve(problem, "auto", effort=effort, workers=1).best
    except UnsupportedRequest:
        return None
    return None if best is None else best.value_ns


def worse(seeds: range, effort: str) -> Iterator[str]:
    """Yield the requests whose plan takes longer than the plan of one of their choices, named."""
    for seed in seeds:
        for kind in ({}, {"experts": True}, {"sharded": True}):
            problem = open_request(seed, **kind)
            named = [best_ns(replace(problem, choices=(choice,)), effort) for choice in problem.choices]
            times = [each for each in named if each is not None]
            open_ns = best_ns(problem, effort)
            if times and (open_ns is None or open_ns > min(times)):
                yield f"seed {seed}, {kind}: {open_ns} ns, named {named}"


@pytest.mark.tier("ci")
def test_some_open_requests_are_answered_as_well_as_named_ones() -> None:
    """The two seeds are of requests where planner ``even`` ranks the best choice last."""
    assert not list(worse(range(1, 2), "quick"))
    assert not list(worse(range(5, 6), "quick"))


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("first", range(0, 68, 4))
def test_open_requests_are_answered_as_well_as_named_ones(first: int) -> None:
    """204 requests."""
    assert not list(worse(range(first, first + 4), "quick"))
