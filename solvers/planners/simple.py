"""The simplest plans of each update rule that keep the pins: candidates of every planner that makes such plans.

Where there are pins the most promising ones are proposed first of all; behind its own search a planner proposes the
others as well, as long as it has found nothing. Of a small request they are all lines of stages on devices of their own
that keep the pins and have room for one micro-batch (``allocators.simple_lines``), so that a planner finds a plan
wherever one of these fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

from penstock.schemas.errors import PenstockError
from penstock.solvers.allocation import Allocation, single_pipeline
from penstock.solvers.allocators.simple_lines import Line, folded_lines, kept_lines, largest_ns
from penstock.solvers.batches import Batch, candidates, dapple_replicas
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.problem import Problem
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.eager import eager, fitted_depth, noam
from penstock.solvers.schedules.wpipe import wpipe
from penstock.solvers.sharing import parallel_pipelines
from penstock.solvers.update_rules import UpdateRule

PROMISING = 12
"""Simple plans that are judged first where there are pins."""

Judged = Callable[[Problem, Allocation], Iterator[Proposal]]
"""The proposals for a line of stages."""


@dataclass(frozen=True)
class Simple:
    """How a planner runs the simplest plans of an update rule.

    ``lines``: one stage to a place, each on one device (``straight``), or two (``folded``). ``in_turn``: replicas may
    take whole micro-batches in turn. ``unpinned``: the plans are also proposed without pins, where the planner's own
    search has found nothing.
    """

    rule: UpdateRule
    judged: Judged
    lines: Literal["any", "straight", "folded"] = "any"
    in_turn: bool = False
    unpinned: bool = False


class _Ranked(NamedTuple):
    """An allocation; ``promise``: the time of its largest stage and of one way through, then of that stage alone."""

    promise: tuple[int, int]
    number: int
    allocation: Allocation


def first_plans(problem: Problem, simple: tuple[Simple, ...], straight: bool) -> Iterator[Proposal]:
    """With pins the most promising simple plans of each allowed rule; ``straight``: with one device to a stage."""
    for each in _allowed(problem, simple) if problem.pins else ():
        ranked = _ranked(problem, each, straight)[:PROMISING]
        yield from chain.from_iterable(each.judged(problem, plan.allocation) for plan in ranked)


def last_plans(
    problem: Problem, simple: tuple[Simple, ...], straight: bool, wanted: Callable[[], bool]
) -> Iterator[Proposal]:
    """All simple plans of each allowed rule, while one is wanted."""
    for each in _allowed(problem, simple):
        if wanted() and (problem.pins or each.unpinned):
            for plan in _ranked(problem, each, straight):
                if not wanted():
                    return
                yield from each.judged(problem, plan.allocation)


def _allowed(problem: Problem, simple: tuple[Simple, ...]) -> Iterator[Simple]:
    return (each for each in simple if each.rule in problem.update_rules)


def _ranked(problem: Problem, simple: Simple, straight: bool) -> list[_Ranked]:
    found: list[_Ranked] = []
    for batch in candidates(problem, dapple_replicas(problem)):
        for line in _lines(problem, batch, simple, straight):
            largest, whole = largest_ns(problem, batch, line)
            promise = (batch.num_micro_batches - 1) * largest + whole, largest
            found.append(_Ranked(promise, len(found), single_pipeline(line, batch.num_micro_batches)))
    return sorted(found, key=lambda each: each[:2])


def _lines(problem: Problem, batch: Batch, simple: Simple, straight: bool) -> list[Line]:
    replicas = problem.num_devices if simple.in_turn else batch.replicas_fed(problem.min_slice)
    replicas = 1 if straight or simple.lines == "straight" else replicas
    return (folded_lines if simple.lines == "folded" else kept_lines)(problem, batch, replicas)


def flushed(*schedules: str) -> Judged:
    """Synchronous plans under these schedules; the judge chooses what recomputes."""

    def judged(problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
        yield Proposal(allocation, schedules, "best", (problem.rules.overlap_all_reduce,))

    return judged


def eagerly(rule: UpdateRule) -> Judged:
    """1F1B without a flush: as many micro-batches in flight as NOAM and memory allow, and one."""

    def judged(problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
        dealt = (each for line in dispatched(problem, allocation) for each in recomputing(problem, line))
        for variant in dealt:
            wanted = (noam(variant), (1,) * len(variant.stages))
            for depth in dict.fromkeys(fitted_depth(problem, variant, rule, each) for each in wanted):
                try:
                    pattern = eager(problem, variant, update_rule=rule, depth=depth)
                except PenstockError:  # too few micro-batches for so many stages: one in flight is among the depths
                    continue
                yield Proposal(variant, ("eager",), "best", (problem.rules.overlap_all_reduce,), rule, pattern)

    return judged


def dispatched(problem: Problem, allocation: Allocation) -> Iterator[Allocation]:
    """The line with its replicas in turn, and by rows where each of them gets enough of every micro-batch."""
    most = max(stage.replicas for stage in allocation.stages)
    if most > 1:
        yield in_turn(allocation)
    if (problem.global_batch_size // allocation.num_micro_batches) // most >= problem.min_slice:
        yield allocation


def in_turn(allocation: Allocation) -> Allocation:
    """The allocation with replicas that take whole micro-batches in turn."""
    stages = (replace(s, dispatch="round_robin") if s.replicas > 1 else s for s in allocation.stages)
    return single_pipeline(tuple(stages), allocation.num_micro_batches)


def grouped(problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
    """WPipe's order, with the paper's warm-up."""
    for variant in recomputing(problem, allocation):
        try:
            pattern = wpipe(problem, variant)
        except PenstockError:  # fewer micro-batches than places
            return
        yield Proposal(variant, ("wpipe",), "best", (problem.rules.overlap_all_reduce,), "double_grouped", pattern)


def averaged(problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
    """One pipeline that averages, with no other beside it, in 1F1B order."""
    for variant in recomputing(problem, allocation):
        plan = parallel_pipelines(variant.stages, 1, variant.num_micro_batches)
        orders = advance_forward(problem, plan, delta=0)
        overlaps = (problem.rules.overlap_all_reduce,)
        yield Proposal(plan, ("advance-forward",), "best", overlaps, "elastic_averaging", orders)


def recomputing(problem: Problem, allocation: Allocation) -> Iterator[Allocation]:
    """The allocation without recomputation, and with every stage recomputing, as the request allows."""
    if problem.recompute != "always":
        yield allocation
    if problem.recompute != "never":
        stages = (replace(stage, recompute=((stage.first, stage.last),)) for stage in allocation.stages)
        yield single_pipeline(tuple(stages), allocation.num_micro_batches)
