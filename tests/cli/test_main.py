"""Every way to get it wrong on the command line: one message, the right exit code, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.plan import planning
from penstock.cli.service import remote
from penstock.schemas.plan import PlanFile
from penstock.solvers.model.result import Progress

PROFILE = {
    "schema_version": 1,
    "name": "three",
    "layers": [{"name": f"l{i}", "parameter_bytes": 1000} for i in range(3)],
    "boundaries": [[{"name": f"x{i}", "bytes_per_sample": 10, "gradient_bytes_per_sample": 10}] for i in range(2)],
    "measurements": [
        {
            "device_kind": "cpu",
            "micro_batch_size": 1,
            "layers": [{"forward_ns": 1000, "backward_ns": 2000, "stash_bytes": 100}] * 3,
        }
    ],
    "source": {"method": "analytic", "expected_error": 0.3},
}
TOPOLOGY = """
schema_version: 1
name: two
uniform:
  nodes: 1
  devices_per_node: 2
  kind: cpu
  memory_bytes: 1 MiB
  fabric: {bandwidth_bytes_per_s: 1 GB/s}
"""


@pytest.fixture
def inputs(tmp_path: Path) -> list[str]:
    """The options of a small request."""
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    (tmp_path / "t.yaml").write_text(TOPOLOGY)
    return ["--profile", str(tmp_path / "p.json"), "--topology", str(tmp_path / "t.yaml"), "--global-batch-size", "8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["plan", "--no-such"], "No such option", id="unknown option"),
        pytest.param(["plna"], "No such command", id="unknown command"),
        pytest.param(["verify"], "Missing argument", id="missing argument"),
        pytest.param(["plan"], "missing --profile, --example or --hf, --topology or --cluster", id="no question"),
        pytest.param(["plan", "--global-batch-size", "many"], "valid integer", id="no number"),
        pytest.param(["plan", "--profile", "a", "--example", "b"], "either --profile or --example", id="both"),
        pytest.param(["plan", "--profile", "-", "--topology", "-"], "only one of the files", id="standard input twice"),
        pytest.param(["import", "profile", "x", "--micro-batch-size", "x"], "--micro-batch-size", id="sub-command"),
    ],
)
def test_usage_errors_are_64(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 64
    out, err = capsys.readouterr()
    assert words in err
    assert "Traceback" not in err
    assert out == ""


def _edited(path: Path, **changes: object) -> str:
    path.write_text(json.dumps(PROFILE | changes))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"colour": "red"}, "/colour: Extra inputs are not permitted", id="unknown field"),
        pytest.param({"layers": [], "boundaries": []}, "/layers: Tuple should have at least 1 item", id="empty chain"),
        pytest.param(
            {"boundaries": []}, "boundaries has 0 entries, but 3 layers have 2 boundaries", id="missing boundaries"
        ),
        pytest.param({"schema_version": 2}, "/schema_version", id="another version"),
    ],
)
def test_refused_profiles_are_65(
    changes: dict[str, object], words: str, inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs[1] = _edited(tmp_path / "bad.json", **changes)
    assert main(["plan", *inputs]) == 65
    err = capsys.readouterr().err
    assert words in err
    assert "bad.json" in err


@pytest.mark.parametrize(
    ("place", "other", "words"),
    [
        (1, 3, "t.yaml' is a topology, not a profile\n  try: a topology goes to --topology (-t)"),
        (3, 1, "p.json' is a profile, not a topology\n  try: a profile goes to --profile (-p)"),
    ],
)
def test_a_document_in_the_wrong_place_is_told_its_option(
    place: int, other: int, words: str, inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    inputs[place] = inputs[other]
    assert main(["plan", *inputs]) == 65
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (
            {"model": "gpt2-small", "global_batch_size": 8},
            "/model: Extra inputs are not permitted (given: 'gpt2-small')",
        ),
        ({"plan": {}, "request": {}}, "is a plan file, not a plan request\n  try: `penstock verify`"),
        ({"uniform": {}}, "is a topology, not a plan request\n  try: a topology goes to --topology (-t)"),
    ],
)
def test_a_request_file_that_is_none_is_named(
    document: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(document))
    assert main(["plan", "--request", str(path)]) == 65
    assert words in capsys.readouterr().err


def test_memory_without_its_unit_is_asked_about(inputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    topology = Path(inputs[3])
    topology.write_text(TOPOLOGY.replace("1 MiB", "80"))
    assert main(["plan", *inputs]) == 65
    assert "80 without a unit is 80 B; did you mean 80 GiB or 80 MiB? Write the unit" in capsys.readouterr().err
    topology.write_text(TOPOLOGY.replace("1 MiB", "80 B"))
    assert main(["plan", *inputs]) == 3
    out, _ = capsys.readouterr()
    assert "memory_bytes is 80 bytes; did you mean 80 GiB (85899345920 on the wire, '80 GiB' in YAML)?" in out


def test_a_report_goes_to_the_plan_s_name_unless_told(
    inputs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *inputs, "--planner", "dp", "-o", "made.json"]) == 0
    assert main(["report", "made.json"]) == 0
    assert "writing made.html" in capsys.readouterr().err
    assert (tmp_path / "made.html").read_text().startswith("<!")
    assert main(["report", "-"]) == 64
    assert "name the report's file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a list"),
        ('{"name": NaN}', "NaN is not valid in JSON"),
        ('{"name": 1, "name": 2}', "given twice"),
        ("node1 -- Conv2d -- forward_compute_time=1", "penstock import profile"),
    ],
)
def test_what_is_no_document_is_65(
    text: str, words: str, inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / ("graph.txt" if text.startswith("node") else "p.json")
    path.write_text(text)
    inputs[1] = str(path)
    assert main(["plan", *inputs]) == 65
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-p", "gpt2-small", "--cluster", "1x2xV100"], 65, "No such file or directory\n  try: --example gpt2-small"),
        (["--example", "gpt2-small", "-t", "2x4xV100"], 65, "No such file or directory\n  try: --cluster 2x4xV100"),
        (["--example", "gpt2-small", "--cluster", "2x4"], 64, "say of which kind the devices are: 2x4xA100"),
        (["--example", "gpt2-small", "--cluster", "1x2xV100", "--planner", "zb-v"], 64, "'zb-v' is a schedule"),
        (
            ["--example", "gpt2-small", "--cluster", "1x2xV100", "--planner", "1f1b"],
            64,
            "schedule, did you mean 'early-b",
        ),
        (["--example", "gpt2-small", "--cluster", "1x2xV100", "--server", "here:1"], 1, "its scheme: http://here:1"),
        (["--example", "bert-480", "--cluster", "8x8xH100"], 64, "bert-48"),
        (["--example", "bert-48", "--cluster", "8x8xH900"], 64, "H900"),
        (["--example", "bert-48", "--cluster", "0x8xH100"], 65, "at least 1"),
        (
            ["--example", "bert-48", "--cluster", "1x2xcpu"],
            64,
            "`penstock probe -o here.json` writes one of this machine",
        ),
    ],
)
def test_unknown_names_are_told_the_nearest(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--global-batch-size", "8", *arguments]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "FILE", "--job", "job"], 65, "'job' does not name a job; write module:attribute"),
        (["export", "FILE", "--to", "slurm"], 64, "there is no export format 'slurm'; did you mean 'sbatch'?"),
        (["export", "FILE", "--to", "html"], 64, "did you mean 'report'?"),
        (["import", "profile", "FILE"], 65, "is JSON, not a profile text of PipeDream or DAPPLE"),
    ],
)
def test_what_is_meant_is_told_before_anything_starts(
    arguments: list[str], code: int, words: str, inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([inputs[1] if word == "FILE" else word for word in arguments]) == code
    assert words in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.json")
    for command in (["verify", missing], ["simulate", missing], ["report", missing, "-o", "x"], ["explain", missing]):
        assert main(command) == 65
        assert missing in capsys.readouterr().err


def test_an_unexpected_error_asks_to_be_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(source: str) -> None:
        raise KeyError("no such thing")

    monkeypatch.setattr(remote, "read_plan", broken)
    assert main(["verify", "x"]) == 70
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "penstock: internal error: KeyError: 'no such thing'",
        "  please report it; PENSTOCK_DEBUG=1 shows where",
    ]
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert main(["verify", "x"]) == 70
    assert "Traceback" in capsys.readouterr().err


def _read_by_nobody(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose standard output is a pipe that its reader has closed."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *command],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize("command", [("--help",), ("export", "--help"), ("keys", "--help")])
def test_a_reader_that_has_left_is_no_failure(command: tuple[str, ...]) -> None:
    done = _read_by_nobody(*command)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_has_left_hides_no_failure(tmp_path: Path) -> None:
    done = _read_by_nobody("verify", str(tmp_path / "none.json"))
    assert done.returncode == 65
    assert "none.json" in done.stderr


def test_a_broken_pipe_of_our_own_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(source: str) -> None:
        raise BrokenPipeError(32, "of a child")

    monkeypatch.setattr(remote, "read_plan", broken)
    assert main(["verify", "x"]) == 70
    assert "internal error: BrokenPipeError" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(source: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(remote, "read_plan", interrupted)
    assert main(["verify", "x"]) == 130
    assert capsys.readouterr().err == "penstock: interrupted\n"


def test_an_interrupted_search_writes_its_best_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(reporter: planning.Reporter, _progress: Progress) -> None:
        if reporter.best is not None:
            raise KeyboardInterrupt

    monkeypatch.setattr(planning.Reporter, "progress", interrupted)
    plan = tmp_path / "plan.json"
    arguments = ["--example", "gpt2-small", "--cluster", "1x2xV100", "-b", "16", "--planner", "auto", "--workers", "1"]
    assert main(["plan", *arguments, "-o", str(plan)]) == 130
    streams = capsys.readouterr()
    assert streams.err.endswith("penstock: interrupted\n")
    assert streams.out.splitlines()[-1] == f"the best plan so far, by even, is written to {plan}"
    assert main(["verify", str(plan)]) == 0
    assert main(["plan", *arguments]) == 130
    assert capsys.readouterr().out.endswith("the best plan so far, by even, is lost: -o FILE would have kept it\n")


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("absent", "arguments", "extra"),
    [
        ("numba", ["plan", "--example", "bert-48", "--cluster", "dapple-config-a", "-b", "8"], "solvers"),
        ("fastapi", ["serve"], "service"),
        ("torch", ["profile", "--job", "examples.gpt:tiny"], "executor"),
    ],
)
def test_a_missing_extra_is_named(absent: str, arguments: list[str], extra: str) -> None:
    code = (
        f"import sys; sys.modules[{absent!r}] = None; from penstock.cli.main import main; sys.exit(main({arguments!r}))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 70
    assert absent in done.stderr
    assert f"pip install 'penstock[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -P -m penstock.cli.main --help | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip().count(".") == 2
    assert main(["plan", "--help"]) == 0
    out = capsys.readouterr().out
    for option in ("--profile", "--topology", "--global-batch-size", "--planner", "--schedule", "--time-limit"):
        assert option in out


def test_a_file_that_cannot_be_written(inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["plan", *inputs, "--planner", "dp", "-o", str(tmp_path / "file" / "plan.json")]) == 1
    err = capsys.readouterr().err
    assert "Not a directory" in err
    assert "file/plan.json" in err


def test_the_directory_of_an_output_is_made(inputs: list[str], tmp_path: Path) -> None:
    assert main(["plan", *inputs, "--planner", "dp", "-o", str(tmp_path / "a" / "b" / "plan.json")]) == 0
    assert PlanFile.read(tmp_path / "a" / "b" / "plan.json")
