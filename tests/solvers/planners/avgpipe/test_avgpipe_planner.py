"""AvgPipe as a planner: tunings, partitions, options, memory, pins, the request's profile, and the way to a plan."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paper_models import profile as paper_profile
from problems import make_problem
from small_request import a_request

import penstock
from penstock.convert import from_plan, to_problem
from penstock.examples import catalogue
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.profile import PipelineProfile
from penstock.schemas.request import PlanRequest
from penstock.solvers.judge.shared_processor import parallel_pipelines, sharing_makespan_ns
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.options import checked
from penstock.solvers.model.problem import Pin, PipelineRun, Problem, RankRun
from penstock.solvers.model.result import Result, Status
from penstock.solvers.planners.avgpipe.partition import partitions
from penstock.solvers.planners.avgpipe.planner import MOST_OPERATIONS, orders_of, proposals
from penstock.solvers.planners.avgpipe.predictor import Degrees
from penstock.solvers.planners.avgpipe.tuning import Tuner, best_partitions
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.solve import driver

pytestmark = pytest.mark.tier("ci")

AVGPIPE = PLANNERS["avgpipe"]
ELASTIC = frozenset({"elastic_averaging"})


def a_problem(**how: object) -> Problem:
    """Build six layers on two nodes of two devices; transfers take about as long as computing."""
    settings: dict[str, object] = {
        "boundary_bytes": 25,
        "parameter_bytes": 100,
        "stash_bytes": 30,
        "update_ns": 3,
        "nodes": (2, 2),
        "global_batch_size": 8,
        "micro_batch_sizes": (1, 2, 4, 8),
        "shared": True,
    }
    problem = make_problem([10, 12, 9, 11, 10, 8], **(settings | how))  # type: ignore[arg-type]
    return replace(problem, update_rules=ELASTIC)


def solve(problem: Problem, **options: object) -> Result:
    return driver.solve(problem, AVGPIPE.name, options=options)


def setting_of(result: Result) -> tuple[int, int]:
    assert result.best is not None
    return result.best.allocation.num_micro_batches, len(result.best.allocation.pipelines)


def test_by_default_every_setting_is_judged() -> None:
    """No setting, order or recomputation of the partitions is better than the result."""
    problem = a_problem()
    result = solve(problem, pipelines=3, stages=4)
    assert result.best is not None
    batches = candidates(problem)
    (stages,), _ = best_partitions(problem, batches, partitions(problem, batches, 4))
    times = {}
    for batch in batches:
        for pipelines in (1, 2, 3):
            allocation = parallel_pipelines(stages, pipelines, batch.num_micro_batches)
            orders = [advance_forward(problem, allocation, delta=delta) for delta in (0, 1, 2, 3)]
            orders.append(advance_forward(problem, allocation, afab=True))
            times[batch.num_micro_batches, pipelines] = min(
                sharing_makespan_ns(problem, allocation, each) for each in orders
            )
    assert result.best.value_ns == min(times.values())
    assert times[setting_of(result)] == result.best.value_ns
    assert result.best.update_rule == "elastic_averaging"
    assert "tuning traverse: " in result.sentence
    assert "pipelines on the same devices, each 4 stages" in result.sentence


def guideline(tuner: Tuner, number: int) -> Degrees:
    """Return the most pipelines that fit with this number of micro-batches, as the paper's guidelines have them."""
    return tuner.first_that_fits(Degrees(number, n) for n in range(tuner.most_pipelines, 0, -1))


def test_as_many_pipelines_as_fit_are_those_that_memory_has_room_for() -> None:
    """A pipeline of one and a half layers needs 4 · 2 · 150 of a device's 3000 bytes, so fewer than 8 fit."""
    problem = a_problem(memory_bytes=3000, recompute="never")
    batches = candidates(problem)
    (stages,), _ = best_partitions(problem, batches, partitions(problem, batches, 4))
    tuner = Tuner(problem, batches, stages, 8)
    for number in (8, 1):
        degrees = guideline(tuner, number)
        assert degrees.num_micro_batches == number
        assert 1 <= degrees.num_pipelines < 8
        more = parallel_pipelines(stages, degrees.num_pipelines + 1, number)
        assert tuner.time_ns(more, advance_forward(problem, more)) is None
    assert guideline(replace(tuner, problem=a_problem(), most_pipelines=5, _fits={}), 8) == (8, 5)


def test_the_profile_finds_what_the_predictor_prefers() -> None:
    """A run with little used processors: the chosen setting's prediction is the smallest of all that fit."""
    ranks = tuple(RankRun(80, 60, (300_000, 350_000), 200, 0, 30) for _ in range(4))
    problem = replace(a_problem(), pipeline_run=PipelineRun(8, 1, ranks))
    batches = candidates(problem)
    (stages,), _ = best_partitions(problem, batches, partitions(problem, batches))
    assert len(stages) == 4
    tuner = Tuner(problem, batches, stages, 4)
    chosen = tuner.predicted()
    assert chosen == tuner.settings()[0]
    assert chosen.num_pipelines > 1
    printed = Tuner(problem, batches, stages, 4, "paper")
    result = solve(problem, paper=True, pipelines=4)
    assert setting_of(result) == printed.predicted()
    assert "tuning profile: 1 setting, " in result.sentence
    assert printed.measured(batches[0]) == tuner.measured(batches[-1])


def test_a_simulated_profile_costs_one_run_per_number_of_micro_batches() -> None:
    problem = a_problem(recompute="never")
    batches = candidates(problem)
    (stages,), _ = best_partitions(problem, batches, partitions(problem, batches, 4))
    tuner = Tuner(problem, batches, stages, 4)
    tuner.predicted()
    assert tuner.simulations == len(batches) + 1
    assert "tuning profile by simulation: 1 setting, " in solve(problem, paper=True, stages=4).sentence
    measured = tuner.measured(batches[-1])
    assert [rank.compute_ns for rank in measured.ranks] == [
        8 * 3 * sum([10, 12, 9, 11, 10, 8][stage.first : stage.last + 1]) + 3 * (stage.last + 1 - stage.first)
        for stage in stages
    ]
    assert {rank.utilisation_ppm for rank in measured.ranks} == {(1_000_000,)}


@pytest.mark.tier("nightly")
def test_the_tuned_setting_is_near_the_best_and_the_guidelines_are_not() -> None:
    """Claims A5, A6 on the paper's smallest model and its cluster."""
    request = PlanRequest(
        profile=paper_profile("awd-lstm"),
        topology=catalogue.cluster("avgpipe-3x2"),
        global_batch_size=40,
        update_rules=("elastic_averaging",),
    )
    problem = to_problem(request)
    batches = candidates(problem)
    (stages, *_), _ = best_partitions(problem, batches, partitions(problem, batches))
    tuner = Tuner(problem, batches, stages, 8)
    best = solve(problem).best
    assert best is not None
    ratios = []
    ends = [guideline(tuner, batch.num_micro_batches) for batch in (batches[-1], batches[0])]
    for degrees in (tuner.predicted(), *ends):
        allocation = tuner.allocation(degrees)
        times = [tuner.time_ns(allocation, orders) for orders in orders_of(tuner, allocation)]
        ratios.append(min(time for time in times if time is not None) / best.value_ns)
    assert ratios[0] <= 1.1
    assert min(ratios[1:]) > 1.1 * ratios[0]


def test_the_best_order_is_never_slower_than_that_of_algorithm_1() -> None:
    problem = a_problem()
    best, printed = (solve(problem, paper=paper, stages=4).best for paper in (False, True))
    assert best is not None
    assert printed is not None
    assert best.value_ns <= printed.value_ns


def test_recomputes_only_where_nothing_else_fits() -> None:
    roomy = solve(a_problem(recompute="auto"), stages=4, pipelines=2)
    assert roomy.best is not None
    assert not any(stage.recompute for stage in roomy.best.allocation.stages)
    small = a_problem(recompute="auto", memory_bytes=1600, stash_bytes=300)
    tight = solve(small, stages=4, pipelines=1)
    assert tight.best is not None
    assert all(stage.recompute for stage in tight.best.allocation.stages)
    always = solve(a_problem(recompute="always"), paper=True, stages=4)
    assert always.best is not None
    assert all(stage.recompute for stage in always.best.allocation.stages)


@pytest.mark.tier("nightly")
def test_says_what_is_missing_where_nothing_fits() -> None:
    result = solve(a_problem(memory_bytes=300))
    assert result.status is Status.INFEASIBLE
    assert result.shortage is not None
    assert result.shortage.missing_bytes > 0


def test_keeps_pins_in_every_pipeline() -> None:
    problem = replace(a_problem(), pins=(Pin(0, 0, frozenset({3})),))
    result = solve(problem, paper=True, stages=4)
    assert result.best is not None
    assert all(pipeline.stages[0].devices == (3,) for pipeline in result.best.allocation.pipelines)


def test_devices_of_several_kinds() -> None:
    problem = a_problem(kinds=["cpu", "fast", "cpu", "fast"], speed={"fast": 3.0})
    result = solve(problem, stages=4)
    assert result.best is not None
    layers = [stage.last - stage.first + 1 for stage in result.best.allocation.pipelines[0].stages]
    assert layers[1] + layers[3] > layers[0] + layers[2]


def test_the_same_twice_and_within_a_count() -> None:
    problem = a_problem()
    first, second = (solve(problem) for _ in range(2))
    assert first.best is not None
    assert second.best is not None
    assert first.best.allocation == second.best.allocation
    assert first.sentence == second.sentence
    options = checked("avgpipe", AVGPIPE.options, {})
    numbers = [sum(len(row.operations) for row in each.fixed.rows) for each in proposals(Setting(problem), options)]  # type: ignore[union-attr]
    assert sum(numbers) < MOST_OPERATIONS


def test_refuses_what_it_cannot_take() -> None:
    problem = a_problem()
    with pytest.raises(UnsupportedRequest, match="update rule elastic_averaging only"):
        solve(replace(problem, update_rules=frozenset({"synchronous"})))
    with pytest.raises(InvalidDocument, match="9 stages are requested"):
        solve(problem, stages=9)
    run = PipelineRun(4, 1, (RankRun(1, 1, (1_000_000,), 1, 1, 1),) * 3)
    with pytest.raises(InvalidDocument, match="has 3 ranks"):
        solve(replace(problem, pipeline_run=run), stages=4)
    assert list(proposals(Setting(replace(problem, update_rules=frozenset({"synchronous"}))), {})) == []
    assert list(proposals(Setting(replace(problem, min_slice=9)), {})) == []


def test_says_which_devices_nothing_connects() -> None:
    """Devices 0 and 1 reach each other over 2 alone: no pipeline in this order, but one stage."""
    problem = a_problem(nodes=(3,))
    matrix = np.asarray([[0, 0, 1], [0, 0, 1], [1, 1, 0]], dtype=np.int64) * 10**9
    problem = replace(problem, network=replace(problem.network, matrix_bytes_per_s=matrix, resources=[], _ids={}))
    apart = solve(problem, stages=3)
    assert apart.status is Status.NONE_FOUND
    assert "nothing connects" in apart.sentence
    alone = solve(problem, pipelines=1)
    assert alone.best is not None
    assert len(alone.best.allocation.stages) == 1


def test_one_device_and_one_layer() -> None:
    for layers, nodes in (([5], (3,)), ([5, 6, 7], (1,))):
        problem = replace(make_problem(layers, nodes=nodes, global_batch_size=4), update_rules=ELASTIC)
        result = solve(problem, pipelines=2)
        assert result.best is not None
        assert {device for stage in result.best.allocation.stages for device in stage.devices} == {0}


def test_a_request_brings_its_profile_and_takes_a_plan_home() -> None:
    rank = {
        "compute_ns": 200,
        "send_ns": 3,
        "receive_ns": 4,
        "utilisation": [0.25, 0.75],
        "model_bytes": 200,
        "optimizer_bytes": 300,
        "activation_bytes": 8,
    }
    run = {
        "plan_hash": "sha256:0",
        "device_kind": "V100",
        "num_micro_batches": 4,
        "num_pipelines": 1,
        "batches": 20,
        "ranks": [rank] * 4,
    }
    nodes = [
        {
            "name": n,
            "devices": [{"id": f"{n}/{d}", "kind": "V100", "memory_bytes": 10**6} for d in range(2)],
            "fabric": {"bandwidth_bytes_per_s": 10**9},
        }
        for n in ("a", "b")
    ]
    links = [{"a": "a", "b": "b", "bandwidth_bytes_per_s": 10**9}]
    request = a_request(
        topology={"nodes": nodes, "links": links},
        pipeline_profile=run,
        planner="avgpipe",
        update_rules=["elastic_averaging"],
    )
    assert request.pipeline_profile == PipelineProfile.parse(run)
    problem = to_problem(request)
    assert problem.pipeline_run == PipelineRun(4, 1, (RankRun(200, 7, (250_000, 750_000), 200, 300, 8),) * 4)
    assert PlanRequest.parse(request.model_dump(mode="json")).content_hash() == request.content_hash()
    answer = penstock.solve(request)
    assert answer.plan is not None
    allocation, schedule = from_plan(answer.plan, problem)
    assert len(allocation.pipelines[0].stages) == 4
    assert sharing_makespan_ns(problem, allocation, schedule) == answer.plan.prediction.time_per_global_batch_ns
    assert answer.plan.update_rule == "elastic_averaging"


@pytest.mark.tier("quick")
def test_ranked_settings_are_the_whole_grid() -> None:
    problem = a_problem()
    batches = candidates(problem)
    (stages,), _ = best_partitions(problem, batches, partitions(problem, batches, 4))
    settings = Tuner(problem, batches, stages, 3).settings()
    assert sorted(settings) == sorted(Degrees(b.num_micro_batches, n) for b in batches for n in (1, 2, 3))
