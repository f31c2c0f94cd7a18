"""Pins: every planner keeps them with the least change, or gives the reason why no planner can."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from problems import OF_ANY_TRAINER, make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.pins import broken_pin, keep_pins, keep_pins_of_schedule, unkeepable_pin
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.trainer_limits import Span, Within, misnumbered
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.judging import Judge


def pinned(*pins: tuple[int, int, set[int]], layers: int = 6, **changes: object) -> Problem:
    problem = make_problem([10] * layers, boundary_bytes=1, nodes=(2, 2), global_batch_size=8, **changes)  # type: ignore[arg-type]
    return replace(problem, pins=tuple(Pin(first, last, frozenset(devices)) for first, last, devices in pins))


def straight(*cuts: int, layers: int = 6) -> Allocation:
    edges = [0, *cuts, layers]
    stages = tuple(Stage(low, high - 1, (d,)) for d, (low, high) in enumerate(pairwise(edges)))
    return single_pipeline(stages, 4)


def test_nothing_changes_where_pins_are_kept() -> None:
    problem = pinned((0, 1, {0, 3}))
    assert keep_pins(problem, straight(2, 4)) == straight(2, 4)


def test_devices_change_places() -> None:
    problem = pinned((0, 1, {2}), (4, 5, {0}))
    kept = keep_pins(problem, straight(2, 4))
    assert kept is not None
    assert [stage.devices for stage in kept.stages] == [(2,), (1,), (0,)]


def test_a_move_is_found_whenever_there_is_one() -> None:
    draw = np.random.default_rng(7)
    moves = 0
    for _ in range(200):
        problem = pinned(
            *((at, at, set(draw.choice(4, size=int(draw.integers(1, 4)), replace=False))) for at in range(0, 6, 2))
        )
        allocation = straight(2, 4)
        possible = any(
            broken_pin(problem, single_pipeline(_renumbered(allocation, order), 4)) is None
            for order in permutations(range(4))
        )
        kept = keep_pins(problem, allocation)
        moves += possible
        if possible:
            assert kept is not None
            assert [(s.first, s.last) for s in kept.stages] == [(s.first, s.last) for s in allocation.stages]
        if kept is not None:
            assert broken_pin(problem, kept) is None
    assert 0 < moves < 200


def _renumbered(allocation: Allocation, order: tuple[int, ...]) -> tuple[Stage, ...]:
    return tuple(replace(stage, devices=tuple(order[d] for d in stage.devices)) for stage in allocation.stages)


def test_a_stage_is_cut_where_no_device_may_hold_all_of_it() -> None:
    problem = pinned((0, 2, {0}), (3, 5, {2, 3}))
    whole = single_pipeline((Stage(0, 5, (0, 1, 2, 3)),), 2)
    kept = keep_pins(problem, whole)
    assert kept is not None
    assert [(s.first, s.last, s.devices) for s in kept.stages] == [(0, 2, (0,)), (3, 5, (2, 3))]


@pytest.mark.tier("ci")
def test_pins_that_nothing_can_keep_are_named() -> None:
    assert "none in common" in (unkeepable_pin(pinned((0, 2, {0}), (2, 3, {1}))) or "")
    tight = pinned((2, 2, {0}), (3, 3, {1}), cuttable=[True, True, False, True, True])
    assert "cuttable" in (unkeepable_pin(tight) or "")
    result = solve(tight, "auto")
    assert result.status == "infeasible"
    assert "cuttable" in result.sentence


def test_a_fixed_schedule_follows_its_devices() -> None:
    problem = pinned((0, 1, {3}))
    allocation = straight(2, 4)
    orders = early_backward(problem, allocation, warmup=(3, 2, 1))
    kept = keep_pins_of_schedule(problem, allocation, orders)
    assert kept is not None
    moved, schedule = kept
    assert moved.stages[0].devices == (3,)
    assert [row.devices for row in schedule.rows] == [stage.devices for stage in moved.stages]  # type: ignore[union-attr]


@pytest.mark.cases(6)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("name", sorted(name for name, p in OF_ANY_TRAINER.items() if "synchronous" in p.supports))
def test_every_planner_keeps_pins(name: str) -> None:
    problem = pinned((0, 0, {2, 3}), (5, 5, {0, 1}))
    if name == "chimera":  # its first and last stages lie on the same devices
        with pytest.raises(UnsupportedRequest, match="keeps the pins"):
            solve(problem, name)
        return
    result = solve(problem, name)
    if result.best is None:
        assert "pinned" in result.sentence
    else:
        assert broken_pin(problem, result.best.allocation) is None


def test_pins_do_not_renumber_a_targets_ranks() -> None:
    """Exchanged devices keep the pin, but ranks are numbered stage after stage: with a target that is no plan."""
    limits = Within("deepspeed", ("early-backward",), False, (), False, Span(0, 3), (True,) * 3)
    proposal = Proposal(straight(2, layers=4), ("early-backward",), "A")
    answers = {}
    for within, device in product((None, limits), (0, 1)):
        judge = Judge(Setting(replace(pinned((0, 1, {device}), layers=4), within=within)))
        judge.judge_all("test", [proposal])
        best = judge.best
        answers[within is None, device] = None if best is None else [stage.devices for stage in best.allocation.stages]
    unmoved, exchanged = [(0,), (1,)], [(1,), (0,)]
    assert answers == {(True, 0): unmoved, (True, 1): exchanged, (False, 0): unmoved, (False, 1): None}
    assert misnumbered(pinned(layers=4).nodes(), straight(2, layers=4).stages) is None
