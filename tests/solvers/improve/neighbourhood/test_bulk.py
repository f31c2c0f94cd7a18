"""Bulk simulation gives the simulator's time to the nanosecond, in every network; its bounds and limits hold."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from bulk_times import makespans_ns
from problems import chain, make_problem
from random_plans import random_problem
from reference_simulator import run_reference

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.improve.neighbourhood.batch import MANY, Catalogue
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem
from penstock.solvers.schedules.early_backward import early_backward

NETWORKS = ("shared", "half", "full", "none")


def rules_of(network: str) -> tuple[bool, Any]:
    """Return whether the network is shared, and the kind of private channels."""
    return (True, "half") if network == "shared" else (False, network)


def drawn(rng: random.Random, network: str, timeless: bool = True) -> Problem:
    """Draw a problem in a network of that kind."""
    problem = random_problem(rng)
    shared, channel = rules_of(network)
    problem = replace(problem, rules=replace(problem.rules, shared=shared, channel=channel))
    return problem if timeless or not _takes_no_time(problem) else drawn(rng, network, timeless)


def _takes_no_time(problem: Problem) -> bool:
    costs = problem.measured["cpu"][0]
    return bool((costs.forward_ns == 0).any() or (costs.backward_ns == 0).any())


def drawn_stages(rng: random.Random, problem: Problem) -> tuple[Stage, ...]:
    """Draw stages on separate devices with replicas that split micro-batches, some recomputing."""
    free = list(range(problem.num_devices))
    rng.shuffle(free)
    most = min(len(free), problem.num_layers)
    count = rng.randint(1, most)
    firsts = [0, *sorted(rng.sample(range(1, problem.num_layers), count - 1)), problem.num_layers]
    stages = []
    for s, (first, stop) in enumerate(pairwise(firsts)):
        size = rng.randint(1, len(free) - (count - 1 - s))
        devices, free = tuple(sorted(free[:size])), free[size:]
        again = ((first, stop - 1),) if rng.random() < 0.3 else ()
        stages.append(Stage(first, stop - 1, devices, recompute=again))
    return tuple(stages)


def drawn_warmups(rng: random.Random, stages: int, batches: int, count: int) -> np.ndarray:
    """Draw warm-ups that never grow along the stages."""
    each = [sorted((rng.randint(1, batches) for _ in range(stages)), reverse=True) for _ in range(count)]
    return np.asarray(each, dtype=np.int64)


@pytest.mark.cases(2)
@pytest.mark.parametrize("network", NETWORKS)
def test_times_are_the_judges(network: str) -> None:
    """Many allocations of one number of micro-batches at once, then each of them under many warm-ups."""
    rng = random.Random(network)
    for _ in range(40):
        problem = drawn(rng, network)
        number = rng.randint(1, min(8, problem.global_batch_size))
        plans = [drawn_stages(rng, problem) for _ in range(4)]
        catalogue = Catalogue(problem, number)
        rows = catalogue.rows(plans)
        warmups = np.ones(rows.stages.shape, dtype=np.int64)
        for n, stages in enumerate(plans):
            warmups[n, : len(stages)] = drawn_warmups(rng, len(stages), number, 1)
        times = catalogue.makespans_ns(rows, warmups)
        for n, stages in enumerate(plans):
            assert catalogue.stages(rows, n) == stages
            plan = single_pipeline(stages, number)
            vectors = np.vstack((warmups[n, : len(stages)], drawn_warmups(rng, len(stages), number, 3)))
            judged = [makespan_ns(problem, plan, early_backward(problem, plan, warmup=v.tolist())) for v in vectors]
            assert judged[0] == times[n]
            assert judged == makespans_ns(problem, plan, vectors).tolist()


@pytest.mark.parametrize("network", NETWORKS)
def test_times_are_the_references(network: str) -> None:
    rng = random.Random(7)
    for _ in range(12):
        problem = drawn(rng, network)
        plan = single_pipeline(drawn_stages(rng, problem), rng.randint(1, min(6, problem.global_batch_size)))
        vector = drawn_warmups(rng, len(plan.stages), plan.num_micro_batches, 1)
        orders = early_backward(problem, plan, warmup=vector[0].tolist())
        assert run_reference(problem, plan, orders).makespan == makespans_ns(problem, plan, vector)[0]


@pytest.mark.parametrize("network", NETWORKS)
def test_longer_chains(network: str) -> None:
    """Twelve stages and forty micro-batches of two sizes, with transfers that take about as long as the stages."""
    rng = random.Random(3)
    shared, channel = rules_of(network)
    forms: tuple[Any, ...] = ("pairs", "ports", "bus")
    for form in forms:
        problem = make_problem(
            [rng.randint(20, 60) for _ in range(12)],
            None,
            [rng.randint(5, 60) for _ in range(11)],
            1000,
            nodes=(4, 4, 4),
            form=form,
            full_duplex=form == "pairs",
            shared=shared,
            channel=channel,
            transfer="nic",
            global_batch_size=90,
            bucket_bytes=1500,
        )
        plans = [chain([(1, [d]) for d in range(12)], 40), chain([(2, [0, 1]), (4, [2]), (4, [4, 5, 6]), (2, [8])], 40)]
        for plan in plans:
            vectors = drawn_warmups(rng, len(plan.stages), 20, 5)
            judged = [makespan_ns(problem, plan, early_backward(problem, plan, warmup=v.tolist())) for v in vectors]
            assert judged == makespans_ns(problem, plan, vectors).tolist()


def test_operations_that_take_no_time_are_judged_too() -> None:
    problem = make_problem([0, 5, 0, 4], [0, 7, 3, 0], 4, global_batch_size=6, channel="half")
    plan = chain([(1, [0]), (1, [1]), (1, [2]), (1, [3])], 6)
    vectors = np.asarray([[4, 3, 2, 1], [6, 6, 6, 6], [1, 1, 1, 1], [1, 2, 2, 2]])
    judged = [makespan_ns(problem, plan, early_backward(problem, plan, warmup=v.tolist())) for v in vectors[:3]]
    assert makespans_ns(problem, plan, vectors).tolist() == [*judged, NEVER_NS]


@pytest.mark.parametrize("network", NETWORKS)
def test_warm_ups_that_grow_wait_for_ever(network: str) -> None:
    shared, channel = rules_of(network)
    problem = make_problem([3, 3], None, 2, shared=shared, channel=channel)
    plan = chain([(1, [0]), (1, [1])], 4)
    assert (makespans_ns(problem, plan, np.asarray([[1, 2], [2, 2]])) == NEVER_NS).tolist() == [True, False]


def test_threads_change_nothing() -> None:
    rng = random.Random(1)
    for network in NETWORKS:
        problem = drawn(rng, network)
        plan = single_pipeline(drawn_stages(rng, problem), problem.global_batch_size)
        vectors = drawn_warmups(rng, len(plan.stages), problem.global_batch_size, 2 * MANY)
        alone = makespans_ns(problem, plan, vectors)
        assert (alone == makespans_ns(problem, plan, vectors, threads=3)).all()


@pytest.mark.parametrize("shared", [False, True])
def test_nothing_connects(shared: bool) -> None:
    base = make_problem([3, 3, 3], None, 2, 8, nodes=(2, 1), shared=shared)
    network = base.network
    alone = Network(network.device_names, network.node_names, network.node_of, network.insides, ())
    problem = replace(base, network=alone)
    catalogue = Catalogue(problem, 4)
    plans = [
        chain([(2, [0]), (1, [1])], 4).stages,
        chain([(2, [0]), (1, [2])], 4).stages,
        chain([(3, [0, 1])], 4).stages,
        chain([(3, [1, 2])], 4).stages,
    ]
    times = catalogue.makespans_ns(catalogue.rows(plans), np.ones((4, 2), dtype=np.int64))
    assert (times == NEVER_NS).tolist() == [False, True, False, True]


@pytest.mark.cases(2)
@pytest.mark.parametrize("network", NETWORKS)
def test_bounds_and_limits_hold(network: str) -> None:
    """No plan that fits has more in flight than its limits, or takes less than its bound."""
    rng = random.Random(5)
    tight, fitting = 0, 0
    for _ in range(60):
        problem = drawn(rng, network)
        memory = rng.randint(100, 600)
        problem = replace(problem, devices=tuple(replace(d, memory_bytes=memory) for d in problem.devices))
        number = rng.randint(1, min(8, problem.global_batch_size))
        catalogue = Catalogue(problem, number)
        stages = drawn_stages(rng, problem)
        rows = catalogue.rows([stages])
        limits, bound = catalogue.limits(rows)[0], catalogue.bounds_ns(rows)[0]
        tight += bool((limits < number).any())
        for vector in drawn_warmups(rng, len(stages), number, 6).tolist():
            plan = Allocation(single_pipeline(stages, number).pipelines, number)
            timeline = simulate(problem, plan, early_backward(problem, plan, warmup=vector))
            if all(use.memory.total <= problem.capacity_bytes(d) for d, use in timeline.uses.items()):
                fitting += 1
                assert (limits[: len(stages)] >= vector).all()
                assert bound <= timeline.time_per_global_batch_ns
    assert tight > 5
    assert fitting > 20
