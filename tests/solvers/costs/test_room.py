"""Memory that a stage holds and needs, and the micro-batches that fit: counted by hand from the profile's bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from problems import chain, make_problem

from penstock.solvers.costs.memory import (
    activation_bytes,
    free_bytes,
    micro_batches_that_fit,
    static_bytes,
    step_bytes,
    transient_bytes,
)
from penstock.solvers.costs.memory_budget import needed_bytes, with_room
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.solve.driver import solve

ROWS = 2
FIRST, MIDDLE, LAST = (Stage(i, i, (i,)) for i in range(3))
BESIDE = 9 + 6
"""Bytes on every device beside its stages: the context, and the headroom."""


def _problem(**changes: Any) -> Problem:
    """Return three layers, micro-batches of two samples, and sizes that all differ."""
    settings: dict[str, Any] = {
        "boundary_bytes": [5, 7],
        "backward_bytes": [3, 11],
        "parameter_bytes": [100, 200, 300],
        "stash_bytes": [20, 30, 40],
        "workspace_bytes": [1, 2, 4],
        "state_factor": 2,
        "context_bytes": 9,
        "headroom_bytes": 6,
        "global_batch_size": 4,
        "micro_batch_sizes": (ROWS,),
        "nodes": (3,),
    }
    return make_problem([10, 10, 10], **(settings | changes))


@pytest.mark.parametrize(
    ("stage", "counted", "expected"),
    [
        pytest.param(FIRST, True, 2 * 1 + 2 * (5 + 3), id="first"),
        pytest.param(MIDDLE, True, 2 * 2 + 2 * (5 + 3) + 2 * (7 + 11), id="middle"),
        pytest.param(LAST, True, 2 * 4 + 2 * (7 + 11), id="last"),
        pytest.param(MIDDLE, False, 2 * 2, id="without-buffers"),
        pytest.param(replace(MIDDLE, devices=(1, 2)), True, 2 + (5 + 3) + (7 + 11), id="replicas-share-rows"),
        pytest.param(Stage(1, 1, (1, 2), "round_robin"), True, 4 + 16 + 36, id="replicas-in-turn"),
    ],
)
def test_what_passes_through_a_stage(stage: Stage, counted: bool, expected: int) -> None:
    assert transient_bytes(_problem(count_buffers=counted), stage, ROWS) == expected


@pytest.mark.parametrize(
    ("stage", "counted", "expected"),
    [(FIRST, True, 40), (MIDDLE, True, 60 + 10), (MIDDLE, False, 60), (LAST, True, 80 + 14)],
)
def test_what_a_micro_batch_in_flight_keeps(stage: Stage, counted: bool, expected: int) -> None:
    assert activation_bytes(_problem(count_buffers=counted), stage, ROWS) == expected


@pytest.mark.parametrize(("more", "fit"), [(-1, 0), (0, 0), (69, 0), (70, 1), (139, 1), (140, 2)])
def test_as_many_micro_batches_fit_as_their_bytes(more: int, fit: int) -> None:
    """The middle layer has parameters, gradients and two states, and 56 bytes pass through it; each keeps 70."""
    problem = _problem(memory_bytes=BESIDE + 4 * 200 + 56 + more)
    assert static_bytes(problem, MIDDLE) == (200, 200, 400)
    assert micro_batches_that_fit(problem, MIDDLE, ROWS) == fit


@pytest.mark.parametrize(("step", "fit"), [(0, 1), (56, 1), (126, 1), (127, 0)])
def test_none_fits_where_the_step_alone_does_not(step: int, fit: int) -> None:
    """Nothing is in flight at the step, so it may use the memory of one micro-batch and of passing messages."""
    problem = _problem(memory_bytes=BESIDE + 4 * 200 + 56 + 70, update_workspace_bytes=[999, step, 999])
    assert micro_batches_that_fit(problem, MIDDLE, ROWS) == fit


@pytest.mark.parametrize(
    ("replicas", "rules", "expected"),
    [
        (1, {}, 16),
        (3, {}, 16),
        (3, {"shard_states": True}, 6),
        (3, {"shard_states": True, "update_in_turn": True}, 11),
        (1, {"update_in_turn": True}, 11),
    ],
)
def test_what_a_step_needs(replicas: int, rules: dict[str, bool], expected: int) -> None:
    problem = _problem(update_workspace_bytes=[5, 11, 999], **rules)
    assert step_bytes(problem, Stage(0, 1, tuple(range(replicas)))) == expected
    assert step_bytes(_problem(**rules), Stage(0, 1, tuple(range(replicas)))) == 0


@pytest.mark.tier("ci")
@pytest.mark.parametrize(("step", "status"), [(100, "feasible"), (122, "none_found")])
def test_a_plan_whose_step_alone_does_not_fit_is_refused(step: int, status: str) -> None:
    """A stage needs 300 of 421 bytes all the time and at its step."""
    problem = make_problem(
        [10, 10],
        [20, 20],
        parameter_bytes=100,
        state_factor=1,
        update_ns=3,
        update_workspace_bytes=step,
        nodes=(2,),
        memory_bytes=421,
    )
    assert solve(problem, "gpipe").status.value == status


def test_what_keeps_nothing_fits_without_limit() -> None:
    assert micro_batches_that_fit(_problem(stash_bytes=0), FIRST, ROWS) == 2**31
    assert micro_batches_that_fit(_problem(stash_bytes=1, count_buffers=False), FIRST, ROWS) < 2**40


def test_a_backward_needs_the_stash_and_what_passes() -> None:
    problem = _problem()
    for stage in (MIDDLE, replace(MIDDLE, recompute=((1, 1),))):
        assert needed_bytes(problem, stage, ROWS) == 800 + 60 + 4
        assert needed_bytes(problem, stage, ROWS, buffers=True) == 800 + 60 + 56
    assert free_bytes(_problem(memory_bytes=1000), [0]) == 1000 - BESIDE


@pytest.mark.parametrize(
    ("memory", "holders"),
    [
        pytest.param((458, 2000, 2000), (0, 1), id="enough"),
        pytest.param((458, 1999, 2000), (0, 2), id="a-byte-less"),
        pytest.param((2000, 457, 458), (2, 0), id="all-in-other-places"),
        pytest.param((441, 1984, 442), (2, 1), id="without-room-for-buffers"),
        pytest.param((400, 400, 401), (0, 1), id="nowhere"),
    ],
)
def test_devices_change_places_where_one_has_not_enough(memory: tuple[int, ...], holders: tuple[int, int]) -> None:
    """By hand: the first layer needs 400 + 40 + 18 bytes, the others 1836 + 140 + 24; without buffers 442 and 1984."""
    problem = _problem(
        parameter_bytes=[100, 200, 259],
        memory_bytes=[BESIDE + each for each in memory],
    )
    allocation = chain([(1, [0]), (2, [1])], 2)
    assert needed_bytes(problem, allocation.stages[0], ROWS, buffers=True) == 458
    assert needed_bytes(problem, allocation.stages[1], ROWS, buffers=True) == 2000
    assert [stage.devices for stage in with_room(problem, allocation).stages] == [(d,) for d in holders]
