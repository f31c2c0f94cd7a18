"""A simulator written from docs/theory/judge.md alone gives the simulator's results, to the nanosecond and the byte."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from page_agreement import assert_same, reductions_of
from page_clock import Clock, Run
from page_costs import Costs, Invalid, Operation, R, W
from page_sharing import simulate_sharing_page
from page_simulator import simulate_page
from problems import make_problem
from random_plans import (
    encoded,
    random_allocation,
    random_averaging,
    random_crossing_pipelines,
    random_orders,
    random_pattern,
    random_pipelines,
    random_problem,
    with_ties,
)

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.judge.shared_processor import simulate_sharing
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import CodecSpeed, Measured, Problem
from penstock.solvers.model.schedule import Orders, Pattern
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.model.update_rules import UpdateRule

Make = Callable[[random.Random, Problem], Allocation]


class Plan(NamedTuple):
    """A plan, and the settings of its simulation."""

    problem: Problem
    allocation: Allocation
    schedule: Orders | Pattern
    overlap: bool | None
    rule: UpdateRule


def random_variety(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with several device kinds and measured sizes, any network, frozen layers, ties and codecs."""
    kinds = {kind: ("cpu", rng.choice([1.0, 1.7, 0.3, 2.5])) for kind in ("a", "b")} | {"cpu": ("cpu", 1.0)}
    mixed = rng.random() < 0.5
    devices = [replace(d, kind=rng.choice(sorted(kinds)) if mixed else "cpu") for d in problem.devices]
    problem = replace(problem, devices=tuple(devices), kind_source=kinds, _costs={})
    if rng.random() < 0.6:
        problem = replace(problem, measured={"cpu": _measured(rng, problem.num_layers)}, linear=rng.random() < 0.3)
    if rng.random() < 0.6:
        problem = replace(problem, network=_network(rng, problem.network))
    rules = replace(problem.rules, all_reduce=rng.choice(["flat", "hierarchical", "dapple"]))
    if rng.random() < 0.3:
        trainable = np.diff(problem.trainable_bytes) * [rng.random() < 0.6 for _ in range(problem.num_layers)]
        problem = replace(problem, trainable_bytes=np.concatenate(([0], np.cumsum(trainable))))
    if rng.random() < 0.5:
        problem = with_ties(rng, problem)
    same = [
        (int(a) if a == b else rng.randint(0, int(min(a, b))))
        for a, b in zip(problem.forward_bytes, problem.backward_bytes, strict=True)
    ]
    encodable = tuple((size, rng.randint(1, 2)) if size else (0, 0) for size in same)
    speed = CodecSpeed(rng.choice([10**9, 3 * 10**8]), 7 * 10**8)
    return replace(problem, rules=rules, codec=True, codec_speeds=dict.fromkeys(kinds, speed), encodable=encodable)


def _measured(rng: random.Random, layers: int) -> tuple[Measured, ...]:
    """Draw one to three measured sizes, with values that grow and fall."""

    def some(most: int) -> np.ndarray:
        return np.asarray([rng.randint(1, most) for _ in range(layers)])

    points = []
    for rows in sorted(rng.sample(range(1, 9), rng.randint(1, 3))):
        backward = some(30)
        weight = np.asarray([rng.randint(0, b) for b in backward.tolist()])
        points.append(Measured(rows, some(15), backward, weight, some(50), some(20)))
    return tuple(points)


def _network(rng: random.Random, network: Network) -> Network:
    """Draw a matrix, or nodes with and without fabrics whose cables form a graph with circles over every device."""
    size, widths = len(network.device_names), [10**9, 10**9, 5 * 10**8, 3 * 10**9]
    if rng.random() < 0.3:
        width = np.asarray([[0 if u == v else rng.choice(widths) for v in range(size)] for u in range(size)])
        latency = np.asarray([[rng.choice([0, 2, 5]) for _ in range(size)] for _ in range(size)])
        return replace(network, matrix_bytes_per_s=width, matrix_latency_ns=latency)
    insides = tuple(
        Inside(rng.choice(["pairs", "ports", "bus"]), rng.choice(widths), rng.choice([0, 3]), rng.random() < 0.5)
        for _ in network.insides
    )
    cables = []
    for node, name in enumerate(network.node_names):
        ends = [name]
        if rng.random() < 0.5:
            ends = [device for d, device in enumerate(network.device_names) if network.node_of[d] == node]
        for end in ends * rng.choice([1, 1, 2]):
            switch = rng.choice(["leaf", "spine"])
            lanes = rng.choice([1, 1, 2, 3]) if end == name else 1
            pair = (end, switch) if rng.random() < 0.5 else (switch, end)
            cables.append(Cable(*pair, rng.choice(widths), rng.choice([0, 1, 4]), rng.random() < 0.5, lanes))
    cables.append(Cable("leaf", "spine", rng.choice(widths), 1, rng.random() < 0.5))
    rng.shuffle(cables)
    return replace(
        network, insides=insides, cables=tuple(cables), resources=[], _ids={}, _routes={}, _paths={}, _narrowest={}
    )


def flushed(rng: random.Random) -> Plan:
    """Draw a plan of one pipeline."""
    return _orders(rng, random_allocation, _problem(rng))


def pipelines(rng: random.Random) -> Plan:
    """Draw a plan of several pipelines on separate devices."""
    return _orders(rng, random_pipelines, _problem(rng, 2))


def crossing(rng: random.Random) -> Plan:
    """Draw a plan of several pipelines over the same devices."""
    return _orders(rng, random_crossing_pipelines, _problem(rng, 2))


def periodic(rng: random.Random) -> Plan:
    """Draw a plan without a flush."""
    problem = _problem(rng)
    allocation, pattern, rule, _run = random_pattern(rng, problem)
    allocation = encoded(rng, allocation) if problem.codec else allocation
    return Plan(problem, allocation, pattern, rng.choice([None, True, False]), rule)


def _problem(rng: random.Random, least: int = 1) -> Problem:
    problem = random_problem(rng)
    while min(problem.num_devices, problem.global_batch_size) < least:
        problem = random_problem(rng)
    problem = random_variety(rng, problem) if rng.random() < 0.7 else problem
    return _with_collisions(rng, problem) if rng.random() < 0.3 else problem


def _with_collisions(rng: random.Random, problem: Problem) -> Problem:
    """Return the problem with ties and a shared network on which most events fall on the same few instants."""
    small = {"forward_bytes": problem.forward_bytes % 2, "backward_bytes": problem.backward_bytes % 2}
    for name in ("parameter_bytes", "trainable_bytes", "update_ns"):
        small[name] = np.concatenate(([0], np.cumsum(np.diff(getattr(problem, name)) % 3)))
    points = tuple(
        replace(
            point, forward_ns=point.forward_ns % 3, backward_ns=point.backward_ns % 3, weight_ns=point.weight_ns * 0
        )
        for point in problem.measured["cpu"]
    )
    inside, cables = Inside("bus", 10**9, 0, True), tuple(x._replace(latency_ns=0) for x in problem.network.cables)
    network = replace(problem.network, insides=(inside,) * len(problem.network.insides), cables=cables)
    network = replace(network, resources=[], _ids={}, _routes={}, _paths={}, _narrowest={})
    rules = replace(problem.rules, shared=True, bucket_bytes=rng.choice([1, 3, 10]))
    problem = replace(
        problem, **small, measured={"cpu": points}, network=network, rules=rules, encodable=(), codec=False
    )
    return with_ties(rng, replace(problem, _costs={}))


def _orders(rng: random.Random, make: Make, problem: Problem) -> Plan:
    allocation = make(rng, problem)
    orders = random_orders(rng, allocation)
    allocation = encoded(rng, allocation) if problem.codec else allocation
    return Plan(problem, allocation, orders, rng.choice([None, True, False]), "synchronous")


PLANS = (flushed, pipelines, crossing, periodic)
SEEDS = 230


def judged(plan: Plan) -> Timeline:
    """Return the simulator's timeline; raise InvalidPlan."""
    return simulate(plan.problem, plan.allocation, plan.schedule, overlap=plan.overlap, update_rule=plan.rule)


def read(plan: Plan) -> Run:
    """Return the page's run; raise Invalid."""
    return simulate_page(plan.problem, plan.allocation, plan.schedule, plan.overlap, plan.rule)


def assert_same_verdict(plan: Plan) -> bool:
    """Check that the page and the simulator both refuse the plan, or agree on it; return whether they refuse it."""
    try:
        run = read(plan)
    except Invalid:
        with pytest.raises(InvalidPlan):
            judged(plan)
        return True
    assert_same(judged(plan), run)
    return False


@pytest.mark.parametrize("make", PLANS)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_page_gives_what_the_judge_gives(seed: int, make: Callable[[random.Random], Plan]) -> None:
    assert_same_verdict(make(random.Random(seed)))


@pytest.mark.parametrize("seed", range(90))
def test_pipelines_that_share_processors(seed: int) -> None:
    rng = random.Random(seed)
    problem, allocation, orders = random_averaging(seed)
    problem = random_variety(rng, problem) if rng.random() < 0.6 else problem
    assert_same(simulate_sharing(problem, allocation, orders), simulate_sharing_page(problem, allocation, orders))


def _spoiled(rng: random.Random, plan: Plan) -> Plan:
    if rng.random() < 0.3 and plan.problem.network.matrix_bytes_per_s is None:
        network = plan.problem.network
        cables = tuple(cable for cable in network.cables if rng.random() < 0.5)
        network = replace(network, cables=cables, resources=[], _ids={}, _routes={}, _paths={}, _narrowest={})
        return plan._replace(problem=replace(plan.problem, network=network, _costs={}))
    rows = []
    for row in plan.schedule.rows:
        operations = row.operations.copy()
        if len(operations) and rng.random() < 0.6:
            i, j = rng.randrange(len(operations)), rng.randrange(len(operations))
            operations[[i, j]] = operations[[j, i]]
        rows.append(replace(row, operations=operations))
    return plan._replace(schedule=Orders("spoiled", tuple(rows)))


@pytest.mark.parametrize("seed", range(120))
def test_sums_that_become_ready_with_other_reductions(seed: int) -> None:
    """Two pipelines of three stages on one bus, with times of 0 to 2; the first to start shows which sums join when."""
    plan = _tied_pipelines(random.Random(seed))
    run = read(plan)
    assert run.ties
    assert_same(judged(plan), run)


def test_readiness_in_a_later_repetition_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of these plans end otherwise if a sum that becomes ready in step 1 joins in the next repetition only."""
    come = Clock._come

    def later(self: Clock, lane: int, before: Operation | None, *, in_step_1: bool) -> None:
        come(self, lane, before, in_step_1=False)

    monkeypatch.setattr(Clock, "_come", later)
    plans = [_tied_pipelines(random.Random(seed)) for seed in range(0, 120, 3)]
    assert sum(sorted(judged(plan).reductions) != sorted(reductions_of(read(plan))) for plan in plans) > 0


def _tied_pipelines(rng: random.Random) -> Plan:
    def draw(count: int, least: int, most: int) -> list[int]:
        return [rng.randint(least, most) for _ in range(count)]

    ties = tuple((f"t{k}", rng.choice([(1, 2), (1, 2), (0, 1), (0, 2)]), rng.randint(1, 2)) for k in range(2))
    problem = make_problem(
        draw(3, 0, 2),
        draw(3, 0, 2),
        draw(2, 0, 2),
        draw(3, 1, 2),
        update_ns=draw(3, 0, 1),
        nodes=(6,),
        form="bus",
        shared=True,
        global_batch_size=rng.randint(2, 4),
        bucket_bytes=rng.choice([1, 10]),
        overlap_all_reduce=rng.random() < 0.5,
        shared_parameters=ties[: rng.randint(1, 2)],
    )
    count = rng.randint(2, problem.global_batch_size)
    cut, devices = rng.randint(1, count - 1), rng.sample(range(6), 6)
    orders_of_devices = [devices[:3], devices[2::-1] if rng.random() < 0.3 else devices[3:]]
    parts = [tuple(Stage(layer, layer, (d,)) for layer, d in enumerate(part)) for part in orders_of_devices]
    allocation = Allocation((Pipeline(parts[0], (0, cut - 1)), Pipeline(parts[1], (cut, count - 1))), count)
    return Plan(problem, allocation, random_orders(rng, allocation), None, "synchronous")


def test_plans_of_every_kind_are_met() -> None:
    """A third of the seeds has plans of every kind."""
    met: Counter[str] = Counter()
    for number in range(0, SEEDS * len(PLANS), 3):
        met.update(_kinds(PLANS[number % len(PLANS)](random.Random(number // len(PLANS)))))
    assert met["plan"] > 300
    assert {kind: count for kind, count in met.items() if count < 15} == {}
    assert set(met) == KINDS


KINDS = {
    *("plan", "flushed", "weight_stashing", "double_buffered", "double_grouped", "several pipelines"),
    *("shared", "private none", "private half", "private full", "nic", "spp", "dapple", "madpipe"),
    *("flat", "hierarchical", "dapple all-reduce", "overlap", "no overlap", "matrix", "device cables", "several kinds"),
    *("replicas", "round_robin", "stages of a device", "split backward", "recompute in backward", "recompute apart"),
    *("encoded", "summed tie", "tie not summed", "frozen", "sharded states", "no buffers", "measured scaling"),
}


def _kinds(plan: Plan) -> set[str]:
    problem, rules, stages = plan.problem, plan.problem.rules, plan.allocation.stages
    operations = plan.schedule.operations if isinstance(plan.schedule, Pattern) else None
    kinds = {(op.kind, op.stage) for op in operations or ()}
    for row in plan.schedule.rows if operations is None else ():
        kinds |= {(kind, s) for kind, s, _m in row.operations.tolist()}
    apart = {s for kind, s in kinds if kind == R}
    segments = {s for s, stage in enumerate(stages) if stage.recompute}
    devices = Counter(d for stage in stages for d in stage.devices)
    cable_ends = {end for cable in problem.network.cables for end in cable[:2]} & set(problem.network.device_names)
    matrix, costs = problem.network.matrix_bytes_per_s is not None, Costs(problem, plan.allocation, plan.overlap)
    used = {problem.devices[d].kind for d in devices}
    features = {
        "shared" if rules.shared else f"private {rules.channel}": True,
        "nic" if rules.shared else rules.transfer: True,
        "dapple all-reduce" if rules.all_reduce == "dapple" else rules.all_reduce: True,
        "overlap" if costs.overlap else "no overlap": True,
        plan.rule if plan.rule != "synchronous" else "flushed": True,
        "plan": True,
        "several pipelines": len(plan.allocation.pipelines) > 1,
        "matrix": matrix,
        "device cables": bool(cable_ends) and not matrix,
        "several kinds": len(used) > 1,
        "replicas": any(len(stage.devices) > 1 for stage in stages),
        "round_robin": any(stage.dispatch == "round_robin" and len(stage.devices) > 1 for stage in stages),
        "stages of a device": max(devices.values()) > 1,
        "split backward": any(kind == W for kind, _s in kinds),
        "recompute in backward": bool(segments - apart),
        "recompute apart": bool(apart),
        "encoded": any(stage.coded[1] for stage in stages),
        "summed tie": bool(costs.ties(plan.rule)),
        "tie not summed": bool(problem.shared_parameters) and not costs.ties(plan.rule),
        "frozen": bool((problem.trainable_bytes != problem.parameter_bytes).any()),
        "sharded states": problem.memory.shard_states,
        "no buffers": not problem.memory.count_buffers,
        "measured scaling": not problem.linear,
    }
    return {kind for kind, there in features.items() if there}


def test_the_page_refuses_what_the_judge_refuses() -> None:
    """Two operations of a row are swapped, or the network is in parts."""
    met: Counter[bool] = Counter()
    for seed in range(60):
        rng = random.Random(seed)
        make = rng.choice([random_allocation, random_pipelines, random_crossing_pipelines])
        met[assert_same_verdict(_spoiled(rng, _orders(rng, make, _problem(rng, 2))))] += 1
    assert min(met[True], met[False]) > 8
