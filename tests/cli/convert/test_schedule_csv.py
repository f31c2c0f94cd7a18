"""``penstock import schedule`` and ``export schedule``: there and back, and what is said of a bad CSV."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.planning.programs.lower import programs
from penstock.schemas.plan import PlanFile

ONE_F_ONE_B = "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
PROFILE = {
    "schema_version": 1,
    "name": "even",
    "layers": [{"name": f"l{i}", "parameter_bytes": 1000} for i in range(4)],
    "boundaries": [[{"name": f"x{i}", "bytes_per_sample": 10, "gradient_bytes_per_sample": 10}] for i in range(3)],
    "measurements": [
        {
            "device_kind": "cpu",
            "micro_batch_size": 1,
            "layers": [{"forward_ns": 100_000, "backward_ns": 200_000, "stash_bytes": 100}] * 4,
        }
    ],
    "source": {"method": "measured", "expected_error": 0.15},
}
TOPOLOGY = """
schema_version: 1
name: few
uniform:
  nodes: 1
  devices_per_node: 2
  kind: cpu
  memory_bytes: 1 MiB
  fabric: {bandwidth_bytes_per_s: 10 GB/s}
"""


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """GPipe's on two stages, three micro-batches."""
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    (tmp_path / "t.yaml").write_text(TOPOLOGY)
    path = str(tmp_path / "plan.json")
    inputs = ["-p", str(tmp_path / "p.json"), "-t", str(tmp_path / "t.yaml"), "-b", "6"]
    options = ["--planner", "gpipe", "--set", "stages=2", "--micro-batch-size", "2"]
    assert main(["plan", *inputs, *options, "-o", path]) == 0
    capsys.readouterr()
    return path


def imported(plan: str, text: str, tmp_path: Path) -> tuple[int, Path]:
    (tmp_path / "s.csv").write_text(text)
    out = tmp_path / "new.json"
    return main(["import", "schedule", str(tmp_path / "s.csv"), "--plan", plan, "-o", str(out)]), out


def test_an_imported_schedule_is_a_plan_like_any_other(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = imported(plan, ONE_F_ONE_B, tmp_path)
    output = capsys.readouterr().out
    assert code == 0
    assert "the imported order takes" in output
    assert "the plan's own order (gpipe)" in output
    before, after = PlanFile.read(plan).plan, PlanFile.read(out).plan
    assert after.planner == after.schedule.name == "torch-csv"
    assert after.pipelines == before.pipelines
    assert after.prediction is not None
    assert before.prediction is not None
    assert after.prediction.peak_memory_bytes < before.prediction.peak_memory_bytes
    assert after.certificates
    for command in (["verify"], ["simulate"], ["explain"], ["report", "-o", str(tmp_path / "r.html")]):
        assert main([command[0], str(out), *command[1:]]) == 0
    assert [program.device for program in programs(PlanFile.read(out))] == ["node0/0", "node0/1"]
    capsys.readouterr()
    assert main(["export", "schedule", str(out)]) == 0
    assert capsys.readouterr().out == ONE_F_ONE_B


def test_a_schedule_of_other_micro_batches(
    plan: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("0F0,0F1,0I1,0W1,0I0,0W0\n1F0,1F1,1I1,1I0,1W0,1W1\n"))
    assert main(["import", "schedule", "-", "--plan", plan]) == 0
    result = PlanFile.model_validate_json(capsys.readouterr().out).plan
    assert (result.num_micro_batches, result.micro_batch_size) == (2, 3)
    assert result.pipelines[0].micro_batches == (0, 1)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("0F0,0F1,0B0,0B1\n1F0,1FOO3,1B0,1B1\n", ["line 2, column 2", "'1FOO3'", "such as 2F0"], id="typo"),
        pytest.param("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", ["line 1", "0B1 is missing"], id="missing"),
        pytest.param("0F0,0B0,0F0\n1F0,1B0\n", ["line 1, column 3", "0F0 occurs twice", "column 1"], id="doubled"),
        pytest.param("0F0,0B0\n1B0,1F0\n", ["line 2, column 1", "1B0 stands before 1F0"], id="order"),
        pytest.param("0F0,0B0\n1F0,1I0\n", ["line 2", "1W0 is missing"], id="half-a-backward"),
        pytest.param("0F0,0B0,0W0\n1F0,1B0\n", ["line 1", "0B0 is a whole backward"], id="both"),
        pytest.param("", ["the schedule is empty", "try:"], id="empty"),
        pytest.param("\n\n", ["the schedule is empty"], id="only-lines"),
        pytest.param("0F0,0B0\n", ["no stage 1", "the plan has 2 stages"], id="too-few-ranks"),
        pytest.param("0F0,0B0\n1F0,1B0\n2F0,2B0\n", ["line 3 runs stage 2", "2 stages"], id="too-many-ranks"),
        pytest.param("0F0,0B0\n2F0,2B0\n", ["stage 1 is on no line"], id="a-stage-left-out"),
        pytest.param("0F0,1F0,1B0,0B0\n", ["runs stages [0, 1]", "stage 0 hold stages [0]"], id="other-places"),
        pytest.param("0F0,0B0\n0F1,0B1\n", ["stage 0 is on lines 1 and 2"], id="stage-twice"),
        pytest.param("0F999999999,0B0\n1F0,1B0\n", ["0F0 is missing"], id="far-out"),
        pytest.param("999999999F0,0B0\n1F0,1B0\n", ["stage 2 is on no line"], id="far-stage"),
        pytest.param("0F0,0B0,0SEND_F0\n1F0,1B0\n", ["line 1, column 3", "compute-only"], id="lowered"),
        pytest.param(
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n",
            [
                "wait for each other in a circle",
                "line 1, column 2: 0B0 waits for 1B0 at line 2, column 3",
                "line 2, column 2: 1F1 waits for 0F1 at line 1, column 3",
            ],
            id="circle",
        ),
        pytest.param(
            "".join(",".join(f"{s}{k}{m}" for k in "FB" for m in range(7)) + "\n" for s in (0, 1)),
            ["7 micro-batches", "6 samples"],
            id="more-than-samples",
        ),
    ],
)
def test_a_bad_schedule_is_refused_by_line_and_column(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    code, out = imported(plan, text, tmp_path)
    message = capsys.readouterr().err
    assert code == 65
    assert all(word in message for word in words), message
    assert "Traceback" not in message
    assert not out.exists()


def test_a_file_that_is_not_there(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "schedule", str(tmp_path / "none.csv"), "--plan", plan]) == 65
    assert "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("F0:3 B0:2", ["Stage 0 in the row of node0/0", "B2 is missing"], id="missing"),
        pytest.param("F0:3 F1 B0:3", ["F1 is there twice"], id="doubled"),
        pytest.param("F0:3 B0:4", ["B3 has nothing to do there"], id="too-much"),
        pytest.param("F0 B0 F1:3 B1:3", ["deadlock", "node0/0", "node0/1"], id="circle"),
        pytest.param("F0:3 FOO3", ["FOO3"], id="typo"),
    ],
)
def test_a_plan_whose_order_cannot_run_says_where(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    document = json.loads(Path(plan).read_text())
    rows = document["plan"]["schedule"]["rows"]
    if len(rows) == 1:
        rows[:] = [{"devices": [device], "text": rows[0]["text"]} for device in rows[0]["devices"]]
    rows[0]["text"] = text
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(document))
    assert main(["verify", str(changed)]) == 1
    output = "".join(capsys.readouterr())
    assert all(word in output for word in words), output
