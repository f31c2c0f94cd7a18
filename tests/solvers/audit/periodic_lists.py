"""Plans without a flush, and pipelines that average, for the lists of plans that claims are checked against.

Patterns are built by modulo scheduling: each operation of a micro-batch starts as early as its devices are free in
every period. The package's generators of patterns are used as well.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress

from list_allocations import Draw, drawn_apart, drawn_in_turn, drawn_looped, drawn_together, numbers_allowed

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Pattern, PatternOperation, Schedule
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.one_f_one_b_star import one_f_one_b_star
from penstock.solvers.schedules.periodic.wpipe import wpipe
from penstock.solvers.verify.verifier import verify

Judge = Callable[[Problem, Allocation, Schedule, bool, UpdateRule], JudgedPlan | None]
Change = Callable[[random.Random, Problem, Allocation], Allocation]
MISSES = 25
"""Draws in a row without a plan after which a list of plans ends."""


def periodic(
    problem: Problem, rng: random.Random, rule: UpdateRule, judge: Judge, change: Change
) -> Iterator[JudgedPlan]:
    """Yield plans of an update rule without a flush, endlessly; stop after ``MISSES`` draws in a row without a plan."""
    draws: tuple[Draw, ...] = (drawn_apart, drawn_in_turn, drawn_together, drawn_looped)
    misses = 0
    while misses < MISSES:
        misses += 1
        allocation = rng.choice(draws)(rng, problem)
        if allocation is None:
            continue
        allocation = change(rng, problem, allocation)
        early = problem.rules.overlap_all_reduce and rng.random() < 0.7
        for pattern in _patterns(problem, rng, allocation, rule):
            plan = judge(problem, allocation, pattern, early, rule)
            how = {"overlap": early, "update_rule": rule}
            # A round's step may stand between gradients of the next one: only the verifier notices.
            if plan is not None and not verify(problem, allocation, pattern, plan.timeline, **how):  # type: ignore[arg-type]
                misses = 0
                yield plan


def averaging(problem: Problem, rng: random.Random, judge: Judge, change: Change) -> Iterator[JudgedPlan]:
    """Yield plans of pipelines on the same devices, each of which has a separate global batch."""
    misses = 0
    while misses < MISSES:
        misses += 1
        first = drawn_apart(rng, problem)
        if first is None or any(stage.replicas > 1 for stage in first.stages):
            continue
        number = rng.choice(numbers_allowed(problem))
        stages = change(rng, problem, first).stages
        allocation = parallel_pipelines(stages, rng.randint(1, 3), number)
        delta = rng.randint(0, len(stages) - 1)
        with suppress(InvalidPlan, UnsupportedRequest):
            orders = advance_forward(problem, allocation, delta=delta, afab=rng.random() < 0.2)
            early = problem.rules.overlap_all_reduce
            plan = judge(problem, allocation, orders, early, "elastic_averaging")
            if plan is not None:
                misses = 0
                yield plan


def _patterns(problem: Problem, rng: random.Random, allocation: Allocation, rule: UpdateRule) -> Iterator[Pattern]:
    with suppress(InvalidPlan, UnsupportedRequest):
        if rule == "double_grouped":
            yield wpipe(problem, allocation, policy=rng.choice(["A", "B"]))
        elif rng.random() < 0.5:
            yield eager(problem, allocation, update_rule=rule)
        elif rule == "double_buffered":
            yield one_f_one_b_star(problem, allocation)
    for _ in range(2):
        yield modulo_pattern(problem, rng, allocation)


def modulo_pattern(problem: Problem, rng: random.Random, allocation: Allocation) -> Pattern:
    """Build a pattern of one micro-batch a period; the period is the busiest device's load, or a little longer."""
    rows = -(-problem.global_batch_size // allocation.num_micro_batches)
    split = {s for s in range(len(allocation.stages)) if rng.random() < 0.2}
    apart = {s for s, stage in enumerate(allocation.stages) if stage.recompute and rng.random() < 0.5}
    steps = []
    for s, stage in enumerate(allocation.stages):
        steps.append((FORWARD, s, stage_costs(problem, stage, rows).forward_ns))
    for s in reversed(range(len(allocation.stages))):
        cost = stage_costs(problem, allocation.stages[s], rows)
        inside = cost.recompute_ns if s not in apart else 0
        if s in apart:
            steps.append((RECOMPUTE, s, cost.recompute_ns))
        if s in split:
            steps.append((INPUT, s, inside + cost.backward_ns - cost.weight_ns))
            steps.append((WEIGHT, s, cost.weight_ns))
        else:
            steps.append((BACKWARD, s, inside + cost.backward_ns))
    load = [0] * problem.num_devices
    for _kind, s, duration in steps:
        for device in allocation.stages[s].devices:
            load[device] += max(1, duration)
    period = max(load) + rng.choice([0, 0, rng.randint(0, max(load))])
    return Pattern("modulo", period, 1, tuple(_placed(allocation, steps, period, rng.choice([0, 0, 1, 5]))))


def _placed(
    allocation: Allocation, steps: list[tuple[int, int, int]], period: int, hop: int
) -> Iterator[PatternOperation]:
    """Place each step after the one before, when its devices are first free for long enough, else when it is ready."""
    spans: dict[int, list[tuple[int, int]]] = {}
    ready = 0
    for kind, s, duration in steps:
        devices = allocation.stages[s].devices
        size = max(1, duration)
        busy = [span for device in devices for span in spans.get(device, [])]
        ends = [ready, *(ready + (end - ready) % period for _begin, end in busy)]
        free = [t for t in sorted(ends) if not any(_meet(t % period, size, span, period) for span in busy)]
        start = free[0] if free else ready
        for device in devices:
            spans.setdefault(device, []).append((start % period, start % period + size))
        yield PatternOperation(kind, s, start % period, start // period, 0)
        ready = start + size + (hop if kind != WEIGHT else 0)


def _meet(start: int, size: int, span: tuple[int, int], period: int) -> bool:
    """Return whether an operation overlaps a placed one in the circle of a period."""
    begin, end = span
    return any(start + turn < end and begin < start + turn + size for turn in (-period, 0, period))
