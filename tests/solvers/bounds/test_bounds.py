"""No bound is above a plan's time: random plans, every order of tiny ones, CP-SAT; and cases where bounds are exact."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest
import reference_windows
from ortools.sat.python import cp_model
from problems import chain, early_backward, gpipe, make_problem, straight, warmup_orders, with_just_enough_memory

from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import window_bound_ns
from penstock.solvers.bounds.trainer import within_bounds
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.transfer import transfer
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.trainer_limits import Span, Within


@pytest.mark.parametrize("seed", range(120))
def test_windows_hold_for_straight_pipelines_in_tight_memory(seed: int) -> None:
    rng = random.Random(seed)
    stages, batches = rng.randint(1, 5), rng.randint(1, 9)
    problem = make_problem(
        [rng.randint(0, 20) for _ in range(stages)],
        [rng.randint(0, 40) for _ in range(stages)],
        [rng.randint(0, 15) for _ in range(stages - 1)],
        rng.randint(0, 30),
        stash_bytes=rng.randint(0, 50),
        workspace_bytes=rng.randint(0, 9),
        update_ns=rng.randint(0, 9),
        nodes=rng.choice([(1,) * stages, (stages,)]),
        global_batch_size=batches + rng.choice([0, 0, rng.randint(0, batches - 1) if batches > 1 else 0]),
        shared=rng.random() < 0.4,
        channel=rng.choice(["half", "full", "none"]),
        full_duplex=rng.random() < 0.5,
        form=rng.choice(["pairs", "ports", "bus"]),
        latency_ns=rng.choice([0, 2]),
    )
    allocation = straight(problem, batches)
    top = rng.randint(1, batches)
    ahead = [top]
    for _ in range(stages - 1):
        ahead.append(rng.randint(max(1, ahead[-1] - 2), ahead[-1]))
    orders = warmup_orders(allocation, ahead)
    timeline = simulate(problem, allocation, orders)
    for each in (problem, with_just_enough_memory(problem, timeline)):
        assert schedule_bound(each, allocation, orders).bound_ns <= timeline.time_per_global_batch_ns
    cases = (problem, with_just_enough_memory(problem, timeline))
    loose, tight = (window_bound_ns(StageTimes(each, allocation, orders)) for each in cases)
    assert [loose, tight] == [reference_windows.window_bound_ns(StageTimes(each, allocation, orders)) for each in cases]
    assert loose <= tight <= timeline.time_per_global_batch_ns


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(60))
def test_the_schedule_bound_stays_below_the_cp_sat_optimum(seed: int) -> None:
    rng = random.Random(seed)
    stages, batches = rng.randint(1, 4), rng.randint(1, 6)
    channel = rng.choice(["half", "full", "none"])
    problem = make_problem(
        [rng.randint(1, 12) for _ in range(stages)],
        [rng.randint(1, 24) for _ in range(stages)],
        [rng.randint(0, 12) for _ in range(stages - 1)],
        0,
        stash_bytes=10,
        nodes=(1,) * stages,
        global_batch_size=batches,
        channel=channel,
        count_buffers=False,
        memory_bytes=[10 * rng.randint(max(1, stages - s), 6) for s in range(stages)],
    )
    allocation = straight(problem, batches)
    orders = gpipe(allocation)
    limits = [problem.devices[s].memory_bytes // 10 for s in range(stages)]
    best = _optimum(problem, allocation, limits)
    assert schedule_bound(problem, allocation, orders).bound_ns <= best


def _optimum(problem: Problem, allocation: Allocation, limits: list[int]) -> int:
    """Return the shortest time of any order of operations and transfers, with ``limits[s]`` in flight at most."""
    model, stages, batches = cp_model.CpModel(), len(allocation.stages), allocation.num_micro_batches
    horizon = 10_000
    lanes: dict[object, list] = {}

    def step(name: str, resource: object, size: int):
        begin = model.new_int_var(0, horizon, name)
        if size and resource is not None:
            lanes.setdefault(resource, []).append(model.new_fixed_size_interval_var(begin, size, name))
        return begin, begin + size

    makespan = model.new_int_var(0, horizon, "makespan")
    forward, backward = {}, {}
    for m in range(batches):
        reached = 0
        for s in range(stages):
            cost = stage_costs(problem, allocation.stages[s], 1)
            forward[s, m] = step(f"F{s},{m}", ("lane", s), cost.forward_ns)
            model.add(forward[s, m][0] >= reached)
            reached = _carry(problem, allocation, model, step, s, 0, forward[s, m][1], m)
        for s in reversed(range(stages)):
            cost = stage_costs(problem, allocation.stages[s], 1)
            backward[s, m] = step(f"B{s},{m}", ("lane", s), cost.backward_ns)
            model.add(backward[s, m][0] >= reached)
            reached = _carry(problem, allocation, model, step, s, 1, backward[s, m][1], m)
        model.add(makespan >= backward[0, m][1])
    for intervals in lanes.values():
        model.add_no_overlap(intervals)
    for s in range(stages):
        for m in range(batches - 1):
            model.add(forward[s, m + 1][0] >= forward[s, m][1])
            model.add(backward[s, m + 1][0] >= backward[s, m][1])
        for m in range(batches - limits[s]):
            model.add(forward[s, m + limits[s]][0] >= backward[s, m][1])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)


def _carry(problem, allocation, model, step, s, way, ready, m):
    move = transfer(problem, allocation, s, 1, way)
    if move is None:
        return ready
    edge = s if way == 0 else s - 1
    resource = {"half": ("edge", edge), "full": ("edge", edge, way), "none": None}[problem.rules.channel]
    begin, end = step(f"C{s},{way},{m}", resource, move.duration_ns)
    model.add(begin >= ready)
    return end


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("batches", [1, 4, 9])
def test_uniform_stages_without_communication_reach_the_bound(stages: int, batches: int) -> None:
    problem = make_problem([3] * stages, [7] * stages, nodes=(stages,), global_batch_size=batches)
    allocation = straight(problem, batches)
    for orders in (gpipe(allocation), early_backward(allocation), early_backward(allocation, "B")):
        time_ns = simulate(problem, allocation, orders).time_per_global_batch_ns
        assert time_ns == (batches + stages - 1) * 10
        assert schedule_bound(problem, allocation, orders).bound_ns == time_ns


def test_the_request_bound_is_below_every_straight_partition() -> None:
    problem = make_problem([3, 1, 4, 1, 5], boundary_bytes=2, update_ns=1, nodes=(3,), global_batch_size=6)
    bound = request_bound(problem)
    assert bound.bound_ns == (6 * 3 * 14 + 5 + 2) // 3
    for count in (1, 2, 3):
        for cuts in combinations(range(1, 5), count - 1):
            sizes = [b - a for a, b in zip((0, *cuts), (*cuts, 5), strict=True)]
            allocation = chain([(size, [s]) for s, size in enumerate(sizes)], 6)
            time_ns = simulate(problem, allocation, early_backward(allocation)).time_per_global_batch_ns
            assert bound.bound_ns <= time_ns


def test_one_device_reaches_the_request_bound() -> None:
    problem = make_problem([3, 1], update_ns=2, nodes=(1,), global_batch_size=5)
    allocation = chain([(2, [0])], 5)
    time_ns = simulate(problem, allocation, gpipe(allocation)).time_per_global_batch_ns
    assert time_ns == request_bound(problem).bound_ns == 5 * 12 + 4


def test_one_micro_batch_is_bounded_by_its_path() -> None:
    problem = make_problem([30, 10], nodes=(4,), global_batch_size=1)
    bound = request_bound(problem)
    assert bound.bound_ns == 30 + 10 + (30 - 1) + (10 - 1) + 30
    assert bound.method.startswith("fill")


def test_memory_that_holds_one_micro_batch_makes_the_bound_a_cycle() -> None:
    problem = make_problem(
        [10, 10], boundary_bytes=5, stash_bytes=100, nodes=(1, 1), global_batch_size=4, memory_bytes=150
    )
    allocation = straight(problem, 4)
    orders = warmup_orders(allocation, [1, 1])
    time_ns = simulate(problem, allocation, orders).time_per_global_batch_ns
    assert time_ns == 4 * (10 + 5 + 30 + 5 + 20)
    assert schedule_bound(problem, allocation, orders).bound_ns == time_ns


def test_a_shared_bus_bounds_by_its_load() -> None:
    problem = make_problem([1, 1, 1], boundary_bytes=50, nodes=(3,), form="bus", shared=True, global_batch_size=6)
    allocation = straight(problem, 6)
    bound = schedule_bound(problem, allocation, gpipe(allocation))
    assert bound.method == "load of a link or channel"
    assert bound.bound_ns == 1 + 6 * 4 * 50 + 2
    assert simulate(problem, allocation, gpipe(allocation)).time_per_global_batch_ns >= bound.bound_ns


def test_the_first_layer_steps_after_its_last_backward() -> None:
    """Two stages: 10 ns until the second one works 4 × 300, then the first one's backward, 20, and its step, 50."""
    within = Within("megatron", ("early-backward",), False, (), False, Span(0, 1), (True,))
    problem = make_problem([10, 100], [20, 200], update_ns=[50, 1], nodes=(2,), global_batch_size=4)
    assert {bound.bound_ns for bound in within_bounds(replace(problem, within=within))} == {10 + 4 * 300 + 20 + 50}
