"""Hosts and a plan for one job: bounds exclude sets, regular plans rank the others, the job's planner decides.

1. Sets (``families``), one of each class of sets that are alike, each with a bound on every plan for it.
2. A regular plan (``regular``) for the most compact set of each number of hosts, the largest first. Then for the other
   sets, the most promising number first, if their bound permits a better plan than the best and a regular plan would
   win on hosts with unlimited links. On many hosts a limit on the total of devices ends this.
3. The planner that the job requests, on the sets that can still win: all of them where they are small or the job limits
   its planner, else until the time limit. Without any limit large sets keep their regular plans.

Ties: fewest devices, then fewest switches newly fragmented, then the most compact, then the order of the tree.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import accumulate
from typing import Protocol

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.degrees.contract import Problems
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, JudgedPlan, Result, Status
from penstock.solvers.placement import regular
from penstock.solvers.placement.at_degrees import Hosts
from penstock.solvers.placement.families import Families
from penstock.solvers.placement.limits import PlacementLimits
from penstock.solvers.placement.site import Chosen, Site
from penstock.solvers.solve import choices

SMALL = 6_000
"""Layers × devices × numbers of micro-batches × choices of degrees up to which planners run without a limit."""
EFFORT = 3_072
"""Total devices of the sets that get a regular plan in addition to the most compact ones."""
KEPT = 8
"""Number of problems that are cached."""
MOST_RAISED = 2
"""Numbers of hosts whose bounds are raised to the maximum after the search."""
UNLIMITED_DIVISOR = 2
"""A regular plan for n devices with unlimited bandwidth counts as n / 2 devices."""
SPARE = 2
"""Regular plans may take 1/2 of a time limit."""


class Asker(Protocol):
    """The job's request."""

    @property
    def limited(self) -> bool:
        """Return whether the job limits its planner."""

    @property
    def drawn(self) -> bool:
        """Return whether regular plans are valid for the job: one flushed pipeline, no other trainer's limits."""

    @property
    def has_choices(self) -> bool:
        """Return whether the job leaves degrees of parallelism open."""

    def problem(self, chosen: Chosen) -> Problem:
        """Return the job's problem on these devices."""

    def solve(self, problem: Problem, left_ns: int | None) -> Result:
        """Solve a problem with the job's planner."""


@dataclass(eq=False)
class HostSet:
    """A set of ``number`` hosts that fragments a number of switches; no plan for it takes less than ``bound_ns``.

    ``least``: hosts that are kept, used or not. ``place``: rank among the sets of this many hosts, most compact first.
    ``cells``: the GPUs of each device of the result's plan, where degrees are a choice. ``is_solved``: the job's
    planner has run on it. ``surpassed``: its regular plans would lose even with unlimited bandwidth. ``tightest``: no
    higher bound can be computed.
    """

    number: int
    chosen: Chosen
    broken: int
    bound_ns: int
    least: int = 1
    place: int = 0
    result: Result | None = None
    cells: tuple[tuple[int, ...], ...] = ()
    is_solved: bool = False
    surpassed: bool = False
    tightest: bool = False

    @property
    def settled(self) -> bool:
        """Return whether the set has been evaluated."""
        return self.surpassed or self.result is not None

    @property
    def best(self) -> JudgedPlan | None:
        """Return the set's plan."""
        return None if self.result is None else self.result.best

    @property
    def certified(self) -> bool:
        """Return whether its result has a bound on every plan."""
        return self.result is not None and any(each.scope == REQUEST_SCOPE for each in self.result.bounds)

    @property
    def devices(self) -> int:
        """Return the number of devices of the set."""
        return sum(count for _host, count in self.chosen)

    @property
    def used(self) -> Chosen:
        """Return the hosts that the plan uses with their device counts, and more hosts where ``least`` requires it."""
        if self.best is None:
            return self.chosen
        ends = list(accumulate(count for _host, count in self.chosen))
        hosts = {bisect_right(ends, gpu) for device in self.best.timeline.uses for gpu in self.gpus(device)}
        spare = [number for number in range(len(self.chosen)) if number not in hosts]
        kept = hosts | set(spare[: max(0, self.least - len(hosts))])
        return tuple(each for number, each in enumerate(self.chosen) if number in kept)

    @property
    def devices_used(self) -> int:
        """Return the number of the set's devices on the hosts that the plan uses."""
        return sum(count for _host, count in self.used)

    def gpus(self, device: int) -> tuple[int, ...]:
        """Return the GPUs of a device of the result's plan, or of its shortage."""
        return self.cells[device] if self.cells else (device,)

    def take(self, result: Result, cells: tuple[tuple[int, ...], ...] = ()) -> None:
        """Keep the better plan, and the higher of two bounds that hold for every such plan."""
        self.bound_ns = max(self.bound_ns, *(b.bound_ns for b in result.bounds if b.scope == REQUEST_SCOPE), 0)
        if self.best is None or (result.best is not None and result.best.value_ns <= self.best.value_ns):
            self.result, self.cells = result, cells


@dataclass
class Choice:
    """The result. ``cut_short``: why the search ended before all sets that could win were planned."""

    limits: PlacementLimits
    options: list[HostSet]
    every_set: bool
    best: HostSet | None
    cut_short: str = ""
    unplanned: int = 0

    @property
    def bound_cost(self) -> int | None:
        """Return a lower bound on the cost of every plan for any of the sets."""
        costs = [cost for option in self.options if (cost := _least_cost(self.limits, option)) is not None]
        return min(costs, default=None)

    @property
    def refuted(self) -> bool:
        """Return whether it is proven that no set has a plan within the budget: every set was evaluated."""
        return self.every_set and all(_is_refuted(self.limits, option) for option in self.options)

    def by_number(self) -> dict[int, list[HostSet]]:
        """Return the sets of each number of hosts."""
        options: dict[int, list[HostSet]] = {}
        for option in self.options:
            options.setdefault(option.number, []).append(option)
        return dict(sorted(options.items()))


@dataclass
class Chooser:
    """The search of one job over ``hosts`` of a site. ``on_progress`` is called after every set that is evaluated."""

    site: Site
    hosts: Iterable[int]
    limits: PlacementLimits
    asker: Asker
    deadline: Deadline
    on_progress: Callable[[Chooser], None] = lambda _chooser: None
    options: list[HostSet] = field(default_factory=list)
    best: HostSet | None = None
    _bounds: dict[object, int] = field(default_factory=dict)
    _fast: dict[object, bool] = field(default_factory=dict)
    _hosts_by_key: dict[object, Hosts] = field(default_factory=dict)
    _shared_problems: dict[object, Problems] = field(default_factory=dict)
    _joined: bool | None = None

    def __post_init__(self) -> None:
        self._problem = lru_cache(maxsize=KEPT)(self.asker.problem)

    def run(self) -> Choice:
        """Run all three steps."""
        hosts = frozenset(self.hosts)
        families = Families(self.site, hosts, self.limits.least, self.limits.most or len(hosts))
        for number in families.numbers():
            self._add(families, number)
        firsts = {option.number: option for option in reversed(self.options)}
        for number in sorted(firsts, reverse=True):
            self._plan(firsts[number])
        if self.limits.cheapest and not families.every_set:
            self._between(families)
        self._others(families.every_set)
        cut_short = self._ask()
        if self.asker.has_choices:
            self._explain()
            self._certify()
        unplanned = sum(not option.settled and self._can_win(option) for option in self.options)
        return Choice(self.limits, self.options, families.every_set, self.best, cut_short, unplanned)

    def _add(self, families: Families, number: int) -> list[HostSet]:
        added: dict[int, HostSet] = {}
        for chosen in families.sets(number):
            within = self.limits.within(self.site, chosen)
            if within is not None and self.site.alike(within) not in added:
                broken = self.site.newly_broken(within)
                added[self.site.alike(within)] = HostSet(
                    number, within, broken, self._bound_ns(within), self.limits.least, len(added)
                )
        self.options += added.values()
        return list(added.values())

    def _bound_ns(self, chosen: Chosen) -> int:
        """Return the bound on every plan; it depends only on the devices' kinds and the numbers on the hosts.

        Where degrees are a choice, it is raised once it matters.
        """
        if self.asker.has_choices:
            return self._hosts(chosen).bound_ns()
        kinds = tuple(sorted(self.site.devices[device].kind for device in self.site.devices_of(chosen)))
        key = kinds, tuple(sorted(count for _host, count in chosen))
        if key not in self._bounds:
            self._bounds[key] = request_bound(self._problem(chosen)).bound_ns
        return self._bounds[key]

    def _hosts(self, chosen: Chosen) -> Hosts:
        """Return the choices of degrees on hosts of these groups, in this order; computed once."""
        groups = tuple((self.site.hosts[host].group, count) for host, count in chosen)
        key: tuple[object, ...] = groups
        if self._joined is None:
            self._joined = not self.site.is_tree or bool(self._problem(chosen).collectives)
        if self._joined:
            key = self.site.alike(chosen), groups
        if key not in self._hosts_by_key:
            problems = None if self._joined else self._shared_problems.setdefault(frozenset(groups), {})
            self._hosts_by_key[key] = Hosts(self._problem(chosen), problems)
        return self._hosts_by_key[key]

    def _raise_bound(self, option: HostSet, *, tightest: bool = False) -> None:
        """Raise the bound of a set where degrees are a choice: to the highest so far, or to the highest possible."""
        if self.asker.has_choices and not option.tightest:
            hosts = self._hosts(option.chosen)
            option.bound_ns = max(option.bound_ns, hosts.tighten() if tightest else hosts.bound_ns())
            option.tightest = tightest

    def _explain(self) -> None:
        """Compute the shortages of the nearest plans, where no set has a plan."""
        for option in self.options:
            result = option.result
            if self.best is None and result is not None and result.best is None and result.shortage is None:
                problem = self._problem(option.chosen)
                self._take(option, problem, partial(choices.quick, problem))

    def _certify(self) -> None:
        """Raise the most important bounds: of a few sets that may cost least, and of the best plan.

        Small sets have all their bounds raised.
        """
        for option in self.options:
            self._raise_bound(option, tightest=_is_small(self._hosts(option.chosen).problem))
        for _ in range(MOST_RAISED):
            possible = [each for each in self.options if self.limits.keeps(each.bound_ns)]
            least = min(possible, key=lambda each: self.limits.cost(each.bound_ns, each.devices), default=None)
            if least is None or least.tightest or self.deadline.passed:
                break
            for option in self.options:
                if self._hosts(option.chosen) is self._hosts(least.chosen):
                    self._raise_bound(option, tightest=True)
        self.certify_best()

    def certify_best(self) -> None:
        """Verify the best plan and compute its bounds, if it has no bound: at the end, or when the search stops."""
        best = self.best
        if self.asker.has_choices and best is not None and best.result is not None and not best.certified:
            problem = self._problem(best.chosen)
            best.result = self._hosts(best.chosen).certified(problem, best.result)

    def _between(self, families: Families) -> None:
        """Bisect between a number of hosts that keeps the deadline and the next smaller one that does not."""
        while self.best is not None and not self._late:
            numbers = sorted({option.number for option in self.options})
            low = max((n for n in numbers if n < self.best.number), default=self.best.number - 1)
            middle = (low + self.best.number) // 2
            if middle in numbers or middle < self.limits.least:
                return
            for option in self._add(families, middle)[:1]:
                self._plan(option)

    def _others(self, every_set: bool) -> None:
        left = EFFORT
        for option in sorted(self.options, key=self._promise):
            if option.result is not None or not self._can_win(option):
                continue
            if self._late or (left < 0 and not every_set):
                return
            before = len(self._fast)
            if self._may_win(option):
                self._plan(option, self._longest_ns)
                left -= option.devices
            else:
                option.surpassed = True
                self.on_progress(self)
            left -= (len(self._fast) - before) * option.devices // UNLIMITED_DIVISOR

    def _promise(self, option: HostSet) -> tuple[int, int, int]:
        """Return the sort key of numbers of hosts: the cost of their best plan, then their bounds."""
        costs = [
            self.limits.cost(other.best.value_ns, other.devices)
            for other in self.options
            if other.number == option.number and other.best is not None
        ]
        return min(costs, default=2**62), self.limits.cost(option.bound_ns, option.devices), option.broken

    def _may_win(self, option: HostSet) -> bool:
        """Return whether a regular plan would win with unlimited bandwidth; computed once for hosts that are alike."""
        if not self.asker.drawn:
            return True
        if self.asker.has_choices:
            return self._hosts(option.chosen).may_take(self._longest_ns)
        key = tuple((self.site.hosts[host].group, count) for host, count in option.chosen)
        if key not in self._fast:
            ends = list(accumulate(count for _host, count in option.chosen))
            self._fast[key] = regular.may_take(
                self._problem(option.chosen),
                lambda devices: self._longest_ns(ends[bisect_left(ends, devices)]),
            )
        return self._fast[key]

    def _plan(self, option: HostSet, upper_bound_ns: Callable[[int], int] = lambda _devices: NEVER_NS) -> None:
        """Plan a set; where degrees are a choice, only if the regular plan takes no longer than ``upper_bound_ns``."""
        if option.result is not None or self._late:
            return
        problem = self._problem(option.chosen)
        if not self.asker.drawn:
            option.is_solved = True
            self._take(option, problem, partial(self.asker.solve, problem, self.deadline.share_ns(SPARE)))
            return
        if self.asker.has_choices:
            self._take(option, problem, partial(self._hosts(option.chosen).plan, problem, upper_bound_ns))
            self._raise_bound(option)
        else:
            self._take(option, problem, partial(regular.plan, problem))

    def _longest_ns(self, devices: int) -> int:
        """Return the longest step time with which a plan on this many devices may win."""
        if self.best is None or self.best.best is None:
            return self.limits.deadline_ns or NEVER_NS
        return self.limits.longest_ns(self.limits.cost(self.best.best.value_ns, self.best.devices_used), devices)

    def _ask(self) -> str:
        """Run the job's planner on the sets that can win; return why not on all of them."""
        for option in sorted(self.options, key=self._rank):
            if option.is_solved or not self._can_win(option):
                continue
            self._raise_bound(option, tightest=True)
            if not self._can_win(option):
                continue
            problem = self._problem(option.chosen)
            if not (self.deadline.limited or self.asker.limited or _is_small(problem)):
                return "so large a set keeps its regular plan unless there is a time limit"
            if self.deadline.passed:
                return "the time limit came first"
            option.is_solved = True
            self._take(option, problem, partial(self.asker.solve, problem, self.deadline.share_ns(1)))
        return ""

    def _take(self, option: HostSet, problem: Problem, solve: Callable[[], Result | None]) -> None:
        try:
            result = solve()
            if result is None:
                option.surpassed = True
                self.on_progress(self)
                return
        except UnsupportedRequest as refused:
            if not problem.choices:
                raise
            result = Result(Status.INFEASIBLE, (refused.detail,))  # the set has no model-parallel groups at any choice
        option.take(result, choices.problem_of(problem, result).cells)
        keeps = option.best is not None and self.limits.keeps(option.best.value_ns)
        if keeps and (self.best is None or self._rank(option) < self._rank(self.best)):
            self.best = option
        self.on_progress(self)

    def _rank(self, option: HostSet) -> tuple[bool, int, int, int, int, Chosen]:
        """Return the sort key of sets: the best plan first; sets without a plan last, the most promising first."""
        if option.best is None or not self.limits.keeps(option.best.value_ns):
            late, cost, devices, used = (
                True,
                self.limits.cost(option.bound_ns, option.devices),
                option.devices,
                option.chosen,
            )
        else:
            late, devices, used = False, option.devices_used, option.used
            cost = self.limits.cost(option.best.value_ns, devices)
        return late, cost, devices, option.broken, option.place, used

    def _can_win(self, option: HostSet) -> bool:
        """Return whether a plan there may cost less than the best, or the same on fewer devices."""
        least = _least_cost(self.limits, option)
        if least is None or (option.result is not None and option.result.status is Status.OPTIMAL):
            return False
        if self.best is None or self.best.best is None:
            return True
        if option is self.best:
            return least < self.limits.cost(self.best.best.value_ns, self.best.devices_used)
        devices = self.best.devices_used
        return (least, option.devices) < (self.limits.cost(self.best.best.value_ns, devices), devices)

    @property
    def _late(self) -> bool:
        """Return whether regular plans have used their share of the time."""
        left_s, limit_s = self.deadline.left_s, self.deadline.limit_s
        return left_s is not None and limit_s is not None and left_s < limit_s / SPARE


def _is_refuted(limits: PlacementLimits, option: HostSet) -> bool:
    """Return whether no plan for the set fits in memory, or all miss the deadline."""
    proven = option.result is not None and option.result.status is Status.INFEASIBLE
    return proven or not limits.keeps(option.bound_ns)


def _least_cost(limits: PlacementLimits, option: HostSet) -> int | None:
    """Return the set's least possible cost; None where no plan for the set keeps the deadline."""
    return limits.cost(option.bound_ns, option.devices) if limits.keeps(option.bound_ns) else None


def _is_small(problem: Problem) -> bool:
    return problem.num_layers * problem.num_devices * len(candidates(problem)) * max(1, len(problem.choices)) <= SMALL
