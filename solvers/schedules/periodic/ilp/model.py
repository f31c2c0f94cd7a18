"""The variables and constraints of a pattern: the n-form with triangle cuts (ALGORITHMS 4.4, SOLVERS B).

Time is counted in periods: rho = T0 / T with T0 the largest load of a resource, every duration divided by T0. All
constraints are then linear in rho, so the largest rho is found without bisection. Symbols as in ``path``; memory is
counted when a forward starts, where it peaks, as a part of what a processor has after its weights and buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, combinations, pairwise
from typing import Any

import pulp

from penstock.solvers.schedules.periodic.ilp.path import PathOperation, rivals
from penstock.solvers.schedules.periodic.ilp.silence import silence
from penstock.solvers.schedules.support.stage_line import StageLine

OPTIMAL = pulp.LpSolutionOptimal
FEASIBLE = pulp.LpSolutionIntegerFeasible
IMPOSSIBLE = pulp.LpSolutionInfeasible
GAP = 1e-7
TOLERANCE = 1e-9
"""Tolerances: of rho, at which a pattern counts as the best; of constraints."""


@dataclass(eq=False)
class Model:
    """The patterns of a line whose period is between ``least_ns`` and ``upper_bound_ns``.

    ``room_bytes``: each processor's memory budget for in-flight micro-batches; stage s may keep ``most[s]`` of them.
    """

    line: StageLine
    path: tuple[PathOperation, ...]
    room_bytes: list[int]
    most: list[int]
    least_ns: int
    upper_bound_ns: int
    lp: Any = field(default_factory=lambda: pulp.LpProblem("pattern", pulp.LpMaximize))
    counts: dict[tuple[int, int], Any] = field(default_factory=dict)

    def build(self) -> None:
        """Make all variables and constraints."""
        at = {(step.forward, step.stage): i for i, step in enumerate(self.path) if not step.move}
        self.forward = [at[True, s] for s in range(self.line.size)]
        self.backward = [at[False, s] for s in range(self.line.size)]
        self.duration = [step.duration_ns / self.least_ns for step in self.path]
        self.rho = self.lp.add_variable("rho", self.least_ns / self.upper_bound_ns, 1)
        self.lp += self.rho
        self._starts()
        for operations in rivals(self.path):
            self._one_at_a_time(operations)
            self._triangles(operations)
        self._memory()

    def _starts(self) -> None:
        """Add the starts, in path order; a wait of a period or more would only keep more in flight."""
        first = self.lp.add_variable("s_0", 0, 0)
        last = [self.lp.add_variable(f"s_{i}", 0, 2 * i) for i in range(1, len(self.path))]
        self.start = [first, *last]
        for i, j in pairwise(range(len(self.path))):
            waits = self.start[j] - self.start[i] - self.duration[i] * self.rho
            self.lp += waits >= 0
            self.lp += waits <= 1

    def _one_at_a_time(self, operations: tuple[int, ...]) -> None:
        """Add the constraints that operations of a resource run one at a time, also operations of other micro-batches.

        They are n_ij periods apart, plus a rest of less than a period.
        """
        most = list(accumulate(self.most, min))
        for i, j in combinations(operations, 2):
            around = most[min(self.path[i].stage, self.path[j].stage)] - 1
            count = self.lp.add_variable(f"n_{i}_{j}", 0, min(around, 2 * (j - i)), cat="Integer")
            self.counts[i, j] = count
            apart = self.start[j] - self.start[i] - count
            self.lp += apart >= self.duration[i] * self.rho
            self.lp += apart + self.duration[j] * self.rho <= 1
        self.lp += pulp.lpSum(self.duration[i] for i in operations) * self.rho <= 1

    def _triangles(self, operations: tuple[int, ...]) -> None:
        """Add the triangle cuts: the floors of two spans add up to the floor of the whole, or one less."""
        for i, j, k in combinations(operations, 3):
            more = self.counts[i, k] - self.counts[i, j] - self.counts[j, k]
            self.lp += more >= 0
            self.lp += more <= 1

    def _memory(self) -> None:
        for number, room in enumerate(self.room_bytes):
            stages = [s for s in range(self.line.size) if self.line.processor[s] == number]
            for now in stages:
                kept = [self.line.kept_bytes[s] / max(1, room) * self._in_flight(s, now) for s in stages]
                self.lp += pulp.lpSum(kept) <= 1

    def _in_flight(self, s: int, now: int) -> Any:
        """Return the micro-batches that stage s keeps as a forward of stage ``now`` starts: F started, B not ended."""
        return self._count(self.forward[s], self.forward[now]) - self._count(self.backward[s], self.forward[now])

    def _count(self, i: int, j: int) -> Any:
        if i == j:
            return 0
        return self.counts[i, j] if i < j else -1 - self.counts[j, i]


class HighsWithNodes(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS through PuLP, with a node limit, for which PuLP has no option."""

    def findSolutionValues(self, lp: Any) -> tuple[int, int]:  # noqa: N802
        """Find values of the variables; return their status and the solution's status."""
        if lp.solverModel.getModelStatus().name != "kSolutionLimit":
            status, worth = super().findSolutionValues(lp)
            return status, worth
        for variable, value in zip(lp.variables(), lp.solverModel.getSolution().col_value, strict=True):
            variable.varValue = value
        if lp.solverModel.getInfo().primal_solution_status:
            return pulp.LpStatusOptimal, FEASIBLE
        return pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound


def ask(model: Model, nodes: int, seed: int) -> tuple[int, float]:
    """Solve a model; return PuLP's ``sol_status`` and the largest rho that is still possible.

    ``LpStatus`` says Optimal of whatever was found when a limit came; only ``sol_status`` tells.
    """
    options = {"mip_max_nodes": nodes, "random_seed": seed, "mip_rel_gap": GAP, "parallel": "off"}
    options |= {"mip_feasibility_tolerance": TOLERANCE, "primal_feasibility_tolerance": TOLERANCE}
    with silence():
        model.lp.solve(HighsWithNodes(msg=False, threads=1, **options))
    worth = int(model.lp.sol_status)
    if worth == OPTIMAL:
        return worth, float(model.rho.value())
    if worth != IMPOSSIBLE:
        return worth, min(1.0, abs(float(model.lp.solverModel.getInfo().mip_dual_bound)))
    return worth, 1.0
