"""Memory where a request says nothing: gradients of 16-bit profiles as wide as ranks hold them, and some left free."""

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
from penstock.planning.inputs import RESERVE, with_open_degrees
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import MemoryModel, PlanRequest

JOB = "examples.gpt:tiny"
QUESTION = ("--cluster", "1x2xH100", "-b", "16", "--micro-batch-size", "4", "--planner", "dp")


@pytest.fixture(scope="module")
def half() -> ModelProfile:
    return analytic_profile(load_job(JOB), "H100", (4,), "bf16")


def held_by_a_rank() -> int:
    """Return the bytes of the gradient buffers of a rank with all layers, for parameters as the job makes them."""
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
    plan_request = PlanRequest(profile=half, topology=topology, global_batch_size=16, memory={"gradient": "parameter"})
    assert with_open_degrees(plan_request).memory.gradient == "parameter"
    answer = penstock.plan(
        half, topology, global_batch_size=16, micro_batch_sizes=[4], planner="dp", memory={"gradient": "parameter"}
    )
    assert counted(answer.file) * 2 == held_by_a_rank()
    assumption = "gradients in the parameters' bf16, as requested, not in Penstock's fp32: 16 bytes per parameter"
    assert assumption in answer.plan.assumptions


def test_full_width_and_other_trainers_are_left_alone(half: ModelProfile) -> None:
    topology = catalogue.cluster("1x2xH100")
    full = half.model_copy(update={"parameter_dtype": "fp32"})
    for question in (
        PlanRequest(profile=full, topology=topology, global_batch_size=16),
        PlanRequest(profile=half, topology=topology, global_batch_size=16, target="deepspeed"),
        PlanRequest(profile=half.content_hash(), topology=topology, global_batch_size=16),
    ):
        assert with_open_degrees(question).memory.gradient == question.memory.gradient


# ---- memory that is left free ------------------------------------------------------------------------------------


def test_what_a_request_says_is_kept_and_nothing_said_leaves_three_percent() -> None:
    request = PlanRequest(profile=catalogue.profile("gpt"), topology=catalogue.cluster("1x2xV100"), global_batch_size=8)
    assert request.memory.headroom_bytes == 0
    (node,) = catalogue.cluster("1x2xV100").expanded().nodes
    left = with_open_degrees(request).memory.headroom_bytes
    assert left >= RESERVE * node.devices[0].memory_bytes > left - 1
    assert with_open_degrees(with_open_degrees(request)).memory.headroom_bytes == left
    for stated in (0, 5):
        explicit = request.model_copy(update={"memory": MemoryModel(headroom_bytes=stated)})
        assert with_open_degrees(explicit).memory.headroom_bytes == stated


def test_of_several_kinds_it_is_the_part_of_the_largest() -> None:
    data = catalogue.cluster("1x2xV100").expanded().model_dump(mode="json")
    data["nodes"][0]["devices"][1]["memory_bytes"] *= 2
    topology = catalogue.cluster("1x2xV100").parse(data)
    request = PlanRequest(profile=catalogue.profile("gpt"), topology=topology, global_batch_size=8)
    assert with_open_degrees(request).memory.headroom_bytes >= RESERVE * data["nodes"][0]["devices"][1]["memory_bytes"]


def test_plans_leave_it_free() -> None:
    """A GPU has just the memory that a plan takes: without a reserve it is found, with the usual one another is."""
    data = catalogue.cluster("1xV100").expanded().model_dump(mode="json")

    def peak_bytes(**memory: int) -> int:
        topology = catalogue.cluster("1xV100").parse(data)
        file = penstock.plan("gpt", topology, global_batch_size=256, planner="dp", max_plans=4, memory=memory).file
        assert file.plan.prediction is not None
        return file.plan.prediction.peak_memory_bytes

    exact = data["nodes"][0]["devices"][0]["memory_bytes"] = peak_bytes()
    assert peak_bytes(headroom_bytes=0) == exact
    assert peak_bytes() <= (1 - RESERVE) * exact
