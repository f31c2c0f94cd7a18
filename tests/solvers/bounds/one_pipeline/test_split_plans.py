"""Plans of one pipeline with split backwards and any stages on any devices: never below their bound."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from problems import make_problem
from split_plans import optima, with_weights

from penstock.solvers.bounds.one_pipeline.deferred_weights import DeferredWeights
from penstock.solvers.bounds.schedule_bound import one_pipeline_bound
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Measured, Problem

LONG = 10**6
NEAR = 51, 101, 156, 52
"""Requests whose bound is near the optimum of a plan."""


def tiny_request(seed: int) -> Problem:
    """Draw two or three layers on two devices, one to three samples, with memory for some of them or for all."""
    rng = random.Random(seed)
    layers = rng.choice([2, 2, 3])
    stash = [rng.choice([10, 20]) for _ in range(layers)]
    parameters = [rng.choice([0, 6, 40]) for _ in range(layers)]
    room = rng.choice([sum(parameters), max(parameters)]) + rng.choice([1, 1, 2, 6]) * sum(stash)
    problem = make_problem(
        [rng.randint(1, 9) for _ in range(layers)],
        [rng.randint(1, 18) for _ in range(layers)],
        [rng.choice([0, 1, rng.randint(0, 8)]) for _ in range(layers - 1)],
        parameters,
        stash_bytes=stash,
        update_ns=rng.randint(0, 3),
        nodes=rng.choice([(1, 1), (2,)]),
        memory_bytes=room,
        between_bytes_per_s=rng.choice([10**9, 10**9, 10**8]),
        global_batch_size=rng.randint(1, 4),
        micro_batch_sizes=(1,),
        shared=rng.random() < 0.5,
        channel=rng.choice(["half", "full", "none"]),
        transfer=rng.choice(["nic", "spp", "dapple", "madpipe"]),
        overlap_all_reduce=rng.random() < 0.5,
        count_buffers=False,
        recompute=rng.choice(["never", "never", "auto"]),  # type: ignore[arg-type]
    )
    return with_weights(problem, rng)


def every_allocation(problem: Problem) -> Iterator[Allocation]:
    """Yield every partition with every set of devices for every stage, and every allowed recomputation."""
    sets = [tuple(d for d in range(problem.num_devices) if mask >> d & 1) for mask in range(1, 2**problem.num_devices)]
    ways = (False, True) if problem.recompute == "auto" else (False,)
    for cut in product((False, True), repeat=problem.num_layers - 1):
        edges = [0, *(i + 1 for i, each in enumerate(cut) if each), problem.num_layers]
        spans = list(pairwise(edges))
        for devices_of_stages, again in product(product(sets, repeat=len(spans)), product(ways, repeat=len(spans))):
            if max(map(len, devices_of_stages)) > problem.global_batch_size:
                continue
            stages = (
                Stage(i, j - 1, d, recompute=((i, j - 1),) if way else ())
                for (i, j), d, way in zip(spans, devices_of_stages, again, strict=True)
            )
            yield single_pipeline(tuple(stages), problem.global_batch_size)


def least_ns(problem: Problem) -> int:
    """Return the least time of any order of any plan, by CP-SAT within memory."""
    return min((value for _plan, value in optima(problem, every_allocation(problem))), default=LONG)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("block", range(4))
def test_never_above_the_optimum_of_any_plan(block: int) -> None:
    """CP-SAT orders each plan's forwards, input and weight gradients within memory; none is left out."""
    for seed in (*range(8 * block, 8 * block + 8), NEAR[block]):
        problem = tiny_request(seed)
        bound = one_pipeline_bound(problem, split=True)
        assert bound.bound_ns <= least_ns(problem), seed


def test_memory_raises_it_for_plans_that_fit() -> None:
    """Request 52, whose memory holds no more than one micro-batch."""
    problem = tiny_request(52)
    bound, free = (one_pipeline_bound(problem, split=True, fits=fits) for fits in (True, False))
    assert bound.bound_ns > free.bound_ns
    assert bound.covers.memory < free.covers.memory


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("seed", "name", "fault"),
    [
        (51, "work", lambda _waiting, work, _weight: work),
        (101, "most_ns", lambda _waiting, _devices: 0),
    ],
    ids=["no weight gradient waits", "no room to wait in"],
)
def test_these_requests_find_faults(
    seed: int, name: str, fault: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that lets no weight gradient fill the end of a step, or too few, is above the optimum."""
    problem = tiny_request(seed)
    least = least_ns(problem)
    assert one_pipeline_bound(problem, split=True).bound_ns <= least
    monkeypatch.setattr(DeferredWeights, name, fault)
    assert one_pipeline_bound(problem, split=True).bound_ns > least


def test_where_nothing_can_wait_it_is_the_bound_of_whole_backwards() -> None:
    """Backwards without weight gradients, as of frozen layers: split or whole, their plans take as long."""
    compared = 0
    for seed in range(24):
        problem = tiny_request(seed)
        plain = replace(problem, measured={kind: tuple(map(_frozen, each)) for kind, each in problem.measured.items()})
        split, whole = one_pipeline_bound(plain, split=True, fits=False), one_pipeline_bound(plain, fits=False)
        assert split.bound_ns <= whole.bound_ns
        compared += split.bound_ns == whole.bound_ns
    assert compared == 24


def _frozen(point: Measured) -> Measured:
    return replace(point, weight_ns=np.zeros_like(point.weight_ns))


def test_weight_gradients_fill_the_way_back_as_far_as_memory_holds_them() -> None:
    """Four layers on four devices, each too large to be there twice: ways of 0, 10, 20 and 30 ns there, and back.

    With memory for four micro-batches on each device, weight gradients of 40 ns may wait on it: more than the way back.
    With memory for one they fill 10 ns of it.
    """
    problem = make_problem(
        [10] * 4,
        [20] * 4,
        0,
        [10**6] * 4,
        weight_ns=[10] * 4,
        stash_bytes=10,
        count_buffers=False,
        nodes=(1,) * 4,
        global_batch_size=8,
        channel="none",
    )
    filled, way = 240 + (0 + 10 + 20 + 30) // 4, (0 + 10 + 20 + 30) // 4
    assert one_pipeline_bound(problem, split=True, fits=False).bound_ns == filled
    assert one_pipeline_bound(_with_room(problem, 4), split=True).bound_ns == filled
    assert filled < one_pipeline_bound(_with_room(problem, 1), split=True).bound_ns <= 240 + 2 * way - 10


def _with_room(problem: Problem, micro_batches: int) -> Problem:
    room = 2 * 10**6 + 10 * micro_batches
    return replace(problem, devices=tuple(replace(device, memory_bytes=room) for device in problem.devices))
