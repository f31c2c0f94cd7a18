"""Asking CP-SAT, and reading its answer back as orders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from penstock.solvers.allocation import Allocation
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders, Row
from penstock.solvers.timeline import Timeline

if TYPE_CHECKING:
    from penstock.solvers.jobshop.model import Model

EFFORT = 5.0
"""CP-SAT's deterministic time for a question."""


@dataclass(frozen=True)
class Question:
    """Is there a step of at most ``at_most_ns``, given that none is below ``at_least_ns``?

    The allocation has one pipeline, and each stage devices of its own that share micro-batches by rows.
    ``as_judged``: nothing waits on purpose, and a channel carries first what is ready first, as in the judge's step.
    """

    problem: Problem
    allocation: Allocation
    at_most_ns: int
    at_least_ns: int = 0
    as_judged: bool = False
    effort: float = EFFORT

    @property
    def judgeable(self) -> bool:
        """Whether the model knows the judge's rules: private channels, half duplex, micro-batches of one size."""
        rules = self.problem.rules
        even = self.problem.global_batch_size % self.allocation.num_micro_batches == 0
        return not rules.shared and rules.channel == "half" and even


@dataclass(frozen=True)
class Answer:
    """No step takes less than ``bound_ns``. ``orders`` is the best one found; None: there is none, or none yet.

    ``proven``: the bound is the optimum of the model, or no step is as short as asked for. ``spent``: deterministic
    time.
    """

    bound_ns: int
    orders: Orders | None
    proven: bool
    spent: float


def solve(question: Question, hint: Timeline | None = None) -> Answer:
    """The shortest step of an allocation, or a bound on it; ``hint`` is a judged step to begin with.

    The horizon rises: mostly the optimum is the bound known before or near it, and short horizons are quickly decided.
    The same question has the same answer: one thread, the request's seed, a limit on deterministic time.
    """
    low, gap = question.at_least_ns, question.at_most_ns - question.at_least_ns
    answer = Answer(low, None, True, 0.0)
    for horizon in sorted({low, low + gap // 4, low + gap // 2, low + gap}):
        rest = replace(question, at_most_ns=horizon, at_least_ns=answer.bound_ns, effort=question.effort - answer.spent)
        found = _solve_within(rest, hint)
        answer = replace(found, spent=answer.spent + found.spent)
        if answer.orders is not None or not answer.proven or answer.spent >= question.effort:
            break
    return answer


def _solve_within(question: Question, hint: Timeline | None) -> Answer:
    from ortools.sat.python import cp_model

    from penstock.solvers.jobshop.as_judged import keep_the_judges_rules
    from penstock.solvers.jobshop.model import MOST_UNITS, Model

    unit = 1 + question.at_most_ns // MOST_UNITS
    model = Model(question.problem, question.allocation, question.at_most_ns // unit, unit)
    makespan = model.build()
    model.cp.add(makespan >= question.at_least_ns // unit)
    if question.as_judged:
        keep_the_judges_rules(model)
    model.cp.minimize(makespan)
    if hint is not None:
        _give_hint(model, hint)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.linearization_level = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.random_seed = question.problem.seed % 2**31
    solver.parameters.max_deterministic_time = question.effort
    status = solver.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        return Answer(question.at_most_ns + 1, None, True, solver.deterministic_time)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(question.at_least_ns, None, False, solver.deterministic_time)
    bound = max(question.at_least_ns, round(solver.best_objective_bound) * unit)
    starts = {key: (solver.value(step.start), step.size) for key, step in model.operations.items()}
    orders = _orders(question.allocation, starts)
    return Answer(bound, orders, status == cp_model.OPTIMAL, solver.deterministic_time)


def _orders(allocation: Allocation, starts: dict[tuple[int, int, int], tuple[int, int]]) -> Orders:
    """Each stage's operations by start; at one instant what takes no time first, forwards before backwards."""
    rows = []
    for s, stage in enumerate(allocation.stages):
        own = [(start, size, kind, m) for (kind, stage_of, m), (start, size) in starts.items() if stage_of == s]
        operations = [(kind, s, m) for _start, _size, kind, m in sorted(own)]
        rows.append(Row(stage.devices, np.asarray(operations, dtype=np.int32)))
    return Orders("job-shop", tuple(rows))


def _give_hint(model: Model, timeline: Timeline) -> None:
    """The start of everything in a judged step."""
    for track in timeline.tracks:
        for (kind, s, m), start in zip(track.operations.tolist(), track.start_ns.tolist(), strict=True):
            model.cp.add_hint(model.operations[kind, s, m].start, start // model.unit_ns)
    moves = timeline.transfers
    columns = (moves.direction.tolist(), moves.stage.tolist(), moves.micro_batch.tolist())
    for key, start in zip(zip(*columns, strict=True), moves.start_ns.tolist(), strict=True):
        if key in model.transfers:
            model.cp.add_hint(model.transfers[key].start, start // model.unit_ns)
    for reduction in timeline.reductions:
        step = model.reductions.get((reduction.stage, reduction.bucket))
        if step is not None:
            model.cp.add_hint(step.start, reduction.start_ns // model.unit_ns)
