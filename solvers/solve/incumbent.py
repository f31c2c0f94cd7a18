"""The state of a solve: the incumbent (the best plan so far), the proofs, and the obstacles to other plans.

Ties between plans: time per global batch, fewest devices, then the allocation's layers and devices, then fewest warm-up
forwards, then the plan that was offered first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from penstock.schemas.coverage import SCHEDULE_SCOPE, Covers
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.solvers.bounds.coverage import allowed, features_of_candidate
from penstock.solvers.bounds.feasibility import Proof, proof_of_infeasibility
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.costs.memory import largest_shortage
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, Bound, JudgedPlan, Progress, Reason, Result, Shortage, Status
from penstock.solvers.model.schedule import Orders, Schedule, kinds_of
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.encoding import encoded
from penstock.solvers.verify.verifier import verify

Key = tuple[int, int, tuple[object, ...], int, str]


def key_of(value_ns: int, allocation: Allocation, schedule: Schedule) -> Key:
    """Return the sort key of plans; the least is the best."""
    stages = tuple((s.first, s.last, s.devices, s.dispatch, s.recompute, s.modules) for s in allocation.stages)
    used = len({d for s in allocation.stages for d in s.devices})
    warmup = sum(schedule.warmup) if isinstance(schedule, Orders) else 0
    return value_ns, used, (stages, allocation.num_micro_batches), warmup, schedule.name


def with_timeline(problem: Problem, plan: JudgedPlan) -> JudgedPlan:
    """Return the plan with its timeline, which is simulated once in a process.

    Raises ``InvalidPlan`` if the simulation contradicts the one of another process (our bug).
    """
    if plan.simulated is None:
        how = plan.allocation, plan.schedule
        timeline = simulate(problem, *how, overlap=plan.overlap_all_reduce, update_rule=plan.update_rule)
        slower = timeline.time_per_global_batch_ns != plan.value_ns
        if slower or largest_shortage(problem, plan.allocation, timeline):
            raise InvalidPlan(f"a plan of {plan.planner!r} is slower or larger than its own process has found")
        plan.simulated = timeline
    return plan


@dataclass
class Incumbent:
    """The best plan that was offered; None before the first plan."""

    best: JudgedPlan | None = None
    _key: Key | None = None

    def is_beaten_by(self, key: Key) -> bool:
        """Return whether a plan with this key is better."""
        return self._key is None or key < self._key

    def offer(self, plan: JudgedPlan) -> bool:
        """Take a plan if it is better than the incumbent; return whether it is."""
        key = key_of(plan.value_ns, plan.allocation, plan.schedule)
        if not self.is_beaten_by(key):
            return False
        self.best, self._key = plan, key
        return True


def shown(bounds: Sequence[Bound]) -> tuple[Bound, ...]:
    """Return the highest bound on every plan of the request, and the highest of all where that is higher."""
    wide = max((bound for bound in bounds if bound.scope == REQUEST_SCOPE), key=lambda bound: bound.bound_ns)
    highest = max(bounds, key=lambda bound: bound.bound_ns)
    return (wide,) if highest.bound_ns <= wide.bound_ns else (wide, highest)


@dataclass
class Proofs:
    """The highest bound on each class of plans."""

    setting: Setting
    by_class: dict[Covers, Bound] = field(default_factory=dict)
    _plan_features: tuple[JudgedPlan, Covers] | None = None

    @cached_property
    def every_plan(self) -> Bound:
        """The bound on every plan of the request, from its work and its first micro-batch alone."""
        return request_bound(self.setting.problem) if self.setting.whole is None else self.setting.whole

    @cached_property
    def allowed(self) -> Covers:
        """The class of all plans that the request allows."""
        return allowed(self.setting.problem)

    def add(self, bound: Bound) -> bool:
        """Take a bound if it is higher than the previous bound on the same class; return whether it is."""
        previous = self.by_class.get(bound.covers)
        if previous is not None and bound.bound_ns <= previous.bound_ns:
            return False
        self.by_class[bound.covers] = bound
        return True

    def on_every_plan(self, more: Iterable[Bound] = ()) -> Bound:
        """Return the highest bound on every plan of the request; ``more``: bounds that are not taken yet."""
        bounds = [bound for bound in (*self.by_class.values(), *more) if self.allowed <= bound.covers]
        return max((self.every_plan, *bounds), key=lambda bound: bound.bound_ns)

    def shown(self, best: JudgedPlan) -> tuple[Bound, ...]:
        """Return the bound on every plan of the request, then a higher one that covers the plan, if there is one.

        A bound that the plan refutes is left out.
        """
        features = self._features(best)
        covering = [
            each for each in self.by_class.values() if features <= each.covers and each.bound_ns <= best.value_ns
        ]
        return shown([self.on_every_plan(), *covering])

    def reached(self, best: JudgedPlan | None) -> bool:
        """Return whether no better plan like the incumbent is needed: it is within the gap of a bound that covers it.

        With ``first_feasible`` any plan is enough.
        """
        if best is None or self.setting.first_feasible:
            return best is not None
        return best.value_ns <= self.shown(best)[-1].bound_ns * (1.0 + self.setting.gap)

    def sparing(self, best: JudgedPlan | None, plans: Covers | None) -> Bound | None:
        """Return a bound on a class of plans that makes a search for them needless; None if no bound does.

        ``plans``: the class; None: all plans. The requested gap applies between the incumbent and a bound that also
        covers the
        incumbent. With ``first_feasible`` any incumbent is enough.
        """
        if best is None or self.setting.first_feasible:
            return None if best is None else self.every_plan
        gap, features = self.setting.gap, self._features(best)
        wanted = self.allowed if plans is None else plans
        sparing = [bound for bound in (self.every_plan, *self.by_class.values()) if wanted <= bound.covers]
        enough = (b for b in sparing if best.value_ns <= b.bound_ns * (1.0 + (gap if features <= b.covers else 0.0)))
        return next(enough, None)

    def _features(self, plan: JudgedPlan) -> Covers:
        """Return the plan's features, computed once for the incumbent."""
        if self._plan_features is None or self._plan_features[0] is not plan:
            self._plan_features = plan, features_of_candidate(self.setting.problem, plan)
        return self._plan_features[1]


class OrderBound(NamedTuple):
    """A bound on every schedule of a plan's allocation with operations of these kinds."""

    plan: JudgedPlan
    bound: Bound

    def covers(self, candidate: JudgedPlan) -> bool:
        """Return whether the bound covers the schedule of a plan."""
        bounded = self.plan
        if not (isinstance(bounded.schedule, Orders) and isinstance(candidate.schedule, Orders)):
            return False
        how, other = (
            (each.allocation, each.overlap_all_reduce, each.update_rule, kinds_of(each.orders))
            for each in (bounded, candidate)
        )
        return how == other


@dataclass
class Obstacles:
    """The obstacles that kept proposals from becoming plans.

    ``shortage``: the least of all shortages. ``disconnected`` and ``unpinned``: of the last proposal whose devices are
    not
    connected, or that breaks a pin. ``proposed``: whether there was any proposal.
    """

    shortage: Shortage | None = None
    disconnected: str | None = None
    unpinned: str | None = None
    proposed: bool = False

    def lacks(self, short: Shortage) -> None:
        """Keep a shortage if it is the least."""
        if self.shortage is None or short.missing_bytes < self.shortage.missing_bytes:
            self.shortage = short

    def add(self, later: Obstacles) -> None:
        """Add the obstacles of a later task."""
        if later.shortage is not None:
            self.lacks(later.shortage)
        self.disconnected = later.disconnected or self.disconnected
        self.unpinned = later.unpinned or self.unpinned
        self.proposed = self.proposed or later.proposed


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a task and its results.

    ``best`` and ``proven``: its best plan and its bounds, of all that it announced. ``order_bound``: its bound on the
    schedules of one allocation. ``unfinished``: a limit cut it off. ``out_of_patience``: it ended because more plans
    were
    unlikely to be better (``Effort.patience``). ``note``: a clause for ``why``. ``refused``: why it cannot take the
    request. ``lost``: the signal or status that ended its process. ``remedy``: a change that makes an infeasible
    request
    feasible.
    """

    best: JudgedPlan | None = None
    proven: tuple[Bound, ...] = ()
    order_bound: OrderBound | None = None
    obstacles: Obstacles = field(default_factory=Obstacles)
    unfinished: bool = False
    out_of_patience: bool = False
    note: str = ""
    refused: UnsupportedRequest | None = None
    lost: str | None = None
    remedy: str | None = None


@dataclass
class State:
    """The state of a solve: the combined results of all tasks so far.

    ``on_incumbent`` is called with every better plan, ``on_progress`` also with bounds and the tasks at work.
    ``plain``: the best of plain plans (``JudgedPlan.is_plain``). ``unfinished`` and ``out_of_patience``: tasks that a
    limit
    or the effort has ended. ``left_out``: planners that do not suit the request, with the reason (``eligible``).
    ``refused``: planners that cannot take it, with their error. ``spared``: planners that cannot improve on the best
    plan,
    with the bound that shows it. ``lost``: tasks whose process died, and how. ``remedy``: a change that makes an
    infeasible
    request feasible. ``codec_note``: the time that codecs save.
    """

    setting: Setting
    on_incumbent: Callable[[JudgedPlan], None] | None = None
    on_progress: Callable[[Progress], None] | None = None
    best: JudgedPlan | None = None
    announced: JudgedPlan | None = None
    incumbent: Incumbent = field(default_factory=Incumbent)
    plain: Incumbent = field(default_factory=Incumbent)
    obstacles: Obstacles = field(default_factory=Obstacles)
    order_bounds: list[OrderBound] = field(default_factory=list)
    unfinished: dict[str, None] = field(default_factory=dict)
    out_of_patience: dict[str, None] = field(default_factory=dict)
    spared: dict[str, Bound] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, Reason] = field(default_factory=dict)
    refused: dict[str, UnsupportedRequest] = field(default_factory=dict)
    remedy: str | None = None
    codec_note: str = ""

    def __post_init__(self) -> None:
        self.proofs = Proofs(self.setting)

    @property
    def problem(self) -> Problem:
        """The problem that is solved."""
        return self.setting.problem

    def take(self, name: str, outcome: Outcome) -> None:
        """Merge a task's plans, bounds and obstacles; of plans that tie, the earlier one stays."""
        if outcome.unfinished:
            self.unfinished[name] = None
        if outcome.out_of_patience:
            self.out_of_patience[name] = None
        if outcome.lost is not None:
            self.lost[name] = outcome.lost
        if outcome.note:
            self.notes[name] = outcome.note
        if outcome.order_bound is not None:
            self.order_bounds.append(outcome.order_bound)
        if outcome.refused is not None:
            self.refused[name] = outcome.refused
        self.remedy = self.remedy or outcome.remedy
        self.obstacles.add(outcome.obstacles)
        for bound in outcome.proven:
            self.proofs.add(bound)
        if outcome.best is not None:
            self.offer(outcome.best)

    def offer(self, plan: JudgedPlan) -> None:
        """Make a plan the incumbent if it is better."""
        if plan.is_plain:
            self.plain.offer(plan)
        if self.incumbent.offer(plan):
            self.best = with_timeline(self.problem, plan)
            self._announce(self.best)

    def announce(self, plan: JudgedPlan) -> None:
        """Announce a plan that is better than all announced plans, before its task's turn in the order."""
        if self.announced is None or plan.value_ns < self.announced.value_ns:
            self._announce(with_timeline(self.problem, plan))

    def _announce(self, plan: JudgedPlan) -> None:
        if self.announced is None or plan.value_ns < self.announced.value_ns:
            self.announced = plan
            if self.on_incumbent is not None:
                self.on_incumbent(plan)

    def report(self, proven: Iterable[Bound], working: tuple[str, ...]) -> None:
        """Report progress; ``proven``: bounds that are not taken yet."""
        if self.on_progress is not None:
            value_ns = None if self.announced is None else self.announced.value_ns
            self.on_progress(Progress(value_ns, self.proofs.on_every_plan(proven), working))

    @property
    def shares_times(self) -> bool:
        """Whether tasks may share their best times: False where the answer might depend on when a time arrives."""
        counted = self.setting.max_plans is not None or self.setting.effort.patience is not None
        return self.setting.gap == 0 and not counted and not self.setting.first_feasible

    @property
    def shared_ns(self) -> int | None:
        """Return the least time of any plan, where times are shared."""
        return None if self.announced is None or not self.shares_times else self.announced.value_ns

    @property
    def done(self) -> bool:
        """Return whether no better plan like the incumbent is needed."""
        return self.proofs.reached(self.best)

    def enough(self, plans: Covers | None) -> bool:
        """Return whether no search for a class of plans is needed."""
        return self.proofs.sparing(self.best, plans) is not None

    def spare(self, name: str, plans: Covers | None) -> None:
        """Note which bound made a planner needless."""
        bound = self.proofs.sparing(self.best, plans)
        assert bound is not None
        self.spared[name] = bound

    def choose_codecs(self) -> None:
        """Encode the incumbent's tensors where that saves time in the simulation."""
        if self.best is None or not self.problem.codec:
            return
        encoding = encoded(self.problem, self.best, lambda: self.setting.deadline.passed)
        if encoding is not None:
            self.best, self.codec_note = encoding
            self._announce(self.best)

    @cached_property
    def refuted(self) -> Proof | None:
        """The proof that there is no plan, computed only if no plan was found."""
        return None if self.best is not None else proof_of_infeasibility(self.problem)

    @property
    def status(self) -> Status:
        """Return the status of a solve without a plan: ``infeasible`` only with a proof, also if a limit came first.

        A limit of plans is no ``time_limit``: with it the answer is the same on every machine.
        """
        if self.refuted is not None:
            return Status.INFEASIBLE
        return Status.TIME_LIMIT if self.unfinished and self.setting.deadline.passed else Status.NONE_FOUND

    @property
    def shortage(self) -> Shortage | None:
        """The shortage of the nearest plan, if there is no plan, with a remedy if there is one."""
        short = self.obstacles.shortage or (None if self.refuted is None else self.refuted.shortage)
        return short and replace(short, remedy=self.remedy)

    def result(self, clauses: Iterable[str], not_asked: Mapping[str, Reason] | None = None) -> Result:
        """Return the best plan, the bounds on classes of plans and on orders; the plan is not ``certified`` yet."""
        unfinished, seconds, others = tuple(self.unfinished), self.setting.deadline.seconds, not_asked or {}
        why, best = tuple(clauses), self.best
        if best is None:
            return Result(self.status, why, None, (), self.shortage, seconds, unfinished, not_asked=others)
        bounds = (*self.proofs.shown(best), *(each.bound for each in self.order_bounds if each.covers(best)))
        return Result(Status.FEASIBLE, why, best, bounds, None, seconds, unfinished, not_asked=others)


def certified(problem: Problem, result: Result) -> Result:
    """Return the result with its plan verified, the bound on every order of its allocation, and whether it is optimal.

    The first of a result's bounds is on every plan. Raises ``InvalidPlan`` where the verifier refuses the plan (our
    bug).
    """
    best = result.best
    if best is None:
        return result
    how = best.allocation, best.schedule
    faults = verify(problem, *how, best.timeline, overlap=best.overlap_all_reduce, update_rule=best.update_rule)
    if faults:
        raise InvalidPlan(f"planner {best.planner!r} made a plan that does not verify: " + "; ".join(faults[:3]))
    analytic = schedule_bound(problem, *how, best.update_rule, best.overlap_all_reduce)
    of_orders = (each for each in result.bounds if each.scope == SCHEDULE_SCOPE)
    order_bound = max((analytic, *of_orders), key=lambda bound: bound.bound_ns)
    bounds = (*(each for each in result.bounds if each.scope != SCHEDULE_SCOPE), order_bound)
    # A steady state whose cycle is longer than what was measured may be averaged a little too fast.
    sound = all(best.value_ns >= bound.bound_ns for bound in bounds)
    optimal = sound and best.value_ns <= bounds[0].bound_ns + bounds[0].tolerance_ns
    return replace(result, status=Status.OPTIMAL if optimal else Status.FEASIBLE, bounds=bounds)
