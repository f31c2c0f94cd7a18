"""A solve: rounds of tasks, done by workers, whose results are combined in the order of the tasks.

Every task is one planner's search, or one attempt to improve or prove a plan. Each task has a separate judge
(``judging``), as if it ran alone. ``tasks`` defines the tasks and their rounds, ``workers`` runs them, ``incumbent``
keeps the best plan of all and decides when it is good enough, and ``why`` makes the sentence for the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.explanation.hints import hints
from penstock.solvers.explanation.what_if import Replan
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.options import checked
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Progress, Result, Status
from penstock.solvers.planners.catalogue import PLANNERS, resolve
from penstock.solvers.planners.effort import THOROUGH, effort_of
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.eligible import not_asked
from penstock.solvers.solve.incumbent import State, certified
from penstock.solvers.solve.judging import Judge
from penstock.solvers.solve.tasks import Remedy, Task, first_tasks, rounds
from penstock.solvers.solve.why import reasons, why
from penstock.solvers.solve.workers import Here, Workforce, is_small, workers_for

HINTED_BY, HINT_PLANS = "relax", 4
"""The planner of changed problems, used to find remedies, and its greatest number of simulated plans."""


def solve(
    problem: Problem,
    planner: str = "auto",
    *,
    time_limit_ns: int | None = None,
    effort: str = THOROUGH.name,
    start: JudgedPlan | None = None,
    on_incumbent: Callable[[JudgedPlan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **limits: Any,
) -> Result:
    """Return the best plan, simulated and verified, with its bounds; or why there is no plan, and a remedy.

    ``effort``: a name of ``EFFORTS``; ``limits``: further fields of ``Setting``. Other parameters and errors: as in
    ``search``.
    """
    setting = Setting(problem, Deadline(time_limit_ns), planner, effort=effort_of(effort), **limits)
    return certified(problem, explained(setting, search(setting, start, on_incumbent, on_progress)))


def explained(setting: Setting, result: Result) -> Result:
    """Add to the result why its plan takes its time and, for planner ``auto``, the best improvement and the planners
    not run.

    For a request that leaves degrees open, the planners that did not run are named once for all choices.
    """
    asks_others, more = resolve(setting.planner).asks_others, list[str]()
    if result.best is not None and setting.prove_bounds and not setting.deadline.passed:
        replan = replanned_by(HINTED_BY, HINT_PLANS) if asks_others else None
        more = hints(setting.problem, result.best, replan, result.bounds[0].bound_ns)
    if asks_others and setting.problem.choice is None and result.status is not Status.INFEASIBLE:
        more += not_asked([result.not_asked])
    return replace(result, why=(*result.why, *more))


def search(
    setting: Setting,
    start: JudgedPlan | None = None,
    on_incumbent: Callable[[JudgedPlan], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Result:
    """Return the best plan with bounds, simulated but not yet ``certified``; or why there is no plan.

    ``start``: an earlier plan to improve. ``on_incumbent`` is called with every improvement, ``on_progress`` with every
    improvement, bound, and change of the tasks at work. If bounds are proven and there is no plan, remedies are
    searched
    too. Raises ``UnsupportedRequest`` and ``InvalidDocument`` as ``Planner.check`` does, and where the planner cannot
    take
    the request.
    """
    row, problem = resolve(setting.planner), setting.problem
    values = row.check(problem.update_rules, setting.schedule, setting.options)
    state = State(setting, on_incumbent, on_progress)
    small = is_small(setting)
    if start is not None:
        state.offer(start)
    elif row.asks_others and not small:
        quick = State(replace(setting, first_feasible=True))
        run(quick, [first_tasks(setting, values)], Here(quick.setting))
        if quick.incumbent.best is not None:
            state.offer(quick.incumbent.best)
    with workers_for(state, 0 if small else setting.workers, one_planner=not row.asks_others) as workforce:
        run(state, rounds(state, row, values), workforce)
        shortage = state.shortage if setting.prove_bounds and state.best is None else None
        if shortage is not None and state.status is not Status.TIME_LIMIT:
            run(state, [[Remedy(row.name, values, feasible)]], workforce)
    state.choose_codecs()
    return state.result(why(state), reasons(state) if row.asks_others else None)


def run(state: State, every_round: Iterable[list[Task]], workforce: Workforce) -> None:
    """Run each round's tasks; results count in the order of the tasks, whichever ends first (``workers.Round``)."""
    for tasks in every_round:
        for task, outcome in workforce.run(tasks, state):
            state.take(task.name, outcome)


def feasible(setting: Setting, planner: str, values: Mapping[str, object]) -> bool:
    """Return whether a planner has a plan that fits, in this process."""
    state = State(setting)
    with suppress(UnsupportedRequest):  # a request that the planner does not support has no plan from it
        run(state, rounds(state, PLANNERS[planner], values), Here(setting))
    return state.best is not None


def judged(problem: Problem, name: str, proposals: Iterable[Proposal], schedule: str = "auto") -> Result:
    """Return the best of some proposals, verified, or the shortage of the nearest one."""
    state = State(Setting(problem, schedule=schedule))
    judge = Judge(state.setting)
    judge.judge_all(name, proposals)
    state.take(name, judge.outcome())
    return certified(problem, state.result(()))


def replanned_by(planner: str, max_plans: int) -> Replan:
    """Return a function that plans a changed problem with a planner's default options and few plans.

    Raises ``UnsupportedRequest`` for a planner that does not exist.
    """
    row = resolve(planner)

    def replan(problem: Problem) -> JudgedPlan | None:
        with suppress(UnsupportedRequest):  # a request that the planner does not support has no plan from it
            if row.proposals is None:
                return solve(problem, row.name, max_plans=max_plans).best
            judge = Judge(Setting(problem, max_plans=max_plans))
            judge.judge_all(row.name, row.proposals(judge.setting, checked(row.name, row.options, {})))
            return judge.best
        return None

    return replan
