"""Experts that ranks share out: a run's gradients against one process's, and what is refused before it starts."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from expert_jobs import BATCH, wide
from rank_pool import RankPool, differences

from penstock.convert import to_problem
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.run.job import load_job
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.degrees.contract import contract
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.schedules.gpipe import gpipe

HERE = Path(__file__).parent


@cache
def profile() -> ModelProfile:
    """Compute the costs of layers in fp32, alone and shared: profiles have no fp64."""
    return analytic_profile(wide, "H100", (1, 2), tensor_degrees=(2,), expert_degrees=(2,))


def programs_of(
    degrees: Degrees, cells: int, *, stages: int = 1, sharding: str = "none", norm: bool = False
) -> list[Program]:
    """Lower equal stages on ``cells`` GPU groups: two micro-batches, buckets of one or two layers, one recomputed."""
    uniform = UniformCluster(
        nodes=1,
        devices_per_node=cells * degrees.cell,
        kind="H100",
        memory_bytes=2**36,
        fabric=Fabric(bandwidth_bytes_per_s=10**11),
    )
    request: dict[str, Any] = {
        "profile": profile(),
        "topology": ClusterTopology(name="world", uniform=uniform),
        "global_batch_size": BATCH,
        "memory": {"precision": "full"},
        "network": {"bucket_bytes": 4_000},
        "degrees": {name: value for name, value in degrees._asdict().items() if value > 1},
        "sharding": sharding,
    }
    problem = contract(to_problem(PlanRequest.model_validate(request)), Choice(degrees, sharding))  # type: ignore[arg-type]
    depth, replicas = len(profile().layers) // stages, cells // stages
    parts = tuple(
        Stage(
            k * depth,
            (k + 1) * depth - 1,
            tuple(range(k * replicas, (k + 1) * replicas)),
            recompute=((1, 1),) if k == 0 else (),
        )
        for k in range(stages)
    )
    allocation = single_pipeline(parts, 2)
    return lower(problem, allocation, gpipe(problem, allocation), norm=norm)


CASES = {
    "two meshes of a GPU in a cell": (Degrees(expert=2), 1, {}),
    "two meshes that draw random numbers": (Degrees(expert=2), 1, {"job": "dropping"}),
    "experts in a mesh": (Degrees(tensor=2, expert=2), 1, {}),
    "two cells": (Degrees(expert=2), 2, {}),
    "two stages": (Degrees(expert=2), 2, {"stages": 2}),
    "two cells, clipped": (Degrees(expert=2), 2, {"norm": True}),
    "two cells of a mesh, states shared out, clipped": (
        Degrees(tensor=2, expert=2), 2, {"norm": True, "sharding": "optimizer"}
    ),
}  # fmt: skip


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", CASES)
def test_shared_experts_train_as_in_one_process(pool: RankPool, name: str) -> None:
    degrees, cells, more = CASES[name]
    options = {"clip_norm": 0.05} if "norm" in more else {}
    programs = programs_of(degrees, cells, **{key: value for key, value in more.items() if key != "job"})
    job = f"expert_jobs:{more.get('job', 'wide')}"
    results = pool.train(programs, job, steps=2, directory=str(HERE), options=options)
    gradients, loss = differences(results)
    assert max(gradients, loss) <= 1e-12


def test_what_ranks_cannot_share_out_is_refused_before_any_step(pool: RankPool) -> None:
    with pytest.raises(UnsupportedRequest, match=r"'block.0' .* expert 3: .* 4 experts cannot be split evenly"):
        analytic_profile(wide, "H100", (1,), expert_degrees=(3,))
    with pytest.raises(UnsupportedRequest, match="'llama-tiny' has no experts for 2 GPUs to share"):
        analytic_profile(load_job("examples.llama:tiny"), "H100", (1,), expert_degrees=(2,))
    results = pool.train(programs_of(Degrees(expert=2), 1), "examples.llama:tiny", steps=1)
    assert all("has no experts for 2 GPUs to share" in each["reason"] for each in results)
    assert [event["kind"] for each in results for event in each["events"]] == ["warning"], "of the smaller batch"
