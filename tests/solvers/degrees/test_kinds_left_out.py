"""A plan for a cluster of several kinds of devices is never slower than one for a part of it without one kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
from open_requests import open_request
from random_requests import request_of

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.degrees.planned import keeping
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Result
from penstock.solvers.solve import choices, driver
from penstock.solvers.solve.searched import kinds_apart


def answer(problem: Problem) -> Result | None:
    solve = choices.solve if problem.choices or kinds_apart(problem) else driver.solve
    try:
        return solve(problem, "auto", effort="quick", workers=1)
    except UnsupportedRequest:
        return None


def mixed(seed: int) -> Problem | None:
    """Return a drawn request, every third one with degrees left open, if its devices are of several kinds."""
    problem = open_request(seed, sharded=seed % 2 == 0) if seed % 3 == 0 else request_of(seed)
    plain = problem.within is None and not problem.pins and not problem.codec
    return problem if plain and len({device.kind for device in problem.devices}) > 1 else None


def requests(seeds: range) -> Iterator[tuple[int, Problem]]:
    for seed in seeds:
        if (problem := mixed(seed)) is not None:
            yield seed, problem


def slower_than_a_part(problem: Problem) -> str | None:
    """Return both times where a part without one kind has a plan that the whole request does not have."""
    whole = answer(problem)
    kinds = sorted({device.kind for device in problem.devices})
    for kind in kinds:
        part = keeping(problem, [d for d, device in enumerate(problem.devices) if device.kind != kind])
        alone = answer(replace(part))
        if alone is None or alone.best is None:
            continue
        if whole is None or whole.best is None or whole.best.value_ns > alone.best.value_ns:
            return f"{whole and whole.best and whole.best.value_ns} ns, without {kind} {alone.best.value_ns}"
    return None


@pytest.mark.tier("ci")
def test_some_mixed_clusters_are_never_slower_than_a_part() -> None:
    slower = [slower_than_a_part(problem) for _, problem in islice(requests(range(40)), 6)]
    assert len(slower) == 6
    assert not any(slower), slower


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("first", range(40, 240, 40))
def test_mixed_clusters_are_never_slower_than_a_part(first: int) -> None:
    slower = {seed: slower_than_a_part(problem) for seed, problem in requests(range(first, first + 40))}
    assert len(slower) > 3
    assert not any(slower.values()), slower
