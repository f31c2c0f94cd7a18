"""The bounds of all plans: never above the time of any plan of any kind; the label search against a reference."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from drawn_problems import random_request
from problems import make_network, make_problem
from random_plans import random_allocation, random_orders, random_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.coverage import class_bound, contiguous, features_of, features_of_candidate
from penstock.solvers.bounds.one_pipeline.bound import Piece, TimeBisection
from penstock.solvers.bounds.one_pipeline.label_kernel import Labels, Terms, least_cost
from penstock.solvers.bounds.one_pipeline.layer_costs import Holding, Numbers, numbers_of, options_of
from penstock.solvers.bounds.one_pipeline.slice_times import Slices
from penstock.solvers.bounds.schedule_bound import one_pipeline_bound, request_bound
from penstock.solvers.improve.job_shop import Question, solve
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import CLASS_SCOPE, REQUEST_SCOPE
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.solve import driver

NEVER = 2**60


@pytest.mark.cases(1)
@pytest.mark.parametrize("block", range(4))
def test_never_above_random_plans_of_one_pipeline(block: int) -> None:
    """Stages on any devices, several on some of them, in any order that runs."""
    seen = 0
    for seed in range(40 * block, 40 * block + 40):
        rng = random.Random(seed)
        problem = random_problem(rng) if seed % 2 else random_request(seed, 6, 4)
        problem = replace(problem, micro_batch_sizes=())
        bounds = [one_pipeline_bound(problem, split=split, fits=False) for split in (False, True)]
        bounds.append(request_bound(problem, fits=False))
        for _ in range(4):
            drawn = random_allocation(rng, problem)
            stages = tuple(replace(stage, dispatch="rows") for stage in drawn.stages)
            allocation = single_pipeline(stages, drawn.num_micro_batches)
            orders = random_orders(rng, allocation)
            time_ns = makespan_ns(problem, allocation, orders)
            for bound in bounds:
                if features_of(problem, allocation, orders, fits=False) <= bound.covers:
                    seen += 1
                    assert bound.bound_ns <= time_ns, (seed, bound.method)
    assert seen > 160


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("seed", range(50_000, 50_008))
def test_never_above_any_planners_plan(seed: int) -> None:
    """Every planner of plans with a flush, each with its schedules: contiguous, interleaved, V, split, pipelines."""
    rng = random.Random(seed)
    problem = replace(random_request(seed, 6, 3), min_slice=rng.choice([1, 1, 2]))
    if rng.random() < 0.6:
        problem = replace(problem, micro_batch_sizes=())
    bounds = one_pipeline_bound(problem), one_pipeline_bound(problem, split=True), request_bound(problem)
    compared = plans = 0
    for name, planner in PLANNERS.items():
        if name in ("auto", "exact") or "synchronous" not in planner.supports:
            continue
        for schedule in planner.accepts:
            try:
                best = driver.solve(problem, planner.name, schedule=schedule, max_plans=8).best
            except UnsupportedRequest:
                continue
            plans += best is not None
            for bound in bounds:
                if best is not None and features_of_candidate(problem, best) <= bound.covers:
                    assert bound.bound_ns <= best.value_ns, (name, schedule, bound)
                    compared += 1
    assert compared > 10 or not plans, "of seeds with plans enough are covered"


@pytest.mark.cases(1)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(14))
def test_never_above_the_job_shop_of_any_plan(seed: int) -> None:
    """All plans of tiny requests, every stage on any devices; CP-SAT orders each, and none is left out."""
    problem = tiny_request(seed)
    optima = [
        solve(Question(problem, allocation, 10**4, effort=2.0)).bound_ns for allocation in every_allocation(problem)
    ]
    assert request_bound(problem).bound_ns <= one_pipeline_bound(problem).bound_ns <= min(optima)


def tiny_request(seed: int) -> Problem:
    """Draw two or three layers on one to three devices, up to three samples."""
    rng = random.Random(seed)
    layers, nodes = rng.choice([(2, (1, 1)), (2, (2,)), (3, (1, 1)), (3, (2,)), (2, (2, 1)), (2, (3,))])
    return make_problem(
        [rng.randint(1, 9) for _ in range(layers)],
        [rng.randint(1, 18) for _ in range(layers)],
        [rng.randint(0, 8) for _ in range(layers - 1)],
        [rng.choice([0, 6, 40]) for _ in range(layers)],
        update_ns=rng.randint(0, 3),
        nodes=nodes,
        global_batch_size=rng.randint(1, 3),
        micro_batch_sizes=(),
        shared=rng.random() < 0.5,
        channel=rng.choice(["half", "full", "none"]),
        transfer=rng.choice(["nic", "spp", "dapple", "madpipe"]),
        overlap_all_reduce=rng.random() < 0.5,
        bucket_bytes=rng.choice([1, 10**6]),
        count_buffers=False,
    )


def every_allocation(problem: Problem) -> Iterator[Allocation]:
    """Yield every partition with every set of devices for every stage and every number of micro-batches."""
    sets = [tuple(d for d in range(problem.num_devices) if mask >> d & 1) for mask in range(1, 2**problem.num_devices)]
    for cut in product((False, True), repeat=problem.num_layers - 1):
        bounds = [0, *(i + 1 for i, each in enumerate(cut) if each), problem.num_layers]
        for devices_of_stages in product(sets, repeat=len(bounds) - 1):
            stages = tuple(Stage(i, j - 1, d) for (i, j), d in zip(pairwise(bounds), devices_of_stages, strict=True))
            for number in range(1, problem.global_batch_size + 1):
                yield single_pipeline(stages, number)


def test_the_label_search_finds_what_listing_finds() -> None:
    """Random terms of up to four layers and devices, against a list of every choice of options and new devices."""
    rng = random.Random(7)
    differ = 0
    for _ in range(60):
        terms = random_terms(rng)
        for devices in range(1, len(terms.after)):
            expected = min(_listed(terms, devices), NEVER)
            for cap in (64, 1):
                assert least_cost(terms, _room(terms, devices, cap), devices, expected) <= expected
            assert least_cost(terms, _room(terms, devices, 64), devices, expected) == expected
            assert expected == NEVER or least_cost(terms, _room(terms, devices, 64), devices, expected + 1) == expected
            differ += expected < NEVER
    assert differ > 60


def random_terms(rng: random.Random) -> Terms:
    layers, devices = rng.randint(1, 4), rng.randint(1, 4)
    ranges = options_of(devices)
    count, draw = len(ranges), np.random.default_rng(rng.randint(0, 10**6))

    def table(*shape: int) -> np.ndarray:
        return draw.integers(0, 20, shape)

    behind = np.maximum.accumulate(table(devices + 1, layers), axis=0)
    weight = rng.choice([0, 1, 2])
    return Terms(
        least=np.asarray([each.least for each in ranges]),
        most=np.asarray([each.most for each in ranges]),
        forward=table(count, layers),
        gradient=table(count, layers),
        work=table(count, layers),
        after=behind,
        update=table(layers),
        cuttable=np.asarray([True, *(rng.random() < 0.8 for _ in range(layers - 1))]),
        out=table(count, count, layers),
        back=table(count, count, layers),
        out_same=table(count, count, layers),
        back_same=table(count, count, layers),
        closed=draw.random((count, count, layers)) < 0.2,
        closed_same=draw.random((count, count, layers)) < 0.2,
        head=rng.choice([0, 0, 7]),
        tail=rng.choice([0, 0, 15]),
        rest_weight=weight,
        update_weight=2 - weight,
    )


def _room(terms: Terms, devices: int, cap: int) -> Labels:
    shape = (2, devices + 1, len(terms.work))
    return Labels(
        np.zeros((*shape, cap), dtype=np.int64),
        np.zeros((*shape, cap), dtype=np.int64),
        np.zeros(shape, dtype=np.int64),
    )


def _listed(terms: Terms, devices: int) -> int:
    """Return the least cost over every choice: work, and each device's waits before and after its operations."""
    options, layers = terms.work.shape
    choices = [(o, new) for o in range(options) for new in range(int(terms.most[o]) + 1)]
    return min([NEVER, *(_cost(terms, devices, plan) for plan in product(choices, repeat=layers))])


def _cost(terms: Terms, devices: int, plan: tuple[tuple[int, int], ...]) -> int:
    used, cost = 0, 0
    head, rest = terms.head, terms.tail
    for layer, (o, new) in enumerate(plan):
        number = max(new, int(terms.least[o]))
        done = used == devices
        if layer == 0 and (new == 0 or number != new):
            return NEVER
        if layer and not done:
            before = plan[layer - 1][0]
            if not terms.cuttable[layer] and (o != before or new):
                return NEVER
            if (terms.closed if new else terms.closed_same)[before, o, layer]:
                return NEVER
            head += int((terms.out if new else terms.out_same)[before, o, layer])
            rest += int((terms.back if new else terms.back_same)[before, o, layer])
        used += new
        if used > devices or (not done and number > used):
            return NEVER
        if done:
            number = int(terms.least[o])
        rest = max(rest, int(terms.after[number, layer]))
        cost += 2 * int(terms.work[o, layer]) + terms.update_weight * number * int(terms.update[layer])
        cost += new * (2 * head + terms.rest_weight * rest)
        head += int(terms.forward[o, layer])
        rest += int(terms.gradient[o, layer])
    return cost if used == devices else NEVER


@pytest.mark.parametrize("seed", range(60_000, 60_040))
def test_more_devices_and_faster_links_never_raise_the_bounds(seed: int) -> None:
    """For small requests the bisection ends at the exact ns, but larger ranges of devices may be merged differently."""
    rng = random.Random(seed)
    layers, inside, between = rng.randint(1, 5), rng.choice([10**9, 10**8]), rng.choice([10**8, 3 * 10**7])
    how = {
        "global_batch_size": rng.randint(1, 8),
        "micro_batch_sizes": rng.choice([(), (1,), (2,)]),
        "shared": rng.random() < 0.5,
        "channel": rng.choice(["half", "full", "none"]),
        "transfer": rng.choice(["nic", "spp", "madpipe"]),
        "update_ns": rng.randint(0, 3),
    }
    how["micro_batch_sizes"] = tuple(size for size in how["micro_batch_sizes"] if size <= how["global_batch_size"])
    layer = [rng.randint(1, 30) for _ in range(layers)]
    sent, parameters = [rng.randint(0, 12) for _ in range(layers - 1)], [rng.randint(0, 40) for _ in range(layers)]

    def bounds(nodes: tuple[int, ...], faster: int) -> tuple[int, int]:
        network = make_network(nodes, inside_bytes_per_s=inside * faster, between_bytes_per_s=between * faster)
        problem = make_problem(layer, None, sent, parameters, network=network, **how)
        return request_bound(problem).bound_ns, one_pipeline_bound(problem).bound_ns

    plain = bounds((1, 1), 1)
    assert bounds((1, 1), 3) <= plain
    for more in ((1, 1, 1), (1, 1, 1, 1)):
        assert bounds(more, 1) <= plain


@pytest.mark.parametrize("seed", range(30))
def test_times_of_slices_are_the_least_of_their_range(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_request(seed)
    slices = Slices(problem)
    least = rng.randint(1, 6)
    most = least + rng.randint(0, 6)
    times = slices.times(least, most, 60)
    for rows in range(least, most + 1):
        for kind in {device.kind for device in problem.devices}:
            costs = problem.costs(kind, rows)
            forward, backward = np.diff(costs.forward_ns), np.diff(costs.backward_ns)
            assert (times.forward <= forward).all()
            assert (times.backward <= backward).all()
            assert (times.work * rows <= (forward + backward) * 60).all()
            assert (times.backward_work * rows <= backward * 60).all()
    one = slices.times(most, most, most)
    exact = [np.diff(problem.costs(kind, most).forward_ns) for kind in {device.kind for device in problem.devices}]
    assert (one.forward == np.min(exact, axis=0)).all()


def test_pieces_hold_for_each_of_their_numbers() -> None:
    """A bound for a range of numbers of micro-batches holds for each of them."""
    proven = 0
    for seed in range(12):
        problem = replace(random_request(seed, 5, 4), micro_batch_sizes=(), global_batch_size=8)
        together = Piece(Holding(problem), Numbers(2, 4))
        for time_ns in (20, 60, 150, 300):
            if together.proves(time_ns):
                proven += 1
                assert all(Piece(Holding(problem), Numbers(n, n)).proves(time_ns) for n in (2, 3, 4))
    assert proven > 5


def test_what_is_proven_once_is_proven_below() -> None:
    for seed in range(10):
        problem = replace(random_request(seed, 5, 4), micro_batch_sizes=())
        search = TimeBisection(problem)
        start_ns = request_bound(problem).bound_ns
        bound = search.bound_ns(start_ns)
        assert TimeBisection(problem).proves(bound) or bound == start_ns
        assert all(TimeBisection(problem).proves(t) for t in range(start_ns, bound, max(1, (bound - start_ns) // 5)))


def test_numbers_of_micro_batches_are_those_of_the_request() -> None:
    problem = make_problem([1], global_batch_size=12, micro_batch_sizes=())
    assert numbers_of(problem) == [Numbers(1, 12)]
    assert numbers_of(replace(problem, min_slice=5)) == [Numbers(1, 2)]
    assert numbers_of(replace(problem, micro_batch_sizes=(2, 5))) == [Numbers(3, 3), Numbers(6, 6)]
    assert numbers_of(replace(problem, micro_batch_sizes=(2, 5), min_slice=3)) == [Numbers(3, 3)]


def test_slow_devices_count_as_what_they_are_worth() -> None:
    """A device that is three times as fast does three parts in four of the work."""
    problem = make_problem(
        [30, 60], [60, 120], nodes=(2,), kinds=["cpu", "fast"], speed={"fast": 3.0}, global_batch_size=4
    )
    assert request_bound(problem).bound_ns == 4 * 270 // 3 * 3 // 4


@pytest.mark.tier("ci")
def test_a_bound_covers_plans_of_its_class() -> None:
    """Contiguous plans are plans of one pipeline, which are plans; not the other way round."""
    problem = make_problem([5, 5, 5], boundary_bytes=1, parameter_bytes=9, nodes=(2,), global_batch_size=4)
    line = driver.solve(problem, "gpipe").best
    looped = make_problem([5] * 4, nodes=(2,), global_batch_size=4)
    turned = driver.solve(looped, "interleaved").best
    split = driver.solve(problem, "zero-bubble").best
    assert line is not None
    assert turned is not None
    assert split is not None
    every, one = request_bound(problem), one_pipeline_bound(problem)
    apart = class_bound(problem, contiguous(problem, range(1, 5)), 1, "label search")
    plans = (("l", problem, line), ("t", looped, turned), ("s", problem, split))
    bounds = every, one, apart
    coverage = {n: tuple(features_of_candidate(p, plan) <= b.covers for b in bounds) for n, p, plan in plans}
    assert coverage == {"l": (True, True, True), "t": (True, True, False), "s": (True, False, False)}
    assert [bound.scope for bound in bounds] == [REQUEST_SCOPE, CLASS_SCOPE, CLASS_SCOPE]


def test_small_slices_cost_what_they_were_measured_at() -> None:
    """Half the work takes as long with one sample as with two: either the slices are large, or the way is short."""
    problem = make_problem([20] * 4, [40] * 4, 0, 0, measured_rows=2, linear=False, nodes=(1,) * 4, global_batch_size=8)
    problem = replace(problem, micro_batch_sizes=())
    assert request_bound(problem).bound_ns == 4 * 4 * 60 // 4
    assert one_pipeline_bound(problem).bound_ns >= 240


def test_devices_wait_for_the_first_micro_batch() -> None:
    """A slow network leaves no choice: four devices in a line, with heads of 0, 10, 20, 30 ns and tails of 0 to 60."""
    problem = make_problem(
        [10] * 4, [20] * 4, 0, 10**6, nodes=(1,) * 4, global_batch_size=8, micro_batch_sizes=(1,), channel="none"
    )
    assert request_bound(problem).bound_ns == 240
    assert one_pipeline_bound(problem).bound_ns == 240 + (0 + 30 + 60 + 90) // 4
