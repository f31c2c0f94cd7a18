"""The bound where memory binds, against the best of all plans of one pipeline, by hand, and against every planner."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest
from brute_plans import plans
from ortools.linear_solver import pywraplp
from problems import make_problem, warmup_orders

from penstock.schemas.errors import PenstockError
from penstock.solvers.bounds.first_backward import _per_sample, first_backward_ns, room_bytes
from penstock.solvers.bounds.schedule_bound import MEMORY, request_bound
from penstock.solvers.costs.memory import fits
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.degrees import Module
from penstock.solvers.model.problem import Problem
from penstock.solvers.solve.driver import solve


def narrow(seed: int) -> Problem:
    """Draw two or three layers on two devices, or two on three, with memory for some of the activations."""
    draw = np.random.default_rng(seed)
    layers, devices = [(2, 2), (3, 2), (2, 3)][seed % 3]
    batch = int(draw.integers(2, 5))
    stash = draw.integers(20, 60, layers)
    parameters = draw.integers(0, 8, layers)
    room = parameters.sum() * 4 + stash.max() + draw.uniform(0.02, 0.3) * stash.sum() * batch / devices
    return make_problem(
        draw.integers(20, 100, layers).tolist(),
        parameter_bytes=parameters.tolist(),
        stash_bytes=stash.tolist(),
        nodes=(devices,),
        memory_bytes=(room * draw.uniform(0.9, 1.1, devices)).astype(int).tolist(),
        context_bytes=int(draw.integers(0, 10)),
        global_batch_size=batch,
        micro_batch_sizes=(1,),
        state_factor=int(draw.integers(0, 3)),
        recompute=draw.choice(["auto", "never"]),
    )


def least_ns(problem: Problem) -> int | None:
    """Return the best time of all fitting plans of one pipeline with stages apart, under all early-backward orders."""
    best: int | None = None
    for plan in plans(problem, "synchronous"):
        most = range(1, plan.num_micro_batches + 1)
        for warmup in product(most, repeat=len(plan.stages)):
            if any(after > before for before, after in pairwise(warmup)):
                continue
            orders = warmup_orders(plan, list(warmup))
            try:
                if best is not None and makespan_ns(problem, plan, orders) >= best:
                    continue
                timeline = simulate(problem, plan, orders)
            except PenstockError:
                continue
            if fits(problem, timeline) and (best is None or timeline.time_per_global_batch_ns < best):
                best = timeline.time_per_global_batch_ns
    return best


@pytest.mark.tier("nightly")
def test_no_plan_that_fits_is_quicker() -> None:
    binding = 0
    for seed in range(90):
        problem = narrow(seed)
        best, bound = least_ns(problem), request_bound(problem)
        assert best is None or bound.bound_ns <= best, seed
        binding += best is not None and bound.method == MEMORY
        assert request_bound(problem, fits=False).bound_ns <= bound.bound_ns
    assert binding >= 10


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(6))
def test_no_planner_has_a_better_plan_in_little_memory(seed: int) -> None:
    problem = narrow(seed)
    plan = solve(problem, max_plans=2, workers=1).best
    assert plan is None or request_bound(problem).bound_ns <= plan.value_ns


def roomy(memory_bytes: int, recompute: str = "auto") -> Problem:
    """Build two layers of forward 10 and backward 20 on two devices, four samples; a sample keeps 10 bytes of each."""
    return make_problem(
        [10, 10],
        parameter_bytes=[0, 0],
        stash_bytes=[10, 10],
        nodes=(2,),
        memory_bytes=[memory_bytes] * 2,
        global_batch_size=4,
        micro_batch_sizes=(1,),
        recompute=recompute,
    )


def test_the_room_before_the_first_backward_is_shared_out() -> None:
    assert request_bound(roomy(10**6)).bound_ns == 4 * 60 // 2
    tight = request_bound(roomy(10))
    # A slice is forward in 20. There are 8 forwards of 10; the 20 bytes spare 20 of them, and two devices do the rest.
    assert (tight.bound_ns, tight.method) == (20 + (240 - 20) // 2, MEMORY)
    assert tight.covers.memory == {"fits"}
    assert request_bound(roomy(10, "never")).bound_ns == tight.bound_ns
    assert request_bound(roomy(10), fits=False).bound_ns == 120


def test_what_is_begun_before_the_first_backward_takes_time_as_well() -> None:
    problem = make_problem(
        [20],
        [40],
        parameter_bytes=[0],
        stash_bytes=[11],
        nodes=(2,),
        memory_bytes=[6] * 2,
        global_batch_size=10,
        micro_batch_sizes=(1,),
        recompute="auto",
    )
    ((kind, (point,)),) = problem.measured.items()
    modules: dict[Module, tuple[np.ndarray, np.ndarray]] = {"mlp": (np.asarray([10]), np.asarray([1]))}
    problem = replace(problem, measured={kind: (replace(point, modules=modules),)}, _costs={})
    # Memory holds the module of all ten samples, but in 20 ns two devices begin only two: both modules and one
    # rest spare 30 of the work that follows.
    bound = request_bound(problem)
    assert (bound.bound_ns, bound.method) == (20 + (600 - 30) // 2, MEMORY)


def most_spared(problem: Problem, slice_ns: int) -> Fraction:
    """Return the most work that can be spared, over all fractions of samples begun, by a linear program in floats."""
    solver = pywraplp.Solver.CreateSolver("GLOP")
    batch, more = problem.global_batch_size, solver.Sum
    time, size, value = [], [], []
    for layer in _per_sample(problem):
        begun = solver.NumVar(0, batch, "")
        time.append(begun * float(layer.forward_ns))
        rest = layer.forward_ns - sum(work for work, _freed in layer.modules)
        parts = [(layer.stash_bytes, max(0, rest)), *((freed, work) for work, freed in layer.modules)]
        if problem.recompute == "never":
            parts = [(layer.stash_bytes, layer.whole_ns - layer.backward_ns)]
        else:
            value.append(begun * float(layer.whole_ns - layer.forward_ns - layer.backward_ns))
        for freed, work in parts:
            kept = solver.NumVar(0, batch, "")
            solver.Add(kept <= begun)
            size.append(kept * float(freed))
            value.append(kept * float(work))
    solver.Add(more(time) <= problem.num_devices * slice_ns)
    solver.Add(more(size) <= room_bytes(problem))
    solver.Maximize(more(value))
    assert solver.Solve() == solver.OPTIMAL
    return Fraction(solver.Objective().Value())


@pytest.mark.parametrize("seed", range(60))
def test_prices_find_what_a_linear_program_does(seed: int) -> None:
    problem = narrow(seed)
    if seed % 2:
        draw = np.random.default_rng(seed)
        ((kind, (point,)),) = problem.measured.items()
        freed = (point.stash_bytes * draw.uniform(0, 0.9, problem.num_layers)).astype(np.int64)
        modules: dict[Module, tuple[np.ndarray, np.ndarray]] = {"mlp": (point.forward_ns // 2, freed)}
        problem = replace(problem, measured={kind: (replace(point, modules=modules),)}, _costs={})
    slice_ns = int(np.random.default_rng(seed).integers(1, 300))
    work = sum((each.whole_ns for each in _per_sample(problem)), Fraction(0))
    later = int(problem.update_ns[-1]) + problem.global_batch_size * work
    exact = slice_ns + (later - most_spared(problem, slice_ns)) / problem.num_devices
    assert first_backward_ns(problem, slice_ns) == pytest.approx(float(exact), abs=1.01)


def test_replicas_that_recompute_as_little_as_fits_nearly_meet_it() -> None:
    layers, kept = 20, 9  # and memory for the layer that is being rebuilt
    problem = make_problem(
        [10] * layers,
        parameter_bytes=[0] * layers,
        stash_bytes=[10] * layers,
        nodes=(2,),
        memory_bytes=[10 * (kept + 1)] * 2,
        global_batch_size=2,
        micro_batch_sizes=(2,),
    )
    again = tuple((layer, layer) for layer in range(layers - kept))
    plan = single_pipeline((Stage(0, layers - 1, (0, 1), "rows", again),), 1)
    timeline = simulate(problem, plan, warmup_orders(plan, [1]))
    assert fits(problem, timeline)
    assert timeline.time_per_global_batch_ns == 200 + 10 * (layers - kept) + 400
    assert request_bound(problem).bound_ns == 200 + (layers * 2 * 30 - 10 * 2 * (kept + 1)) // 2
