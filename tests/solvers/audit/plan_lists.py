"""Lists of plans of small requests, of every kind that the request allows; brute force for the audit of claims.

Allocations are drawn by plain combinatorics, kind by kind: stages apart, several stages on a device, replicas that
split each micro-batch or take turns, several pipelines apart and crossing, plans without a flush, pipelines that
average. Each kind is sampled at random where it has more plans than the list may hold. Each allocation is tried under
several orders, and moves of single operations improve some of them. No planner and no enumeration of the package is
used; the simulator measures each plan's time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from list_allocations import FLUSHED, Draw, numbers_allowed, partitions
from list_orders import Style, list_order, moved
from periodic_lists import averaging, periodic

from penstock.layouts.limits import faults as faults_beyond
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import INPUT, RECOMPUTE
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.model.trainer_limits import Within
from penstock.solvers.model.update_rules import PERIODIC_RULES, UpdateRule
from penstock.solvers.schedules.trainer_orders import order_of
from penstock.solvers.verify.verifier import verify

MOVES = 12
"""Moves of one operation each that are tried on a plan that is the best so far."""
MISSES = 40
"""Draws in a row without a plan after which a kind ends."""
FAR_NS = 2**60


def permitted(problem: Problem, plan: JudgedPlan) -> str | None:
    """Return what the request does not allow in a plan; None where it allows everything."""
    allocation = plan.allocation
    if plan.update_rule not in problem.update_rules:
        return f"update rule {plan.update_rule}"
    if allocation.num_micro_batches not in numbers_allowed(problem):
        return f"{allocation.num_micro_batches} micro-batches"
    if plan.overlap_all_reduce and not problem.rules.overlap_all_reduce:
        return "all-reduces beside the backwards"
    least = problem.global_batch_size // allocation.num_micro_batches
    for s, stage in enumerate(allocation.stages):
        if least // (stage.replicas if stage.dispatch == "rows" else 1) < problem.min_slice:
            return f"stage {s} has slices below min_slice"
        for pin in problem.pins:
            if pin.first <= stage.last and stage.first <= pin.last and not set(stage.devices) <= pin.devices:
                return f"stage {s} breaks a pin"
        if not problem.codec and True in stage.coded:
            return f"stage {s} encodes"
        if problem.recompute == "never" and stage.recomputes:
            return f"stage {s} recomputes"
        if problem.recompute == "always" and not stage.recompute and _may_recompute(problem, stage):
            return f"stage {s} does not recompute"
    if problem.within is not None:
        return next(iter(faults_beyond(problem, allocation, plan.schedule, problem.within)), None)
    return None


def _may_recompute(problem: Problem, stage: Stage) -> bool:
    """Return whether the request's trainer can recompute a layer of the stage; true without a target."""
    within = problem.within
    return within is None or (stage.first <= within.span.last and within.span.first <= stage.last)


def verified(problem: Problem, plan: JudgedPlan) -> list[str]:
    """List why the plan is not valid for the request: faults of the plan, memory, features that are not allowed."""
    how = {"overlap": plan.overlap_all_reduce, "update_rule": plan.update_rule}
    faults = verify(problem, plan.allocation, plan.schedule, plan.timeline, **how)  # type: ignore[arg-type]
    faults += [f"device {d} has too little memory" for d in _too_small(problem, plan)]
    beyond = permitted(problem, plan)
    return faults if beyond is None else [*faults, beyond]


def _too_small(problem: Problem, plan: JudgedPlan) -> list[int]:
    limits = [device.memory_bytes - problem.memory.headroom_bytes for device in problem.devices]
    return [d for d, use in plan.timeline.uses.items() if use.memory.total > limits[d]]


def judged(
    problem: Problem, allocation: Allocation, schedule: Schedule, overlap: bool, rule: UpdateRule = "synchronous"
) -> JudgedPlan | None:
    """Return the plan with its timeline; None where it cannot run, does not fit, or is not allowed by the request."""
    try:
        timeline = simulate(problem, allocation, schedule, overlap=overlap, update_rule=rule)
    except (InvalidPlan, UnsupportedRequest):
        return None
    plan = JudgedPlan.of("listed", allocation, schedule, timeline, overlap, rule)
    return None if _too_small(problem, plan) or permitted(problem, plan) is not None else plan


def plans_of(problem: Problem, seed: int, most: int) -> Iterator[JudgedPlan]:
    """Yield up to ``most`` plans that fit, of all kinds in turn; moves of operations improve the best ones."""
    rng = random.Random(f"plans {seed}")
    makers: list[Iterator[JudgedPlan]] = []
    if not numbers_allowed(problem):
        return
    if problem.within is not None:
        makers.append(_expressible(problem, rng, problem.within))
    elif "synchronous" in problem.update_rules:
        makers += [_flushed(problem, rng, draw) for draw in FLUSHED]
    rules = problem.update_rules if problem.within is None else frozenset()
    makers += [periodic(problem, rng, rule, judged, _recomputing) for rule in sorted(rules & PERIODIC_RULES)]
    if "elastic_averaging" in rules:
        makers.append(averaging(problem, rng, judged, _recomputing))
    count = 0
    while makers and count < most:
        for maker in list(makers):
            plan = next(maker, None)
            if plan is None:
                makers.remove(maker)
                continue
            count += 1
            yield plan


def orders_of(problem: Problem, plan: JudgedPlan, rng: random.Random, most: int) -> Iterator[JudgedPlan]:
    """Yield other orders of the operations of a flushed plan's allocation."""
    assert isinstance(plan.schedule, Orders)
    kinds = {(k, s) for row in plan.schedule.rows for k, s, _m in row.operations.tolist()}
    split = frozenset(s for k, s in kinds if k == INPUT)
    apart = frozenset(s for k, s in kinds if k == RECOMPUTE)
    for _ in range(most):
        style = _style(problem, plan.allocation, rng)._replace(split=split, apart=apart)
        orders = list_order(problem, plan.allocation, style, rng)
        other = judged(problem, plan.allocation, orders, plan.overlap_all_reduce)
        if other is not None:
            yield other


# ---- plans with a flush ----------------------------------------------------------------------------------------------


def _flushed(problem: Problem, rng: random.Random, draw: Draw) -> Iterator[JudgedPlan]:
    """Yield plans of one kind, endlessly; stop after ``MISSES`` draws in a row without a plan that fits."""
    best, misses = FAR_NS, 0
    while misses < MISSES:
        allocation = draw(rng, problem)
        plan = None if allocation is None else _ordered(problem, rng, _recomputing(rng, problem, allocation))
        misses += 1
        if plan is None:
            continue
        misses = 0
        yield plan
        if plan.value_ns < best:
            plan = _improved(problem, rng, plan)
            best = plan.value_ns
            yield plan


def _expressible(problem: Problem, rng: random.Random, within: Within) -> Iterator[JudgedPlan]:
    """Yield plans that a trainer can express.

    Stages are equally replicated on ranks in a loop or a V, under the trainer's orders.
    """
    misses = 0
    while misses < 3 * MISSES:
        misses += 1
        per = rng.randint(1, problem.num_devices)
        ranks = rng.randint(1, problem.num_devices // per)
        devices = rng.sample(range(problem.num_devices), ranks * per)
        parts = rng.choice(partitions(problem))
        turn = [*range(ranks), *(reversed(range(ranks)) if rng.random() < 0.5 else range(ranks))]
        groups = [devices[r * per : (r + 1) * per] for r in (turn[i % len(turn)] for i in range(len(parts)))]
        plain = [Stage(a, b, tuple(group)) for (a, b), group in zip(parts, groups, strict=True)]
        how = rng.choice(list(within.ways(plain)))
        stages = tuple(replace(stage, recompute=within.segments(stage, how)) for stage in plain)
        number = rng.choice(numbers_allowed(problem))
        allocation = single_pipeline(stages, number)
        with suppress(InvalidPlan, UnsupportedRequest):
            orders = order_of(problem, allocation, rng.choice(within.schedules), within.group(ranks, number))
            judged_plan = judged(problem, allocation, orders, problem.rules.overlap_all_reduce)
            if judged_plan is not None:
                misses = 0
                yield judged_plan


def _ordered(problem: Problem, rng: random.Random, allocation: Allocation) -> JudgedPlan | None:
    """Return the first of some orders that fits, each with fewer micro-batches in flight than the one before."""
    early = problem.rules.overlap_all_reduce and rng.random() < 0.7
    style = _style(problem, allocation, rng)
    allocation = _coded(rng, problem, allocation)
    while True:
        plan = judged(problem, allocation, list_order(problem, allocation, style, rng), early)
        if plan is not None or style.most <= 1:
            return plan
        style = style._replace(most=style.most - 1)


def _style(problem: Problem, allocation: Allocation, rng: random.Random) -> Style:
    every = range(len(allocation.stages))
    split = rng.choice([frozenset(), frozenset(), frozenset(every), frozenset(s for s in every if rng.random() < 0.5)])
    apart = frozenset(s for s in every if allocation.stages[s].recomputes) if rng.random() < 0.3 else frozenset()
    return Style(
        most=rng.randint(1, allocation.num_micro_batches),
        forward_first=rng.random() < 0.3,
        deep_first=rng.random() < 0.5,
        split=split if problem.within is None else frozenset(),
        apart=apart if problem.within is None else frozenset(),
        noise=rng.choice([0.0, 0.0, 0.2]),
    )


def _improved(problem: Problem, rng: random.Random, plan: JudgedPlan) -> JudgedPlan:
    """Improve a plan by moves of single operations that make it no slower and keep it within memory."""
    assert isinstance(plan.schedule, Orders)
    best = plan
    for _ in range(MOVES):
        assert isinstance(best.schedule, Orders)
        orders = moved(best.schedule, rng)
        with suppress(InvalidPlan):
            value = makespan_ns(problem, best.allocation, orders, overlap=best.overlap_all_reduce)
            if value <= best.value_ns:
                best = judged(problem, best.allocation, orders, best.overlap_all_reduce) or best
    return best


def _recomputing(rng: random.Random, problem: Problem, allocation: Allocation) -> Allocation:
    """Let stages recompute as the request says; where it is "auto", draw all, none, some, or parts of some."""
    if problem.recompute == "never":
        return allocation
    much = 1.0 if problem.recompute == "always" else rng.choice([0.0, 0.0, 0.5, 1.0])
    partly = rng.random() < 0.3 and problem.recompute == "auto"

    def again(stage: Stage) -> Stage:
        if rng.random() >= much:
            return stage
        first = rng.randint(stage.first, stage.last) if partly else stage.first
        last = rng.randint(first, stage.last) if partly else stage.last
        if problem.module_sets and rng.random() < 0.5:
            return replace(stage, modules=rng.choice(problem.module_sets))
        return replace(stage, recompute=((first, last),))

    return _each_stage(allocation, again)


def _coded(rng: random.Random, problem: Problem, allocation: Allocation) -> Allocation:
    """Let some edges encode, if the request allows it and tensors that can be encoded cross them."""
    if not problem.codec or rng.random() < 0.5:
        return allocation
    pipelines = []
    for pipeline in allocation.pipelines:
        inner = [problem.encodable[s.last][0] > 0 and rng.random() < 0.5 for s in pipeline.stages[:-1]]
        ends = [False, *inner, False]
        stages = [replace(s, coded=(ends[i], ends[i + 1])) for i, s in enumerate(pipeline.stages)]
        pipelines.append(Pipeline(tuple(stages), pipeline.micro_batches))
    return Allocation(tuple(pipelines), allocation.num_micro_batches)


def _each_stage(allocation: Allocation, change: Callable[[Stage], Stage]) -> Allocation:
    pipelines = (Pipeline(tuple(map(change, p.stages)), p.micro_batches) for p in allocation.pipelines)
    return Allocation(tuple(pipelines), allocation.num_micro_batches)
