"""The suffix search: the CP-SAT optimum, a reference, valid bounds whenever it is cut short, and refuted claims."""

from __future__ import annotations

import random
from functools import cache
from itertools import pairwise

import pytest
from every_order import times_of_every_order
from line_cases import limited_line, random_line
from problems import chain, make_problem, straight, warmup_orders, with_just_enough_memory
from random_plans import random_allocation, random_orders, random_problem
from reference_suffix import best_period_of_one, plain_optimum, plain_table

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import effective_limits, window_bound_ns
from penstock.solvers.bounds.suffix import prove, takes
from penstock.solvers.bounds.suffix.exact_search import SuffixSearch
from penstock.solvers.bounds.suffix.stage_line import line_of, suffix_line
from penstock.solvers.bounds.suffix.table import suffix_bound_ns
from penstock.solvers.improve.job_shop import Question, solve
from penstock.solvers.improve.order import optimise_order
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.recomputed import recomputed, recomputing

pytestmark = pytest.mark.tier("ci")

FAR = 10**7


def optimum(problem: Problem, plan: Allocation) -> int:
    """Return CP-SAT's optimum, with channels in any order."""
    answer = solve(Question(problem, plan, FAR))
    assert answer.proven
    return answer.bound_ns


@cache
def solved_line(seed: int) -> tuple[Problem, Allocation, int]:
    """Return a drawn line with CP-SAT's optimum, which several tests compare with."""
    problem, plan = random_line(seed)
    return problem, plan, optimum(problem, plan)


def search_of(problem: Problem, plan: Allocation, effort: int = 10**6) -> SuffixSearch:
    return SuffixSearch(line_of(StageTimes(problem, plan, Orders("any", ()))), effort)


@pytest.mark.parametrize("seed", range(60))
def test_the_search_finds_the_cp_sat_optimum(seed: int) -> None:
    problem, plan, best = solved_line(seed)
    answer = prove(problem, plan, FAR, 10**6)
    assert answer.proven
    assert answer.bound_ns == best
    assert answer.orders is not None
    assert makespan_ns(problem, plan, answer.orders) >= best
    none = prove(problem, plan, best - 1, 10**6)
    assert (none.bound_ns, none.orders, none.proven) == (best, None, True)


@pytest.mark.parametrize("seed", range(40))
def test_the_search_is_its_reference(seed: int) -> None:
    """In the reference any operation may be next, without bounds and target times."""
    problem, plan = random_line(seed, most_batches=4)
    line = line_of(StageTimes(problem, plan, Orders("any", ())))
    assert prove(problem, plan, FAR, 10**6).bound_ns == plain_optimum(line, plan.num_micro_batches)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("seed", range(40))
def test_what_is_proven_of_suffixes_holds_for_every_number(seed: int) -> None:
    """phi_s(n) is at most the optimum of n micro-batches alone on the suffix from s."""
    problem, plan = random_line(200 + seed, most_batches=4)
    batches = plan.num_micro_batches
    search = search_of(problem, plan)
    analytic = search.line.phi.copy()
    search.run(FAR)
    for s in range(len(plan.stages)):
        for n in range(1, batches + 1):
            best = plain_optimum(suffix_line(search.line, s), n)
            assert analytic[s, n] <= search.line.phi[s, n] <= best
            if s > 0:
                assert search.line.phi[s, n] == best


@pytest.mark.tier("quick")
@pytest.mark.parametrize("seed", range(40))
def test_the_table_is_its_reference(seed: int) -> None:
    line = search_of(*random_line(seed)).line
    assert line.phi.tolist() == plain_table(line)


@pytest.mark.parametrize("effort", [0, 1, 10, 100, 400])
@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_a_starved_search_never_says_too_much(seed: int, effort: int) -> None:
    problem, plan, best = solved_line(seed)
    for at_most in (FAR, best, best - 1):
        answer = prove(problem, plan, at_most, effort)
        assert answer.bound_ns <= best
        assert answer.spent <= effort
        if answer.proven:
            assert answer.bound_ns == best
        assert answer.orders is None or answer.proven


@pytest.mark.tier("quick")
def test_many_micro_batches_in_flight_are_searched_for_in_little_memory() -> None:
    """Only few states of 40,000 micro-batches that may all be in flight fit into memory, and each counts as many."""
    problem, plan = limited_line([9, 7], [20, 11], [30], [30], [40_000] * 2, 40_000)
    search = search_of(problem, plan, 10_000)
    proof = search.run(FAR)
    assert search.bound_ns <= proof.bound_ns <= makespan_ns(problem, plan, warmup_orders(plan, [2, 1]))
    assert proof.spent <= 11_000
    assert search._words.nbytes + search._counts.nbytes <= 2**29


TRIES = 8


def _drawn(seed: int) -> tuple[Problem, Allocation, Orders] | None:
    """Return the first random plan of a seed that the search supports; None if none of TRIES plans is."""
    for number in range(TRIES):
        rng = random.Random(TRIES * seed + number)
        problem = random_problem(rng)
        plan = random_allocation(rng, problem)
        orders = random_orders(rng, plan)
        kinds = {int(kind) for row in orders.rows for kind in row.operations[:, 0]}
        if takes(StageTimes(problem, plan, Orders("any", ()))) and kinds <= {FORWARD, BACKWARD}:
            return problem, plan, orders
    return None


@pytest.mark.tier("quick")
def test_most_seeds_have_a_plan_that_is_taken() -> None:
    assert sum(_drawn(seed) is not None for seed in range(30)) >= 20


@pytest.mark.parametrize("seed", range(30))
def test_a_proof_is_below_whatever_the_judge_says(seed: int) -> None:
    """Uneven micro-batches, all-reduces, updates, shared networks, recomputation: never above a plan that fits."""
    drawn = _drawn(seed)
    if drawn is None:
        return
    problem, plan, orders = drawn
    timeline = simulate(problem, plan, orders)
    tight = with_just_enough_memory(problem, timeline)
    assert prove(tight, plan, FAR, 10**5).bound_ns <= timeline.time_per_global_batch_ns


def test_all_reduces_and_updates_of_unequal_length_are_part_of_the_optimum() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        stages, batches = rng.randint(1, 3), rng.randint(2, 5)
        problem = make_problem(
            [rng.randint(1, 20) for _ in range(stages)],
            [rng.randint(1, 30) for _ in range(stages)],
            [rng.randint(1, 20) for _ in range(stages - 1)],
            [rng.randint(0, 60) for _ in range(stages)],
            update_ns=[rng.randint(0, 40) for _ in range(stages)],
            nodes=(2 * stages,),
            global_batch_size=2 * batches,
            micro_batch_sizes=(2,),
            overlap_all_reduce=rng.random() < 0.5,
            transfer="spp",
        )
        plan = chain([(1, [2 * s, 2 * s + 1]) for s in range(stages)], batches)
        answer = prove(problem, plan, FAR, 10**6)
        assert answer.proven
        assert answer.bound_ns == optimum(problem, plan)


def test_what_it_cannot_take_is_refused() -> None:
    problem = make_problem([1, 1], nodes=(1,), global_batch_size=4)
    with pytest.raises(UnsupportedRequest, match="stages on separate devices"):
        prove(problem, chain([(1, [0]), (1, [0])], 4), FAR)


def test_more_micro_batches_may_cost_less_than_the_bottleneck_each() -> None:
    """BOUNDS Part II, 1: neither T(M) >= T(M') + (M - M') x bottleneck nor a second difference of T >= 0 holds."""
    values = []
    for batches in range(1, 9):
        problem, plan = limited_line([28, 13], [9, 34], [30], [30], [2, 1], batches)
        values.append(prove(problem, plan, FAR, 10**6).bound_ns)
    assert values == [144, 191, 288, 345, 442, 499, 596, 653]
    bottleneck = 30 + 30
    grown = [after - before for before, after in pairwise(values)]
    assert min(grown) < bottleneck
    assert values[3] < values[2] + bottleneck
    assert any(after < before for before, after in pairwise(grown))


def test_the_best_period_of_one_micro_batch_is_no_lower_bound() -> None:
    """Two micro-batches come round every 154 ns; where all are alike, no period of one is as short as 77."""
    problem, plan = limited_line([28, 13], [9, 34], [30], [30], [2, 1], 8)
    eight = prove(problem, plan, FAR, 10**6).bound_ns
    problem, plan = limited_line([28, 13], [9, 34], [30], [30], [2, 1], 4)
    four = prove(problem, plan, FAR, 10**6).bound_ns
    assert (eight - four) == 4 * 77
    assert best_period_of_one(forward=(28, 13), backward=(9, 34), out=30, home=30, limits=(2, 1)) > 77


def test_warm_ups_that_the_stages_before_cannot_feed_deadlock() -> None:
    """The reason for the clamp on limits: micro-batches in flight on a stage are in flight on the stages before it."""
    problem, plan = limited_line([10, 10], [10, 10], [5], [5], [1, 3], 4)
    with pytest.raises(InvalidPlan, match="deadlock"):
        simulate(problem, plan, warmup_orders(plan, [1, 3]))
    times = StageTimes(problem, plan, Orders("any", ()))
    assert [times.in_flight(0), times.in_flight(1)] == [1, 3]
    assert effective_limits(times) == [1, 1]
    clamped = warmup_orders(plan, effective_limits(times))
    assert prove(problem, plan, FAR, 10**6).bound_ns == simulate(problem, plan, clamped).time_per_global_batch_ns


@pytest.mark.parametrize("seed", range(60))
def test_the_joined_windows_are_part_of_the_schedule_bound(seed: int) -> None:
    problem, plan, best = solved_line(seed)
    times = StageTimes(problem, plan, Orders("any", ()))
    bound = schedule_bound(problem, plan, Orders("any", ())).bound_ns
    assert max(suffix_bound_ns(times), window_bound_ns(times)) <= bound <= best


def test_joining_windows_tells_more_than_the_windows() -> None:
    forward, hops = [107, 86, 69, 101], [82, 56, 24]
    problem, plan = limited_line(forward, [2 * f for f in forward], hops, hops, [4, 3, 2, 1], 16)
    times = StageTimes(problem, plan, Orders("any", ()))
    assert window_bound_ns(times) < suffix_bound_ns(times) <= prove(problem, plan, FAR, 10**6).bound_ns


@pytest.mark.parametrize("seed", range(60))
def test_as_judged_it_is_the_best_of_every_order(seed: int) -> None:
    """Tiny plans: all interleavings of every stage within the limits in flight, timed by the simulator."""
    problem, plan = random_line(1000 + seed, most_batches=3, channel="half")
    best = min(times_of_every_order(problem, plan))
    answer = prove(problem, plan, FAR, 10**6, as_judged=True)
    assert answer.proven
    assert answer.bound_ns == best
    assert answer.orders is not None
    assert makespan_ns(problem, plan, answer.orders) == best
    none = prove(problem, plan, best - 1, 10**6, as_judged=True)
    assert (none.bound_ns, none.orders, none.proven) == (best, None, True)


@pytest.mark.parametrize("seed", range(25))
def test_as_judged_it_is_cp_sats_optimum(seed: int) -> None:
    problem, plan = random_line(1500 + seed, most_batches=4, channel="half")
    optimum_of_judge = solve(Question(problem, plan, FAR, as_judged=True))
    assert optimum_of_judge.proven
    for effort in (10, 100, 10**6):
        answer = prove(problem, plan, FAR, effort, as_judged=True)
        assert answer.bound_ns <= optimum_of_judge.bound_ns
        assert answer.bound_ns == optimum_of_judge.bound_ns or not answer.proven
    assert answer.proven


def test_what_it_does_not_know_of_the_judge_is_refused() -> None:
    problem = make_problem([1, 1], nodes=(2,), global_batch_size=4, shared=True)
    with pytest.raises(UnsupportedRequest, match="private channels"):
        prove(problem, chain([(1, [0]), (1, [1])], 4), FAR, as_judged=True)


def test_recomputation_that_runs_apart_is_not_its_model() -> None:
    """While a gradient is on its way, a stage recomputes: less than the shortest step of backwards that recompute."""
    problem = make_problem(
        [400, 400, 400, 400], boundary_bytes=[300] * 3, nodes=(1,) * 4, global_batch_size=20, recompute="always"
    )
    plan = recomputing(straight(problem, 20), None)
    whole = warmup_orders(plan, [8, 6, 4, 2])
    apart = recomputed(plan, whole)
    value_ns = makespan_ns(problem, plan, apart)
    assert not takes(StageTimes(problem, plan, apart))
    result = optimise_order(problem, plan, apart, overlap=True, value_ns=value_ns, effort=3.0)
    assert result.bound.bound_ns <= result.value_ns <= value_ns
    assert result.value_ns < prove(problem, plan, makespan_ns(problem, plan, whole)).bound_ns
