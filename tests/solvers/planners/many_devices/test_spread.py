"""Planner spread: partitions keep their promised times, fit memory, follow the network's tree, and beat plain ones."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from drawn_problems import random_request
from problems import make_network, make_problem

from penstock.solvers.bounds.device_count.bound import bounds
from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.model.micro_batches import batch_of, candidates
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Status
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.many_devices.device_line import line_of
from penstock.solvers.planners.many_devices.partition import IDLE, Partitions
from penstock.solvers.planners.many_devices.stage_costs import Pieces, replica_choices
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.judging import Judge

SPREAD = PLANNERS["spread"]


def tree(pods: int, nodes: int) -> Network:
    """Build pods of nodes of two devices, named so that nodes with neighbouring numbers are in different pods."""
    hosts = tuple(f"n{i}" for i in range(pods * nodes))
    cables = [Cable(host, f"leaf{i % pods}", 10**9, 0, True) for i, host in enumerate(hosts)]
    cables += [Cable(f"leaf{p}", "spine", 10**8, 0, True) for p in range(pods)]
    names = tuple(f"{host}/{d}" for host in hosts for d in range(2))
    inside = Inside("ports", 10**10, 0, True)
    return Network(names, hosts, tuple(i // 2 for i in range(len(names))), (inside,) * len(hosts), tuple(cables))


def uneven(layers: int, pods: int, nodes: int, seed: int = 0) -> Problem:
    """Build layers of unequal work on a tree."""
    rng = random.Random(seed)
    return make_problem(
        [rng.randint(50, 150) * 1000 for _ in range(layers)],
        None,
        1000,
        1000,
        nodes=(2,) * (pods * nodes),
        network=tree(pods, nodes),
        shared=True,
        global_batch_size=256,
        micro_batch_sizes=(8,),
    )


def searched(problem: Problem) -> Judge:
    """Return a judge with a few dozen of the planner's plans."""
    judge = Judge(Setting(problem, max_plans=40))
    assert SPREAD.proposals is not None
    judge.judge_all("spread", SPREAD.proposals(judge.setting, SPREAD.check(problem.update_rules, "auto", {})))
    return judge


def test_the_line_keeps_pods_together() -> None:
    """For any numbering of nodes, neighbours in the line are joined by a spine once less often than there are pods."""
    problem = uneven(4, 4, 6)
    line = line_of(problem)
    assert sorted(line) == list(range(48))
    pods = [problem.network.node_of[device] % 4 for device in line]
    assert sum(a != b for a, b in pairwise(pods)) == 3


@pytest.mark.parametrize("seed", range(12))
def test_partitions_cover_and_fit(seed: int) -> None:
    """All layers in order, cut only where that is allowed, on no more devices than exist."""
    problem = random_request(seed, 6, 4)
    line = line_of(problem)
    for batch in candidates(problem):
        partitions = Partitions(Pieces(problem, batch, line))
        for split in (split for idle in IDLE for split in partitions.splits(idle)):
            layers = [layer for run in split.runs for layer in range(run.first, run.last + 1)]
            assert layers == list(range(problem.num_layers))
            assert all(problem.cuttable[run.last] for run in split.runs[:-1])
            assert split.devices <= problem.num_devices
            stages = partitions.allocation(split).stages
            devices = [device for stage in stages for device in stage.devices]
            assert len(set(devices)) == len(devices) == split.devices


@pytest.mark.tier("nightly")
def test_promised_times_are_near_the_judges() -> None:
    """With little to send the best split's estimate is within a tenth of its plan's time; the bound is not far.

    The estimate is for 1F1B's warm-up, for which equal stages are best, or nearly.
    """
    problem = uneven(24, 4, 6)
    partitions = Partitions(Pieces(problem, batch_of(problem, 8), line_of(problem)))
    best, *others = (min(partitions.splits(idle)) for idle in IDLE)
    assert best.estimate_ns <= 1.01 * min(others).estimate_ns
    judge = searched(problem)
    assert judge.best is not None
    assert judge.best.value_ns <= 1.1 * best.estimate_ns
    assert judge.best.value_ns <= 1.25 * bounds(problem, 1, lambda _: None).bound_ns


@pytest.mark.tier("ci")
def test_memory_makes_it_recompute_and_then_refuse() -> None:
    """Where stashes do not fit, stages recompute if allowed; else the answer states the missing memory."""
    problem = uneven(24, 4, 6)
    stashes = {
        kind: tuple(replace(point, stash_bytes=np.full(24, 10**6)) for point in points)
        for kind, points in problem.measured.items()
    }
    tight = tuple(replace(device, memory_bytes=8 * 10**6) for device in problem.devices)
    problem = replace(problem, measured=stashes, devices=tight, _costs={})
    problem = replace(problem, recompute="auto", _costs={})
    batch = batch_of(problem, 8)
    partitions = Partitions(Pieces(problem, batch, line_of(problem)))
    for stages in (partitions.allocation(split).stages for idle in IDLE for split in partitions.splits(idle)):
        limits = [micro_batches_that_fit(problem, stage, batch.most_rows) for stage in stages]
        assert all(most >= min(len(stages) - n, batch.num_micro_batches) for n, most in enumerate(limits))
    judge = searched(problem)
    assert judge.best is not None
    assert any(stage.recompute for stage in judge.best.allocation.stages)
    starved = tuple(replace(device, memory_bytes=10**4) for device in problem.devices)
    refused = searched(replace(problem, devices=starved, _costs={}))
    assert refused.best is None
    assert refused.obstacles.shortage is not None


def test_replica_choices_waste_no_device() -> None:
    """The fewest replicas of equally large slices count; never more than rows, and always at least one."""
    problem = uneven(4, 4, 6)
    choices = replica_choices(problem, batch_of(problem, 8)).tolist()
    assert choices == [1, 2, 3, 4, 8]


@pytest.mark.tier("ci")
def test_a_planner_that_is_too_slow_for_so_many_devices_names_this_one() -> None:
    """This holds beyond 256 devices; a planner that was not in time itself has nothing to name."""
    many = uneven(4, 4, 33)
    for name, named in (("dp", True), ("spread", False)):
        result = solve(many, name, time_limit_ns=0)
        assert result.status is Status.TIME_LIMIT
        assert ("at 264 devices use planner spread" in result.sentence) == named


def test_no_network_of_pairs() -> None:
    """The narrowest bandwidth of devices in many nodes is the cables' between them, as pair by pair."""
    problem = uneven(4, 3, 3)
    network = problem.network
    rng = random.Random(1)
    for _ in range(20):
        group = rng.sample(range(problem.num_devices), rng.randint(2, 9))
        assert network.ring_bandwidth(group) == min(network.bandwidth(u, v) for u in group for v in group if u != v)
    matrix = make_network((1, 1, 2))
    assert matrix.walk() in ((0, 1, 2), (0, 2, 1))
