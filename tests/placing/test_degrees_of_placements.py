"""Placements where degrees are a choice: plans of whole cells inside nodes, and sets of nodes that have none."""

from __future__ import annotations

from typing import Any

import pytest

import penstock
from penstock.cli.main import main
from penstock.schemas.api.placement import Placement


def placed(cluster: str = "2x4xH100", **more: Any) -> Placement:
    return penstock.place("llama-3-8b", cluster, global_batch_size=8, **more)


def cells(found: Placement) -> list[tuple[str, ...]]:
    """The GPUs of each cell of the plan, which has no fault."""
    assert found.plan_file is not None
    assert penstock.judge(found.plan_file).faults == ()
    plan = found.plan_file.plan
    size = 1 if plan.degrees is None else plan.degrees.tensor
    stages = [stage.devices for pipeline in plan.pipelines for stage in pipeline.stages]
    return [held[at : at + size] for held in stages for at in range(0, len(held), size)]


def node(gpu: str) -> str:
    return gpu.split("/")[0]


def test_degrees_are_chosen_as_for_a_plan() -> None:
    found = placed(nodes={"max": 1})
    assert found.plan_file is not None
    assert found.plan_file.request.degrees == "auto"
    assert found.plan_file.plan.degrees is not None
    plan = penstock.plan("llama-3-8b", "1x4xH100", global_batch_size=8, planner="even").plan
    assert plan.prediction is not None
    assert found.time_per_global_batch_ns == plan.prediction.time_per_global_batch_ns
    assert f" at {found.plan_file.plan.degrees}, " in found.why[0]
    assert cells(found)


@pytest.mark.parametrize("planner", ["auto", "even"])
def test_cells_are_whole_and_inside_nodes_where_some_gpus_are_taken(planner: str) -> None:
    """Three free GPUs fill one cell of two, and five fill two."""
    taken = ["node0/0", *(f"node1/{gpu}" for gpu in (0, 2, 3)), "node2/1", "node2/5"]
    found = placed(
        "3x8xH100",
        busy=[*taken, *(f"node0/{gpu}" for gpu in range(1, 5))],
        degrees={"tensor": 2},
        sharding="optimizer",
        planner=planner,
    )
    held = cells(found)
    assert all(len(cell) == 2 for cell in held)
    assert all(len({node(gpu) for gpu in cell}) == 1 for cell in held)
    assert {gpu for cell in held for gpu in cell}.isdisjoint(taken)
    assert {node(gpu) for cell in held for gpu in cell} <= set(found.nodes)
    assert found.every_set


def test_a_cluster_without_cells_has_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    found = placed(degrees={"tensor": 8})
    assert (found.status, found.plan_file) == ("infeasible", None)
    assert "tensor 8 needs 8 GPUs in one node, and the largest has 4" in found.why
    asked = ("place", "--example", "llama-3-8b", "--cluster", "2x4xH100", "-b", "8")
    assert main([*asked, "--tensor", "8"]) == 3
    assert "tensor 8 needs 8 GPUs in one node" in capsys.readouterr().out


def test_a_profile_without_degrees_is_placed_as_before() -> None:
    found = penstock.place("vgg-19", "1x2xV100", global_batch_size=8)
    assert found.plan_file is not None
    assert (found.plan_file.request.degrees, found.plan_file.plan.degrees) == (None, None)
