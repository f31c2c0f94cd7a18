"""HetPipe: virtual workers with separate partitions, data parallel with each other, flushed (ALGORITHMS 7.9)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.bounds.feasibility import proof_of_infeasibility
from penstock.solvers.bounds.one_pipeline.confined import holders
from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch, candidates, most_rows
from penstock.solvers.model.options import Option
from penstock.solvers.model.pins import moved
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Reason, Refusal
from penstock.solvers.planners.hetpipe.partitions import HOLDS, POLICIES, Partitions, groupings, groupings_for_pins
from penstock.solvers.planners.proposal import Proposal, under
from penstock.solvers.planners.setting import Setting

WORKERS = Option[str](
    "workers",
    "best",
    "how virtual workers are made of nodes: inside them, equally of all, or of fast and slow ones in pairs",
    choices=("best", *POLICIES),
)
OPTIONS = (WORKERS,)
MAX_JUDGED = 48

Grouping = tuple[tuple[int, ...], ...]


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield every grouping of the devices with every number of micro-batches, the shortest expected first.

    Raises ``UnsupportedRequest`` for a cluster of one node, for fewer micro-batches than workers and for pins to a
    single device, ``InvalidDocument`` for nodes of which no such workers can be made.
    """
    problem = setting.problem
    _refuse_pins(problem)
    wanted = _groupings(problem, options)
    batches = candidates(problem)
    _refuse_few(wanted, batches)
    # Beside partitions that keep the pins in each worker: partitions without pins, on devices exchanged among workers.
    searches = [Partitions(each) for each in ([problem, replace(problem, pins=())] if problem.pins else [problem])]
    plans: dict[Allocation, int] = {}
    for hold in HOLDS:
        for partitions, workers, batch in product(searches, wanted, batches):
            allocation = partitions.allocation(workers, batch, hold)
            kept = None if allocation is None else moved(problem, allocation)
            if kept is not None:
                plans.setdefault(kept, _expected_ns(problem, kept))
        if plans:
            break
    ranked = sorted(plans, key=lambda allocation: plans[allocation])
    for allocation in ranked[:MAX_JUDGED]:
        yield under(problem, allocation, ("early-backward",))


def _refuse_pins(problem: Problem) -> None:
    """Refuse pins of a layer to one device: every worker holds every layer, and no device is in two workers."""
    for layer, devices in enumerate(holders(problem) if problem.pins else ()):
        if len(devices) < 2 and proof_of_infeasibility(problem) is None:
            name = problem.devices[min(devices)].name
            raise UnsupportedRequest(
                f"each of HetPipe's virtual workers holds all layers, but pins let only {name} hold layer {layer}",
                remedy="pin the layer to two devices or more; planner 'pipedream' takes this request",
            )


def _refuse_few(wanted: list[Grouping], batches: Sequence[Batch]) -> None:
    fewest = min(len(workers) for workers in wanted)
    most = max((batch.num_micro_batches for batch in batches), default=fewest)
    if most < fewest:
        kind = "HetPipe needs a micro-batch for each of {} or more virtual workers; a global batch has at most {}"
        raise Refusal(
            Reason(kind, (fewest, most)),
            remedy="smaller micro_batch_sizes or a larger global batch; planner 'pipedream' takes this request",
        )


def _expected_ns(problem: Problem, allocation: Allocation) -> int:
    """Return the slowest worker's step, and one all-reduce of everything among the workers."""
    rows = most_rows(problem, allocation)
    slowest = 0
    for pipeline in allocation.pipelines:
        costs = [stage_costs(problem, stage, rows) for stage in pipeline.stages]
        each = [cost.passes_ns for cost in costs]
        first, last = pipeline.micro_batches
        slowest = max(slowest, sum(each) + (last - first) * max(each))
    workers = [pipeline.stages[0].devices[0] for pipeline in allocation.pipelines]
    return slowest + all_reduce_ns(problem, int(problem.owned_bytes[-1]), workers)


def _groupings(problem: Problem, options: Mapping[str, object]) -> list[Grouping]:
    nodes = [node for node in problem.nodes() if node]
    if len(nodes) < 2:
        number = len(nodes[0])
        kind = "HetPipe needs two nodes or more for its virtual workers; there is one node, with {} " + problem.units(
            number
        )
        raise Refusal(
            Reason(kind, (number,)),
            remedy="planner 'pipedream', which is what HetPipe amounts to on one node",
        )
    workers = WORKERS.of(options)
    chosen = POLICIES if workers == "best" else tuple(p for p in POLICIES if p == workers)
    every = list(dict.fromkeys(grouping for policy in chosen for grouping in groupings(problem, policy)))
    if workers == "best":
        every = list(dict.fromkeys((*every, *groupings_for_pins(problem))))
    if not every:
        raise InvalidDocument(
            f"workers {workers!r} cannot form virtual workers of equal size from nodes with "
            f"{', '.join(str(len(node)) for node in nodes)} devices",
            remedy="workers 'best'",
        )
    return every
