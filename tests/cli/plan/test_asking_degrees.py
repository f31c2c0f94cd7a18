"""``penstock plan --tensor … --sharding …``: what the request says, and what the answer prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.examples import catalogue
from penstock.planning.headline import headline
from penstock.planning.inputs import with_open_degrees
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest

QUESTION = (
    "plan",
    "--example",
    "llama-3-8b",
    "--cluster",
    "1x4xH100",
    "-b",
    "8",
    "--max-plans",
    "1",
    "--planner",
    "even",
)


def test_degrees_are_chosen_where_the_profile_has_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*QUESTION, "-o", str(path)]) == 0
    file, output = PlanFile.read(path), capsys.readouterr().out
    assert (file.request.degrees, file.request.sharding) == ("auto", "auto")
    assert file.plan.degrees is not None
    assert headline(file.plan) in output
    assert "tokens/s/GPU · MFU" in output
    covers = file.plan.certificates[0].covers
    assert set(covers.degrees or ()) == {
        f"{degrees}, {sharded}"
        for degrees in (
            *("tensor 1", "tensor 2", "tensor 4", "tensor 8"),
            *("context 2", "tensor 2, context 2", "tensor 4, context 2", "tensor 8, context 2"),
        )
        for sharded in (
            *("nothing sharded", "optimizer sharded"),
            *("gradients sharded over all GPUs alike", "parameters sharded over all GPUs alike"),
        )
    }
    assert main(["verify", str(path)]) == 0
    assert capsys.readouterr().out == ""


def test_a_pinned_choice_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*QUESTION, "--tensor", "4", "--sharding", "optimizer", "-o", str(path)]) == 0
    plan = PlanFile.read(path).plan
    assert (plan.degrees and plan.degrees.tensor, plan.sharding) == (4, "optimizer")
    assert [len(stage.devices) for stage in plan.pipelines[0].stages] == [4]
    capsys.readouterr()
    assert main(["export", str(path), "--to", "megatron", "-o", str(tmp_path / "x")]) == 0
    assert "--tensor-model-parallel-size 4" in (tmp_path / "x").read_text()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--tensor", "3"), 65, "no plan can have tensor 3: tensor 3 does not divide 32 attention heads"),
        (("--tensor", "8"), 65, "tensor 8 needs 8 GPUs in one node, but the largest node has 4"),
        (("--tensor", "many"), 64, "'many' is neither auto nor numbers such as 1,2,4,8"),
        (("--sharding", "all"), 64, "'parameters_kept'"),
    ],
)
def test_what_cannot_be_is_said(
    options: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*QUESTION, *options]) == code
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.tier("quick")
@pytest.mark.parametrize("fields", [{"target": "megatron"}, {"codec": "auto"}, {"profile": "resnet-50"}], ids=str)
def test_other_requests_stay_at_degrees_of_one(fields: dict[str, Any]) -> None:
    name = fields.get("profile", "llama-3-8b")
    more = {key: value for key, value in fields.items() if key != "profile"}
    profile, topology = catalogue.profile(name), catalogue.cluster("1x4xH100")
    request = PlanRequest(profile=profile, topology=topology, global_batch_size=8, **more)
    result = with_open_degrees(request)
    assert (result.degrees, result.sharding) == (None, None)
    assert result.model_copy(update={"memory": request.memory}) == request


def test_degrees_of_one_alone_are_no_choice(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main([*QUESTION, "--tensor", "1", "--context", "1", "-o", str(path)]) == 0
    file = PlanFile.read(path)
    assert file.request.sharding is None
    assert (file.plan.degrees, file.plan.sharding) == (None, None)


def test_a_table_has_every_choice_and_why_it_is_not_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    assert main([*QUESTION, "--context", "1", "--sharding", "optimizer", "--table"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = next(number for number, line in enumerate(lines) if line.startswith("degrees time peak memory"))
    rows = [line for line in lines[start + 2 :] if line]
    assert rows[0].endswith("the answer")
    assert {row.split(" sharded")[0] for row in rows[:3]} == {"optimizer", "TP 2, optimizer", "TP 4, optimizer"}
    assert rows[3] == "TP 8, optimizer sharded – – – tensor 8 needs 8 GPUs in one node, but the largest node has 4"
    assert main([*QUESTION, "--tensor", "1", "--context", "1", "--sharding", "none", "--table"]) == 0
    assert "no degrees were compared" in capsys.readouterr().out
