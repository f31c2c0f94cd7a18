"""The label search's bound: never above the bound of any listed plan, and equal to the least of these bounds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import pytest
from drawn_problems import narrow_request, random_request
from least_of_plans import EFFORT, least_of, least_of_all, proven_ns, raised, result_of
from problems import chain, make_problem
from split_plans import variants

from penstock.schemas.coverage import NEUTRAL, claim
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.chain_costs import BACK, EXPOSED, KIND, OUT, UPDATE, WORK, ChainCosts
from penstock.solvers.bounds.contiguous.label_pool import ALONE, JOINED, SPANNING
from penstock.solvers.bounds.contiguous.label_search import LabelledStage, chains_of, hop, plan_bound_ns
from penstock.solvers.bounds.contiguous.label_steps import Pieces
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.contiguous.stage_costs import make_pieces
from penstock.solvers.bounds.coverage import contiguous, features_of_candidate
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.improve.job_shop import Question, solve
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, candidates
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.planners.contiguous_bound.planner import Relaxation, proposals
from penstock.solvers.planners.contiguous_bound.warm_ups import climb
from penstock.solvers.planners.exact.chain_tables import WHOLE_BACKWARDS
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.support.fitting_orders import best_order, judged
from penstock.solvers.solve import driver

pytestmark = pytest.mark.tier("ci")


@pytest.mark.cases(2)
@pytest.mark.parametrize("block", range(10))
def test_never_above_the_bound_of_any_plan(block: int) -> None:
    """All plans of 30 requests, each with its bound (``windows``)."""
    tight = total = 0
    for seed in range(30 * block, 30 * block + 30):
        problem = random_request(seed)
        space = Space.of(problem)
        bound, _some = proven_ns(problem, space)
        least = least_of_all(space)
        assert bound <= least, seed
        total += least < NEVER_NS
        tight += bound == least < NEVER_NS
    assert tight > total // 3


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("block", range(4))
def test_never_above_the_job_shop_of_any_plan(block: int) -> None:
    """CP-SAT solves every plan of tiny requests; no bound leaves any out, and without a plan there is no bound."""
    for seed in range(10_000 + 25 * block, 10_025 + 25 * block):
        problem = random_request(seed, 4, 3)
        space = Space.of(problem)
        if space.count() > 40:
            continue
        bound, some = proven_ns(problem, space)
        optima = [value for batch in space.batches for value in _optima(space, batch)]
        assert bound <= min(optima, default=NEVER_NS), seed
        assert some or not optima


def _optima(space: Space, batch: Batch) -> Iterator[int]:
    """Yield the job shop's optimum of each plan."""
    for stages in range(1, space.most_stages + 1):
        for placement in space.placements(stages):
            if max(map(len, placement)) > batch.replicas_fed(space.problem.min_slice):
                continue
            for firsts in space.partitions(stages):
                for plan in variants(space.problem, space.allocation(batch, firsts, placement)):
                    answer = solve(Question(space.problem, plan, _one_at_a_time_ns(space.problem, plan)))
                    assert answer.proven
                    if answer.orders is not None:
                        yield answer.bound_ns


def _one_at_a_time_ns(problem: Problem, plan: Allocation) -> int:
    """Return a time longer than any sensible order: everything one after the other."""
    times = StageTimes(problem, plan, WHOLE_BACKWARDS)
    work = sum(cost.forward_ns + cost.backward_ns + cost.recompute_ns for costs in times.costs for cost in costs)
    moved = sum(sum(use.load_ns for use in uses) for uses in times.resources.values())
    hops = plan.num_micro_batches * 2 * (sum(times.out) + sum(times.back))
    return plan.num_micro_batches * work + moved + hops + sum(times.exposed) + sum(times.update_ns)


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(20_000, 20_016))
def test_no_planner_has_a_better_plan(seed: int) -> None:
    """The planners include ``relax`` and ``auto``; the certificate is never above the plan that it comes with."""
    problem = random_request(seed, 6, 4)
    bound, covers = None, NEUTRAL
    for name in ("relax", "dp", "gpipe", "model-parallel", "dapple", "spp", "pipedream", "auto"):
        try:
            result = driver.solve(problem, name)
        except UnsupportedRequest:
            continue
        if name == "relax":
            relaxation = Relaxation(problem, EFFORT)
            list(relaxation.run())
            bound, covers = relaxation.bound_ns, relaxation.bound.covers
        if result.best is None:
            continue
        assert result.bounds[0].bound_ns <= result.best.value_ns
        if features_of_candidate(problem, result.best) <= covers:
            assert bound is not None
            assert bound <= result.best.value_ns, name


@pytest.mark.parametrize("number", [49, 56, 62, 84, 109, 115, 134])
def test_relax_searches_among_plans_that_cables_delay(number: int) -> None:
    """The plan of the least bound takes up to 58 % longer than planner ``dapple``'s; other plans of labels do not."""
    problem = narrow_request(number)
    relax, dapple = (driver.solve(problem, name, workers=0).best for name in ("relax", "dapple"))
    assert relax is not None
    assert dapple is not None
    assert relax.value_ns <= 1.005 * dapple.value_ns


def test_plans_below_a_limit_are_not_below_what_is_proven() -> None:
    several = 0
    for seed in range(20):
        problem = random_request(seed, 6, 4)
        for search in Relaxation(problem, EFFORT).searches_of(candidates(problem)):
            while not search.closed:
                raised(search)
            limit_ns = 2 * search.bound_ns
            paths = result_of(search.paths(limit_ns, 8))
            several += len(paths) > 1
            assert len(set(paths)) == len(paths) <= 8
            for path in paths:
                bound = plan_bound_ns(chains_of(search.pieces, path, limit_ns), search.pieces.batches)
                assert bound >= search.bound_ns
    assert several > 10


def test_one_micro_batch_does_not_idle_twice() -> None:
    """BOUNDS section 7: the two idle windows add up only where they cannot be the same; with M = 1 they are."""
    problem = make_problem([5, 7], [11, 13], [3], nodes=(2,), global_batch_size=1)
    assert proven_ns(problem, Space.of(problem))[0] == 5 + 7 + 11 + 13
    apart = replace(problem, pins=(Pin(0, 0, frozenset({0})), Pin(1, 1, frozenset({1}))))
    plan = chain([(1, [0]), (1, [1])], 1)
    assert schedule_bound(apart, plan, WHOLE_BACKWARDS).bound_ns == 5 + 7 + 11 + 13 + 2 * 3


def test_backwards_before_a_stage_do_not_delay_its_all_reduce() -> None:
    """BOUNDS section 7: the first stage's slow backwards come after the backwards that delay the second's gradients."""
    problem = make_problem(
        [10, 10], [200, 10], [0], [0, 3_000], nodes=(3,), global_batch_size=4, channel="none", overlap_all_reduce=False
    )
    plan = chain([(1, [0]), (1, [1, 2])], 4)
    optimum = solve(Question(problem, plan, 10**6)).bound_ns
    assert optimum == best_order(problem, plan, 2**60).value_ns
    assert schedule_bound(problem, plan, WHOLE_BACKWARDS).bound_ns <= optimum
    bound, _some = proven_ns(problem, Space.of(problem))
    assert bound <= min(_optima(Space.of(problem), Space.of(problem).batches[0]))


def test_the_grid_is_refined_until_the_bound_is_the_plans_own() -> None:
    """Rates of earlier stages count once they are points of the grid."""
    higher = 0
    for seed in range(80):
        problem = replace(random_request(seed, 6, 4), recompute="never")
        for search in Relaxation(problem, EFFORT).searches_of(candidates(problem)):
            path = None
            first = 0
            while not search.closed:
                path = raised(search) or path
                first = first or (search.bound_ns if path else 0)
            higher += path is not None and first < search.bound_ns
    assert higher > 0


@pytest.mark.parametrize("seed", range(30_000, 30_020))
def test_merged_labels_bound_too(seed: int) -> None:
    problem = random_request(seed)
    space = Space.of(problem)
    for batch in space.batches:
        (search,) = Relaxation(problem, EFFORT).searches_of([batch])
        search.cap = 1
        for _ in range(20):
            raised(search)
        if not search.empty:
            assert search.bound_ns <= least_of(space, batch)


@pytest.mark.tier("quick")
@pytest.mark.parametrize("seed", range(40))
def test_tables_are_those_of_the_stages(seed: int) -> None:
    """On one node of equal devices every stage's times are exact, on others never above; so are the transfers."""
    problem = random_request(seed)
    one_node = len(problem.nodes()) == 1 and len({device.kind for device in problem.devices}) == 1
    for batch in candidates(problem):
        number = batch.num_micro_batches
        pieces = make_pieces(problem, batch, Links(problem))
        costs = ChainCosts(problem, number)
        places = problem.num_devices
        for r in range(1, pieces.limit.shape[1]):
            for first, stop in combinations(range(problem.num_layers + 1), 2):
                again = ((first, stop - 1),) if problem.recompute == "always" else ()
                stage = Stage(first, stop - 1, tuple(range(places - r, places)), recompute=again)
                row = costs.stage(stage)
                real = costs.stage_columns[row]
                at = (0, r, first, stop)
                mine = [pieces.forward[at], pieces.backward[at], pieces.work[at], pieces.after[:, r, first, stop].min()]
                theirs = [real[:2].min(), real[2:4].min(), real[WORK], real[EXPOSED] + real[UPDATE]]
                assert all(a <= b for a, b in zip(mine, theirs, strict=True))
                if one_node:
                    assert mine[:3] == theirs[:3]
                    assert pieces.after[0, r, first, stop] == theirs[3]
                for target in range(1, places - r + 1) if stop < problem.num_layers else ():
                    other = Stage(stop, stop, tuple(range(target)))
                    assert _way_is_possible(costs, pieces, stage, other)


@pytest.mark.tier("quick")
def test_a_plan_s_transfers_back_are_those_to_the_stage_before() -> None:
    """Three layers on three devices of a node at 1 GB/s, micro-batches of one sample."""
    problem = make_problem([10] * 3, boundary_bytes=[5, 7], backward_bytes=[20, 30], nodes=(3,), global_batch_size=2)
    (batch,) = candidates(problem)
    path = tuple(LabelledStage(layer, layer + 1, 1, JOINED if layer < 2 else ALONE, 0) for layer in range(3))
    chains = chains_of(make_pieces(problem, batch, Links(problem)), path)
    assert (chains.out.tolist(), chains.back.tolist()) == ([[5, 7, 0]], [[0, 20, 30]])


@pytest.mark.tier("quick")
def test_a_ring_over_two_nodes_has_the_steps_inside_them() -> None:
    """Two nodes of four: 2 ÷ 2 of the bytes at 0.1 GB/s and 2 × 3 ÷ 4 at 1 GB/s.

    Two steps take 6 ns and six take 3 ns.
    """
    links = Links(make_problem([1], nodes=(4, 4), latency_ns=3, between_bytes_per_s=10**8, all_reduce="hierarchical"))
    assert links.ring(8, True) == (10.0 + 1.5, 2 * 6 + 6 * 3)


@pytest.mark.tier("quick")
def test_only_more_replicas_than_a_node_holds_span_nodes() -> None:
    """Links do not count one by one: four replicas have shapes by the run of devices in a node, five have one shape."""
    problem = make_problem([1], nodes=(4, 4), global_batch_size=8, micro_batch_sizes=(8,))
    (batch,) = candidates(problem)
    shape = make_pieces(problem, batch, Links(problem)).shape
    assert [(shape[r] >= 0).tolist() for r in (4, 5)] == [[False] * 4 + [True], [True] + [False] * 4]


def _way_is_possible(costs: ChainCosts, pieces: Pieces, source: Stage, target: Stage) -> bool:
    """Return whether the table has a way between two stages that is no longer than the real one, and no less free."""
    if target.replicas >= pieces.limit.shape[1]:
        return True
    row = costs.edge(source, target)
    real = costs.edge_columns[row]
    nodes = [costs.problem.network.nodes_of(stage.devices) for stage in (source, target)]
    spanning = [
        len(places) > 1 and (pieces.spans or stage.replicas > pieces.node_size)
        for places, stage in zip(nodes, (source, target), strict=True)
    ]
    same_node = not any(spanning) and nodes[0] == nodes[1] and len(nodes[0]) == 1
    placed = SPANNING if spanning[0] else JOINED if same_node else ALONE
    first = LabelledStage(source.first, source.last + 1, source.replicas, placed, 0)
    second = LabelledStage(target.first, target.last + 1, target.replicas, SPANNING if spanning[1] else ALONE, 0)
    out, back, channel = hop(pieces, first, second)
    return bool(out <= real[OUT] and back <= real[BACK] and channel >= real[KIND])


def test_more_devices_than_it_can_search_are_refused() -> None:
    with pytest.raises(UnsupportedRequest, match="at most 256 devices"):
        driver.solve(make_problem([1, 1], nodes=(257,)), "relax")


def test_an_optimum_of_a_class_is_claimed_of_that_class_only() -> None:
    problem = make_problem([4, 4, 4, 4], boundary_bytes=1, nodes=(2,), global_batch_size=8)
    result = driver.solve(problem, "relax")
    assert result.status == "feasible"
    wide, narrow, _of_plan = result.bounds
    assert result.best is not None
    assert wide.bound_ns < narrow.bound_ns == result.best.value_ns
    assert claim(wide.scope, wide.covers) == "No plan of this request"
    assert claim(narrow.scope, narrow.covers).startswith("No plan of one pipeline, ")
    plan = result.best.allocation
    twice = single_pipeline((plan.stages[0], replace(plan.stages[-1], devices=plan.stages[0].devices)), 8)
    apart = contiguous(problem, [plan.num_micro_batches])
    assert features_of_candidate(problem, result.best) <= apart
    assert not features_of_candidate(problem, replace(result.best, allocation=twice)) <= apart
    assert not features_of_candidate(problem, replace(result.best, update_rule="double_buffered")) <= apart


def test_a_search_can_be_left_between_pieces() -> None:
    """Each piece ends with a valid bound, never below the one before; the last bound is the proof."""
    problem = random_request(7, 6, 4)
    whole = Relaxation(problem, EFFORT)
    bounds = [whole.bound_ns for _piece in whole.run()]
    assert bounds == sorted(bounds)
    assert len(bounds) > 3
    assert bounds[-1] == whole.bound_ns > 0
    left = Relaxation(problem, EFFORT)
    pieces = left.run()
    for expected in bounds[:3]:
        next(pieces)
        assert left.bound_ns == expected


@pytest.mark.tier("quick")
def test_proposals_carry_a_bound_from_the_first_piece_on() -> None:
    problem = random_request(7, 6, 4)
    all_proposals = list(proposals(Setting(problem), {"effort": 30}))
    proven = [each.proven.bound_ns for each in all_proposals if each.proven is not None]
    assert all_proposals[0].proven is None
    assert len(proven) == len(all_proposals) - 1
    assert proven == sorted(proven)


@pytest.mark.tier("quick")
def test_uneven_warm_ups_are_never_worse() -> None:
    """Long transfers and little memory; results equal the simulator's, fit into memory, and often are better."""
    better = 0
    for seed in range(12):
        rng = random.Random(seed)
        problem = make_problem(
            [rng.randint(5, 20) for _ in range(5)],
            [rng.randint(5, 40) for _ in range(5)],
            [rng.randint(2, 25) for _ in range(4)],
            stash_bytes=[1] * 5,
            nodes=(1,) * 5,
            memory_bytes=rng.choice([2**40, 200]),
            global_batch_size=12,
            shared=False,
            channel="half",
        )
        plan = chain([(1, [s]) for s in range(5)], 12)
        start = best_order(problem, plan, 2**60).plan
        assert start is not None
        best = climb(problem, start, 0, 200)
        assert best.value_ns <= start.value_ns
        assert judged(problem, plan, best.orders, 2**60).plan == best
        assert climb(problem, start, start.value_ns, 200) == start
        better += best.value_ns < start.value_ns
    assert better > 0
