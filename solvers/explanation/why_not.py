"""The comparison with another choice of degrees: both plans' times by parts, and the error that would turn the order.

The parts are means over the GPU groups in use, so they add up to the times. Computation, exposed collectives,
recomputation and updates are the differences in time when these are removed one after the other; waiting times are the
parts of ``idle``. An error is a factor on the times of collectives inside GPU groups, of both plans, or on the
computation at one choice. The plans keep their orders and are simulated again, and bisection finds the factor at which
the other plan wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from math import sqrt
from typing import Literal, NamedTuple

from penstock.solvers.degrees.contract import with_times
from penstock.solvers.degrees.inner_times import STATED, TimeFactors
from penstock.solvers.degrees.shares import COLLECTIVES, without_collectives
from penstock.solvers.explanation.idle import idle_split
from penstock.solvers.explanation.other_layout import Difference
from penstock.solvers.explanation.run import JudgedRun
from penstock.solvers.explanation.what_if import retime
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan

MOST = 100
"""The largest factor that is tried; the least is its inverse."""
PRECISION = 1.002
"""The largest ratio of the two factors between which the order turns."""
DENOMINATOR = 2000
"""The largest denominator of a factor."""


class Planned(NamedTuple):
    """A plan, and the problem at its degrees."""

    problem: Problem
    plan: JudgedPlan

    def time_ns(self, times: TimeFactors = STATED) -> int:
        """Return the time of the plan's order where passes take ``times`` as long as stated."""
        problem, plan = self.problem if times == STATED else with_times(self.problem, times), self.plan
        return makespan_ns(
            problem, plan.allocation, plan.schedule, overlap=plan.overlap_all_reduce, update_rule=plan.update_rule
        )


class Turn(NamedTuple):
    """The factor on a number from which on the other plan is the quicker one; None: no tried factor turns the order.

    ``of``: the plan whose number it is: the quicker one, the slower one, or both.
    """

    number: Literal["collectives", "computation"]
    of: Literal["quicker", "slower", "both"]
    factor: Fraction | None


def time_parts(planned: Planned) -> dict[str, int]:
    """Return the parts of a plan's time, in ns; they add up to it."""
    problem, plan = planned
    idle = idle_split(JudgedRun(problem, plan))
    gpus = sum(len(each.gpus) for each in idle) * plan.timeline.window_rounds
    parts = dict(_computing(problem, plan))
    parts["pipeline transfers"] = sum(len(each.gpus) * each.transfer_ns for each in idle) // gpus
    parts["reductions"] = sum(len(each.gpus) * each.all_reduce_ns for each in idle) // gpus
    return parts | {"bubble": plan.value_ns - sum(parts.values())}


def _computing(problem: Problem, plan: JudgedPlan) -> Iterator[tuple[str, int]]:
    """Yield the parts of the time in which GPU groups are busy: the differences when costs are removed one by one."""
    left, bare = _busy_ns(problem, plan), problem
    exposed = []
    for over in COLLECTIVES:
        bare = without_collectives(problem, COLLECTIVES[: COLLECTIVES.index(over) + 1])
        less = _busy_ns(bare, plan)
        exposed.append((f"{over} communication", left - less))
        left = less
    still = replace(bare, update_ns=0 * bare.update_ns, step_collectives_ns=None)
    less = _busy_ns(still, plan)
    again = less - _busy_ns(still, _kept(plan))
    yield "computation", less - again
    yield from exposed
    yield "recomputation", again
    yield "updates", left - less


def _kept(plan: JudgedPlan) -> JudgedPlan:
    """Return the plan with stages that keep all of their activations, regardless of memory."""
    return replace(plan, allocation=plan.allocation.having(stage.plain for stage in plan.allocation.stages))


def _busy_ns(problem: Problem, plan: JudgedPlan) -> int:
    """Return the mean time in which a GPU group in use is busy, per global batch."""
    uses = retime(problem, plan).timeline.uses
    return sum(use.busy_ns for use in uses.values()) // len(uses)


def differences(theirs: Planned, ours: Planned) -> tuple[Difference, ...]:
    """Return the parts in which two plans differ, in order; the differences add up to the times' difference."""
    parts = time_parts(theirs), time_parts(ours)
    result = (Difference(name, parts[0][name], parts[1][name]) for name in parts[0])
    return tuple(each for each in result if each.theirs_ns or each.ours_ns)


# ---- how wrong a number must be --------------------------------------------------------------------------------------


def turns(theirs: Planned, ours: Planned) -> Iterator[Turn]:
    """Yield by how much each number must be wrong to turn the order; a number may be of one side only."""
    quicker, slower = sorted((ours, theirs), key=lambda each: each.plan.value_ns)
    sides = [each for each in (quicker, slower) if _communicates(each)]
    if sides:

        def collectives(factor: Fraction) -> bool:
            times = TimeFactors(Fraction(1), *[factor] * len(COLLECTIVES))
            return slower.time_ns(times) < quicker.time_ns(times)

        of: Literal["quicker", "slower", "both"] = (
            "both" if len(sides) == 2 else "quicker" if sides[0] is quicker else "slower"
        )
        tried = [turn for far in (MOST, Fraction(1, MOST)) if (turn := turning(collectives, far)) is not None]
        yield Turn("collectives", of, min(tried, key=lambda each: max(each, 1 / each), default=None))
    if _degrees(quicker) == _degrees(slower):
        return
    fixed_ns = slower.time_ns()
    yield Turn("computation", "quicker", turning(lambda f: fixed_ns < quicker.time_ns(TimeFactors(f)), MOST))
    least_ns = quicker.time_ns()
    yield Turn("computation", "slower", turning(lambda f: slower.time_ns(TimeFactors(f)) < least_ns, Fraction(1, MOST)))


def turning(turned: Callable[[Fraction], bool], far: Fraction | int) -> Fraction | None:
    """Bisect for the factor between 1 and ``far`` at which the order turns; return None where it does not."""
    if not turned(Fraction(far)):
        return None
    near, there = 1.0, float(far)
    while max(there / near, near / there) > PRECISION:
        middle = sqrt(near * there)
        near, there = (near, middle) if turned(_factor(middle)) else (middle, there)
    return _factor(there)


def _factor(value: float) -> Fraction:
    return Fraction(value).limit_denominator(DENOMINATOR)


def _communicates(planned: Planned) -> bool:
    """Return whether the plan's passes have collectives inside GPU groups that take time."""
    free = TimeFactors(Fraction(1), *[Fraction(0)] * len(COLLECTIVES))
    return planned.time_ns(free) < planned.plan.value_ns


def _degrees(planned: Planned) -> object:
    choice = planned.problem.choice
    return None if choice is None else choice.degrees
