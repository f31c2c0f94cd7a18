"""One stage that all GPUs share out: its costs by hand, unsupported requests, and plans with this stage."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor

import numpy as np
import pytest
from problems import make_problem
from small_request import with_degrees

from penstock.convert import to_problem
from penstock.planning.judge import judge
from penstock.questions.solve import solve
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.solvers.costs.memory import static_bytes, step_bytes
from penstock.solvers.costs.stage import stage_costs, update_ns
from penstock.solvers.degrees.contract import contract, replicas_apart
from penstock.solvers.degrees.shares import without_collectives
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.degrees import Choice, Degrees, Sharding
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.solve import driver

WHOLE = Stage(0, 2, (0,))


def three_layers(**changes: object) -> Problem:
    """Build three layers on four GPUs of a node at 1 byte/ns.

    An all-gather of n bytes takes 3/4 n ns, as does a reduce-scatter.
    """
    defaults = {
        "parameter_bytes": [400, 800, 40],
        "update_ns": [40, 80, 4],
        "stash_bytes": [5, 6, 7],
        "global_batch_size": 16,
        "micro_batch_sizes": (4, 8),
        "gradient_factor": 2,
        "state_factor": 6,
    }
    return make_problem([100, 500, 200], [150, 1000, 300], **(defaults | changes))  # type: ignore[arg-type]


def shared(problem: Problem, sharding: Sharding) -> Problem:
    return contract(problem, Choice(sharding=sharding))


def test_parameters_by_hand() -> None:
    """Gathers of 300, 600 and 30 ns, sums of gradients, twice as wide, of 600, 1,200 and 60 ns; one row on each GPU."""
    cells = shared(three_layers(), "parameters")
    costs = stage_costs(cells, WHOLE, 1)
    assert costs.forward_ns == 300 + max(100, 600) + max(500, 30) + 200
    assert costs.backward_ns == 30 + max(300, 600) + max(1000, 300 + 60) + max(150, 1200) + 600
    twice = stage_costs(cells, WHOLE, 2)
    assert twice.forward_ns == 300 + max(200, 600) + max(1000, 30) + 400, "what is gathered does not grow with rows"
    assert twice.backward_ns == 30 + max(600, 600) + max(2000, 360) + max(300, 1200) + 600
    assert update_ns(cells, WHOLE) == 31
    assert cells.global_batch_size == 4
    assert cells.samples_per_row == 4
    assert static_bytes(cells, WHOLE) == (310, 2 * 310, 6 * 310)
    assert costs.workspace_bytes == 2 * 800 + 2 * 800, "two gathered layers, and the gradients of one"
    assert costs.kept_bytes == 18


def test_gradients_by_hand() -> None:
    cells = shared(three_layers(), "gradients")
    costs = stage_costs(cells, WHOLE, 1)
    assert costs.forward_ns == 800
    assert costs.backward_ns == 300 + max(1000, 60) + max(150, 1200) + 600
    assert update_ns(cells, WHOLE) == 31 + 300 + 600 + 30, "parameters are gathered after the step"
    assert static_bytes(cells, WHOLE) == (1240, 2 * 310, 6 * 310)
    assert costs.workspace_bytes == 2 * 800


def test_without_overlap_one_comes_after_the_other() -> None:
    costs = stage_costs(shared(three_layers(overlap_all_reduce=False), "parameters"), WHOLE, 1)
    assert costs.forward_ns == 800 + 930
    assert costs.backward_ns == 1450 + 930 + 1860


def test_kept_parameters_are_costed_as_a_sharded_optimizer() -> None:
    problem = three_layers()
    kept, optimizer = (shared(problem, each) for each in ("parameters_kept", "optimizer"))
    stage = Stage(0, 2, (0, 1, 2, 3))
    assert static_bytes(kept, stage) == (1240, 2 * 1240, 7 * 310), "parts of the parameters besides their states"
    assert static_bytes(optimizer, stage) == (1240, 2 * 1240, 6 * 310)
    in_fp32 = replace(problem, memory=replace(problem.memory, shard_factor=0))
    assert static_bytes(shared(in_fp32, "parameters_kept"), stage) == static_bytes(optimizer, stage)


def test_layers_that_are_not_trained_are_gathered_and_not_summed() -> None:
    problem = three_layers(trainable_bytes=[400, 0, 40])
    costs = stage_costs(shared(problem, "parameters"), WHOLE, 1)
    assert costs.forward_ns == 300 + 600 + 500 + 200
    assert costs.backward_ns == 30 + max(300, 600) + max(1000, 300 + 60) + 150 + 600
    assert static_bytes(shared(problem, "parameters"), WHOLE) == (100 + 200 + 10, 220, 660)
    kept = static_bytes(shared(problem, "parameters_kept"), Stage(0, 2, (0, 1, 2, 3)))
    assert kept.parameters == 1240 + 800, "each replica has them whole besides the gathered copy"


def test_copies_are_made_by_each_replica_of_the_whole_parameters_that_it_has() -> None:
    """Copies neither move nor are shared out: all costs are as without them, but for the memory of whole parameters."""
    plain, copies = three_layers(), np.asarray([0, 200, 600, 600])
    problem = replace(plain, parameter_bytes=plain.parameter_bytes + copies, copied_bytes=copies)
    for sharding in ("gradients", "parameters"):
        without, cells = (stage_costs(shared(each, sharding), WHOLE, 1) for each in (plain, problem))
        assert (cells.forward_ns, cells.backward_ns) == (without.forward_ns, without.backward_ns)
        assert update_ns(shared(problem, sharding), WHOLE) == update_ns(shared(plain, sharding), WHOLE)
    assert static_bytes(shared(problem, "gradients"), WHOLE) == (1240 + 600, 2 * 310, 6 * 310)
    assert static_bytes(shared(problem, "parameters"), WHOLE) == (310, 2 * 310, 6 * 310), "gone with whole parameters"
    assert cells.workspace_bytes == 2 * (800 + 400) + 2 * 800
    stage = Stage(0, 2, (0, 1, 2, 3))
    assert static_bytes(shared(problem, "parameters_kept"), stage) == (1240 + 600, 2 * 1240, 7 * 310)
    assert static_bytes(shared(problem, "optimizer"), stage) == (1240 + 600, 2 * 1240, 6 * 310)


def test_a_step_needs_a_part_of_its_workspace() -> None:
    problem = three_layers(update_workspace_bytes=[40, 80, 4])
    assert step_bytes(shared(problem, "parameters"), WHOLE) == 31


def test_two_kinds_wait_for_each_other_layer_by_layer() -> None:
    """The second two GPUs are twice as slow."""
    problem = three_layers(kinds=["cpu", "cpu", "old", "old"], speed={"old": 0.5})
    assert stage_costs(shared(problem, "gradients"), WHOLE, 1).forward_ns == 1600


def test_what_moves_can_be_left_out() -> None:
    cells = shared(three_layers(), "parameters")
    bare = without_collectives(cells, ("data",))
    assert stage_costs(bare, WHOLE, 1).forward_ns == 800
    assert stage_costs(bare, WHOLE, 1).backward_ns == 1450


def test_replicas_apart_are_those_that_share_the_stage_out() -> None:
    apart = replicas_apart(shared(three_layers(), "parameters"))
    assert apart.num_devices == 4
    assert apart.choice == Choice(sharding="parameters")
    assert stage_costs(apart, Stage(0, 2, (0, 1, 2, 3)), 4).forward_ns == 800


def test_more_rows_never_take_less_and_memory_is_exact_at_each() -> None:
    cells = shared(three_layers(global_batch_size=64, micro_batch_sizes=()), "parameters")
    (points,) = cells.measured.values()
    assert {rows(16 / number) for number in range(1, 17) for rows in (floor, ceil)} <= {point.rows for point in points}
    assert (np.diff([point.forward_ns for point in points], axis=0) >= 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"global_batch_size": 18},
            "4 replicas that need equally many samples, but the global batch of 18 is not a multiple of 4",
        ),
        ({"micro_batch_sizes": (1, 2)}, "no micro-batch of 1, 2 samples is a multiple of 4"),
    ],
)
def test_uneven_shares_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedRequest, match=words):
        shared(three_layers(**changes), "parameters")


def test_pins_to_some_gpus_and_other_update_rules_are_refused() -> None:
    with pytest.raises(UnsupportedRequest, match="contain no whole group of 4 GPUs"):
        shared(replace(three_layers(), pins=(Pin(0, 0, frozenset({0})),)), "gradients")
    assert shared(replace(three_layers(), pins=(Pin(0, 0, frozenset(range(4))),)), "gradients").pins == ()
    with pytest.raises(UnsupportedRequest, match="weight_stashing updates need several versions"):
        shared(replace(three_layers(), update_rules=frozenset({"weight_stashing"})), "parameters")


@pytest.mark.tier("ci")
@pytest.mark.parametrize("planner", ["even", "dp", "dapple", "spp", "gpipe", "exact", "auto"])
@pytest.mark.parametrize("sharding", ["gradients", "parameters"])
def test_every_planner_finds_the_one_stage(planner: str, sharding: Sharding) -> None:
    cells = shared(three_layers(), sharding)
    result = driver.solve(cells, planner, max_plans=8, workers=1)
    assert result.best is not None
    (stage,) = result.best.allocation.stages
    assert (stage.first, stage.last, stage.devices) == (0, 2, (0,))
    least = min(number * sum(stage_costs(cells, WHOLE, 4 // number)[:2]) + update_ns(cells, WHOLE) for number in (2, 4))
    assert result.best.value_ns == least, "of two and four micro-batches, as 8 and 4 samples ask"


@pytest.mark.tier("ci")
def test_a_plan_with_several_stages_is_no_plan() -> None:
    """A plan of two stages for a request that was answered with one; half of the GPUs would hold half of the layers."""
    request = with_degrees(degrees={"tensor": 1}, sharding="parameters", planner="even", micro_batch_sizes=[4])
    plan = solve(request).plan
    assert plan is not None
    assert plan.sharding == "parameters"
    assert judge(PlanFile(plan=plan, request=request)).faults == ()
    first, *_ = plan.pipelines
    (stage,) = first.stages
    halves = tuple(
        stage.model_copy(update={"layers": layers, "devices": stage.devices[part]})
        for layers, part in (((0, 1), slice(2)), ((2, 3), slice(2, 4)))
    )
    split = plan.model_copy(update={"pipelines": (first.model_copy(update={"stages": halves}),)})
    first_fault, *_ = judge(PlanFile(plan=split, request=request)).faults
    assert "2 stages: parameters would be gathered again for each of 2 micro-batches" in first_fault


def test_degrees_and_sharding_go_together() -> None:
    """Two GPUs of a node share each layer, and both nodes all layers: gathers are among the two lanes."""
    problem = to_problem(with_degrees(degrees={"tensor": 2}, sharding="parameters", micro_batch_sizes=[4]))
    cells = contract(problem, Choice(Degrees(tensor=2), "parameters"))
    assert cells.samples_per_row == 2
    assert cells.cells == ((0, 1, 2, 3),)
    plain = contract(problem, Choice(Degrees(tensor=2), "optimizer"))
    stage = Stage(0, 3, (0,))
    alone = stage_costs(without_collectives(cells, ("data",)), stage, 2)
    assert alone.forward_ns == stage_costs(plain, stage, 2).forward_ns
