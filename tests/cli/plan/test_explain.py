"""``penstock explain``: its tables, its layouts, and what it says of plans that are not good."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.cli import show
from penstock.cli.main import main
from penstock.examples.tiny import tiny_plan_file
from penstock.planning import explain as explaining
from penstock.report.plan_files import page
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.explanation import changes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan


@pytest.fixture
def data() -> dict[str, Any]:
    """Four layers of 2 + 4 ms a sample on two devices: two stages, four micro-batches of four samples."""
    return copy.deepcopy(tiny_plan_file())


def written(data: dict[str, Any], folder: Path) -> str:
    data["plan"]["request_hash"] = PlanRequest.parse(data["request"]).content_hash()
    path = folder / "plan.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_the_usual_table(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "PROGRESS_S", math.inf)  # a busy machine may take longer than the first line waits
    assert main(["explain", written(data, tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for words in ("binds", "critical path of one step", "links twice as wide", "1 device less", "recompute everywhere"):
        assert words in out
    assert "re-planned" in out
    assert "re-drafted" in out


def test_of_a_large_plan_changes_are_tried_when_they_are_asked_for(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if two stages of four micro-batches were many operations."""
    path = written(data, tmp_path)
    small = penstock.explain(path)
    assert small.untried == ""
    assert small.what_ifs
    assert small.sensitivities
    monkeypatch.setattr(explaining, "MAX_OPERATIONS", 15)
    large = penstock.explain(path)
    assert (large.what_ifs, large.sensitivities) == ((), ())
    assert "16 operations, more than 15" in large.untried
    assert large.model_copy(update={"untried": ""}) == penstock.explain(path, what_if=()).model_copy(
        update={"untried": ""}
    )
    assert [row.name for row in penstock.explain(path, what_if=["bandwidth=2"]).what_ifs] == ["", "bandwidth=2"]
    assert penstock.explain(path, what_if=["all"]) == small
    assert main(["explain", path]) == 0
    out, _err = capsys.readouterr()
    assert "changes are tried only when they are asked for" in " ".join(out.split())
    assert "twice as wide" not in out
    assert "changes are tried only when" in page(PlanFile.read(path))


@pytest.mark.tier("quick")
def test_on_many_gpus_what_plans_again_is_tried_when_it_is_asked_for(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs count as many here, and the effect of single changes of stages is still known at once."""
    path = written(data, tmp_path)
    small = penstock.explain(path)
    monkeypatch.setattr(explaining, "MAX_GPUS", 1)
    large = penstock.explain(path, why_not=["default"])
    assert (large.what_ifs, large.why_not, large.sensitivities) == ((), (), small.sensitivities)
    assert "2 GPUs, more than 1" in large.untried
    assert penstock.explain(path, what_if=["all"]) == small


@pytest.mark.tier("quick")
def test_each_of_the_usual_changes_is_made_once(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []

    def counted(problem: Problem, plan: JudgedPlan, text: str) -> changes.Change:
        texts.append(text)
        return change(problem, plan, text)

    change = changes.change
    monkeypatch.setattr(changes, "change", counted)
    explanation = penstock.explain(written(data, tmp_path))
    named = [row.name for row in explanation.what_ifs[1:]]
    assert named == [text for text in texts if text in named]
    assert len(set(texts)) == len(texts)


def test_json_is_what_the_python_api_gives(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F0 of 16 ms on stage 0, four micro-batches of 48 ms on stage 1, B3 of 32 ms on stage 0; or as much elsewhere."""
    path = written(data, tmp_path)
    assert main(["explain", path, "--what-if", "speed=2", "--json"]) == 0
    explanation = Explanation.model_validate_json(capsys.readouterr().out)
    assert (
        explanation
        == penstock.explain(PlanFile.read(path), what_if=["speed=2"])
        == penstock.explain(path, what_if=["speed=2"])
    )
    assert (
        explanation.path.length_ns
        == explanation.time_ns
        == sum(segment.length_ns for segment in explanation.path.segments)
    )
    assert sum(share.length_ns for share in explanation.path.shares if share.what == "operation") == 5 * 48_000_000
    assert [row.name for row in explanation.what_ifs] == ["", "speed=2"]
    for idle in explanation.idle:
        parts = idle.model_dump(exclude={"devices", "num_gpus", "whole_ns", "global_batches"})
        assert sum(parts.values()) == idle.whole_ns == explanation.time_ns


@pytest.mark.parametrize("cuts", ["1", "block1", " 1 "])
def test_why_not_this_layout(
    cuts: str, data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three layers on the second device take half as long again as two: 72 ms a micro-batch."""
    path = written(data, tmp_path)
    assert main(["explain", path, "--cuts", cuts, "--json"]) == 0
    layout = Explanation.model_validate_json(capsys.readouterr().out).layout
    assert layout is not None
    assert layout.fits
    assert layout.theirs is not None
    assert layout.theirs.time_ns > 4 * 72_000_000
    assert layout.theirs.time_ns - layout.ours.time_ns == sum(d.theirs_ns - d.ours_ns for d in layout.differences)
    assert main(["explain", path, "--cuts", cuts]) == 0
    out = capsys.readouterr().out
    assert "longer: +" in out
    assert "computing of the binding stage" in out


def test_a_layout_of_named_devices(data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(data, tmp_path)
    options = ["--cuts", "2", "--devices", "node1/0;node0/0", "--schedule", "gpipe", "--micro-batches", "2"]
    assert main(["explain", path, *options, "--json"]) == 0
    layout = Explanation.model_validate_json(capsys.readouterr().out).layout
    assert layout is not None
    assert layout.theirs is not None
    assert "M = 2, gpipe" in layout.theirs.stages


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--cuts", "3,1"], 65, "stage 2 would begin with layer 1"),
        (["--cuts", "7"], 65, "there is no layer 7"),
        (["--cuts", "1,2"], 65, "3 stages need 3 devices; there are 2"),
        (["--cuts", "blok2"], 65, "did you mean 'block"),
        (["--cuts", "1", "--replicas", "1"], 65, "1 replica counts are given for 2 stages"),
        (["--cuts", "1", "--replicas", "one,1"], 64, "not a number of devices"),
        (["--cuts", "1", "--devices", "node0/0;node9/0"], 65, "no device 'node9/0'"),
        (["--cuts", "1", "--schedule", "1f1b"], 64, "did you mean 'early-backward'?"),
        (["--cuts", "1", "--schedule", "eager"], 65, "does not order the stages"),
        (["--cuts", "1", "--micro-batches", "0"], 64, "not a number of micro-batches"),
        (["--cuts", "1", "--micro-batches", "99"], 65, "cannot be split into 99"),
        (["--replicas", "1,1"], 64, "a layout needs its cuts"),
        (["--what-if", "bandwith=2"], 65, "is not a known change"),
        (["--what-if", "speed=2", "--planner", "daple"], 64, "dapple"),
        (["--what-if", "speed=2", "--max-plans", "0"], 65, "max_plans"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    options: list[str],
    code: int,
    words: str,
    data: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", written(data, tmp_path), *options]) == code
    assert words in capsys.readouterr().err


def test_a_plan_that_lacks_memory_is_explained(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No micro-batch fits 300 MB: the stage's parameters and states alone do not."""
    data["request"]["topology"]["uniform"]["memory_bytes"] = 300_000_000
    path = written(data, tmp_path)
    assert main(["explain", path, "--what-if", "memory=4"]) == 1
    out, err = capsys.readouterr()
    assert "which has 286 MiB: 85.8 MiB (90,000,000 bytes) are missing" in out
    assert "are missing" in out
    assert "4 times the memory" in out
    assert "needs 372 MiB (390,000,000 bytes)" in err
    assert main(["explain", path, "--cuts", "2"]) == 1
    assert "does not fit: stage 0 (layers 0–1) needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("where", "what", "words"),
    [
        (("plan", "pipelines", 0, "stages", 1, "layers"), [2, 7], "is not a range of layers"),
        (("plan", "schedule", "rows", 0, "text"), "F0 B0 F1 B1 F2 B3 F3 B2", "cannot be simulated"),
        (("plan", "schedule", "rows", 0, "text"), "F0 F1 F2 F3 B3 B2 B1 B0", "wait"),
    ],
    ids=["a plan of another model", "an operation too early", "a circle"],
)
def test_plans_that_cannot_run_are_refused(
    where: tuple[Any, ...],
    what: object,
    words: str,
    data: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place: Any = data
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = what
    if words == "wait":
        data["plan"]["schedule"]["rows"][1]["text"] = "F1 B1 F0 B0 F2 B2 F3 B3"
        place[where[-1]] = "F0 B0 F1 B1 F2 B2 F3 B3"
    assert main(["explain", written(data, tmp_path)]) == 1
    assert words in capsys.readouterr().err
