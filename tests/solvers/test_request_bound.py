"""The label search's bound: never above any plan that is listed, and as high as the least bound of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from problems import make_problem

from penstock.solvers.allocation import Allocation, single_pipeline
from penstock.solvers.batches import Batch
from penstock.solvers.bounds import schedule_bound
from penstock.solvers.enumeration import Space
from penstock.solvers.kernels.windows import NEVER
from penstock.solvers.planners.chain_tables import WHOLE_BACKWARDS, ChainTables
from penstock.solvers.planners.proposal import shortage_of, unreachable
from penstock.solvers.planners.relax import NEVER_NS, Relaxation
from penstock.solvers.problem import Problem

EFFORT = 10**8


def random_request(seed: int, layers: int = 5, devices: int = 4) -> Problem:
    """A few layers on a few devices; every rule, network and memory that the bound knows is drawn."""
    rng = random.Random(seed)
    count = rng.randint(2, layers)
    nodes = rng.choice([n for n in ((1, 1), (2, 1), (3,), (2, 2), (4,), (1, 1, 1, 1), (3, 1)) if sum(n) <= devices])
    scale = rng.choice([1, 3, 20])
    size = rng.choice([2, 3, 4, 5, 8])
    mixed = rng.random() < 0.25
    shared = rng.random() < 0.4
    return make_problem(
        [rng.randint(1, 30) for _ in range(count)],
        [rng.randint(1, 60) for _ in range(count)],
        [rng.randint(0, 12) * scale for _ in range(count - 1)],
        [rng.randint(0, 40) * scale for _ in range(count)],
        backward_bytes=[rng.randint(0, 12) * scale for _ in range(count - 1)],
        stash_bytes=[rng.randint(0, 30) for _ in range(count)],
        workspace_bytes=rng.choice([0, 20]),
        update_ns=rng.randint(0, 5),
        memory_bytes=rng.choice([2**40, 2**40, rng.randint(60, 400) * scale]),
        context_bytes=rng.choice([0, 10]),
        nodes=nodes,
        kinds=[rng.choice(["cpu", "quick"]) for _ in range(sum(nodes))] if mixed else None,
        speed={"quick": 1.7} if mixed else None,
        between_bytes_per_s=rng.choice([10**9, 3 * 10**8, 5 * 10**7]),
        latency_ns=rng.choice([0, 0, 3]),
        form=rng.choice(["pairs", "ports", "bus"]),
        full_duplex=rng.random() < 0.5,
        global_batch_size=size,
        micro_batch_sizes=rng.choice([(1,), (2,), (1, 2), (3,), (size,)]) if size > 2 else (1, 2),
        shared=shared,
        channel=rng.choice(["half", "full", "none"]),
        transfer=rng.choice(["nic", "spp", "dapple", "madpipe"]),
        all_reduce=rng.choice(["flat", "hierarchical", "dapple"]),
        bucket_bytes=rng.choice([1, 60, 10**6]),
        overlap_all_reduce=rng.random() < 0.7,
        state_factor=rng.choice([0, 2]),
        shard_states=rng.random() < 0.3,
        count_buffers=rng.random() < 0.7,
        recompute=rng.choice(["never", "never", "auto", "always"]),
        linear=rng.random() < 0.5,
        shared_parameters=(("tied", (0, count - 1), 30),) if rng.random() < 0.3 else (),
        cuttable=[rng.random() < 0.85 for _ in range(count - 1)],
    )


def proven_ns(problem: Problem, space: Space) -> tuple[int, bool]:
    """The bound alone, without any plan to cut the search off with; and whether there is a plan at all."""
    searches = Relaxation(problem, EFFORT).searches_of(space.batches)
    for search in searches:
        while not search.closed:
            search.step(search.bound_ns * 2 + 10)
    bounds = [search.bound_ns for search in searches if not search.empty]
    return min(bounds, default=NEVER_NS), bool(bounds)


@pytest.mark.parametrize("block", range(10))
def test_never_above_the_bound_of_any_plan(block: int) -> None:
    """All plans of 30 requests, each with its own bound (``windows``)."""
    tight = total = 0
    for seed in range(30 * block, 30 * block + 30):
        problem = random_request(seed)
        space = Space.of(problem)
        bound, _some = proven_ns(problem, space)
        least = min([NEVER, *(_least(space, batch) for batch in space.batches)])
        assert bound <= least, seed
        total += least < NEVER
        tight += bound == least < NEVER
    assert tight > total // 3


def _least(space: Space, batch: Batch) -> int:
    """The least bound of the plans of one number of micro-batches; ``ChainTables`` says where to look first."""
    tables, least = ChainTables(space, batch), NEVER
    for stages in range(1, space.most_stages + 1):
        fed = [p for p in space.placements(stages) if max(map(len, p)) <= batch.replicas_fed(space.problem.min_slice)]
        partitions = space.partitions(stages)
        if not fed or not len(partitions):
            continue
        bounds = tables.bounds(partitions, fed)
        for p, cut in zip(*np.unravel_index(np.argsort(bounds, axis=None, kind="stable"), bounds.shape), strict=True):
            if bounds[p, cut] >= least:
                break
            for plan in variants(space.problem, space.allocation(batch, partitions[cut], fed[p])):
                least = min(least, schedule_bound(space.problem, plan, WHOLE_BACKWARDS).bound_ns)
    return least


def variants(problem: Problem, plan: Allocation) -> Iterator[Allocation]:
    """The plan with every set of stages recomputing that the request allows, where one micro-batch fits."""
    if unreachable(problem, plan) is not None:
        return
    choices = {"never": (False,), "always": (True,), "auto": (False, True)}[problem.recompute]
    for chosen in product(choices, repeat=len(plan.stages)):
        stages = tuple(
            replace(stage, recompute=((stage.first, stage.last),)) if again else stage
            for stage, again in zip(plan.stages, chosen, strict=True)
        )
        variant = single_pipeline(stages, plan.num_micro_batches)
        if shortage_of(problem, variant, (1,) * len(stages)) is None:
            yield variant
