"""The commands on a small problem, whose answer is known by hand where it says so."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import show
from penstock.cli.main import main
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile

LAYERS = 4
KEYS = [
    "planner",
    "schedule",
    "update_rule",
    "status",
    "iteration_ns",
    "peak_memory_bytes",
    "bound_ns",
    "gap",
    "speedup_vs_one_device",
    "seconds",
    "why",
    "degrees",
    "sharding",
    "chosen",
    "stages",
    "layout",
]


def _profile(stash_bytes: int = 100) -> dict[str, Any]:
    layer = {"forward_ns": 100_000, "backward_ns": 200_000, "stash_bytes": stash_bytes}
    return {
        "schema_version": 1,
        "name": "even",
        "layers": [{"name": f"l{i}", "parameter_bytes": 1000} for i in range(LAYERS)],
        "boundaries": [[{"name": f"x{i}", "bytes_per_sample": 10, "gradient_bytes_per_sample": 10}] for i in range(3)],
        "measurements": [{"device_kind": "cpu", "micro_batch_size": 1, "layers": [layer] * LAYERS}],
        "source": {"method": "measured", "expected_error": 0.15},
    }


def _topology(memory: str = "1 MiB", devices: int = 2) -> str:
    return f"""
schema_version: 1
name: few
uniform:
  nodes: 1
  devices_per_node: {devices}
  kind: cpu
  memory_bytes: {memory}
  fabric: {{bandwidth_bytes_per_s: 10 GB/s}}
"""


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    (tmp_path / "p.json").write_text(json.dumps(_profile()))
    (tmp_path / "t.yaml").write_text(_topology())
    return ["--profile", str(tmp_path / "p.json"), "--topology", str(tmp_path / "t.yaml"), "--global-batch-size", "8"]


@pytest.fixture
def plan(inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    path = str(tmp_path / "plan.json")
    options = ["--planner", "gpipe", "--set", "stages=2", "--micro-batch-size", "1"]
    assert main(["plan", *inputs, *options, "-o", path]) == 0
    capsys.readouterr()
    return path


def test_plan_prints_what_it_found(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "PROGRESS_S", math.inf)  # a busy machine may take longer than the first line waits
    code = main(["plan", *inputs, "--verbose", "-o", str(tmp_path / "plan.json")])
    out, err = capsys.readouterr()
    file = PlanFile.read(tmp_path / "plan.json")
    assert code in (0, 2)
    assert err == ""
    assert file.plan.prediction is not None
    for words in ("even on few", "predicted", "± 15.0 % (measured costs)", "bound", "gap", "|", "few/0"[-2:]):
        assert words in out
    assert all(len(line) <= 110 for line in out.splitlines() if "|" in line)


def test_who_was_not_asked_is_seen_in_a_terminal_in_json_and_in_the_report(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clause = "not asked, as the request names no target: uniform"
    plan, page = tmp_path / "plan.json", tmp_path / "plan.html"
    assert main(["plan", *inputs, "--planner", "auto", "--effort", "quick", "-v", "-o", str(plan)]) == 0
    assert f"\n  {clause}\n" in capsys.readouterr().out, "a line of its own"
    assert clause in json.loads(plan.read_text())["why"]
    assert main(["report", str(plan), "-o", str(page)]) == 0
    assert f"<li>{clause}</li>" in page.read_text()


def test_json_is_pure_and_is_the_plan_written(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    code = main(["plan", *inputs, "--json", "-o", str(path)])
    result = ResultOut.model_validate_json(capsys.readouterr().out)
    assert result.plan == PlanFile.read(path).plan
    assert code == 0
    assert main(["plan", *inputs, "--require-optimal"]) == {"optimal": 0, "feasible": 2}[result.status]
    assert main(["plan", *inputs, "--json"]) == 0


def test_a_plan_on_standard_output_can_be_piped(
    inputs: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *inputs, "-o", "-"]) == 0
    text = capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["verify", "-"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.tier("nightly")
def test_infeasible_is_3_and_says_what_is_missing(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.yaml").write_text(_topology("2000 B"))
    path = tmp_path / "plan.json"
    assert main(["plan", *inputs, "-o", str(path)]) == 3
    out = capsys.readouterr().out
    assert "infeasible" in out
    assert "few" in out or "node0/" in out
    assert not path.exists()


def test_a_request_file_is_overridden_by_options(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = tmp_path / "r.yaml"
    request.write_text("global_batch_size: 4\nplanner: dp\nmemory: {optimizer: sgd, headroom_bytes: 1 KiB}\n")
    arguments = ["plan", "--request", str(request), *inputs[:4], "--optimizer", "momentum", "--json"]
    assert main([*arguments, "-o", str(tmp_path / "plan.json")]) == 0
    file = PlanFile.read(tmp_path / "plan.json")
    assert (file.request.global_batch_size, file.plan.planner) == (4, "dp")
    assert file.request.memory.optimizer == "momentum"
    assert file.request.memory.headroom_bytes == 1024
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--planner", "daple"], 64, "dapple"),
        (["--set", "stages=2"], 64, "stages"),
        (["--planner", "gpipe", "--set", "stages=9"], 65, "between 1 and 2"),
        (["--planner", "gpipe", "--set", "stages"], 64, "OPTION=VALUE"),
        (["--schedule", "1f2b"], 64, "1f2b"),
        (["--recompute", "perhaps"], 64, "--recompute: Input should be"),
        (["--network", "fast"], 64, "--network: "),
        (["--optimizer", "adagrad"], 64, "--optimizer: "),
        (["--micro-batch-size", "9"], 65, "exceed the global batch"),
        (["--micro-batch-size", "0"], 64, "--micro-batch-size: "),
        (["--time-limit", "-1"], 64, "is not a duration; write 90 (seconds), 10s, 5min, 1h30min or 2d"),
        (["--time-limit", "12d"], 64, "is not between 0s and 11d"),
        (["--gap", "-1"], 64, "--gap: "),
        (["--seed", "-1"], 64, "--seed: "),
    ],
)
def test_wrong_options(
    options: list[str], code: int, words: str, inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *inputs, *options]) == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_no_time_at_all_is_a_limit_that_has_passed(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *inputs, "--time-limit", "0", "--json"]) == 4
    result = ResultOut.model_validate_json(capsys.readouterr().out)
    assert (result.status, result.plan) == ("time_limit", None)
    assert re.search("the time limit came before|limit of 0 s was over", result.sentence)


def test_compare_gives_the_agreed_keys(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Two devices share eight samples of 4 × 0.3 ms: no plan is faster than 4.8 ms, and data parallel is near it."""
    assert main(["compare", *inputs, "--max-plans", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["planner"] for row in rows} >= {"dp", "gpipe", "model-parallel", "dapple", "auto"}
    assert all(list(row) == KEYS for row in rows)
    by_planner = {row["planner"]: row for row in rows}
    assert by_planner["auto"]["iteration_ns"] == min(row["iteration_ns"] for row in rows if row["iteration_ns"])
    assert all(row["iteration_ns"] >= 4_800_000 for row in rows if row["iteration_ns"])
    assert all(row["why"] for row in rows)
    assert main(["compare", *inputs, "--planner", "dp"]) == 0
    out = capsys.readouterr().out
    assert "dp" in out
    assert "dapple" not in out


def test_verify_is_silent_when_good_and_says_each_fault(
    plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", plan]) == 0
    assert capsys.readouterr() == ("", "")
    document = json.loads(Path(plan).read_text())
    document["plan"]["prediction"]["time_per_global_batch_ns"] += 10**6
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(document))
    assert main(["verify", str(bad)]) == 1
    assert "the judge finds" in capsys.readouterr().out
    document["plan"]["pipelines"][0]["stages"][0]["layers"] = [0, 0]
    bad.write_text(json.dumps(document))
    assert main(["verify", str(bad)]) == 1
    assert capsys.readouterr().out.strip()


def test_simulate_shows_and_exports(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "chrome.json"
    assert main(["simulate", plan, "--chrome-trace", str(trace)]) == 0
    assert "F0" in capsys.readouterr().out
    events = json.loads(trace.read_text())["traceEvents"]
    forwards = [event for event in events if event["ph"] == "X" and event["cat"] == "forward"]
    assert len(forwards) == 2 * 8, "two stages, eight micro-batches"
    assert main(["simulate", plan, "--json"]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["time_per_global_batch_ns"] == PlanFile.read(plan).plan.prediction.time_per_global_batch_ns  # type: ignore[union-attr]


def test_simulate_refuses_what_has_no_meaning(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(Path(plan).read_text())
    document["plan"]["schedule"]["rows"][0]["text"] = "B0 F0"
    Path(plan).write_text(json.dumps(document))
    assert main(["simulate", plan]) == 1
    assert "the plan cannot be simulated" in capsys.readouterr().err


def test_explain_without_what_ifs_is_short_and_names_what_binds(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", plan, "--what-if", "none"]) == 0
    out = capsys.readouterr().out
    for words in (
        "busiest device",
        "binds",
        "critical path of one step",
        "how the devices spend their time",
        "10 % less time",
    ):
        assert words in out
    assert len(out.splitlines()) <= 60
    assert all(len(line) <= 110 for line in out.splitlines() if "ms" in line and line.startswith(" "))


def test_report_writes_one_file(plan: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert main(["report", plan, "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "even on few" in text


NODE = (
    "node{} -- {} -- forward_compute_time={}, backward_compute_time=3.0, activation_size=4000.0, parameter_size=8.0\n"
)


def test_import_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The micro-batch size stands in the file's name, unless it is given."""
    text = tmp_path / "net_pbs4.txt"
    lines = NODE.format(1, "Input0", 0.0) + NODE.format(2, "Linear", 1.5) + NODE.format(3, "Linear", 1.5)
    text.write_text(lines + "\tnode1 -- node2\n\tnode2 -- node3\n")
    out = tmp_path / "p.json"
    assert main(["import", "profile", str(text), "-o", str(out), "--name", "net"]) == 0
    profile = ModelProfile.read(out)
    assert (profile.name, profile.measurements[0].micro_batch_size) == ("net", 4)
    assert [layer.forward_ns for layer in profile.measurements[0].layers] == [1_500_000, 1_500_000]
    assert "net: 2 layers, 1 cuts" in capsys.readouterr().out
    plain = text.rename(tmp_path / "net.txt")
    assert main(["import", "profile", str(plain), "-o", str(out)]) == 64
    assert "how many samples the times" in capsys.readouterr().err
    assert main(["import", "profile", str(plain), "--micro-batch-size", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "net"


def test_analytic_profile_then_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "p.json")
    assert main(["profile", "--job", "examples.gpt:tiny", "--analytic", "V100", "-o", out]) == 0
    assert "analytic" in capsys.readouterr().out
    arguments = ["plan", "--profile", out, "--cluster", "2xV100", "-b", "16", "--planner", "dp"]
    assert main(arguments) == 0
    assert "± 35.0 % (analytic costs)" in capsys.readouterr().out


def test_run_trains_on_real_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = str(tmp_path / "p.json")
    sizes = ["--micro-batch-size", "4"]
    assert main(["profile", "--job", "examples.gpt:tiny", "--analytic", "V100", *sizes, "-o", profile]) == 0
    plan, trace, chrome = (str(tmp_path / name) for name in ("plan.json", "trace.json", "chrome.json"))
    arguments = ["plan", "--profile", profile, "--cluster", "2xV100", "-b", "16", *sizes, "--planner", "gpipe"]
    assert main([*arguments, "--set", "stages=2", "-o", plan]) == 0
    capsys.readouterr()
    command = ["run", plan, "--job", "examples.gpt:tiny", "--steps", "3", "--check", "--trace-steps", "2"]
    assert main([*command, "--trace", trace, "--chrome-trace", chrome]) == 0
    out = capsys.readouterr().out
    for words in ("starting 2 ranks", "measured", "predicted", "gradients  0 apart"):
        assert words in out
    page = tmp_path / "report.html"
    assert main(["report", plan, "--trace", trace, "-o", str(page)]) == 0
    assert "Predicted and measured timeline" in page.read_text(encoding="utf-8")
    assert json.loads(Path(chrome).read_text())["traceEvents"]
    ranks = json.loads(Path(trace).read_text())["ranks"]
    assert sorted((one["rank"], one["step"]) for one in ranks) == [(0, 1), (0, 2), (1, 1), (1, 2)]


@pytest.mark.tier("nightly")
def test_run_refuses_another_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, plan = str(tmp_path / "p.json"), str(tmp_path / "plan.json")
    assert main(["profile", "--job", "examples.gpt:tiny", "--analytic", "V100", "-o", profile]) == 0
    arguments = ["plan", "--profile", profile, "--cluster", "2xV100", "-b", "64", "--planner", "gpipe"]
    assert main([*arguments, "-o", plan]) == 0
    capsys.readouterr()
    assert main(["run", plan, "--job", "examples.gpt:job"]) == 1
    assert "layer" in capsys.readouterr().err


def test_agent_settings_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["agent", "--server", "nowhere", "--job", "gpt=examples.gpt:job"]) == 65
    assert "write http://host:port" in capsys.readouterr().err
    assert main(["agent", "--server", "http://127.0.0.1:1", "--job", "gpt"]) == 64
    assert "KEY=MODULE:ATTRIBUTE" in capsys.readouterr().err


def test_serve_refuses_to_be_open_to_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "0.0.0.0"]) == 65
    assert "can be reached from other machines" in capsys.readouterr().err


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (
            "--cluster 4x1xV100 -b 32 --micro-batch-size 4 --update-rule weight_stashing --pin 0-6=node0/0"
            " --pin 7-13=node1/0,node2/0,node3/0 --require-optimal",
            2,
        ),
        ("--cluster 2x1xV100 -b 8 --planner relax --pin 0-13=node0/0 --require-optimal", 0),
    ],
)
def test_pins_that_stages_of_their_own_keep_have_a_plan(
    command: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the second one, whose layers are all pinned to one device, the bound says that it is the best."""
    assert main(["plan", "--example", "gpt2-small", *command.split()]) == code
    assert "/step ± 35.0 % (analytic costs)" in capsys.readouterr().out


def test_a_planner_that_finds_nothing_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """One V100 does not hold the model, four do: ``dp`` finds no plan, which is 4; of one device that is proven: 3."""
    arguments = ["plan", "--example", "gpt2-xl", "-b", "8", "--micro-batch-size", "1", "--planner", "dp"]
    assert main([*arguments, "--cluster", "1x4xV100"]) == 4
    assert "none_found: no plan was found that fits; it is not proven that none exists" in capsys.readouterr().out
    assert main([*arguments, "--cluster", "1x1xV100"]) == 3
    assert "infeasible: there is no plan: " in capsys.readouterr().out
