"""DAPPLE: plans by memoised search, then early backward (sections III-V).

The warm-up is P_A, P_B, their ratio, or what simulates fastest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.grid.block_partition import thinnest
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch, candidates, dapple_replicas
from penstock.solvers.model.options import PAPER
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.dapple.search import FormulaPlan, Rules, search, straight
from penstock.solvers.planners.dapple.tables import PlacementTables, shape
from penstock.solvers.planners.proposal import Proposal, under
from penstock.solvers.planners.setting import Setting

OPTIONS = (PAPER,)
AT_ONCE = 2
AFTERWARDS = 24
TIGHT_BATCHES = 6
WORTH_JUDGING = 8
"""The plans up to 1/8 above the best latency are simulated: so far the simulator may reverse their order."""


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the best plans of each number of micro-batches at once, then the next best plans of all numbers."""
    problem = setting.problem
    policy = "acr" if PAPER.of(options) else "best"
    left: list[FormulaPlan] = []
    seen: set[Allocation] = set()
    for plans in _searches(setting, PAPER.of(options)):
        if setting.deadline.passed:
            return
        for plan in plans[:AT_ONCE]:
            seen.add(plan.allocation)
            yield under(problem, plan.allocation, ("early-backward",), policy)
        left += plans[AT_ONCE:]
    left.sort(key=lambda plan: plan.latency_ns)
    for plan in [plan for plan in left if plan.allocation not in seen][:AFTERWARDS]:
        yield under(problem, plan.allocation, ("early-backward",), policy)
    if not seen:
        yield from (under(problem, allocation, ("early-backward",), policy) for allocation in thinnest(problem))


def _searches(setting: Setting, paper: bool) -> Iterator[list[FormulaPlan]]:
    """Yield the plans of the search for every batch.

    Where memory is short, search again for fixed numbers of stages and the micro-batches that these keep in flight.
    Plans much slower than ``Setting.upper_bound_ns`` are left out. When nothing fits by the memory estimate and there
    is no such limit, search once more without buffers in the estimate.
    """
    problem, limit_ns = setting.problem, setting.upper_bound_ns
    longest = NEVER_NS if limit_ns is None else limit_ns
    base, singles = shape(problem), shape(problem, (1,))
    for lenient in (False, True) if limit_ns is None else (False,):
        rules = Rules(paper=paper, lenient=lenient)
        best_of: dict[Batch, FormulaPlan] = {}
        yield from _every_batch(problem, rules, base, singles, best_of, longest)
        if best_of:
            yield from _by_stages(problem, rules, base, best_of, longest)
            return


def _every_batch(
    problem: Problem,
    rules: Rules,
    base: PlacementTables,
    singles: PlacementTables,
    best_of: dict[Batch, FormulaPlan],
    longest: int,
) -> Iterator[list[FormulaPlan]]:
    """Yield the plans of each batch, the most promising batch first; store each batch's best plan in ``best_of``."""
    best = longest
    for batch in sorted(candidates(problem, dapple_replicas(problem)), key=lambda b: _work_ns(problem, b)):
        plans = straight(problem, batch, _limited(rules, best), singles).plans
        plans = tuple(p for p in plans if not rules.paper or len(p.allocation.stages) == problem.num_devices)
        best = min([best, *(plan.latency_ns for plan in plans)])
        plans += search(problem, batch, _limited(rules, best), base).plans
        best = min([best, *(plan.latency_ns for plan in plans)])
        if plans:
            best_of[batch] = min(plans, key=lambda plan: plan.latency_ns)
        yield _ascending(plans)


def _by_stages(
    problem: Problem, rules: Rules, base: PlacementTables, best_of: dict[Batch, FormulaPlan], longest: int
) -> Iterator[list[FormulaPlan]]:
    """Yield plans whose stages hold what P_A keeps in flight, where the plans of ``best_of`` do not.

    That memory test needs the number of stages, so the search runs for the best plan's number, its halves and its
    doubles.
    """
    ranked = sorted(best_of.items(), key=lambda item: (item[1].latency_ns, item[0].num_micro_batches))[:TIGHT_BATCHES]
    best = longest
    for batch, fastest in ranked:
        if not _is_tight(problem, batch, fastest.allocation):
            continue
        length = len(fastest.allocation.stages)
        totals = dict.fromkeys((length, length // 2, length * 2, length // 4, length * 4))
        for total in (t for t in totals if 1 < t <= min(problem.num_layers, problem.num_devices)):
            plans = search(problem, batch, replace(_limited(rules, best), total_stages=total), base).plans
            best = min([best, *(plan.latency_ns for plan in plans)])
            yield _ascending(plans)


def _is_tight(problem: Problem, batch: Batch, allocation: Allocation) -> bool:
    """Return whether some stage cannot hold the micro-batches that P_A keeps in flight without recomputation."""
    stages = allocation.stages
    plain = [replace(stage, recompute=()) for stage in stages]
    return any(
        micro_batches_that_fit(problem, stage, batch.most_rows) < min(len(stages) - i, batch.num_micro_batches)
        for i, stage in enumerate(plain)
    )


def _limited(rules: Rules, best_ns: int) -> Rules:
    return replace(rules, limit_ns=min(NEVER_NS, best_ns + best_ns // WORTH_JUDGING))


def _ascending(plans: Iterable[FormulaPlan]) -> list[FormulaPlan]:
    return list(dict.fromkeys(sorted(plans, key=lambda plan: plan.latency_ns)))


def _work_ns(problem: Problem, batch: Batch) -> tuple[int, int]:
    """Return a batch's sort key: the smaller, the more promising.

    It is the batch's work spread evenly over the devices that it can feed, by the first device's kind.
    """
    costs = problem.costs(problem.devices[0].kind, batch.most_rows)
    work = int(costs.forward_ns[-1] + costs.backward_ns[-1]) * batch.num_micro_batches
    longest = int((np.diff(costs.forward_ns) + np.diff(costs.backward_ns)).max())
    fill = int(costs.forward_ns[-1] + costs.backward_ns[-1]) // max(1, min(batch.least_rows, problem.num_devices))
    return work // problem.num_devices + fill + longest, batch.num_micro_batches
