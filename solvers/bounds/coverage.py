"""The features of plans, in the terms of ``schemas.coverage``: of one plan, of all plans of a request, of searches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from penstock.schemas.coverage import (
    CLASS_SCOPE,
    EVEN,
    EVERY_PLAN,
    OVER_ALL,
    REQUEST_SCOPE,
    Covers,
    Scope,
    Values,
    every,
    ranges_of,
)
from penstock.schemas.program import INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.bounds.one_pipeline.layer_costs import numbers_of
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.micro_batches import batches_tried
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.model.schedule import STEP, Orders, Schedule
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.trainer_orders import IN_A_V, ONE_STAGE

_KINDS = STEP + 1
Kinds = set[tuple[int, int]]
"""Pairs of an operation's kind and its stage."""


def features_of(
    problem: Problem,
    allocation: Allocation,
    schedule: Schedule,
    update_rule: UpdateRule = "synchronous",
    overlap: bool = True,
    fits: bool = True,
) -> Covers:
    """Return the class of the plans with the same features as this plan; ``fits``: whether it fits into memory."""
    stages = allocation.stages
    devices = [device for stage in stages for device in stage.devices]
    kinds = _kinds(schedule)
    split = any(kind in (INPUT, WEIGHT) for kind, _stage in kinds)
    in_turn = any(stage.dispatch == "round_robin" and stage.replicas > 1 for stage in stages)
    in_order = all(tuple(sorted(stage.devices)) == stage.devices for stage in stages)
    within = problem.within
    kept = within is not None and within.keeps(allocation, schedule.name, problem.global_batch_size)
    return Covers(
        pipelines=_one("one" if len(allocation.pipelines) == 1 else "several"),
        devices=_one("one_stage" if len(set(devices)) == len(devices) else "several_stages"),
        dispatch=_one("round_robin" if in_turn else "rows"),
        backward=_one("split" if split else "whole"),
        recompute=frozenset(_recomputed(stage) for stage in stages),
        recompute_modules=_one("some" if any(stage.modules for stage in stages) else "none"),
        recompute_runs=_where_recomputed(stages, kinds),
        codecs=_one("fp16s" if any(True in stage.coded for stage in stages) else "none"),
        update_rule=_one(update_rule),
        all_reduce=_one("overlapped" if overlap else "after_backward"),
        replica_order=_one("cluster" if in_order else "other"),
        memory=_one("fits" if fits else "exceeds"),
        pins=_one("kept" if broken_pin(problem, allocation) is None else "broken"),
        trainer=_one(within.trainer if within is not None and kept else "none"),
        degrees=_degrees(problem),
        order=_one(schedule.name),
        micro_batches=ranges_of([allocation.num_micro_batches]),
    )


def features_of_candidate(problem: Problem, plan: JudgedPlan) -> Covers:
    """Return ``features_of`` for a judged plan that fits."""
    return features_of(problem, plan.allocation, plan.schedule, plan.update_rule, plan.overlap_all_reduce)


def allowed(problem: Problem) -> Covers:
    """Return the class of all plans that a request allows, whichever planner makes them."""
    modes = {"none"} if problem.recompute == "never" else {"none", "stage", "segments"}
    if problem.recompute == "always" and problem.within is None:
        modes.remove("none")  # a trainer may not be able to recompute all layers (``within.span``)
    limits = {} if problem.within is None else {"trainer": _one(problem.within.trainer)} | _of_trainer(problem)
    whole = every("pipelines", "devices", "dispatch", "backward", "recompute_runs", "replica_order")
    return Covers(
        **{  # type: ignore[arg-type]
            **whole,
            "recompute": frozenset(modes),
            "recompute_modules": modules_known(problem) if problem.recompute == "auto" else _one("none"),
            "all_reduce": _reductions(problem),
            "codecs": frozenset({"none", "fp16s"} if problem.codec else {"none"}),
            "update_rule": frozenset(problem.update_rules),
            "trainer": None,
            "degrees": frozenset(map(_named, problem.choices)) or _degrees(problem),
            "order": None,
            "micro_batches": allowed_numbers(problem),
            **limits,
        }
    )


def _of_trainer(problem: Problem) -> dict[str, Values]:
    """Return the values to which a target limits its plans, whatever the request allows (``within``)."""
    assert problem.within is not None
    limits = {name: _one(value) for name, value in (("pipelines", "one"), ("dispatch", "rows"), ("codecs", "none"))}
    orders = frozenset(problem.within.schedules)
    if orders <= frozenset(ONE_STAGE):
        limits["devices"] = _one("one_stage")
    if not orders & frozenset(IN_A_V):
        limits["backward"] = _one("whole")
    return limits | {"order": orders}


def allowed_numbers(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Return the numbers of micro-batches that a request allows, as ranges."""
    merged: list[tuple[int, int]] = []
    for least, most in numbers_of(problem):
        if merged and merged[-1][1] == least - 1:
            merged[-1] = merged[-1][0], most
        else:
            merged.append((least, most))
    return tuple(merged)


def scope_of(problem: Problem, covers: Covers) -> Scope:
    """Return whether a bound covers every plan that the request allows, or only some of them."""
    return REQUEST_SCOPE if allowed(problem) <= covers else CLASS_SCOPE


def class_bound(problem: Problem, covers: Covers, bound_ns: int, method: str) -> Bound:
    """Return a bound on a class of a request's plans, with the scope that follows from the request."""
    return Bound(scope_of(problem, covers), covers, bound_ns, method)


# ---- classes that bounds cover and searches stay within --------------------------------------------------------------


def every_plan(problem: Problem) -> Covers:
    """Return all plans at the problem's degrees that keep the pins, under the request's rules.

    They have up to the request's largest number of micro-batches.
    """
    least = min(number for number, _most in allowed_numbers(problem))
    numbers = ((least, max(least, problem.global_batch_size)),)
    rules = frozenset(problem.update_rules)
    at = _degrees(problem)
    return replace(
        EVERY_PLAN,
        recompute_modules=modules_known(problem),
        update_rule=rules,
        degrees=at,
        micro_batches=numbers,
        pins=_one("kept"),
    )


def fitting(problem: Problem) -> Covers:
    """Return the plans of ``every_plan`` that fit into memory."""
    return replace(every_plan(problem), memory=_one("fits"))


def whatever_is_pinned(bound: Bound) -> Bound:
    """Return a bound that was proven without the request's pins: it covers plans that break them as well."""
    return replace(bound, covers=replace(bound.covers, pins=every("pins")["pins"]))


def one_pipeline(problem: Problem, *, split: bool = False) -> Covers:
    """Return the flushed plans of one pipeline, with replicas by rows, whole backwards and nothing encoded.

    Devices may hold several stages, which may recompute. ``split``: the same plans with backwards whole or split.
    """
    free = every("devices", "recompute", "recompute_runs", "all_reduce", "replica_order", "memory")
    return Covers(
        **free,
        backward=_backwards(split),
        recompute_modules=modules_known(problem),
        trainer=None,
        degrees=_degrees(problem),
        order=None,
        micro_batches=allowed_numbers(problem),
    )


def stages_apart(problem: Problem) -> Covers:
    """Return the plans of ``one_pipeline`` whose stages share no devices, and recompute whole or not at all.

    Their numbers of micro-batches are the numbers that planners of one pipeline try.
    """
    return Covers(
        **every("recompute_runs", "all_reduce", "replica_order"),
        recompute=frozenset({"none", "stage"}),
        trainer=None,
        degrees=_degrees(problem),
        order=None,
        micro_batches=ranges_of(batch.num_micro_batches for batch in batches_tried(problem)),
    )


def planned_apart(problem: Problem) -> Covers:
    """Return the plans of ``stages_apart`` that recompute as the request says: all plans that their planners make."""
    again = _one("in_backward") if problem.recompute == "never" else every("recompute_runs")["recompute_runs"]
    return replace(stages_apart(problem), recompute=_modes(problem), recompute_runs=again)


def _backwards(split: bool) -> Values:
    return every("backward")["backward"] if split else _one("whole")


def modules_known(problem: Problem) -> Values:
    """Return whether plans may recompute single modules: where the profile knows their costs."""
    degrees = {choice.degrees for choice in problem.choices}
    measured = problem.modules or any(variant.modules for variant in problem.variants if variant.degrees in degrees)
    return every("recompute_modules")["recompute_modules"] if measured else _one("none")


def _modes(problem: Problem) -> Values:
    """Return the recomputation modes of stages that planners make."""
    return frozenset({"never": {"none"}, "always": {"stage"}}.get(problem.recompute, {"none", "stage"}))


def contiguous(problem: Problem, numbers: Iterable[int], *, split: bool = False) -> Covers:
    """Return the plans of ``one_pipeline`` whose stages share no devices, and recompute inside the backwards.

    ``split``: with backwards whole or split. Stages recompute whole or not at all, as the request says. Without overlap
    in the request, the bounds of this class hold for all-reduces after the last backward only.
    """
    return Covers(
        **every("replica_order"),
        backward=_backwards(split),
        recompute=_modes(problem),
        all_reduce=_reductions(problem),
        trainer=None,
        degrees=_degrees(problem),
        order=None,
        micro_batches=ranges_of(numbers),
    )


def target_plans(problem: Problem) -> Covers:
    """Return all plans within the limits of the request's target that fit into memory."""
    assert problem.within is not None
    return Covers(
        **every("devices", "backward", "recompute", "recompute_runs", "replica_order"),
        all_reduce=_reductions(problem),
        trainer=_one(problem.within.trainer),
        degrees=_degrees(problem),
        order=frozenset(problem.within.schedules),
        micro_batches=allowed_numbers(problem),
    )


def _reductions(problem: Problem) -> Values:
    """Return when all-reduces may run: only after the last backward if the request does not let them overlap it."""
    return every("all_reduce")["all_reduce"] if problem.rules.overlap_all_reduce else _one("after_backward")


def orders_of(plan: Covers) -> Covers:
    """Return the class of a plan's allocation under any order of operations, even one that no trainer can express."""
    return replace(plan, order=None, trainer=None)


def _degrees(problem: Problem) -> Values:
    """Return the degrees of the problem."""
    return _one("1" if problem.choice is None else _named(problem.choice))


def _named(choice: Choice) -> str:
    """Return a choice's name with its assumptions: batches are rows of a sample for each mesh."""
    if choice.in_one_stage:
        left_out = "" if choice.excluded is None else f" but {choice.excluded}"
        return f"{choice._replace(excluded=None)} {OVER_ALL}{left_out}"
    return str(choice) if choice.degrees.meshes == 1 else f"{choice}, {EVEN} {choice.degrees.meshes_in_words}"


def _one(value: str) -> Values:
    return frozenset({value})


def _recomputed(stage: Stage) -> str:
    if not stage.recompute:
        return "none"
    return "stage" if stage.recompute == ((stage.first, stage.last),) else "segments"


def _where_recomputed(stages: tuple[Stage, ...], kinds: Kinds) -> Values:
    apart = {stage for kind, stage in kinds if kind == RECOMPUTE}
    inside = [s for s, stage in enumerate(stages) if stage.recomputes and s not in apart]
    if not apart:
        return _one("in_backward")
    return frozenset({"apart", "in_backward"}) if inside else _one("apart")


def _kinds(schedule: Schedule) -> Kinds:
    if isinstance(schedule, Orders):
        rows = (row.operations.astype(np.int64) for row in schedule.rows)
        codes = {code for row in rows for code in np.unique(row[:, 1] * _KINDS + row[:, 0]).tolist()}
        return {(code % _KINDS, code // _KINDS) for code in codes}
    return {(operation.kind, operation.stage) for operation in schedule.operations}
