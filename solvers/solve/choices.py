"""A request that leaves degrees of parallelism open: every choice is an ordinary problem (``degrees.contract``).

Before the first search the least of the choices' bounds is the request's (``searched``). Then ``auto`` searches the
choices in rounds: planner ``even``, which takes little time, then all planners with few plans, then with more. A choice
whose bound is not below the best plan is ruled out, and after each round only those go on that are near the best
(successive halving, with the distance instead of the half), of large requests only the best ones. The best one gets the
whole effort of the request. Another planner gives it to all choices that are near the best of ``even``. The certificate
is the minimum over the choices of the best bound of each: a choice that was left out of a round keeps its own.
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
"""The planner of plans within the limits of another trainer, which is given every choice: others make plans beyond."""

LAST = 1.5
"""The limit of the sizes of the choices in the last round, as a multiple of the largest choice's."""
CAUSES = 3
"""How many choices without a plan a sentence gives the reason for."""


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

    The parameters are those of ``driver.solve``; ``on_incumbent`` is called with the problem of each plan as well.
    Raises UnsupportedRequest where no choice can be made, or the planner can take none of them.
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
    """Return the best plan of planner ``QUICK`` over all choices, and the least of the bounds that were asked for.

    Nothing is proven of single ones. Raises UnsupportedRequest where no choice can be made.
    """
    search = Search(Setting(problem, planner=QUICK, workers=1, prove_bounds=False))
    search.run()
    return search.outcome()


def certified(
    problem: Problem,
    known: list[Searched],
    refused: dict[Choice, UnsupportedRequest],
    proposal: Proposal,
    choice: Choice,
) -> Result:
    """Return a plan of planner ``QUICK`` at one choice, verified, with its bounds and those over all choices.

    ``known``: what is known of the choices, whose bounds are tightened here.
    """
    search = Search(Setting(problem, planner=QUICK, prove_bounds=False))
    search.choices, search.refused = [copy(each) for each in known], refused
    search.best = next(each for each in search.choices if each.choice == choice)
    cells = contract(problem, choice)
    search.best.take(driver.judged(cells, QUICK, [proposal]))
    return search.outcome(cells)


def problem_of(problem: Problem, result: Result) -> Problem:
    """Return the problem that a result's plan or shortage belongs to: the request's, at the choice of the result."""
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
        """Search until one choice is left and has had its effort, or none can hold a better plan.

        In the first round choices of few cells come first: their plans are found soonest.
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
                asked = replace(self.setting, planner=QUICK, options={}, workers=0, max_plans=None)
            else:
                asked = replace(self._planners_only(), max_plans=min(plans, self.setting.max_plans or plans))
            self._round(left, asked, quick=plans is None, near=near)
            left = self._nearest(left, near, untried=plans is None)
        self._round(self._last(left), self.setting, final=True)
        self._place_back()

    def _place_back(self) -> None:
        """Make the best plan one of all devices, if a kind of them was left out and its cells are cells of them all."""
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

        Their sizes add up to ``LAST`` times the largest choice's at most. The best one alone has the rest of a limit of
        time, and the whole effort of a request that is too large for comparing all choices.
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
        """Give planners ``LISTED`` their effort, and improve the order of the best plan; return who goes on.

        So they do without a limit, where asking all at the best choice takes long, at choices that are not far from it.
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
        asked = replace(excluding(setting, others), workers=1, prove_bounds=False)
        self._search(self.best, asked, counts=False)
        return self._nearest(left, near, untried=True)

    @property
    def _limit_ns(self) -> float | None:
        """The time from which on plans are no better by more than the gap; None as long as there is no plan."""
        return None if self.best_ns is None else self.best_ns / (1.0 + self.setting.gap)

    def _is_surpassed(self, each: Searched) -> bool:
        """Return whether a bound that takes less time than planner ``QUICK`` shows that no plan is better."""
        return self._limit_ns is not None and (each.least_ns >= self._limit_ns or each.bound.bound_ns >= self._limit_ns)

    def _by_cells(self) -> list[Searched]:
        return sorted(self.choices, key=lambda each: (each.cells, each.load_ns))

    def _run_one(self, left: list[Searched]) -> None:
        """Give a planner's whole effort to the choices that are near the best of planner ``QUICK``.

        What a planner proposes first says little of its best plan. Where it has no plan there, the others follow.
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
        """Return the time of the best plan of planner ``QUICK``; NEVER_NS where it has none."""
        known: dict[Choice, int] = self.problem.results.setdefault("quick", {})  # as where planners are compared
        if each.choice not in known:
            deadline = Deadline(self.deadline.share_ns(4 * len(self.choices)))
            found = None
            with suppress(UnsupportedRequest):  # plans with a flush are not asked for
                found = driver.search(Setting(each.problem, deadline, QUICK, workers=1, prove_bounds=False)).best
            known[each.choice] = NEVER_NS if found is None else found.value_ns
        return known[each.choice]

    @property
    def best_ns(self) -> int | None:
        """The time of the best plan; None as long as there is none."""
        return None if self.best is None else self.best.value_ns

    @property
    def asks_others(self) -> bool:
        """Return whether the planner asks others."""
        return resolve(self.setting.planner).asks_others

    def _round(
        self,
        left: list[Searched],
        asked: Setting,
        *,
        near: float = 1.0,
        quick: bool = False,
        final: bool = False,
    ) -> None:
        """Search the open choices; of the time left each gets as much as those that wait, and later rounds half.

        Plans that take longer than ``near`` times the best one are of no use. After the ``final`` round there are none.
        The ``quick`` one leaves out choices that are far from the best plan, and does not share out its time, since
        each takes little; it asks for no bounds that take longer.
        """
        for number, each in enumerate(left):
            parts = (1 if final else 2) * (1 if quick else len(left) - number)
            limit_ns = self.deadline.share_ns(parts)
            if quick and (self._is_far(each) or self._is_surpassed(each)):
                continue
            if (quick or self.is_open(each)) and not self.deadline.passed:
                most_ns = None if quick or self.best_ns is None else int(near * self.best_ns)
                proves = final and asked.prove_bounds
                limited = replace(asked, deadline=Deadline(limit_ns), upper_bound_ns=most_ns, prove_bounds=proves)
                self._search(each, limited)

    def _is_far(self, each: Searched) -> bool:
        """Return whether no plain layout of a choice can be near the best plan; degrees of 1 are not left out so."""
        if self.best_ns is None or each.is_one or self._compares_all or each.least_ns >= self.best_ns:
            return False
        least_ns = Layouts(each.problem).least_ns()
        each.far = ROUNDS[0].near * self.best_ns < least_ns < NEVER_NS  # where none may fit, planners are asked
        return each.far

    def _nearest(self, left: list[Searched], near: float, *, untried: bool) -> list[Searched]:
        """Return the open choices, the best first, as far as they are near the best plan; all where there is none.

        ``untried``: also those that have no plan yet. Degrees of 1 stay as long as their bound allows, with an effort
        that ends planners until all of them have been asked: a plan without groups of GPUs is not missed because
        planner ``QUICK`` has a slow one. Neither stays if it lacks much memory.
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
        near_best = [each for each in left if not each.dropped]  # before bounds are asked for, which take longer
        return sorted(filter(self.is_open, near_best), key=Searched.by_value)

    def _afforded(self, ranked: list[Searched]) -> list[Searched]:
        """Return the best choice, and those after it for which effort is left, for degrees of 1 all of their own.

        With an effort that ends planners half of it is left for choices that have no plan yet.
        """
        found: list[Searched] = []
        for each in ranked:
            most = self._most // 2 if self._ends_planners and each.value_ns is None else self._most
            if found and len(found) + 1 > eligible.most_comparable(self.deadline):
                each.dropped = "the limit left no time to compare them"
            elif found and self._spent + (each.size if each.is_one else 0) >= most:
                each.dropped = f"the sizes of better ones add up to {most:,} already"
            else:
                found.append(each)
                self._spent += each.size
        return found

    def is_open(self, each: Searched) -> bool:
        """Return whether a choice may hold a better plan than the best one, by more than the gap that was asked for."""
        if each.impossible or each.choice in self.refused:
            return False
        return self._limit_ns is None or each.is_below(self._limit_ns)

    def _search(self, each: Searched, asked: Setting, *, counts: bool = True) -> None:
        """Search one choice from what was known; keep its bound, and a better plan. ``counts``: planners are asked."""

        def on_incumbent(plan: JudgedPlan) -> None:
            if self.on_incumbent is not None and (self.best_ns is None or plan.value_ns < self.best_ns):
                self.on_incumbent(PlanOfChoice(each.problem, plan))

        def on_progress(progress: Progress) -> None:
            assert self.on_progress is not None
            known = [value for value in (progress.value_ns, self.best_ns) if value is not None]
            working = tuple(f"{name} at {each.choice}" for name in progress.working)
            self.on_progress(Progress(min(known, default=None), self.bound(), working))

        asks_others = resolve(asked.planner).asks_others
        setting = replace(excluding(asked, left_out(each)) if asks_others else asked, problem=each.problem)
        known = None if each.result is None else each.result.best
        try:
            result = driver.search(setting, known, on_incumbent, None if self.on_progress is None else on_progress)
        except UnsupportedRequest as refused:
            if asked.planner == self.setting.planner:
                self.refused[each.choice] = refused
            return
        each.take(result)
        if counts and asked.planner not in result.unfinished:
            each.asked.add(asked.planner)
        each.prove_bounds = asked.prove_bounds
        if counts and asks_others:
            each.not_asked = result.not_asked
        if each.value_ns is not None and (self.best_ns is None or each.value_ns < self.best_ns):
            self.best = each

    def _planners_only(self) -> Setting:
        """Return what is asked of the rounds before the last: planners in this process, without a search afterwards.

        With an effort that ends planners none that is exact is asked: it goes on for its proof whatever it has found.
        """
        proofs = eligible.EXACT if self._ends_planners else ()
        others = dict.fromkeys(PHASES) | dict.fromkeys(proofs, Reason("proofs are looked for at the best choice alone"))
        return replace(excluding(self.setting, others), workers=1)

    # ---- what came of it ---------------------------------------------------------------------------------------------

    def bound(self) -> Bound:
        """Return the least of the choices' bounds: no plan of the request takes less."""
        return least_of(self.problem, self.choices)

    def outcome(self, problem: Problem | None = None) -> Result:
        """Return the answer; ``problem``: its plan's problem, where the choices searched have another.

        Raises UnsupportedRequest where every choice is refused, for the reason that most of them share.
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
        own = [each for each in result.bounds if each.scope == SCHEDULE_SCOPE or each.bound_ns > wide.bound_ns]
        if wide.bound_ns > bound.bound_ns:
            own.insert(0, replace(wide, scope=CLASS_SCOPE))
        explained = driver.explained(replace(self.setting, problem=self.best.problem), result)
        answer = replace(
            result,
            why=why_best(self, explained, bound),
            bounds=(bound, *own),
            seconds=self.deadline.seconds,
            choice=choice if self.problem.choices or choice.excluded else None,
        )
        return incumbent.certified(problem or self.best.problem, answer)

    def _nothing(self) -> Result:
        """Return why there is no plan: proven only where it is proven of every choice."""
        if not self.problem.choices:
            return self._alone()
        known = [each for each in self.choices if each.result is not None]
        if not known:
            return Result(Status.TIME_LIMIT, ("the time limit came before any choice of degrees was searched",))
        statuses = {each.result.status for each in known if each.result is not None}
        proven = all(each.impossible for each in self.choices if each.bounds_all)
        taken = [each for each in self.choices if each.choice not in self.refused]
        late = Status.TIME_LIMIT in statuses or len(known) < len(taken)
        status = Status.INFEASIBLE if proven else Status.TIME_LIMIT if late else Status.NONE_FOUND
        nearest = min(known, key=_by_shortage)
        found = self._with_remedy(nearest)
        others = [each for each in known if each is not nearest and each.result is not None and each.bounds_all]
        causes = [f"{each.choice}: {each.result.sentence}" for each in others if each.result is not None]
        more = (f"and {len(causes) - CAUSES} more choices",) if len(causes) > CAUSES else ()
        left = spared(self) if status is Status.NONE_FOUND else ()
        why = (*at(nearest.choice, found.why), *causes[:CAUSES], *more, *left)
        return replace(found, status=status, why=why, seconds=self.deadline.seconds, choice=nearest.choice)

    def _alone(self) -> Result:
        """Return the answer on all devices, whose planners say what stands in the way of each."""
        setting = replace(self.setting, deadline=Deadline(self.deadline.share_ns()))
        return replace(driver.explained(setting, driver.search(setting)), seconds=self.deadline.seconds)

    def _with_remedy(self, nearest: Searched) -> Result:
        """Return the result of the choice that lacks least, with what would help; of no other choice is that asked."""
        assert nearest.result is not None
        if nearest.prove_bounds or nearest.result.shortage is None or self.deadline.passed:
            return nearest.result
        deadline, schedule = Deadline(self.deadline.share_ns()), self.setting.schedule
        with suppress(UnsupportedRequest):  # plans with a flush are not asked for
            found = driver.search(Setting(nearest.problem, deadline, QUICK, workers=1, schedule=schedule))
            return found if found.best is None else nearest.result
        return nearest.result


def _by_shortage(each: Searched) -> tuple[bool, bool, int]:
    short = None if each.result is None else each.result.shortage
    return not each.bounds_all, short is None, 0 if short is None else short.missing_bytes
