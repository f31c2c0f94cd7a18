"""Placements where degrees are a choice: plans of whole GPU groups inside nodes, and sets of nodes without groups."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.cli.main import main
from penstock.convert import to_problem
from penstock.examples import catalogue
from penstock.planning.inputs import with_open_degrees
from penstock.schemas.api.placement import Placement
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Link
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.model.problem import Problem
from penstock.solvers.placement.at_degrees import Hosts
from penstock.solvers.solve import choices
from penstock.solvers.solve.searched import least_bound

pytestmark = pytest.mark.tier("ci")


def placed(cluster: str = "2x4xH100", **more: Any) -> Placement:
    return penstock.place("llama-3-8b", cluster, global_batch_size=8, **more)


def cells(placement: Placement) -> list[tuple[str, ...]]:
    """Return the GPUs of each group of the plan, which has no fault."""
    assert placement.plan_file is not None
    assert penstock.judge(placement.plan_file).faults == ()
    plan = placement.plan_file.plan
    size = 1 if plan.degrees is None else plan.degrees.tensor
    stages = [stage.devices for pipeline in plan.pipelines for stage in pipeline.stages]
    return [devices[at : at + size] for devices in stages for at in range(0, len(devices), size)]


def node(gpu: str) -> str:
    return gpu.split("/")[0]


def test_degrees_are_chosen_as_for_a_plan() -> None:
    placement = placed(nodes={"max": 1})
    assert placement.plan_file is not None
    assert placement.plan_file.request.degrees == "auto"
    assert placement.plan_file.plan.degrees is not None
    plan = penstock.plan("llama-3-8b", "1x4xH100", global_batch_size=8, planner="even").plan
    assert plan.prediction is not None
    assert placement.time_per_global_batch_ns == plan.prediction.time_per_global_batch_ns
    assert f" at {placement.plan_file.plan.degrees}, " in placement.why[0]
    assert cells(placement)


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("planner", ["auto", "even"])
def test_cells_are_whole_and_inside_nodes_where_some_gpus_are_taken(planner: str) -> None:
    """Three free GPUs fill one cell of two, and five fill two."""
    busy_gpus = ["node0/0", *(f"node1/{gpu}" for gpu in (0, 2, 3)), "node2/1", "node2/5"]
    placement = placed(
        "3x8xH100",
        busy=[*busy_gpus, *(f"node0/{gpu}" for gpu in range(1, 5))],
        degrees={"tensor": 2},
        sharding="optimizer",
        planner=planner,
    )
    gpu_groups = cells(placement)
    assert all(len(cell) == 2 for cell in gpu_groups)
    assert all(len({node(gpu) for gpu in cell}) == 1 for cell in gpu_groups)
    assert {gpu for cell in gpu_groups for gpu in cell}.isdisjoint(busy_gpus)
    assert {node(gpu) for cell in gpu_groups for gpu in cell} <= set(placement.nodes)
    assert placement.every_set


def test_a_cluster_without_cells_has_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    placement = placed(degrees={"tensor": 8})
    assert (placement.status, placement.plan_file) == ("infeasible", None)
    assert "tensor 8 needs 8 GPUs in one node, but the largest node has 4" in placement.why
    command = ("place", "--example", "llama-3-8b", "--cluster", "2x4xH100", "-b", "8")
    assert main([*command, "--tensor", "8"]) == 3
    assert "tensor 8 needs 8 GPUs in one node" in capsys.readouterr().out


@pytest.mark.tier("nightly")
def test_a_profile_without_degrees_is_placed_as_before() -> None:
    placement = penstock.place("resnet-50", "1x2xV100", global_batch_size=8)
    assert placement.plan_file is not None
    assert (placement.plan_file.request.degrees, placement.plan_file.plan.degrees) == (None, None)


def joined(bandwidth: int, *, apart: bool) -> Problem:
    """Join four nodes of four GPUs below one switch or, ``apart``, below two, with cables as wide as one node's."""
    whole = catalogue.cluster("4x4xH100").expanded()
    names = [node.name for node in whole.nodes]
    above = dict(zip(names, ("left", "left", "right", "right") if apart else ("top",) * 4, strict=True))
    links = [*above.items(), *([("top", "left"), ("top", "right")] if apart else [])]
    topology: ClusterTopology = whole.model_copy(
        update={
            "switches": tuple({"top", *above.values()}),
            "links": tuple(Link(a=b, b=a, bandwidth_bytes_per_s=bandwidth, latency_ns=2_000) for a, b in links),
        }
    )
    plan_request = PlanRequest(profile=catalogue.profile("llama-3-8b"), topology=topology, global_batch_size=32)
    return to_problem(with_open_degrees(plan_request))


@pytest.mark.tier("nightly")
def test_what_is_known_of_hosts_holds_however_they_are_joined() -> None:
    """Bounds are at most the bounds of the set itself, and the plan is the best of every choice planned separately."""
    sets = [joined(gb * 10**9, apart=apart) for gb, apart in ((400, False), (1, True), (12, True))]
    hosts, chosen = Hosts(sets[0], {}), set()
    for problem in sets:
        whole = choices.quick(problem)
        assert whole.best is not None
        chosen.add(whole.choice)
        transferred = hosts.plan(problem, lambda _gpus: NEVER_NS)
        assert transferred is not None
        assert transferred.best is not None
        assert transferred.best.value_ns == whole.best.value_ns
        assert hosts.plan(problem, lambda _gpus, least=whole.best.value_ns: least - 1) is None
        assert hosts.may_take(lambda _gpus, least=whole.best.value_ns: least)
        certified = hosts.certified(problem, transferred)
        assert certified.best is not None
        assert hosts.bound_ns() <= hosts.tighten() <= least_bound(problem).bound_ns <= certified.best.value_ns
        assert certified.bounds[0].bound_ns == hosts.tighten()
    assert len(chosen) > 1
