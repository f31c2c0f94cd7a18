"""SPP: order the devices, partition for every number of stages, execute, keep the best (Algorithm 3; ALGORITHMS 3.4).

Beyond the paper:

- Every number of micro-batches that the request allows is tried.
- Both orders and their reversals are tried, since the paper says of no cut which side comes first.
- Replica counts are pruned, and devices may be left over.
- Memory (O-2): what does not fit is partitioned again with stages that hold the micro-batches which P_A keeps in
  flight, from the last stage to the first, so that their number is known.
- The simulator chooses between SPP's order, DAPPLE's and GPipe's.

``paper`` is the paper's system: one order of the devices, all replica counts, all devices, PE alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from penstock.solvers.costs.tables.device_line import likeness
from penstock.solvers.grid.block_partition import thinnest
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch, candidates, dapple_replicas
from penstock.solvers.model.options import PAPER
from penstock.solvers.model.pins import broken_pin, by_layers
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.proposal import Proposal, under
from penstock.solvers.planners.setting import Setting
from penstock.solvers.planners.spp.ordering import ORIENTATIONS, dense_bandwidths, device_order, graph_of
from penstock.solvers.planners.spp.partition import pruned_replicas
from penstock.solvers.planners.spp.plans import RatedPlan, partitioned
from penstock.solvers.planners.spp.prm_kernel import LONGEST_NS
from penstock.solvers.planners.spp.tables import Windows, windows

OPTIONS = (PAPER,)
AT_ONCE = 3
AFTERWARDS = 48


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the best plans of each number of micro-batches at once, then the next best plans of all numbers."""
    problem = setting.problem
    paper = PAPER.of(options)
    lines = list(_orders(problem, paper))
    left: list[RatedPlan] = []
    best = LONGEST_NS
    for batch in sorted(candidates(problem, dapple_replicas(problem)), key=lambda b: _promise(problem, b)):
        plans = _plans(problem, lines, batch, paper, best)
        best = min([best, *(plan.estimate_ns for plan in plans if _limits(problem, plan))])
        for each in _by_pins(problem, plans):
            for plan in each[:AT_ONCE]:
                yield from _proposed(problem, plan.allocation, paper)
            left += each[AT_ONCE:]
    for plan in sorted(left, key=_rank)[:AFTERWARDS]:
        yield from _proposed(problem, plan.allocation, paper)
    if best == LONGEST_NS:
        yield from (_proposal(problem, allocation, paper) for allocation in thinnest(problem))


def _limits(problem: Problem, plan: RatedPlan) -> bool:
    """Return whether a plan limits the search for slower ones: it fits, on devices that the pins allow."""
    return plan.fits and broken_pin(problem, plan.allocation) is None


def _by_pins(problem: Problem, plans: list[RatedPlan]) -> list[list[RatedPlan]]:
    """Split plans into plans that keep the pins and plans whose devices have to be exchanged for it."""
    kept = [plan for plan in plans if broken_pin(problem, plan.allocation) is None]
    return [kept, [plan for plan in plans if plan not in kept]] if problem.pins else [plans]


def _rank(plan: RatedPlan) -> tuple[bool, int]:
    return not plan.fits, plan.estimate_ns


def _proposal(problem: Problem, allocation: Allocation, paper: bool) -> Proposal:
    return under(problem, allocation, ("pe",) if paper else ("pe", "early-backward"))


def _proposed(problem: Problem, allocation: Allocation, paper: bool) -> Iterator[Proposal]:
    """Yield a plan under SPP's and DAPPLE's orders, then under GPipe's; in the paper's system, under SPP's alone."""
    proposal = _proposal(problem, allocation, paper)
    yield proposal
    if len(allocation.stages) > 1 and not paper:
        yield proposal._replace(schedules=("gpipe",))


def _orders(problem: Problem, paper: bool) -> Iterator[Windows]:
    """Yield the device orders to partition along, each once; orders without a difference count as one.

    With pins, also yield two orders with stages that keep them: the first order, and the order of the layers that pins
    name.
    """
    graph = graph_of(problem)
    orders = [device_order(graph, name) for name in (ORIENTATIONS[:1] if paper else ORIENTATIONS)]
    if not paper:
        orders += [order[::-1] for order in orders]
    bandwidth = dense_bandwidths(problem)
    seen: set[object] = set()
    for order in orders:
        key = _appearance(problem, bandwidth, order)
        if key not in seen:
            seen.add(key)
            yield windows(problem, order)
    if problem.pins:
        yield from (
            windows(problem, order, keeping=True) for order in dict.fromkeys((orders[0], by_layers(problem, orders[0])))
        )


def _appearance(problem: Problem, bandwidth: np.ndarray, order: tuple[int, ...]) -> tuple[object, ...]:
    index = np.asarray(order)
    devices = [problem.devices[d] for d in order]
    nodes = {node: number for number, node in enumerate(dict.fromkeys(device.node for device in devices))}
    facts = tuple((likeness(d), nodes[d.node]) for d in devices)
    return bandwidth[np.ix_(index, index)].tobytes(), facts


def _plans(problem: Problem, lines: Iterable[Windows], batch: Batch, paper: bool, best: int) -> list[RatedPlan]:
    """Return plans of every number of stages on every order: plans that fit first, then by estimate."""
    counts = tuple(range(1, problem.num_devices + 1)) if paper else pruned_replicas(problem)
    plans: dict[Allocation, RatedPlan] = {}
    for line in lines:
        for plan in partitioned(problem, line, batch, counts, unused=not paper, best_ns=best):
            plans.setdefault(plan.allocation, plan)
        best = min([best, *(plan.estimate_ns for plan in plans.values() if _limits(problem, plan))])
    return sorted(plans.values(), key=_rank)


def _promise(problem: Problem, batch: Batch) -> tuple[int, int]:
    """Return a batch's sort key: the smaller, the more promising.

    It is the batch's work shared evenly, and the time of one micro-batch through the longest layer's share.
    """
    costs = problem.costs(problem.devices[0].kind, batch.most_rows)
    whole = int(costs.forward_ns[-1] + costs.backward_ns[-1])
    fill = whole // max(1, min(batch.least_rows, problem.num_devices))
    return whole * batch.num_micro_batches // problem.num_devices + fill, batch.num_micro_batches
