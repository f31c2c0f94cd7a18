"""The simplest plans of each update rule: candidates of every planner that makes such plans, with and without pins.

A planner's search is followed by the most promising of the simplest plans: one stage on all devices, even stages of
each number. Where there are pins, the most promising lines of stages that keep them come first of all. A planner that
has no plan by then tries all lines that keep the pins and have free memory for one micro-batch, which a small request
lists (``lines.py``). So it gets a plan wherever a line of stages on separate devices fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import lcm
from typing import Literal, NamedTuple

from penstock.schemas.errors import PenstockError
from penstock.solvers.bounds.feasibility import proof_of_infeasibility
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.micro_batches import Batch, candidates, dapple_replicas
from penstock.solvers.model.problem import Problem, per_problem
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.proposal import Proposal, in_order, under
from penstock.solvers.planners.simple.lines import Line, kept_lines, largest_ns, simple_lines
from penstock.solvers.schedules.advance_forward import advance_forward, in_flight
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.periodic import one_f_one_b_star
from penstock.solvers.schedules.periodic.eager import LONGEST_TURN, eager, fitted_depth, noam
from penstock.solvers.schedules.periodic.wpipe import wpipe
from penstock.solvers.schedules.support.stage_line import StageLine

MOST_LISTED = 4_000
"""Limit on the lines of a request that are listed, over all its numbers of micro-batches."""
PROMISING = 12
"""Simple plans of an update rule that are always simulated; without pins at least one of each shape."""
MOST_DEVICES = 256
"""Limit on the devices of a request without pins whose simplest plans are simulated."""

Judged = Callable[[Problem, Allocation], Iterator[Proposal]]
"""A function that yields the proposals for a line of stages; it can be pickled, for workers."""


@dataclass(frozen=True)
class Simple:
    """A planner's way to run the simplest plans of an update rule.

    ``lines``: one stage to a place, each on one device (``straight``), or two (``folded``). ``in_turn``: replicas may
    take whole micro-batches in turn. ``unpinned``: without pins as well; otherwise the planner's search covers them.
    """

    rule: UpdateRule
    judged: Judged
    lines: Literal["any", "straight", "folded"] = "any"
    in_turn: bool = False
    unpinned: bool = False


class _Ranked(NamedTuple):
    """An allocation; ``promise``: the time of its largest stage and of one pass through, then of that stage alone."""

    promise: tuple[int, int]
    number: int
    allocation: Allocation


def first_plans(problem: Problem, simple: tuple[Simple, ...]) -> Iterator[Proposal]:
    """Yield, for a request with pins, the most promising simple plans of each allowed rule."""
    for each in _allowed(problem, simple) if problem.pins else ():
        ranked = _every_line(problem, each.lines, each.in_turn)[:PROMISING]
        yield from chain.from_iterable(each.judged(problem, plan.allocation) for plan in ranked)


def simplest_plans(problem: Problem, simple: tuple[Simple, ...]) -> Iterator[Proposal]:
    """Yield, for a request without pins, the simplest plans of each allowed rule.

    Flushed plans have P_A's micro-batches in flight.
    """
    for each in _allowed(problem, simple) if not problem.pins and problem.num_devices <= MOST_DEVICES else ():
        if each.unpinned:
            for plan in _simplest(problem, each.lines, each.in_turn):
                yield from (proposal._replace(policy="A") for proposal in each.judged(problem, plan.allocation))


def last_plans(problem: Problem, simple: tuple[Simple, ...], wanted: Callable[[], bool]) -> Iterator[Proposal]:
    """Yield all simple plans of each allowed rule, while ``wanted`` returns True."""
    for each in _allowed(problem, simple):
        if (problem.pins or each.unpinned) and wanted() and proof_of_infeasibility(problem) is None:
            for plan in _every_line(problem, each.lines, each.in_turn):
                if not wanted():
                    return
                yield from chain(each.judged(problem, plan.allocation), _leanest(problem, each, plan.allocation))


def _leanest(problem: Problem, simple: Simple, allocation: Allocation) -> Iterator[Proposal]:
    """Yield flushed plans with one micro-batch at a time in the line, so that only one receive buffer is in use.

    They run under early backward. The proposals for other rules have such plans already, and straight lines are for
    special orders.
    """
    if simple.rule == "synchronous" and simple.lines == "any":
        for variant in recomputing(problem, allocation):
            yield in_order(problem, variant, early_backward(problem, variant, warmup=(1,) * len(variant.stages)))


def _allowed(problem: Problem, simple: tuple[Simple, ...]) -> Iterator[Simple]:
    return (each for each in simple if each.rule in problem.update_rules)


@per_problem
def _every_line(problem: Problem, lines: str, in_turn: bool) -> list[_Ranked]:
    """Return lines that keep the pins and may fit, the most promising first."""
    most = MOST_LISTED // max(1, len(candidates(problem, dapple_replicas(problem))))
    lines_of = partial(kept_lines, most=most, folds=2 if lines == "folded" else 1)
    return _ranked(problem, lines, in_turn, lines_of)


@per_problem
def _simplest(problem: Problem, lines: str, in_turn: bool) -> list[_Ranked]:
    """Return the most promising line of each number and width of stages, then the next best ones."""
    ranked = _ranked(problem, lines, in_turn, simple_lines)
    best = {_shape(each): each for each in reversed(ranked)}
    return sorted({*best.values(), *ranked[:PROMISING]}, key=lambda each: each[:2])


def _ranked(
    problem: Problem, lines: str, in_turn: bool, lines_of: Callable[[Problem, Batch, int], list[Line]]
) -> list[_Ranked]:
    """Return the lines of each number of micro-batches and most replicas, the most promising first."""
    ranked: list[_Ranked] = []
    for batch in candidates(problem, dapple_replicas(problem)):
        replicas = problem.num_devices if in_turn else batch.replicas_fed(problem.min_slice)
        for line in lines_of(problem, batch, 1 if lines == "straight" else replicas):
            largest, whole = largest_ns(problem, batch, line)
            promise = (batch.num_micro_batches - 1) * largest + whole, largest
            ranked.append(_Ranked(promise, len(ranked), single_pipeline(line, batch.num_micro_batches)))
    return sorted(ranked, key=lambda each: each[:2])


def _shape(ranked: _Ranked) -> tuple[int, ...]:
    return tuple(stage.replicas for stage in ranked.allocation.stages)


def flushed(*schedules: str) -> Judged:
    """Return a function for synchronous plans under these schedules; the simulator chooses what recomputes."""
    return partial(_flushed, schedules)


def _flushed(schedules: tuple[str, ...], problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
    yield under(problem, allocation, schedules)


def eagerly(rule: UpdateRule) -> Judged:
    """Return a function for 1F1B without a flush.

    Its plans have as many micro-batches in flight as NOAM and memory allow, or one.
    """
    return partial(_eagerly, rule)


def _eagerly(rule: UpdateRule, problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
    dealt = (each for line in dispatched(problem, allocation, rule) for each in recomputing(problem, line))
    for variant in dealt:
        wanted = (noam(variant), (1,) * len(variant.stages))
        for depth in dict.fromkeys(fitted_depth(problem, variant, rule, each) for each in wanted):
            try:
                pattern = eager(problem, variant, update_rule=rule, depth=depth)
            except PenstockError:  # too few micro-batches for the stages: one in flight is among the depths
                continue
            yield in_order(problem, variant, pattern, rule)


def dispatched(problem: Problem, allocation: Allocation, rule: UpdateRule) -> Iterator[Allocation]:
    """Yield the line with replicas in turn and with replicas that split each micro-batch.

    In turn: where each replica has a micro-batch of an update. Split: where the rows suffice.
    """
    most, number = max(stage.replicas for stage in allocation.stages), allocation.num_micro_batches
    turn = lcm(number, *(stage.replicas for stage in allocation.stages))
    if most > 1 and turn <= max(LONGEST_TURN, number) and (rule == "weight_stashing" or most <= number):
        yield allocation.in_turn()
    if (problem.global_batch_size // allocation.num_micro_batches) // most >= problem.min_slice:
        yield allocation


def starred(problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
    """Yield 1F1B* with two weight versions, of the shortest period for which memory suffices."""
    for variant in recomputing(problem, allocation):
        line = StageLine.of(problem, variant)
        period_ns = one_f_one_b_star.minimal_period_ns(line)
        if period_ns is not None:
            yield in_order(problem, variant, one_f_one_b_star.pattern(line, period_ns), "double_buffered")


def grouped(problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
    """Yield WPipe's order, with the paper's warm-up."""
    for variant in recomputing(problem, allocation):
        try:
            pattern = wpipe(problem, variant)
        except PenstockError:  # fewer micro-batches than places
            return
        yield in_order(problem, variant, pattern, "double_grouped")


def averaged(problem: Problem, allocation: Allocation) -> Iterator[Proposal]:
    """Yield one pipeline that averages, without others: under 1F1B, and with one micro-batch to a stage.

    It has the measured pipeline's number of stages, if there is one.
    """
    run = problem.pipeline_run
    if run is not None and len(allocation.stages) != len(run.ranks):
        return
    for variant in recomputing(problem, allocation):
        plan = parallel_pipelines(variant.stages, 1, variant.num_micro_batches)
        for warmup in (in_flight(plan, 0), (1,) * len(plan.stages)):
            yield in_order(problem, plan, advance_forward(problem, plan, warmup=warmup), "elastic_averaging")


def recomputing(problem: Problem, allocation: Allocation) -> Iterator[Allocation]:
    """Yield the allocation without recomputation, and with every stage recomputing, as the request allows."""
    if problem.recompute != "always":
        yield allocation
    if problem.recompute != "never":
        yield allocation.recomputing(range(len(allocation.stages)))
