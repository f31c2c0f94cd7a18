"""How much of a plan's time is communication among the GPUs that hold a replica together."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.degrees import CellMeasured
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem


def exposed_share(problem: Problem, allocation: Allocation) -> Fraction:
    """Return the share of collectives in the time of all passes, recomputation included; 0 at degrees of 1."""
    if problem.real is None or problem.choice is None:
        return Fraction(0)
    taken = _passes_ns(problem, allocation)
    return Fraction(taken - _passes_ns(_without_collectives(problem, problem.real), allocation), max(1, taken))


def _without_collectives(problem: Problem, gpus: Problem) -> Problem:
    """Return the problem with computation alone."""
    assert problem.choice is not None
    none = ((),) * problem.num_layers

    def alone(point: CellMeasured) -> CellMeasured:
        modules = {name: replace(each, collectives=none) for name, each in point.modules.items()}
        return replace(point, collectives=none, modules=modules)

    variants = tuple(
        replace(variant, measured={kind: tuple(map(alone, points)) for kind, points in variant.measured.items()})
        for variant in gpus.variants
    )
    return contract(replace(gpus, variants=variants), problem.choice)


def _passes_ns(problem: Problem, allocation: Allocation) -> int:
    """Return the time of one micro-batch's passes through all stages of a pipeline, recomputation included."""
    rows = row_classes(problem.global_batch_size, allocation.num_micro_batches)[0][0]
    costs = [stage_costs(problem, stage, rows) for stage in allocation.pipelines[0].stages]
    return sum(each.forward_ns + each.backward_ns + each.recompute_ns for each in costs)
