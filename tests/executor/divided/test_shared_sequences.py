"""Ranks that share sequences, against one process; and what they cannot share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sequence_jobs
import torch
from rank_pool import RankPool, differences

from penstock.convert import to_problem
from penstock.executor.divided.context import positions
from penstock.executor.profiling.analytic import analytic_profile
from penstock.schemas.errors import PenstockError
from penstock.schemas.program import Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.degrees.contract import contract
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import one_f_one_b
from penstock.solvers.schedules.zero_bubble import zb_h1

MICRO_BATCHES = 2
HERE = str(Path(__file__).parent)


def programs_of(
    job: str, degrees: Degrees, schedule: Callable[[Problem, Allocation], Orders], *, stages: int, recompute: bool
) -> list[Program]:
    """Lower a job of ``sequence_jobs`` in so many stages, under a schedule."""
    profile = analytic_profile(
        getattr(sequence_jobs, job),
        "H100",
        (1, 2),
        tensor_degrees=(degrees.tensor,),
        context_degrees=(degrees.context,),
    )
    uniform = UniformCluster(
        nodes=1,
        devices_per_node=degrees.cell * stages,
        kind="H100",
        memory_bytes=2**36,
        fabric=Fabric(bandwidth_bytes_per_s=10**11),
    )
    request = {
        "profile": profile,
        "topology": ClusterTopology(name="test", uniform=uniform),
        "global_batch_size": sequence_jobs.BATCH,
        "degrees": {"tensor": degrees.tensor, "context": degrees.context},
        "sharding": "none",
    }
    cells = contract(to_problem(PlanRequest.model_validate(request)), Choice(degrees, "none"))
    number = len(profile.layers)
    edges = [number * k // stages for k in range(stages + 1)]
    stage_list = [
        Stage(first, end - 1, (k,), recompute=((first, end - 1),) if recompute else ())
        for k, (first, end) in enumerate(pairwise(edges))
    ]
    allocation = single_pipeline(tuple(stage_list), MICRO_BATCHES)
    return lower(cells, allocation, schedule(cells, allocation))


CASES: list[tuple[str, Degrees, Any, dict[str, Any]]] = [
    ("llama_double", Degrees(context=2), one_f_one_b, {"stages": 1, "recompute": True}),
    ("llama_double", Degrees(tensor=2, context=2), one_f_one_b, {"stages": 1, "recompute": False}),
    ("gpt_double", Degrees(tensor=2, context=2), one_f_one_b, {"stages": 1, "recompute": False}),
    ("gpt_double", Degrees(context=2), one_f_one_b, {"stages": 2, "recompute": False}),
    ("pairs_double", Degrees(context=2), zb_h1, {"stages": 2, "recompute": False}),
]


@pytest.mark.tier("nightly")
@pytest.mark.parametrize(("job", "degrees", "schedule", "more"), CASES)
def test_gradients_are_those_of_one_process(
    pool: RankPool, job: str, degrees: Degrees, schedule: Any, more: dict[str, Any]
) -> None:
    """Rows have other numbers of terms, and each rank its own part of them."""
    programs = programs_of(job, degrees, schedule, **more)
    results = pool.train(programs, f"sequence_jobs:{job}", steps=2, directory=HERE)
    gradients, losses = differences(results)
    assert gradients <= 1e-12
    assert losses <= 1e-12


REFUSED = {
    "odd": r"input 'x' of job 'odd' has the shape \(1, 18\), but context 2 splits dimension 1 into 4 chunks",
    "mute": "job 'mute' does not say which of its inputs are sequences",
    "astray": r"job 'astray' names \['tokens'\] in `sequences`, which its batch lacks",
    "pool": "layer 'extra' cannot be divided by context 2: from a part of a sequence it computes 'x'",
    "windowed": "layer 'extra' cannot be divided by context 2: .* an explicit mask",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shared_is_refused_in_a_sentence(name: str) -> None:
    with pytest.raises(PenstockError, match=REFUSED[name]) as refused:
        analytic_profile(getattr(sequence_jobs, name), "H100", (1,), context_degrees=(2,))
    assert "\n" not in refused.value.detail


def test_ranks_refuse_before_the_first_step(pool: RankPool) -> None:
    """A plan of a job that was changed since."""
    programs = programs_of("llama_double", Degrees(context=2), one_f_one_b, stages=1, recompute=False)
    results = pool.train(programs, "sequence_jobs:mute", directory=HERE)
    assert all("does not say which of its inputs are sequences" in one["reason"] for one in results)
    assert all(one["step"] is None for one in results)


def test_check_shows_what_mixes_positions_otherwise(pool: RankPool) -> None:
    """A mean over a rank's own positions has the shape of one over all, so that nothing else can tell."""
    programs = programs_of("mean", Degrees(context=2), one_f_one_b, stages=1, recompute=False)
    gradients, _ = differences(pool.train(programs, "sequence_jobs:mean", directory=HERE))
    assert gradients > 1e-3


def test_positions_are_all_where_nothing_is_shared() -> None:
    assert torch.equal(positions(5), torch.arange(5))
