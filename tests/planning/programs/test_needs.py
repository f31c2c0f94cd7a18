"""The kind of device that a plan assumes for a rank goes with the rank's program."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import penstock
from penstock.planning.judge import judge
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import PlanFile
from penstock.schemas.program import Needs, Program


def planned(tensor: int) -> PlanFile:
    return penstock.plan(
        "gpt2-small",
        "1x4xV100",
        global_batch_size=16,
        update_rules=["synchronous"],
        max_plans=4,
        degrees={"tensor": tensor},
    ).file


@pytest.fixture(scope="module")
def whole() -> PlanFile:
    return planned(1)


def test_programs_say_kind_and_peak_without_context(whole: PlanFile) -> None:
    prediction = whole.plan.prediction
    assert prediction is not None
    devices = {one.device: one for one in prediction.devices}
    for program in penstock.programs(whole):
        use = devices[program.device]
        assert use.memory.context_bytes > 0
        assert program.needs == Needs("V100", use.peak_memory_bytes - use.memory.context_bytes)


@pytest.mark.tier("nightly")
def test_each_gpu_of_a_cell_needs_what_the_cell_holds_of_one() -> None:
    file = planned(2)
    programs, timeline = penstock.programs(file), judge(file).timeline
    assert timeline is not None
    assert len({program.device for program in programs}) == 4
    needs = [program.needs for program in programs]
    assert {one.kind for one in needs if one is not None} == {"V100"}
    mesh = programs[0].mesh
    assert mesh is not None
    assert mesh.tensor == 2
    for one, other in zip(programs[::2], programs[1::2], strict=True):
        assert one.needs == other.needs


def test_needs_are_read_as_they_were_written(whole: PlanFile) -> None:
    program = penstock.programs(whole)[0]
    data = json.loads(json.dumps(program.to_json()))
    assert Program.from_json(data) == program
    assert Program.from_json(data).needs == program.needs is not None
    del data["needs"]
    assert Program.from_json(data) == replace(program, needs=None), "programs from before they had any"
    assert "needs" not in replace(program, needs=None).to_json()


@pytest.mark.parametrize(
    "needs", [{"kind": "V100"}, {"kind": 3, "memory_bytes": 4}, {"kind": "V100", "memory_bytes": -1}]
)
def test_needs_that_are_none_are_refused_by_their_place(whole: PlanFile, needs: object) -> None:
    data = penstock.programs(whole)[0].to_json() | {"needs": needs}
    with pytest.raises(InvalidDocument, match="/needs"):
        Program.from_json(data)
