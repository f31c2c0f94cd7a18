"""The job shop: never above a heuristic, never below a proven bound, as good as every order of tiny plans."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from every_order import times_of_every_order
from problems import chain, gpipe, make_problem, straight, warmup_orders, with_just_enough_memory

from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.improve.job_shop import Question, model, solve
from penstock.solvers.improve.order import optimise_order
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.exact.chain_tables import WHOLE_BACKWARDS
from penstock.solvers.schedules.support.fitting_orders import best_order

pytestmark = pytest.mark.tier("ci")


def random_case(seed: int) -> tuple[Problem, Allocation]:
    rng = random.Random(seed)
    layers, batches = rng.randint(2, 5), rng.randint(1, 5)
    shared = rng.random() < 0.4
    problem = make_problem(
        [rng.randint(1, 30) for _ in range(layers)],
        [rng.randint(1, 60) for _ in range(layers)],
        [rng.randint(0, 40) for _ in range(layers - 1)],
        [rng.randint(0, 90) for _ in range(layers)],
        stash_bytes=rng.choice([0, 50]),
        update_ns=rng.randint(0, 5),
        memory_bytes=rng.choice([2**40, 1_200]),
        nodes=rng.choice([(4,), (2, 2), (1, 1, 1, 1)]),
        global_batch_size=rng.choice([2 * batches, 2 * batches + 1]),
        micro_batch_sizes=(2,),
        shared=shared,
        channel=rng.choice(["half", "full", "none"]),
        transfer=rng.choice(["spp", "nic"]),
        bucket_bytes=rng.choice([60, 10**6]),
        overlap_all_reduce=rng.random() < 0.7,
        form=rng.choice(["pairs", "bus"]),
        full_duplex=rng.random() < 0.5,
    )
    stages = rng.randint(1, min(3, layers))
    cuts = sorted(rng.sample(range(1, layers), stages - 1))
    sizes = np.diff([0, *cuts, layers]).tolist()
    devices = rng.sample(range(4), 4)
    shares = [[devices[s]] for s in range(stages)]
    for device in devices[stages:]:
        shares[rng.randrange(stages)].append(device)
    number = -(-problem.global_batch_size // 2)
    return problem, chain(list(zip(sizes, shares, strict=True)), number)


@pytest.mark.parametrize("seed", range(60))
def test_between_the_bound_and_every_heuristic(seed: int) -> None:
    """Plenty of memory, the request's memory, and just the bytes that an order needs."""
    problem, plan = random_case(seed)
    lowest = schedule_bound(problem, plan, WHOLE_BACKWARDS).bound_ns
    roomy = replace(problem, devices=tuple(replace(d, memory_bytes=2**50) for d in problem.devices))
    steps = [simulate(roomy, plan, order) for order in (*_early(plan), gpipe(plan))]
    values = [step.time_per_global_batch_ns for step in steps]
    answer = solve(Question(roomy, plan, min(values)), steps[0])
    assert answer.proven
    assert answer.orders is not None
    assert schedule_bound(roomy, plan, WHOLE_BACKWARDS).bound_ns <= answer.bound_ns <= min(values)
    assert makespan_ns(roomy, plan, answer.orders) >= answer.bound_ns
    tight = solve(Question(problem, plan, 10 * max(values)))
    assert tight.proven
    assert max(lowest, answer.bound_ns) <= tight.bound_ns
    step = steps[seed % 3]
    value, enough = step.time_per_global_batch_ns, with_just_enough_memory(roomy, step)
    questions = [Question(enough, plan, value), Question(enough, plan, value, 0, as_judged=True)]
    for question in questions[: 1 + questions[1].shop().judgeable]:
        answer = solve(question)
        assert answer.proven
        assert answer.orders is not None
        assert answer.bound_ns <= value


def _early(plan: Allocation) -> list[Orders]:
    depth = [len(plan.stages) - s for s in range(len(plan.stages))]
    return [warmup_orders(plan, [min(f * d, plan.num_micro_batches) for d in depth]) for f in (1, 2, 4)]


@pytest.mark.parametrize("seed", range(24))
def test_as_judged_is_the_best_of_every_order(seed: int) -> None:
    """Tiny plans on private half-duplex channels: all interleavings of every stage, timed by the simulator."""
    rng = random.Random(seed)
    stages, batches = rng.choice([(2, 2), (2, 3), (3, 2), (1, 3)])
    problem = make_problem(
        [rng.randint(1, 12) for _ in range(stages)],
        [rng.randint(1, 12) for _ in range(stages)],
        [rng.randint(1, 25) for _ in range(stages - 1)],
        nodes=(stages,),
        global_batch_size=batches,
        channel="half",
    )
    plan = straight(problem, batches)
    best_ns = min(times_of_every_order(problem, plan))
    plain = solve(Question(problem, plan, 10 * best_ns))
    judged = solve(Question(problem, plan, 10 * best_ns, 0, as_judged=True))
    assert plain.bound_ns <= best_ns
    assert judged.bound_ns == best_ns
    assert judged.orders is not None
    assert makespan_ns(problem, plan, judged.orders) == best_ns
    assert solve(Question(problem, plan, best_ns - 1, 0, as_judged=True)).orders is None
    optimised = optimise_order(problem, plan, None, overlap=True, value_ns=10 * best_ns, effort=10.0)
    assert optimised.bound.bound_ns == best_ns
    assert optimised.schedule is not None
    assert optimised.value_ns == best_ns == makespan_ns(problem, plan, optimised.schedule)


def test_the_vector_of_two_stages() -> None:
    """ALGORITHMS 7.8: S = 2, F = 2, B = 4, c = 1, M = 4 take 32; with at most (2, 1) in flight 34."""
    problem = make_problem([2, 2], [4, 4], [1], nodes=(1, 1), global_batch_size=4)
    plan = straight(problem, 4)
    assert solve(Question(problem, plan, 100)).bound_ns == 32
    tight = replace(
        make_problem([2, 2], [4, 4], [1], stash_bytes=10, nodes=(1, 1), global_batch_size=4, count_buffers=False),
        devices=tuple(replace(d, memory_bytes=10 * k) for d, k in zip(problem.devices, (2, 1), strict=True)),
    )
    answer = solve(Question(tight, plan, 100))
    assert answer.bound_ns == 34
    assert answer.orders is not None
    assert makespan_ns(tight, plan, answer.orders) == 34


def test_coarse_units_bound_from_below(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make_problem([2001, 3003], [4999, 4001], [1234], nodes=(1, 1), global_batch_size=4)
    plan = straight(problem, 4)
    fine = solve(Question(problem, plan, 10**6))
    monkeypatch.setattr(model, "MOST_UNITS", 50_000)
    coarse = solve(Question(problem, plan, 10**6))
    assert 0.95 * fine.bound_ns < coarse.bound_ns <= fine.bound_ns
    assert coarse.orders is not None


def test_the_same_question_has_the_same_answer() -> None:
    problem, plan = random_case(3)
    best = best_order(problem, plan, 2**60).plan
    assert best is not None
    first, second = (solve(Question(problem, plan, best.value_ns)) for _ in range(2))
    assert first.bound_ns == second.bound_ns
    assert first.orders is not None
    assert second.orders is not None
    for one, two in zip(first.orders.rows, second.orders.rows, strict=True):
        assert one.devices == two.devices
        assert (one.operations == two.operations).all()
