"""Planners: the guarantees of all planners, and the purpose of each."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

import pytest
from drawn_problems import four_devices
from problems import OF_ANY_TRAINER, chain, make_problem

from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.solvers.costs.shortages import shortage_of
from penstock.solvers.improve.remedies import extended, remedies
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Result, Status
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.trainer_limits import Span, Within
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS, Planner
from penstock.solvers.planners.proposal import unreachable, whole_backwards_bound_ns
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.driver import run, solve
from penstock.solvers.solve.incumbent import State
from penstock.solvers.solve.tasks import rounds
from penstock.solvers.solve.workers import Here
from penstock.solvers.verify.verifier import verify

pytestmark = pytest.mark.tier("ci")


def solved(planner: Planner, problem: Problem) -> Result | None:
    """Return the result, or None where the planner refuses the request with a remedy."""
    with suppress(UnsupportedRequest):
        return solve(problem, planner.name)
    with pytest.raises(UnsupportedRequest) as refused:
        solve(problem, planner.name)
    assert refused.value.remedy
    return None


CASES: list[dict[str, Any]] = [
    {},
    {"memory_bytes": 20_000_000},
    {"memory_bytes": 22_000_000, "recompute": "never"},
    {"recompute": "always", "memory_bytes": 48_000_000},
    {"micro_batch_sizes": (3, 5)},
    {"global_batch_size": 7, "min_slice": 2, "cuttable": [True, False, True, False]},
    {"kinds": ["fast", "fast", "cpu", "cpu"], "speed": {"fast": 2.0}},
    {"nodes": (1,)},
    {"nodes": (3, 2, 1), "form": "bus", "full_duplex": False, "latency_ns": 1_000},
    {"overlap_all_reduce": False, "channel": "full"},
]


FLUSHED, ALL = frozenset[UpdateRule]({"synchronous"}), frozenset[UpdateRule](get_args(UpdateRule))


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        pytest.param(changes, FLUSHED if "memory_bytes" in changes or "form" in changes else ALL, id=" ".join(changes))
        for changes in CASES
    ],
)
def test_every_plan_is_the_judges_and_auto_is_never_worse(
    changes: dict[str, Any], rules: frozenset[UpdateRule]
) -> None:
    """Every planner's plans verify, with the simulated memory and time, above their bounds; auto is the best.

    Every kind of request once; the plans of all rules and little memory meet in test_madpipe_planner and others.
    """
    drawn = four_devices(len(str(changes)) % 2, 5, **{"global_batch_size": 8, **changes})
    problem = replace(drawn, update_rules=rules)
    values: dict[str, int] = {}
    for name, planner in PLANNERS.items():
        result = solved(planner, problem)
        if result is None:
            assert name != "auto"
            continue
        if result.best is None:
            assert result.status in (Status.INFEASIBLE, Status.NONE_FOUND)
            continue
        best = result.best
        values[name] = best.value_ns
        assert best.update_rule in rules
        how: dict[str, Any] = {"overlap": best.overlap_all_reduce, "update_rule": best.update_rule}
        timeline = simulate(problem, best.allocation, best.schedule, **how)
        assert timeline.time_per_global_batch_ns == best.value_ns
        assert verify(problem, best.allocation, best.schedule, timeline, **how) == []
        for device, use in timeline.uses.items():
            assert use.memory.total <= problem.capacity_bytes(device)
        assert all(bound.bound_ns <= best.value_ns for bound in result.bounds)
        optimal = best.value_ns <= result.bounds[0].bound_ns + result.bounds[0].tolerance_ns
        assert result.status is (Status.OPTIMAL if optimal else Status.FEASIBLE)
        for stage in best.allocation.stages:
            assert stage.last == problem.num_layers - 1 or problem.cuttable[stage.last]
        assert min(c.least_rows for c in candidates(problem)) >= problem.min_slice
    assert values.get("auto") == min(values.values(), default=None)


@pytest.mark.tier("nightly")
def test_the_same_request_gives_the_same_plan() -> None:
    problem = replace(four_devices(3, 4, global_batch_size=4), update_rules=frozenset(get_args(UpdateRule)))
    for planner in OF_ANY_TRAINER.values():
        first, again = solve(problem, planner.name), solve(replace(problem, seed=5, _costs={}), planner.name)
        assert first.best is not None
        assert again.best is not None
        assert first.best.allocation == again.best.allocation
        assert (first.sentence, first.best.schedule.name) == (again.sentence, again.best.schedule.name)


@pytest.mark.parametrize("name", ["dapple", "exact", "spread", "uniform"])
def test_a_search_ends_at_the_time_limit_between_pieces_of_work(name: str) -> None:
    """The judge takes no proposal after the limit, so a search that continues works for nothing."""
    target = Within("deepspeed", ("early-backward",), False, (), False, Span(0, 3), (True,) * 3)
    problem = replace(four_devices(3, 4, global_batch_size=4), within=target if name == "uniform" else None)
    row = PLANNERS[name]
    assert row.proposals is not None
    for limit_ns, ends in ((None, False), (0, True)):
        setting = Setting(problem, Deadline(limit_ns))
        assert (next(row.proposals(setting, row.check(problem.update_rules, "auto", {})), None) is None) == ends


def test_data_parallelism_overlaps_where_that_is_faster() -> None:
    """ALGORITHMS 7.1: backwards of 1 s each, all-reduces of 3 and 0.5 s: 2.5 s exposed with overlap, 3.5 without."""
    problem = make_problem(
        [500, 500],
        [1000, 1000],
        parameter_bytes=[500, 3000],
        nodes=(2,),
        global_batch_size=2,
        micro_batch_sizes=(2,),
        bucket_bytes=1,
        shared=True,
    )
    values = {}
    for overlap in ("yes", "no", "best"):
        result = solve(problem, "dp", options={"overlap": overlap})
        assert result.best is not None
        assert result.best.overlap_all_reduce == (overlap != "no")
        values[overlap] = result.best.value_ns
    assert values == {"yes": 3000 + 2500, "no": 3000 + 3500, "best": 3000 + 2500}


def test_data_parallelism_without_overlap_where_the_request_says_so() -> None:
    result = solve(four_devices(0, overlap_all_reduce=False), "dp")
    assert result.best is not None
    assert not result.best.overlap_all_reduce


def test_gpipe_stages_and_balance_can_be_chosen() -> None:
    problem = four_devices(1)
    result = solve(problem, "gpipe", options={"stages": 3, "by": "layers"})
    assert result.best is not None
    assert [s.last - s.first + 1 for s in result.best.allocation.stages] == [2, 3, 3]
    assert result.best.schedule.name in ("gpipe", "gpipe-lifo")
    with pytest.raises(InvalidDocument, match="is 5 devices in a pipeline, but 4 devices"):
        solve(problem, "gpipe", options={"stages": 5})


def test_model_parallelism_runs_one_micro_batch_at_a_time() -> None:
    result = solve(four_devices(2), "model-parallel", options={"stages": 2})
    assert result.best is not None
    assert isinstance(result.best.schedule, Orders)
    assert result.best.schedule.warmup == (1, 1)


def test_the_paper_of_dapple_is_never_better_than_the_judges_choice() -> None:
    problem = four_devices(4, boundary_bytes=3_000_000, parameter_bytes=40_000_000)
    printed = solve(problem, "dapple", options={"paper": True}).best
    best = solve(problem, "dapple").best
    assert printed is not None
    assert best is not None
    assert best.value_ns <= printed.value_ns


def test_dapple_splits_a_model_whose_gradients_are_dear() -> None:
    """Figure 2's situation: fast inside servers, slow between, heavy weights: one stage per server."""
    problem = make_problem(
        [1_000_000] * 8,
        boundary_bytes=1_000,
        parameter_bytes=20_000_000,
        nodes=(2, 2),
        inside_bytes_per_s=100 * 10**9,
        between_bytes_per_s=10**9,
        global_batch_size=32,
        micro_batch_sizes=(),
        transfer="nic",
    )
    best = solve(problem, "dapple").best
    assert best is not None
    assert {frozenset(problem.devices[d].node for d in s.devices) for s in best.allocation.stages} == {
        frozenset({0}),
        frozenset({1}),
    }


def test_a_schedule_that_was_asked_for() -> None:
    problem = four_devices(1)
    for name, schedule in (("dapple", "gpipe"), ("auto", "gpipe"), ("gpipe", "early-backward"), ("dp", "gpipe")):
        best = solve(problem, name, schedule=schedule).best
        assert best is not None
        assert best.schedule.name.removesuffix("-lifo") == schedule
    with pytest.raises(UnsupportedRequest, match="'model-parallel' does not combine with schedule 'gpipe'"):
        solve(problem, "model-parallel", schedule="gpipe")
    with pytest.raises(UnsupportedRequest, match="no schedule 'gpip'") as refused:
        solve(problem, "auto", schedule="gpip")
    assert refused.value.remedy == "did you mean 'gpipe'?"


def test_recomputation_only_where_memory_asks_for_it() -> None:
    """Stashes of 6 MB that do not fit beside the parameters of the second device."""
    problem = make_problem(
        [1_000_000] * 4,
        stash_bytes=3_000_000,
        parameter_bytes=[1_000, 1_000, 1_000_000, 1_000_000],
        nodes=(2,),
        memory_bytes=[30_000_000, 11_000_000],
        global_batch_size=4,
        micro_batch_sizes=(1,),
        recompute="auto",
    )
    best = solve(problem, "gpipe", options={"stages": 2, "by": "layers"}).best
    assert best is not None
    assert [stage.recompute for stage in best.allocation.stages] == [(), ((2, 3),)]


@pytest.mark.tier("nightly")
def test_incumbents_only_improve() -> None:
    heard: list[JudgedPlan] = []
    result = solve(four_devices(5), "auto", on_incumbent=heard.append)
    values = [candidate.value_ns for candidate in heard]
    assert values == sorted(values, reverse=True)
    assert result.best is not None
    assert heard[-1].value_ns == result.best.value_ns


def test_a_gap_stops_early() -> None:
    heard: list[JudgedPlan] = []
    problem = four_devices(5)
    result = solve(problem, "auto", gap=1000.0, on_incumbent=heard.append)
    assert len(heard) == 1
    assert result.status is Status.FEASIBLE
    assert result.unfinished == ()


def test_a_limit_that_comes_first_is_said() -> None:
    result = solve(four_devices(5), "auto", time_limit_ns=0)
    assert result.status is Status.TIME_LIMIT
    assert result.unfinished[:4] == ("dp", "gpipe", "model-parallel", "even")
    assert "time limit" in result.sentence


def test_a_limit_in_between_names_what_did_not_finish() -> None:
    """The clock advances by a second per reading; the limit comes after the first plans of dp."""
    ticks = iter(range(10**6))
    problem = four_devices(5)
    state = State(Setting(problem, Deadline(10 * 10**9, lambda: 10**9 * next(ticks))))
    run(state, rounds(state, PLANNERS["auto"], {"exclude": ""}), Here(state.setting))
    assert state.best is not None
    assert set(state.unfinished) >= {"dp", "gpipe", "model-parallel", "dapple"}
    assert state.best.planner == "dp"


def test_infeasible_names_stage_device_bytes_and_remedy() -> None:
    """Four layers of 100 bytes with gradients on one device of 700: 100 bytes are missing."""
    problem = make_problem(
        [1] * 4, parameter_bytes=100, nodes=(1,), memory_bytes=700, global_batch_size=1, recompute="auto"
    )
    for name in ("dp", "gpipe", "model-parallel", "dapple", "spp", "pipedream", "auto"):
        planner = PLANNERS[name]
        result = solve(problem, planner.name)
        assert result.status is Status.INFEASIBLE
        short = result.shortage
        assert short is not None
        assert (short.first_layer, short.last_layer, short.device) == (0, 3, 0)
        assert (short.needed_bytes, short.available_bytes, short.missing_bytes) == (800, 700, 100)
        if planner.name != "dp":
            assert short.remedy == "more devices: 1 more node like 'n0' (1 device of kind 'cpu')"
            assert short.remedy in result.sentence
        for word in ("layers 0–3", "'n0/0'", "100 bytes are missing"):
            assert word in result.sentence


REMEDIES: list[tuple[str, dict[str, Any], str]] = [
    (
        "gpipe",
        {"stash_bytes": 60, "recompute": "never", "memory_bytes": 1100, "global_batch_size": 4},
        "allow recomputation: recompute auto (--recompute auto)",
    ),
    ("gpipe", {"memory_bytes": 300}, "more devices: 3 more nodes like 'n0' (3 devices of kind 'cpu')"),
    (
        "dp",
        {"forward_ns": [1], "workspace_bytes": 300, "micro_batch_sizes": (4,), "memory_bytes": 500},
        "smaller micro-batches: micro_batch_sizes [1]",
    ),
    (
        "dp",
        {"state_factor": 2, "nodes": (2,), "memory_bytes": 1300, "global_batch_size": 2, "micro_batch_sizes": (2,)},
        "share the optimizer states: memory.optimizer_sharding over_replicas",
    ),
    ("dp", {"state_factor": 1, "memory_bytes": 1000}, "an optimizer without states: memory.optimizer sgd"),
    ("dp", {"state_factor": 6, "memory_bytes": 1700}, "an optimizer without states: memory.optimizer sgd"),
    ("dp", {"headroom_bytes": 500, "memory_bytes": 900}, "no headroom: memory.headroom_bytes 0"),
    ("dp", {"headroom_bytes": 500, "state_factor": 1, "memory_bytes": 900}, "all of these together: memory.opt"),
]


@pytest.mark.parametrize(("planner", "changes", "remedy"), REMEDIES)
def test_each_remedy_is_found_by_trying(planner: str, changes: dict[str, Any], remedy: str) -> None:
    settings: dict[str, Any] = {"parameter_bytes": 100, "nodes": (1,), "recompute": "auto", "forward_ns": [1] * 4}
    problem = make_problem(**(settings | changes))
    result = solve(problem, planner)
    assert result.shortage is not None
    assert result.shortage.remedy is not None
    assert result.shortage.remedy.startswith(remedy)
    tried = {each.sentence: each.problem for each in remedies(problem)}
    assert solve(tried[result.shortage.remedy], planner).best is not None


def test_nothing_helps_a_layer_that_is_too_large() -> None:
    problem = make_problem([1] * 2, parameter_bytes=[10, 10**6], nodes=(2,), memory_bytes=1000, global_batch_size=1)
    result = solve(problem, "auto")
    assert result.status is Status.INFEASIBLE
    assert result.shortage is not None
    assert result.shortage.remedy is None
    assert result.sentence.count("no remedy tried here works") == 1


@pytest.mark.tier("quick")
def test_more_nodes_are_wired_like_the_last() -> None:
    problem = four_devices(0)
    wider = extended(problem, 2)
    assert [d.name for d in wider.devices[4:]] == ["n1/0+1", "n1/1+1", "n1/0+2", "n1/1+2"]
    assert wider.network.bandwidth(0, 7) == wider.network.bandwidth(0, 3)
    assert wider.network.bandwidth(6, 7) == problem.network.bandwidth(2, 3)


def test_a_batch_that_feeds_nobody_is_said() -> None:
    result = solve(four_devices(0, global_batch_size=3, min_slice=4), "auto")
    assert result.status is Status.INFEASIBLE
    assert result.shortage is None
    assert "min_slice = 4" in result.sentence


def test_stages_that_nothing_connects_are_left_out() -> None:
    problem = four_devices(0)
    apart = replace(problem, network=replace(problem.network, cables=problem.network.cables[:1]))
    for name in ("gpipe", "dapple"):
        result = solve(apart, name)
        assert result.best is not None
        assert len({apart.devices[d].node for s in result.best.allocation.stages for d in s.devices}) == 1
    result = solve(replace(apart, global_batch_size=4, micro_batch_sizes=(4,)), "dp")
    assert result.status is Status.NONE_FOUND
    assert "nothing connects the replicas" in result.sentence
    assert unreachable(apart, chain([(8, [0, 1])], 4)) is None
    assert unreachable(apart, chain([(3, [0]), (5, [2])], 4)) is not None


@pytest.mark.tier("nightly")
def test_quick_bounds_hold() -> None:
    """Estimates that rule a plan out before it is simulated: its work, and its certain memory."""
    for seed in range(4):
        problem = four_devices(seed, count=6)
        for name in ("dp", "gpipe", "model-parallel", "dapple", "spp", "pipedream", *(["auto"] if seed == 0 else [])):
            best = solve(problem, name).best
            assert best is not None
            assert isinstance(best.schedule, Orders)
            if best.schedule.warmup:  # these are for whole backwards, one stage on a device
                assert whole_backwards_bound_ns(problem, best.allocation) <= best.value_ns
                assert shortage_of(problem, best.allocation, best.schedule.warmup) is None


def test_a_plan_that_needs_more_memory_than_estimated_gets_fewer_in_flight() -> None:
    """The memory estimate leaves out nothing that the curve counts at its peak: lowering K is the way down."""
    problem = make_problem(
        [1_000] * 3,
        boundary_bytes=50,
        stash_bytes=100,
        nodes=(3,),
        memory_bytes=[700, 700, 700],
        global_batch_size=12,
        micro_batch_sizes=(1,),
        transfer="nic",
    )
    best = solve(problem, "dapple").best
    assert best is not None
    for device, use in best.timeline.uses.items():
        assert use.memory.total <= problem.capacity_bytes(device)
