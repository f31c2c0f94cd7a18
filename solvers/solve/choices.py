"""A request that leaves degrees of parallelism open: every choice is an ordinary problem (``degrees.contract``).

Before the first search, the least of the choices' bounds is the request's bound (``searched``). Then ``auto`` searches
the choices in rounds: first planner ``even``, which takes little time, then all planners with few plans each, then with
more plans. A choice whose bound is not below the best plan is ruled out. After each round only the choices near the
best
plan continue (successive halving, with the distance instead of the half); of large requests, only the best choices do.
The best choice gets the whole effort of the request. A planner other than ``auto`` searches all choices that are near
the
best plan of ``even``. The certificate is the minimum over the choices of the best bound of each: a choice that was left
out of a round keeps its earlier bound.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import copy
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

from penstock.schemas.coverage import CLASS_SCOPE, SCHEDULE_SCOPE
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, JudgedPlan, Progress, Reason, Result, Status
from penstock.solvers.planners.catalogue import EXCLUDE, PHASES, PLANNERS, resolve
from penstock.solvers.planners.effort import LARGE, THOROUGH, effort_of
from penstock.solvers.planners.even.planner import Layouts
from penstock.solvers.planners.proposal import Proposal, proposed_again
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve import driver, eligible, incumbent
from penstock.solvers.solve.eligible import LISTED, NO_PLAN, QUICK, ROUNDS, excluded_by, excluding, left_out
from penstock.solvers.solve.searched import MOST_RAISED, Searched, choices_of, kinds_apart, least_of, same_cells
from penstock.solvers.solve.tasks import LocalSearch, Selective
from penstock.solvers.solve.why import alternatives, at, idle, spared, why_best

TARGETED = "uniform"
"""The planner of plans within the limits of another trainer; it searches every choice, as others ignore those limits.
"""

LAST = 1.5
"""Greatest sum of the sizes of the choices in the last round, as a multiple of the largest choice's size."""
CAUSES = 3
"""Number of choices without a plan whose reasons an answer gives."""


class PlanOfChoice(NamedTuple):
    """A plan and the problem that it is a plan of."""

    problem: Problem
    plan: JudgedPlan


def solve(
    problem: Problem,
    planner: str = "auto",
    *,
    time_limit_ns: int | None = None,
    effort: str = THOROUGH.name,
    on_incumbent: Callable[[PlanOfChoice], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **limits: Any,
) -> Result:
    """Return the best plan over all choices of a request, with a bound that holds for all of them.

    The parameters are the same as for ``driver.solve``, but ``on_incumbent`` also receives each plan's problem.
    Raises UnsupportedRequest if no choice can be made, or if the planner supports none of them.
    """
    alone: tuple[str, ...] = ()
    if problem.within is not None and resolve(planner).asks_others:
        planner = TARGETED
        alone = (
            f"planner {TARGETED} alone was asked, as others' plans are not kept within {problem.within.trainer}'s",
        )
    setting = Setting(problem, Deadline(time_limit_ns), planner, effort=effort_of(effort), **limits)
    resolve(planner).check(problem.update_rules, setting.schedule, setting.options)
    search = Search(setting, on_incumbent, on_progress)
    search.run()
    result = replace(search.outcome(), alternatives=alternatives(search))
    return result if result.status is Status.INFEASIBLE else replace(result, why=result.why + alone)


def quick(problem: Problem) -> Result:
    """Return the best plan of planner ``QUICK`` over all choices, and the least of the bounds computed so far.

    Single choices have no proof. Raises UnsupportedRequest if no choice can be made.
    """
    search = Search(Setting(problem, planner=QUICK, workers=1, prove_bounds=False))
    search.run()
    return search.outcome()


def certified(
    problem: Problem,
    choices: list[Searched],
    refused: dict[Choice, UnsupportedRequest],
    proposal: Proposal,
    choice: Choice,
) -> Result:
    """Return a plan of planner ``QUICK`` at one choice, verified, with its bounds and the bounds over all choices.

    ``choices``: the choices searched so far; their bounds are tightened here.
    """
    search = Search(Setting(problem, planner=QUICK, prove_bounds=False))
    search.choices, search.refused = [copy(each) for each in choices], refused
    search.best = next(each for each in search.choices if each.choice == choice)
    cells = contract(problem, choice)
    search.best.take(driver.judged(cells, QUICK, [proposal]))
    return search.outcome(cells)


def problem_of(problem: Problem, result: Result) -> Problem:
    """Return the problem that a result's plan or shortage belongs to: the request's problem at the result's choice."""
    return problem if result.choice is None else contract(problem, result.choice)


class Search:
    """The rounds of a solve over choices."""

    def __init__(
        self,
        setting: Setting,
        on_incumbent: Callable[[PlanOfChoice], None] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.setting, self.problem, self.deadline = setting, setting.problem, setting.deadline
        self.on_incumbent, self.on_progress = on_incumbent, on_progress
        self.best: Searched | None = None
        self._spent = 0
        problem, effort = self.problem, setting.effort
        self._ends_planners, self._most = effort.patience is not None, effort.comparing
        kinds = kinds_apart(problem) if self.asks_others else ()
        self.choices, self.refused = choices_of(problem, kinds=(None, *kinds))
        self._compares_all = sum(each.size for each in self.choices) <= self._most
        self._rounds = ROUNDS if self._compares_all or effort.compares else ROUNDS[:1]

    def run(self) -> None:
        """Search until one choice is left and has had its effort, or no choice can hold a better plan.

        The first round begins with choices of few cells, because their plans are found soonest.
        """
        left = self._by_cells()
        if not self.asks_others:
            self._run_one(left)
            return
        for plans, near, planners in self._rounds:
            if planners == LISTED:
                left = self._listed(left, near)
                continue
            left = left if plans is None else self._afforded(left)
            if len(left) <= 1 or (plans is not None and len(self._last(left)) == len(self._open)):
                break
            if plans is None:  # without workers, as a process takes longer to start
                setting = replace(self.setting, planner=QUICK, options={}, workers=0, max_plans=None)
            else:
                setting = replace(self._planners_only(), max_plans=min(plans, self.setting.max_plans or plans))
            self._round(left, setting, quick=plans is None, near=near)
            left = self._nearest(left, near, untried=plans is None)
        self._round(self._last(left), self.setting, final=True)
        self._place_back()

    def _place_back(self) -> None:
        """Expand the best plan to all devices, if a kind was left out and all the plan's cells are also cells of all
        devices.
        """
        best = self.best
        if best is None or best.choice.excluded is None or best.choice.in_one_stage:
            return
        whole = next((each for each in self.choices if each.choice == best.choice._replace(excluded=None)), None)
        if whole is None or best.result is None or (plan := best.result.best) is None:
            return
        devices = same_cells(best.problem, whole.problem, plan.allocation)
        if devices is None:
            return
        result = driver.judged(whole.problem, plan.planner, [proposed_again(plan, devices)])
        whole.take(replace(result, why=idle(whole, best), not_asked=best.result.not_asked))
        self.best = min((each for each in self.choices if each.bounds_all), key=Searched.by_value)

    def _last(self, left: list[Searched]) -> list[Searched]:
        """Return the choices that get the whole effort: the best one, and others if all take little more.

        Their sizes add up to at most ``LAST`` times the largest choice's size. The best choice alone gets the rest of a
        time
        limit, and the whole effort of a request that is too large for comparing all choices.
        """
        if self.deadline.limited or not self._compares_all:
            return left[:1]
        most = LAST * max((each.size for each in self.choices), default=0)
        ranked = [*left, *sorted((each for each in self._open if each not in left), key=Searched.by_value)]
        sizes = accumulate(each.size for each in ranked)
        return [
            each for number, (each, size) in enumerate(zip(ranked, sizes, strict=True)) if not number or size <= most
        ]

    @property
    def _open(self) -> list[Searched]:
        return [each for each in self.choices if self.is_open(each)]

    def _listed(self, left: list[Searched], near: float) -> list[Searched]:
        """Give planners ``LISTED`` their effort, and improve the order of the best plan; return the choices that
        continue.

        Only for a large request without a limit: there running all planners at the best choice takes long, so these
        planners
        first run at all choices near the best plan.
        """
        if self.best is None or self.best.size <= LARGE or self.deadline.limited:
            return left
        setting = self.setting
        values = resolve(setting.planner).check(self.problem.update_rules, setting.schedule, setting.options)
        excluded = excluded_by(Setting(self.problem), EXCLUDE.of(values))
        for planner in (each for each in LISTED if each not in excluded):
            limit_ns = ROUNDS[0].near * (self.best_ns or 0)
            ranked = [each for each in left if each.value_ns is not None and each.value_ns <= limit_ns]
            self._round(ranked, replace(setting, planner=planner, options={}), near=near)
        others = dict.fromkeys((*PLANNERS, LocalSearch.name, Selective.name))
        improvement = replace(excluding(setting, others), workers=1, prove_bounds=False)
        self._search(self.best, improvement, counts=False)
        return self._nearest(left, near, untried=True)

    @property
    def _limit_ns(self) -> float | None:
        """Greatest time of a plan that is better by more than the gap; None before the first plan."""
        return None if self.best_ns is None else self.best_ns / (1.0 + self.setting.gap)

    def _is_surpassed(self, each: Searched) -> bool:
        """Return whether a bound that takes less time than planner ``QUICK`` rules out a better plan."""
        return self._limit_ns is not None and (each.least_ns >= self._limit_ns or each.bound.bound_ns >= self._limit_ns)

    def _by_cells(self) -> list[Searched]:
        return sorted(self.choices, key=lambda each: (each.cells, each.load_ns))

    def _run_one(self, left: list[Searched]) -> None:
        """Give a planner's whole effort to the choices that are near the best of planner ``QUICK``.

        A planner's first proposals say little about its best plan. If it has no plan at these choices, the others
        follow.
        """
        if self.setting.planner in (QUICK, TARGETED) or len(left) < 2:
            self._round(left, self.setting, final=True)
            return
        times: dict[Choice, int] = {}
        for each in left:
            far = each.load_ns > eligible.NEAR * min(times.values(), default=NEVER_NS)
            times[each.choice] = NEVER_NS if far else self._quick_ns(each)
        limit_ns = eligible.NEAR * min(times.values())
        ranked = sorted(left, key=lambda each: times[each.choice])
        near = [each for each in ranked if times[each.choice] <= limit_ns]
        self._round(near, self.setting, final=True)
        for each in ranked[len(near) :]:
            each.dropped = f"planner {QUICK} has no plan there within {eligible.NEAR:g} times its best"
            if self.best is None:
                self._round([each], self.setting, final=True)

    def _quick_ns(self, each: Searched) -> int:
        """Return the time of the best plan of planner ``QUICK``, or NEVER_NS if it has no plan."""
        times: dict[Choice, int] = self.problem.results.setdefault("quick", {})  # as where planners are compared
        if each.choice not in times:
            deadline = Deadline(self.deadline.share_ns(4 * len(self.choices)))
            best = None
            with suppress(UnsupportedRequest):  # the request excludes plans with a flush
                best = driver.search(Setting(each.problem, deadline, QUICK, workers=1, prove_bounds=False)).best
            times[each.choice] = NEVER_NS if best is None else best.value_ns
        return times[each.choice]

    @property
    def best_ns(self) -> int | None:
        """The time of the best plan; None before the first plan."""
        return None if self.best is None else self.best.value_ns

    @property
    def asks_others(self) -> bool:
        """Return whether the planner asks others."""
        return resolve(self.setting.planner).asks_others

    def _round(
        self,
        left: list[Searched],
        setting: Setting,
        *,
        near: float = 1.0,
        quick: bool = False,
        final: bool = False,
    ) -> None:
        """Search the open choices; each gets an equal share of the time left, but later rounds keep half of it.

        Plans that take longer than ``near`` times the best plan are of no use. The ``final`` round keeps no time for
        later rounds.
        The ``quick`` round leaves out choices that are far from the best plan. It does not share out its time, since
        each
        choice takes little, and it computes no bounds that take longer.
        """
        for number, each in enumerate(left):
            parts = (1 if final else 2) * (1 if quick else len(left) - number)
            limit_ns = self.deadline.share_ns(parts)
            if quick and (self._is_far(each) or self._is_surpassed(each)):
                continue
            if (quick or self.is_open(each)) and not self.deadline.passed:
                most_ns = None if quick or self.best_ns is None else int(near * self.best_ns)
                proves = final and setting.prove_bounds
                limited = replace(setting, deadline=Deadline(limit_ns), upper_bound_ns=most_ns, prove_bounds=proves)
                self._search(each, limited)

    def _is_far(self, each: Searched) -> bool:
        """Return whether no plain layout of a choice can be near the best plan; False for degrees of 1."""
        if self.best_ns is None or each.is_one or self._compares_all or each.least_ns >= self.best_ns:
            return False
        least_ns = Layouts(each.problem).least_ns()
        each.far = ROUNDS[0].near * self.best_ns < least_ns < NEVER_NS  # if no layout may fit, planners run
        return each.far

    def _nearest(self, left: list[Searched], near: float, *, untried: bool) -> list[Searched]:
        """Return the open choices near the best plan, the best first; all open choices before the first plan.

        ``untried``: choices without a plan stay as well. Degrees of 1 stay while their bound allows it, with an effort
        that
        ends planners early, until all planners have run: a plan without groups of GPUs must not be missed because
        planner
        ``QUICK`` has a slow one. A choice that lacks much memory is dropped in both cases.
        """
        if self.best_ns is None:
            return sorted(filter(self.is_open, left), key=Searched.by_value)
        limit_ns = near * self.best_ns
        plain = untried or not self._ends_planners

        def goes_on(each: Searched) -> bool:
            if untried and self._compares_all:
                return True
            stays = plain and each.is_one
            if each.value_ns is None:
                return (stays or (untried and not each.far)) and not each.lacks_much
            return stays or each.value_ns <= limit_ns

        for each in left:
            slow = f"their plans by then took more than {near:g} times as long as the best"
            each.dropped = "" if goes_on(each) else NO_PLAN if each.value_ns is None else slow
        near_best = [each for each in left if not each.dropped]  # before computing bounds, which take longer
        return sorted(filter(self.is_open, near_best), key=Searched.by_value)

    def _afforded(self, ranked: list[Searched]) -> list[Searched]:
        """Return the best choice, and the choices after it for which effort is left; degrees of 1 have a separate
        allowance.

        With an effort that ends planners early, half of the allowance is for choices that have no plan yet.
        """
        affordable: list[Searched] = []
        for each in ranked:
            most = self._most // 2 if self._ends_planners and each.value_ns is None else self._most
            if affordable and len(affordable) + 1 > eligible.most_comparable(self.deadline):
                each.dropped = "the limit left no time to compare them"
            elif affordable and self._spent + (each.size if each.is_one else 0) >= most:
                each.dropped = f"the sizes of better ones add up to {most:,} already"
            else:
                affordable.append(each)
                self._spent += each.size
        return affordable

    def is_open(self, each: Searched) -> bool:
        """Return whether a choice may hold a better plan than the best one, by more than the gap that was asked for."""
        if each.impossible or each.choice in self.refused:
            return False
        return self._limit_ns is None or each.is_below(self._limit_ns)

    def _search(self, each: Searched, base: Setting, *, counts: bool = True) -> None:
        """Search one choice from its last plan; keep its bound, and a better plan.

        ``counts``: planners that complete their search are noted and do not run at this choice again.
        """

        def on_incumbent(plan: JudgedPlan) -> None:
            if self.on_incumbent is not None and (self.best_ns is None or plan.value_ns < self.best_ns):
                self.on_incumbent(PlanOfChoice(each.problem, plan))

        def on_progress(progress: Progress) -> None:
            assert self.on_progress is not None
            values = [value for value in (progress.value_ns, self.best_ns) if value is not None]
            working = tuple(f"{name} at {each.choice}" for name in progress.working)
            self.on_progress(Progress(min(values, default=None), self.bound(), working))

        asks_others = resolve(base.planner).asks_others
        setting = replace(excluding(base, left_out(each)) if asks_others else base, problem=each.problem)
        start = None if each.result is None else each.result.best
        try:
            result = driver.search(setting, start, on_incumbent, None if self.on_progress is None else on_progress)
        except UnsupportedRequest as refused:
            if base.planner == self.setting.planner:
                self.refused[each.choice] = refused
            return
        each.take(result)
        if counts and base.planner not in result.unfinished:
            each.finished_planners.add(base.planner)
        each.prove_bounds = base.prove_bounds
        if counts and asks_others:
            each.not_asked = result.not_asked
        if each.value_ns is not None and (self.best_ns is None or each.value_ns < self.best_ns):
            self.best = each

    def _planners_only(self) -> Setting:
        """Return the setting of the rounds before the last: planners in this process, without a search afterwards.

        With an effort that ends planners early, exact planners do not run: they continue for their proof whatever they
        find.
        """
        proofs = eligible.EXACT if self._ends_planners else ()
        others = dict.fromkeys(PHASES) | dict.fromkeys(proofs, Reason("proofs are looked for at the best choice alone"))
        return replace(excluding(self.setting, others), workers=1)

    # ---- the answer ---------------------------------------------------------------------------------------------

    def bound(self) -> Bound:
        """Return the least of the choices' bounds: no plan of the request takes less."""
        return least_of(self.problem, self.choices)

    def outcome(self, problem: Problem | None = None) -> Result:
        """Return the answer; ``problem``: the problem of its plan, if the choices searched have another.

        Raises UnsupportedRequest if every choice is refused, for the most frequent reason.
        """
        if all(each.choice in self.refused for each in self.choices):
            reasons = list(map(str, self.refused.values()))
            raise max(self.refused.values(), key=lambda refusal: reasons.count(str(refusal)))
        if self.best is None:
            return self._nothing()
        result, choice = self.best.result, self.best.choice
        assert result is not None
        assert result.best is not None
        while not self.best.tightest:
            self.best.tighten()
        raised = MOST_RAISED if self.deadline.passed else 2 * len(self.choices)
        bound, wide = least_of(self.problem, self.choices, raised), self.best.bound
        bounds = [each for each in result.bounds if each.scope == SCHEDULE_SCOPE or each.bound_ns > wide.bound_ns]
        if wide.bound_ns > bound.bound_ns:
            bounds.insert(0, replace(wide, scope=CLASS_SCOPE))
        explained = driver.explained(replace(self.setting, problem=self.best.problem), result)
        answer = replace(
            result,
            why=why_best(self, explained, bound),
            bounds=(bound, *bounds),
            seconds=self.deadline.seconds,
            choice=choice if self.problem.choices or choice.excluded else None,
        )
        return incumbent.certified(problem or self.best.problem, answer)

    def _nothing(self) -> Result:
        """Return why there is no plan: proven only if it is proven for every choice."""
        if not self.problem.choices:
            return self._alone()
        searched = [each for each in self.choices if each.result is not None]
        if not searched:
            return Result(Status.TIME_LIMIT, ("the time limit came before any choice of degrees was searched",))
        statuses = {each.result.status for each in searched if each.result is not None}
        proven = all(each.impossible for each in self.choices if each.bounds_all)
        supported = [each for each in self.choices if each.choice not in self.refused]
        late = Status.TIME_LIMIT in statuses or len(searched) < len(supported)
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT if late else Status.NONE_FOUND
        nearest = min(searched, key=_by_shortage)
        result = self._with_remedy(nearest)
        others = [each for each in searched if each is not nearest and each.result is not None and each.bounds_all]
        causes = [f"{each.choice}: {each.result.sentence}" for each in others if each.result is not None]
        more = (f"and {len(causes) - CAUSES} more choices",) if len(causes) > CAUSES else ()
        left = spared(self) if status is Status.NONE_FOUND else ()
        why = (*at(nearest.choice, result.why), *causes[:CAUSES], *more, *left)
        return replace(result, status=status, why=why, seconds=self.deadline.seconds, choice=nearest.choice)

    def _alone(self) -> Result:
        """Return the answer on all devices, in which each planner says what it cannot do."""
        setting = replace(self.setting, deadline=Deadline(self.deadline.share_ns()))
        return replace(driver.explained(setting, driver.search(setting)), seconds=self.deadline.seconds)

    def _with_remedy(self, nearest: Searched) -> Result:
        """Return the result of the choice that lacks least, with a remedy; no other choice is searched for remedies."""
        assert nearest.result is not None
        if nearest.prove_bounds or nearest.result.shortage is None or self.deadline.passed:
            return nearest.result
        deadline, schedule = Deadline(self.deadline.share_ns()), self.setting.schedule
        with suppress(UnsupportedRequest):  # the request excludes plans with a flush
            result = driver.search(Setting(nearest.problem, deadline, QUICK, workers=1, schedule=schedule))
            return result if result.best is None else nearest.result
        return nearest.result


def _by_shortage(each: Searched) -> tuple[bool, bool, int]:
    short = None if each.result is None else each.result.shortage
    return not each.bounds_all, short is None, 0 if short is None else short.missing_bytes
