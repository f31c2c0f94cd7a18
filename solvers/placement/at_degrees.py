"""Regular plans where degrees are a choice: the best of planner ``even`` at any of them, and bounds on all plans.

A choice's lower bound does not depend on how nodes are joined: it is computed once for hosts of the same groups, with
cables that take no time, and holds for every set of such hosts. Choices are examined in the order of their bounds; each
visit raises a choice's bound, at a rising cost, until no bound is below the best plan. That plan is then the best of
all choices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.feasibility import proof_of_infeasibility
from penstock.solvers.bounds.race import Race
from penstock.solvers.costs.infinity import NEVER_NS, UNLIMITED
from penstock.solvers.degrees.contract import Problems, contract, inside_nodes
from penstock.solvers.degrees.planned import planned_cells
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.network import Cable, Network
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Result, Status
from penstock.solvers.planners.even.planner import Layouts
from penstock.solvers.planners.proposal import proposed
from penstock.solvers.solve import choices
from penstock.solvers.solve.eligible import QUICK
from penstock.solvers.solve.searched import Searched, choices_of, least_of


@dataclass
class _Open:
    """A choice on hosts, whatever joins them.

    ``searched``: its bounds on all plans. ``least_ns``: its bound on regular plans. ``layouts``: None until needed.
    """

    searched: Searched
    least_ns: int
    layouts: Layouts | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs in the choice's model-parallel groups."""
        return sum(map(len, planned_cells(self.searched.gpus, self.searched.choice)))

    @property
    def is_local(self) -> bool:
        """Whether no collective inside a pass leaves a node, so that layers cost the same whatever joins the nodes."""
        return not self.searched.choice.in_one_stage and inside_nodes(self.searched.gpus, self.searched.problem.cells)

    def raised(self, below_ns: float) -> _Open:
        """Raise the bound on regular plans and return the choice; the final bound is searched only below a time."""
        before_ns = self.least_ns
        if self.searched.by_load:
            self.least_ns = max(before_ns, self.searched.bound.bound_ns)
        if self.least_ns == before_ns:
            self.layouts = self.layouts or Layouts(self.searched.problem)
            self.least_ns = max(before_ns, self.layouts.least_ns(below_ns))
        return self


@dataclass
class Hosts:
    """The choices of a job on hosts of the same groups, whatever joins them; ``problem``: the problem of one such set.

    ``problems``: the choices' problems on hosts of these groups, however many of each; None where a set's network
    matters, since its problems do not follow from its nodes.
    """

    problem: Problem
    problems: Problems | None
    open: list[_Open] = field(init=False)
    refused: dict[Choice, UnsupportedRequest] = field(init=False)

    def __post_init__(self) -> None:
        joined = self.problems is None
        free = self.problem if joined else replace(self.problem, network=_free(self.problem.network), _costs={})
        searched, self.refused = choices_of(free, self.problems)
        self.open = [_Open(each, each.load_ns) for each in searched]

    def bound_ns(self) -> int:
        """Return a bound on every plan, from the load of each choice; NEVER_NS where the hosts fit no choice."""
        return min((each.searched.least_ns for each in self.open), default=NEVER_NS)

    def tighten(self) -> int:
        """Return the highest bound on every plan that can be computed."""
        return least_of(self.problem, [each.searched for each in self.open]).bound_ns if self.open else NEVER_NS

    def plan(self, problem: Problem, upper_bound_ns: Callable[[int], int]) -> Result | None:
        """Return the best regular plan on such hosts; None if every plan takes more than ``upper_bound_ns``.

        ``upper_bound_ns``: by the number of GPUs. If no plan exists at all, the result has the reason. Raises
        UnsupportedRequest where no choice can be made.
        """
        best: tuple[Problem, JudgedPlan] | None = None

        def limit_ns(each: _Open) -> int:
            return min(upper_bound_ns(each.gpus) + 1, NEVER_NS if best is None else best[1].value_ns)

        race = Race(self.open)
        while (each := race.next_below(limit_ns)) is not None:
            best = self._quickest(problem, each, limit_ns(each)) or best
        if best is not None:
            return _result(*best)
        return self._nothing(problem) if all(upper_bound_ns(each.gpus) >= NEVER_NS for each in self.open) else None

    def _nothing(self, problem: Problem) -> Result:
        """Return that no regular plan fits, or that no plan fits, where that is quickly proven for every choice."""
        proofs = [proof_of_infeasibility(each.searched.problem) for each in self.open]
        if not self.open or None in proofs:
            return choices.quick(problem)
        return Result(Status.INFEASIBLE, ("no choice of degrees fits in memory",))

    def _quickest(self, problem: Problem, each: _Open, below_ns: int) -> tuple[Problem, JudgedPlan] | None:
        """Return the quickest layout of a choice that takes less than a time."""
        assert each.layouts is not None
        try:
            contracted = contract(problem, each.searched.choice, self.problems)
        except UnsupportedRequest:  # no link connects the model-parallel groups
            return None
        layouts = each.layouts if each.is_local else Layouts(contracted)
        plans = layouts.quickest(contracted, below_ns, 1)
        return (contracted, plans[0]) if plans else None

    def may_take(self, upper_bound_ns: Callable[[int], int]) -> bool:
        """Return whether a regular plan may take ``upper_bound_ns``, or less, however the hosts are joined."""
        return Race(self.open).next_below(lambda each: upper_bound_ns(each.gpus) + 1) is not None

    def certified(self, problem: Problem, result: Result) -> Result:
        """Return a regular plan, verified, with the highest bounds on all plans and on its choice's plans."""
        assert result.best is not None
        assert result.choice is not None
        searched = [each.searched for each in self.open]
        return choices.certified(problem, searched, self.refused, proposed(result.best), result.choice)


def _result(contracted: Problem, trial: JudgedPlan) -> Result:
    """Return a plan that is still to be verified, and has no bound."""
    plan = replace(trial, planner=QUICK)
    return Result(Status.FEASIBLE, (), plan, choice=contracted.choice)


def _free(network: Network) -> Network:
    """Return the network with all nodes at one switch, over cables that take no time."""
    core = max(network.node_names) + "+"
    cables = tuple(Cable(core, name, UNLIMITED, 0, True) for name in network.node_names)
    return Network(network.device_names, network.node_names, network.node_of, network.insides, cables)
