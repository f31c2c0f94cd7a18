"""Requests that leave degrees open get plans as good as the same requests with any choice named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

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


KINDS: tuple[dict[str, bool], ...] = ({}, {"experts": True}, {"sharded": True})


def worse(requests: Iterable[tuple[int, dict[str, bool]]], effort: str) -> Iterator[str]:
    """Yield the requests whose plan takes longer than the plan of one of their choices, named."""
    for seed, kind in requests:
        problem = open_request(seed, **kind)
        named = [best_ns(replace(problem, choices=(choice,)), effort) for choice in problem.choices]
        times = [each for each in named if each is not None]
        open_ns = best_ns(problem, effort)
        if times and (open_ns is None or open_ns > min(times)):
            yield f"seed {seed}, {kind}: {open_ns} ns, named {named}"


@pytest.mark.tier("ci")
def test_a_request_whose_best_choice_planner_even_ranks_last() -> None:
    assert not list(worse([(1, {"sharded": True})], "quick"))


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("first", range(0, 68, 4))
def test_open_requests_are_answered_as_well_as_named_ones(first: int) -> None:
    """The parameters cover 204 requests."""
    assert not list(worse(product(range(first, first + 4), KINDS), "quick"))
