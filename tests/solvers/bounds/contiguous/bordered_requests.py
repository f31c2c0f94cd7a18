"""Small requests whose stages share cables: nodes with several devices, switches, lanes, cables of unlike width."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from least_of_plans import raised
from problems import make_problem
from split_plans import variants

from penstock.solvers.bounds.contiguous.label_search import BatchSearch
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.costs.infinity import FAR_NS, NEVER_NS
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.improve.job_shop import Question, solve
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.exact.chain_tables import WHOLE_BACKWARDS

GIGABYTE = 10**9
Cables = Sequence[tuple[str, str, int]]


def network_of(nodes: Sequence[int], cables: Cables, *, full: bool = True, **changes: Any) -> Network:
    """Build nodes n0, n1, … of devices ``n0/0`` …, and cables given by both ends and bytes per second."""
    names = tuple(f"n{i}/{j}" for i, size in enumerate(nodes) for j in range(size))
    inside = Inside(changes.get("form", "pairs"), 10**12, 0, full)
    ends = [Cable(a, b, wide, changes.get("latency_ns", 0), full, changes.get("lanes", 1)) for a, b, wide in cables]
    node_of = tuple(i for i, size in enumerate(nodes) for _ in range(size))
    return Network(names, tuple(f"n{i}" for i in range(len(nodes))), node_of, (inside,) * len(nodes), tuple(ends))


def star(nodes: Sequence[int], widths: Sequence[int]) -> list[tuple[str, str, int]]:
    """Connect every node to one switch; widths are the cables' bytes per second."""
    return [(f"n{i}", "switch", widths[i % len(widths)]) for i in range(len(nodes))]


def pairs(nodes: Sequence[int], inner: int, outer: int) -> list[tuple[str, str, int]]:
    """Connect each two nodes to a switch, and all these switches to one more."""
    switches = range((len(nodes) + 1) // 2)
    return [
        *((f"n{i}", f"s{i // 2}", inner) for i in range(len(nodes))),
        *((f"s{k}", "top", outer) for k in switches),
    ]


def line(nodes: Sequence[int], width: int) -> list[tuple[str, str, int]]:
    """Connect each node to the next."""
    return [(f"n{i}", f"n{i + 1}", width) for i in range(len(nodes) - 1)]


def bordered_request(seed: int) -> Problem:
    """Draw up to six devices in two to five nodes; memory mostly forces stages onto all of them, or all but one."""
    rng = random.Random(seed)
    nodes = rng.choice([(2, 2), (2, 1, 1), (2, 1, 2), (1, 2, 1), (3, 1, 1), (2, 2, 1), (2, 2, 2), (1,) * 4, (1,) * 5])
    width = rng.choice([GIGABYTE, GIGABYTE // 2])
    unlike = rng.choice([[width], [width], [width, 2 * width]])
    cables = rng.choice([star(nodes, unlike), pairs(nodes, rng.choice([1, 20]) * width, width), line(nodes, width)])
    network = network_of(
        nodes,
        cables,
        full=rng.random() < 0.5,
        form=rng.choice(["pairs", "ports", "bus"]),
        latency_ns=rng.choice([0, 0, 2]),
        lanes=rng.choice([1, 1, 2]),
    )
    tight = rng.random() < 0.75
    count = sum(nodes) - rng.choice([0, 0, 1]) if tight else rng.randint(2, 4)
    slow, kept, size = rng.choice([2, 10, 30]), 1000, rng.randint(4, 10)
    return make_problem(
        [rng.randint(1, slow) for _ in range(count)],
        [rng.randint(1, 2 * slow) for _ in range(count)],
        [rng.randint(5, 60) for _ in range(count - 1)],
        [kept] * count if tight else [rng.choice([0, 20, 200]) for _ in range(count)],
        backward_bytes=[rng.randint(5, 60) for _ in range(count - 1)],
        update_ns=rng.randint(0, 5),
        memory_bytes=2 * kept + rng.choice([150, 300, 900]) if tight else 2**40,
        network=network,
        global_batch_size=size,
        micro_batch_sizes=rng.choice([(1,), (1,), (2,)]),
        shared=True,
        transfer="nic",
        all_reduce=rng.choice(["flat", "hierarchical"]),
        bucket_bytes=rng.choice([1, 60, 10**6]),
        overlap_all_reduce=rng.random() < 0.7,
        recompute=rng.choice(["never", "never", "auto"]),
    )


def carried(problem: Problem, batch: Batch, known_ns: int | None = None) -> int:
    """Return the bound by cables for a number of micro-batches, above ``known_ns`` or the label search's bound."""
    label_ns = label_bound_ns(problem, batch) if known_ns is None else known_ns
    search = BatchSearch(problem, batch, Links(problem), bound_ns=label_ns)
    search.carry(FAR_NS)
    return search.carried_ns


def label_bound_ns(problem: Problem, batch: Batch) -> int:
    """Return the bound of the label search; ``NEVER_NS`` if no plan exists."""
    search = BatchSearch(problem, batch, Links(problem))
    while not search.closed:
        raised(search)
    return NEVER_NS if search.empty else search.bound_ns


def plans_of(space: Space, batch: Batch) -> Iterator[Allocation]:
    """Yield every plan of one number of micro-batches."""
    for stages in range(1, space.most_stages + 1):
        for placement in space.placements(stages):
            if max(map(len, placement)) <= batch.replicas_fed(space.problem.min_slice):
                for firsts in space.partitions(stages):
                    yield from variants(space.problem, space.allocation(batch, firsts, placement))


def plans_below(space: Space, batch: Batch, time_ns: int) -> list[Allocation]:
    """List the plans that can take less time, by CP-SAT where a plan's bound does not exclude it."""
    plans = []
    for plan in plans_of(space, batch):
        if schedule_bound(space.problem, plan, WHOLE_BACKWARDS).bound_ns < time_ns:
            answer = solve(Question(space.problem, plan, time_ns - 1))
            assert answer.proven
            plans += [plan] if answer.orders is not None else []
    return plans
