"""Tasks, and the rounds in which a solve runs them: each round begins when the one before has ended.

A task is a small picklable value: a planner's search, the neighbourhood of a plan, the order of one allocation, a
bound, a remedy. ``run`` does it, in this process or in another, announces plans and bounds on its link as they come,
and returns the outcome.

A planner that runs alone has one round: its proposals, and the bound on all plans of one pipeline. ``auto`` has
three:

1. every planner that suits the request (``eligible``), each as if it ran alone with the same limits, so that
   ``auto`` is never worse than any of them;
2. a neighbourhood search from the best plan, while its order is improved or proven;
3. the same improvement or proof of the plan that results from that search.

If the profile measures modules of layers at the degrees, the stages of the best plan recompute modules instead of whole
layers, where that is quicker. This is tried before each of the last two rounds and at the end.

If a plan of several pipelines or with split backwards is best, a search also starts from the best of all others, and
optimises its order as well. With a target there is only the first round: later rounds make plans beyond its limits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.coverage import allowed
from penstock.solvers.bounds.device_count import bound as device_count
from penstock.solvers.bounds.over_time import MOST_LAYERS, over_time_bound
from penstock.solvers.bounds.schedule_bound import MOST_LABELLED, one_pipeline_bound, request_bound, split_apart_bound
from penstock.solvers.bounds.trainer import within_bounds
from penstock.solvers.improve.neighbourhood import flushed, steady
from penstock.solvers.improve.order import optimise_order
from penstock.solvers.improve.remedies import find_remedy
from penstock.solvers.improve.selective import lighter
from penstock.solvers.model.options import checked, unlimited
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, JudgedPlan, Reason
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.update_rules import PERIODIC_RULES
from penstock.solvers.planners.catalogue import EXCLUDE, PLANNERS, Planner, Tier
from penstock.solvers.planners.proposal import Proposal, in_order, proposed
from penstock.solvers.planners.setting import Setting
from penstock.solvers.planners.simple.candidates import first_plans, last_plans, simplest_plans
from penstock.solvers.schedules.catalogue import tried_with
from penstock.solvers.solve.eligible import chosen, excluded_by, why_unsearched
from penstock.solvers.solve.incumbent import OrderBound, Outcome, State, with_timeline
from penstock.solvers.solve.judging import Judge, Link

EFFORT = 1.0
"""Effort of optimising a plan's order without a time limit, in about seconds of one core."""
SHARE = 8
"""Divisor of a time limit: optimising a plan's order gets 1/8 of it."""
LOCAL_SEARCH = 3
"""The local search's effort, as a multiple of the effort of optimising an order."""
ORDER_ROUNDS = 2
"""Rounds of order optimisation: of the planners' best plan, and of what the local search makes of it."""


class Task(Protocol):
    """A piece of work that runs as if it were alone."""

    @property
    def name(self) -> str:
        """The name of its planner or phase."""

    @property
    def makes(self) -> Covers | None:
        """The class of its plans, None for any plan: a bound that covers the class may make the task needless."""

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Run the task, and return its outcome."""


@dataclass(frozen=True)
class Ask:
    """A planner's proposals, judged.

    ``also``: schedules that proposals of several stages are tried under as well. ``early``: whether the task begins
    before
    others.
    """

    name: str
    values: Mapping[str, object]
    also: tuple[str, ...] = ()
    makes: Covers | None = None
    early: bool = False

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Judge until the proposals' end, the limit, or the gap; return the best plan and the bounds."""
        row = PLANNERS[self.name]
        patience = None
        if setting.effort.patience is not None and not (setting.effort.proves and row.tier is Tier.PROOF):
            patience = setting.effort.patience_for(setting.problem)
        judge = Judge(setting, link, patience=patience)
        assert row.proposals is not None
        try:
            proposals = _also_under(self.also, self._proposals(setting))
            simple = row.simple if unlimited(row.options, self.values) else ()
            before, after = first_plans(setting.problem, simple), simplest_plans(setting.problem, simple)
            last = last_plans(setting.problem, simple, lambda: judge.best is None)
            judge.judge_all(self.name, chain(before, proposals, after, last))
        except UnsupportedRequest as refused:
            return replace(judge.outcome(), refused=refused)
        return judge.outcome()

    def _proposals(self, setting: Setting) -> Iterator[Proposal]:
        """Yield what the planner proposes, beginning with its earlier proposals for this problem.

        If an earlier search stopped at its number of plans, the planner continues there, so that a search of few plans
        costs
        nothing twice. With a time limit, or if proposals depend on the setting, it begins again.
        """
        row, kept = PLANNERS[self.name], setting.problem.results
        assert row.proposals is not None
        if setting.deadline.limited or row.bounded:
            yield from row.proposals(setting, self.values)
            return
        key = "proposals", self.name, tuple(self.values.items())
        earlier, later = kept.setdefault(key, ([], row.proposals(setting, self.values)))
        yield from earlier
        if setting.max_plans is None:
            kept.pop(key)  # all proposals follow, and would only take memory
        try:
            for proposal in later:
                if setting.max_plans is not None:
                    earlier.append(proposal)
                yield proposal
        except UnsupportedRequest:
            kept.pop(key, None)
            raise


def _also_under(schedules: tuple[str, ...], proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    for proposal in proposals:
        yield proposal
        if proposal.schedules and len(proposal.allocation.stages) > 1 and proposal.fixed is None:
            yield from (proposal._replace(schedules=(schedule,)) for schedule in schedules)


@dataclass(frozen=True)
class LocalSearch:
    """Local search from a plan. ``proven``: bounds so far; ``effort``: about seconds of one core, counted in steps."""

    start: JudgedPlan
    proven: tuple[Bound, ...]
    effort: float
    name: str = "polish"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Search until the effort is spent, the limit, or the gap; return the best plan."""
        judge = Judge(setting, link)
        judge.offer(with_timeline(setting.problem, self.start))
        for bound in self.proven:
            judge.prove(bound)
        judge.judge_all(self.name, self._proposals(judge))
        return judge.outcome()

    def _proposals(self, judge: Judge) -> Iterator[Proposal]:
        problem, rule = judge.problem, self.start.update_rule

        def stopped() -> bool:
            return judge.done or judge.setting.deadline.passed

        if rule in PERIODIC_RULES:
            # Each step continues from the result of the last one: results of other tasks must not change the walk.
            judge.ceiling_ns = lambda: None
            for plan, pattern in steady.search(problem, rule, self.effort, lambda: judge.best, stopped):
                yield in_order(problem, plan, pattern, rule)
        else:
            assert judge.best is not None
            yield from map(proposed, flushed.search(problem, judge.best, self.effort, stopped))


@dataclass(frozen=True)
class Selective:
    """A change of the plan's order: stages recompute modules instead of whole layers."""

    start: JudgedPlan
    name: str = "selective"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Return the plan with as little recomputation as fits, if that is quicker."""
        judge, start = Judge(setting, link), self.start
        judge.offer(with_timeline(setting.problem, start))
        assert isinstance(start.schedule, Orders)
        lighter_plan = lighter(
            setting.problem, start.allocation, start.schedule, start.overlap_all_reduce, lambda: setting.deadline.passed
        )
        if lighter_plan is not None:
            judge.judge_all(
                self.name, [Proposal(lighter_plan[0], (), overlaps=(start.overlap_all_reduce,), fixed=lighter_plan[1])]
            )
        return judge.outcome()


@dataclass(frozen=True)
class OptimiseOrder:
    """Find a better order of a plan's allocation, or prove it optimal; ``effort`` as in ``optimise_order``."""

    start: JudgedPlan
    effort: float
    name: str = "closing"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Improve the order until it is proven, the effort is spent, or the limit; return the best plan and the bound.

        A requested schedule is not replaced.
        """
        start = self.start
        best: list[JudgedPlan] = []

        def better(orders: Orders, value_ns: int) -> None:
            best[:] = [replace(start, planner=self.name, schedule=orders, value_ns=value_ns, simulated=None)]
            link.announce(best[0])

        optimised = optimise_order(
            setting.problem,
            start.allocation,
            start.schedule,
            overlap=start.overlap_all_reduce,
            value_ns=start.value_ns,
            effort=self.effort,
            update_rule=start.update_rule,
            stopped=lambda: setting.deadline.passed,
            on_better=better if setting.schedule == "auto" else None,
        )
        return Outcome(
            best=best[0] if best else None,
            order_bound=OrderBound(start, optimised.bound),
            unfinished=setting.deadline.passed,
        )


@dataclass(frozen=True)
class Prove:
    """The bounds of all plans of one pipeline, for any memory; for many devices, from stages taken separately.

    Also the bounds of all plans that fit into memory, unless layers are many; with a target, of its plans. ``split``:
    only
    bounds of plans whose backwards may be split, which take longer and spare fewer planners.
    """

    name: str = "bound"
    makes: Covers | None = None
    split: bool = False

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Return the bounds."""
        proven: list[Bound] = []
        for bounds in self._bounds(setting, link):
            for each in bounds:
                link.proven(each)
            proven += bounds
            if setting.deadline.passed:
                break
        return Outcome(proven=tuple(proven))

    def _bounds(self, setting: Setting, link: Link) -> Iterator[list[Bound]]:
        problem = setting.problem
        if self.split:
            yield [one_pipeline_bound(problem, split=True)]
            apart = split_apart_bound(problem, lambda: setting.deadline.passed)
            yield [] if apart is None else [apart]
            return
        if problem.num_devices > MOST_LABELLED:
            yield [device_count.bounds(problem, request_bound(problem).bound_ns, link.proven)]
        else:
            yield [one_pipeline_bound(problem)]
        over_time = over_time_bound(problem) if problem.num_layers <= MOST_LAYERS else None
        yield [] if over_time is None else [over_time]
        if problem.within is not None:
            yield list(within_bounds(problem))


Feasible = Callable[[Setting, str, Mapping[str, object]], bool]
"""A function that returns whether a planner with these options has a plan that fits."""


@dataclass(frozen=True)
class Remedy:
    """The first change that makes a request feasible for a planner with these options."""

    planner: str
    values: Mapping[str, object]
    feasible: Feasible
    name: str = "remedy"
    makes: Covers | None = None

    def run(self, setting: Setting, link: Link) -> Outcome:
        """Try changes until one works, or the limit; return the one that works."""

        def feasible(changed: Problem) -> bool:
            tried = replace(setting, problem=changed, gap=0.0, prove_bounds=True, whole=None, first_feasible=True)
            return not setting.deadline.passed and self.feasible(tried, self.planner, self.values)

        return Outcome(remedy=find_remedy(setting.problem, feasible))


def rounds(state: State, planner: Planner, values: Mapping[str, object]) -> Iterator[list[Task]]:
    """Yield the tasks of each round; ``values`` are all options of the planner.

    Raises ``UnsupportedRequest`` if a planner that runs alone does not support the request.
    """
    setting = state.setting
    proves = setting.prove_bounds and not setting.first_feasible
    bounds: list[Task] = [Prove()] if proves else []
    of_split: list[Task] = [Prove(split=True)] if proves and _may_split(setting.problem) else []
    if planner.proposals is not None:
        yield [Ask(planner.name, values), *bounds, *of_split]
        if state.refused:
            raise state.refused[planner.name]
        return
    excluded = excluded_by(setting, EXCLUDE.of(values))
    rows, state.left_out = chosen(setting, excluded)
    effort, stays = _effort(setting), why_unsearched(setting)
    unsearched = stays or (None if effort else Reason(f"effort {setting.effort.name} has none of it"))
    if unsearched:
        state.left_out |= {name: unsearched for name in (LocalSearch.name, OptimiseOrder.name) if name not in excluded}
        excluded |= {LocalSearch.name, OptimiseOrder.name}
    yield [*bounds, *tasks_for(setting, rows), *of_split]
    only_planners = setting.first_feasible or setting.problem.within is not None
    optimised: set[object] = set()
    for number in range(0 if only_planners or stays else ORDER_ROUNDS):
        yield from _selective(state, excluded)
        following: list[Task] = []
        for start in _starts(state):
            if number == 0 and "polish" not in excluded and _can_search_from(state, start):
                following.append(LocalSearch(start, tuple(state.proofs.by_class.values()), LOCAL_SEARCH * effort))
            if "closing" not in excluded and start.allocation not in optimised:
                following.append(OptimiseOrder(start, effort))
            optimised.add(start.allocation)
        yield following
    if not only_planners:
        yield from _selective(state, excluded)


def _may_split(problem: Problem) -> bool:
    """Return whether plans may have split backwards, and devices are few enough for their bounds."""
    return problem.num_devices <= MOST_LABELLED and "split" in allowed(problem).backward


def _selective(state: State, excluded: set[str]) -> Iterator[list[Task]]:
    """Yield a round for the best plans whose stages recompute, if single modules may be recomputed."""
    if "selective" in excluded or not state.problem.module_sets:
        return
    starts = [start for start in _starts(state) if start.update_rule == "synchronous"]
    tasks: list[Task] = [
        Selective(start)
        for start in starts
        if isinstance(start.schedule, Orders) and any(stage.recomputes for stage in start.allocation.stages)
    ]
    if tasks:
        yield tasks


def first_tasks(setting: Setting, values: Mapping[str, object]) -> list[Task]:
    """Return the simple planners, or the planner of many devices: they give a plan before workers are ready."""
    rows, _ = chosen(setting, excluded_by(setting, EXCLUDE.of(values)))
    simple = [row for row in rows if row.tier is Tier.SIMPLE]
    return tasks_for(setting, simple or [row for row in rows if row.least_devices > 1])


def tasks_for(setting: Setting, rows: list[Planner]) -> list[Task]:
    """Return a task for each planner with its default options, and the schedules that name the planner."""
    tasks: list[Task] = []
    for row in rows:
        also = [each for each in tried_with(row.name) if each.for_any_stages]
        makes = row.makes(setting.problem) if row.makes and not any(each.split for each in also) else None
        values = checked(row.name, row.options, {})
        tasks.append(Ask(row.name, values, tuple(each.name for each in also), makes, row.early))
    return tasks


def _starts(state: State) -> list[JudgedPlan]:
    """Return the best plan, and the best plain plan if another: with its order optimised it may be the better one."""
    best, plain = state.incumbent.best, state.plain.best
    if best is None:
        return []
    return [best] if best.is_plain or plain is None else [plain, best]


def _can_search_from(state: State, start: JudgedPlan) -> bool:
    """Return whether local search supports the plan's update rule and the requested schedule."""
    schedule = "eager" if start.update_rule in PERIODIC_RULES else "early-backward"
    supported = start.update_rule == "synchronous" or start.update_rule in PERIODIC_RULES
    return supported and state.setting.schedule in ("auto", schedule) and not state.done


def _effort(setting: Setting) -> float:
    """Return the effort of optimising the order: from the request's effort or time limit, not from the time left."""
    limit_s, improving = setting.deadline.limit_s, setting.effort.improving
    if improving is not None:
        return EFFORT * improving
    return EFFORT if limit_s is None else limit_s / SHARE
