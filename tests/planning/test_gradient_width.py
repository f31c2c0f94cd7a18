"""Gradients of 16-bit profiles are counted as wide as ranks hold and reduce them, unless a request says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.cli.main import main
from penstock.convert import to_problem
from penstock.examples import catalogue
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.run.job import load_job
from penstock.executor.stage.reduction import Summed
from penstock.planning.documents import with_open_degrees
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest

JOB = "examples.gpt:tiny"
QUESTION = ("--cluster", "1x2xH100", "-b", "16", "--micro-batch-size", "4", "--planner", "dp")


@pytest.fixture(scope="module")
def half() -> ModelProfile:
    return analytic_profile(load_job(JOB), "H100", (4,), "bf16")


def held_by_a_rank() -> int:
    """Bytes of the buffers of gradients of a rank with all layers: of parameters as the job makes them."""
    parameters = [one for spec in load_job(JOB).layers() for one in spec.build().parameters()]
    return sum(flat.buffer.nbytes for flat in Summed(parameters).flats())


def counted(file: PlanFile) -> int:
    prediction = file.plan.prediction
    assert prediction is not None
    return max(each.memory.gradients_bytes for each in prediction.devices)


def test_a_plan_of_the_command_counts_what_a_rank_holds(
    half: ModelProfile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half.write(tmp_path / "half.json")
    path = tmp_path / "plan.json"
    assert main(["plan", "--profile", str(tmp_path / "half.json"), *QUESTION, "-o", str(path)]) == 0
    assert counted(PlanFile.read(path)) == held_by_a_rank()
    assert "Penstock keeps gradients in fp32: 18 bytes per parameter" in PlanFile.read(path).plan.assumptions


def test_replicas_reduce_fp32(half: ModelProfile) -> None:
    answer = penstock.plan(half, "1x2xH100", global_batch_size=16, micro_batch_sizes=[4], planner="dp")
    assert counted(answer.file) == held_by_a_rank()
    reduced = to_problem(answer.request).memory.exchange * half.held_bytes(0, len(half.layers) - 1)
    assert reduced == held_by_a_rank()


def test_what_a_request_says_stays(half: ModelProfile) -> None:
    topology = catalogue.cluster("1x2xH100")
    asked = PlanRequest(profile=half, topology=topology, global_batch_size=16, memory={"gradient": "parameter"})
    assert with_open_degrees(asked) is asked
    answer = penstock.plan(
        half, topology, global_batch_size=16, micro_batch_sizes=[4], planner="dp", memory={"gradient": "parameter"}
    )
    assert counted(answer.file) * 2 == held_by_a_rank()
    said = "gradients in the parameters' bf16, as requested, not in Penstock's fp32: 16 bytes per parameter"
    assert said in answer.plan.assumptions


def test_full_width_and_other_trainers_are_left_alone(half: ModelProfile) -> None:
    topology = catalogue.cluster("1x2xH100")
    full = half.model_copy(update={"parameter_dtype": "fp32"})
    for asked in (
        PlanRequest(profile=full, topology=topology, global_batch_size=16),
        PlanRequest(profile=half, topology=topology, global_batch_size=16, target="deepspeed"),
        PlanRequest(profile=half.content_hash(), topology=topology, global_batch_size=16),
    ):
        assert with_open_degrees(asked) is asked
