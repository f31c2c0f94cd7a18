"""AvgPipe's two degrees by traversal: run every number of micro-batches and of pipelines on ranks (section 7.3).

The paper's own tuning predicts them from one profile (``planners/avgpipe/planner.py``). This one measures: use it to
check the prediction, or where minutes on ranks cost less than a wrong prediction. Stages and devices are the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.convert import from_plan, to_plan, to_problem
from penstock.convert.requested_degrees import at_choice_of
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.avgpipe.predictor import Degrees
from penstock.solvers.planners.avgpipe.tuning import Tuner
from penstock.solvers.schedules.advance_forward import advance_forward

RULE: UpdateRule = "elastic_averaging"


@dataclass(frozen=True)
class Setting:
    """A plan with these degrees. ``judged_ns``: per global batch; ``by_profile``: the choice by the profile."""

    num_micro_batches: int
    num_pipelines: int
    file: PlanFile
    judged_ns: int
    by_profile: bool


@dataclass(frozen=True)
class Tried:
    """A setting and its measured time on ranks, per global batch."""

    setting: Setting
    measured_ns: int


def settings(file: PlanFile, max_pipelines: int) -> list[Setting]:
    """Return every setting that fits, by micro-batches and then pipelines. The order is 1F1B with advanced forwards.

    Raises UnsupportedRequest for a plan without elastic averaging, InvalidPlan where no setting fits.
    """
    if file.plan.update_rule != RULE:
        raise UnsupportedRequest(
            f"tuning needs a plan with {RULE} updates; this plan has {file.plan.update_rule} updates",
            remedy="plan with --planner avgpipe --update-rule elastic_averaging",
        )
    problem = at_choice_of(to_problem(file.request), file.plan)
    allocation, _ = from_plan(file.plan, problem)
    tuner = Tuner(problem, candidates(problem), allocation.pipelines[0].stages, max_pipelines)
    chosen = tuner.predicted()
    fitting = []
    for batch in tuner.batches:
        for pipelines in range(1, max_pipelines + 1):
            degrees = Degrees(batch.num_micro_batches, pipelines)
            if tuner.fits(tuner.allocation(degrees)):
                fitting.append(_setting(file, problem, tuner, degrees, degrees == chosen))
    if not fitting:
        raise InvalidPlan("no setting fits into the memory of the plan's devices", remedy="a plan of more stages")
    return fitting


def _setting(file: PlanFile, problem: Problem, tuner: Tuner, degrees: Degrees, by_profile: bool) -> Setting:
    allocation = tuner.allocation(degrees)
    orders = advance_forward(problem, allocation)
    timeline = simulate(problem, allocation, orders, update_rule=RULE)
    overlap = file.plan.overlap_all_reduce
    plan = to_plan(problem, file.request, JudgedPlan.of("avgpipe", allocation, orders, timeline, overlap, RULE), ())
    setting = PlanFile(plan=plan, request=file.request)
    return Setting(*degrees, setting, timeline.time_per_global_batch_ns, by_profile)


def traverse(fitting: list[Setting], run: Callable[[PlanFile], int]) -> Iterator[Tried]:
    """Run each setting. ``run`` returns the time (ns) of an iteration, which trains one global batch per pipeline."""
    for setting in fitting:
        yield Tried(setting, -(-run(setting.file) // setting.num_pipelines))


def fastest(tried: list[Tried]) -> Tried:
    """Return the setting with the least time per global batch; ties: fewer pipelines, then fewer micro-batches."""
    return min(tried, key=lambda one: (one.measured_ns, one.setting.num_pipelines, one.setting.num_micro_batches))
