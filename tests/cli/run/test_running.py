"""``penstock run``: flags that do not go together are refused by name, before anything is read or started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.run import running
from penstock.cli.run.running import other_devices, other_numbers
from penstock.cli.show import Screen
from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import MissingExtra, UnsupportedRequest
from penstock.schemas.plan import PlanFile

pytestmark = pytest.mark.tier("quick")

REFUSED = [
    pytest.param(["--checkpoint-every", "3"], 65, "checkpoint_every needs a checkpoint_directory", id="no-directory"),
    pytest.param(["--resume", "newest"], 65, "resume needs a checkpoint_directory", id="resume-from-nowhere"),
    pytest.param(["--restarts", "2"], 65, "add --checkpoint DIR", id="restart-from-nowhere"),
    pytest.param(["--check", "--checkpoint", "x", "--resume", "auto"], 65, "leave out --check", id="check-a-resume"),
    pytest.param(["--clip-norm", "0"], 65, "/clip_norm: ", id="norm-of-nothing"),
    pytest.param(["--clip-norm", "nan"], 65, "/clip_norm: ", id="norm-nan"),
    pytest.param(["--precision", "fp8"], 64, "'fp8'", id="unknown-precision"),
    pytest.param(["--resume", "maybe"], 64, "'maybe'", id="unknown-resume"),
    pytest.param(["--staleness", "2"], 64, "less than or equal to 1", id="too-stale"),
    pytest.param(["--steps", "0"], 64, "greater than or equal to 1", id="no-step"),
    pytest.param(["--metrics", "/dev/null/run.jsonl"], 1, "Not a directory", id="metrics-nowhere"),
]


@pytest.mark.tier("ci")
@pytest.mark.parametrize(("flags", "code", "words"), REFUSED)
def test_flags_that_cannot_be_are_refused(
    flags: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "no-such-plan.json", "--job", "mine:job", *flags]) == code
    assert words in capsys.readouterr().err


def test_event_files_without_their_package_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"penstock\[tensorboard\]"):
        running.refuse_combinations(RunOptions(tensorboard_directory="board"), check=False, restarts=0)


def test_what_goes_together_is_not_refused(tmp_path: Path) -> None:
    options = RunOptions(checkpoint_directory=str(tmp_path), resume="auto", tensorboard_directory="board")
    running.refuse_combinations(options, check=False, restarts=3)
    with pytest.raises(UnsupportedRequest, match="--check needs a first step"):
        running.refuse_combinations(options, check=True, restarts=0)


@pytest.mark.parametrize(
    ("options", "first", "steps", "lengths"),
    [
        pytest.param({}, 0, 10, [10], id="one"),
        pytest.param({"checkpoint_every": 4}, 0, 10, [4, 4, 2], id="checkpoints"),
        pytest.param({"checkpoint_every": 4, "evaluate_every": 6}, 0, 12, [4, 2, 2, 4], id="both"),
        pytest.param({"checkpoint_every": 4}, 3, 10, [1, 4, 2], id="after-a-checkpoint-at-another-place"),
        pytest.param({}, 0, 2500, [1000, 1000, 500], id="long"),
        pytest.param({}, 5, 5, [], id="nothing-left"),
    ],
)
def test_a_run_is_cut_at_its_halts(options: dict[str, Any], first: int, steps: int, lengths: list[int]) -> None:
    run_options = RunOptions.parse({"checkpoint_directory": "x", **options})
    assert run_options.segments(first, steps) == lengths


def _planned_for(kind: str) -> PlanFile:
    data = json.loads(json.dumps(tiny_plan_file()).replace('"V100"', json.dumps(kind)))
    return PlanFile.parse(data)


@pytest.mark.parametrize(
    ("kind", "device", "words"),
    [
        ("A100", "cpu", "the plan is for 2 devices of kind A100; here all ranks compute on the CPU"),
        ("8xH100-tp8", "cpu", "of kind 8xH100-tp8"),
        ("A100", "cuda", None),
        ("cpu", "cpu", None),
        ("laptop", "cpu", None),
    ],
)
def test_a_plan_for_gpus_on_the_cpu_is_said_aloud(kind: str, device: str, words: str | None) -> None:
    warning = other_devices(_planned_for(kind), device)
    assert (warning is None) == (words is None)
    assert words is None or (warning is not None and words in warning)


@pytest.mark.parametrize(
    ("dtype", "precision", "warned"),
    [("bf16", "bf16", True), ("fp16", "bf16", True), ("bf16", "fp32", False), ("fp32", "bf16", False)],
)
def test_autocast_over_parameters_in_16_bits_is_said_aloud(dtype: str, precision: str, warned: bool) -> None:
    data = tiny_plan_file()
    data["request"]["profile"]["parameter_dtype"] = dtype
    warning = other_numbers(PlanFile.parse(data), precision)
    assert (warning is not None) == warned
    if warning is not None:
        assert f"parameters in {dtype}, and --precision {precision} is autocast" in warning


def test_a_run_that_has_nothing_left_to_train_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    progress = running.Progress(Screen.of(), PlanFile.parse(tiny_plan_file()), steps=30)
    progress({"kind": "resumed", "step": 20, "directory": "saved/step-20"})
    assert "nothing is left" not in capsys.readouterr().out
    progress({"kind": "resumed", "step": 30, "directory": "saved/step-30"})
    assert "nothing is left to train: --steps 30 counts from the very first start" in capsys.readouterr().out
