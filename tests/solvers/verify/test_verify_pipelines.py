"""The verifier on several pipelines: gradients are reduced by groups of layers that the same stages hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from problems import gpipe, make_problem

from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.verify.updates import groups_of
from penstock.solvers.verify.verifier import verify


def _good() -> tuple[Problem, Allocation, Orders, Timeline]:
    """Return two pipelines of unlike cuts: layers 0, 1 | 2 and 0 | 1, 2; two micro-batches each."""
    problem = make_problem([10, 12, 8], boundary_bytes=6, parameter_bytes=40, update_ns=3, shared=True)
    first = Pipeline((Stage(0, 1, (0,)), Stage(2, 2, (1,))), (0, 1))
    second = Pipeline((Stage(0, 0, (2,)), Stage(1, 2, (3,))), (2, 3))
    allocation = Allocation((first, second), 4)
    orders = gpipe(allocation)
    return problem, allocation, orders, simulate(problem, allocation, orders)


def test_a_good_plan_gives_no_sentence() -> None:
    assert verify(*_good()) == []


def test_layers_are_grouped_by_the_stages_that_hold_them() -> None:
    """By hand: cut after layer 0 and after layer 1."""
    _problem, allocation, _orders, timeline = _good()
    groups = [(group.first, group.last, group.stages, group.devices) for group in groups_of(allocation)]
    assert groups == [(0, 0, (0, 2), (0, 2)), (1, 1, (0, 3), (0, 3)), (2, 2, (1, 3), (1, 3))]
    assert sorted((each.stage, each.bucket) for each in timeline.reductions) == [(0, 0), (0, 1), (1, 0)]


def _reduction(timeline: Timeline, at: int, **changes: int) -> Timeline:
    reductions = sorted(timeline.reductions)
    reductions[at] = reductions[at]._replace(**changes)
    return replace(timeline, reductions=tuple(reductions))


TIMES: dict[str, tuple[Callable[[Timeline], Timeline], str]] = {
    "a group that is not reduced": (
        lambda t: replace(t, reductions=tuple(sorted(t.reductions)[1:])),
        "Stage 0 reduces buckets [1] instead of 2",
    ),
    "a reduction that nobody needs": (
        lambda t: replace(t, reductions=(*t.reductions, t.reductions[0]._replace(stage=2))),
        "Stage 2 reduces buckets",
    ),
    "one before the other pipeline's backward": (
        lambda t: _reduction(t, 2, start_ns=0, end_ns=40),
        "Bucket 0 of stage 1 starts at 0 ns, before it is ready",
    ),
    "one too short": (
        lambda t: _reduction(t, 0, end_ns=sorted(t.reductions)[0].start_ns + 1),
        "Bucket 0 of stage 0 takes 1 ns, not 40 ns",
    ),
    "a step before a group of another cut": (
        lambda t: replace(
            t, updates=tuple(each._replace(start_ns=0, end_ns=6) if each.stage == 3 else each for each in t.updates)
        ),
        "The optimizer step of stage 3 on n0/3 starts too early",
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_wrong_times_are_said(name: str) -> None:
    problem, allocation, orders, timeline = _good()
    change, sentence = TIMES[name]
    faults = verify(problem, allocation, orders, change(timeline))
    assert any(sentence in fault for fault in faults), faults


def test_a_step_waits_for_every_group_of_its_stage() -> None:
    problem, allocation, orders, timeline = _good()
    ends = {(each.stage, each.bucket): each.end_ns for each in timeline.reductions}
    step = next(each for each in timeline.updates if each.stage == 3)
    assert step.start_ns >= max(ends[0, 0], ends[1, 0])
    early = tuple(
        each._replace(start_ns=each.start_ns - 1, end_ns=each.end_ns - 1) if each.stage == 3 else each
        for each in timeline.updates
    )
    assert step.start_ns == max(ends[0, 0], ends[1, 0])
    assert any("stage 3" in fault for fault in verify(problem, allocation, orders, replace(timeline, updates=early)))


def test_a_device_of_two_pipelines_has_one_row_in_a_flushed_step() -> None:
    problem, allocation, _orders, timeline = _good()
    second = replace_device(allocation.pipelines[1], 1)
    shared = Allocation((allocation.pipelines[0], second), 4)
    assert verify(problem, shared, gpipe(shared), timeline) == ["Device n0/1 is in 2 rows."]


def replace_device(pipeline: Pipeline, device: int) -> Pipeline:
    """Return the pipeline with its last stage on another device."""
    return replace(pipeline, stages=(*pipeline.stages[:-1], replace(pipeline.stages[-1], devices=(device,))))


def test_micro_batches_of_pipelines_have_to_tile() -> None:
    problem, allocation, orders, timeline = _good()
    late = replace(allocation.pipelines[1], micro_batches=(3, 3))
    faults = verify(problem, Allocation((allocation.pipelines[0], late), 4), orders, timeline)
    assert faults == ["Pipeline 1 takes micro-batches 3 to 3, but 2 is the next."]
