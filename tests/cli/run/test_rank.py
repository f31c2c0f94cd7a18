"""``penstock rank``: what is refused before any other process is looked for, and what rank 0 writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.cli.run.rank import Files, Log
from penstock.examples.tiny import tiny_plan_file
from penstock.executor.launched.process import Outcome
from penstock.planning.programs.bundles import make_bundle
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.ranks.bundle import JobBundle, LaunchReport
from penstock.schemas.trace import Trace

LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    PlanFile.parse(tiny_plan_file()).write(path)
    return path


@pytest.fixture(scope="module")
def job(plan: Path) -> Path:
    path = plan.with_name("job.json")
    path.write_bytes(make_bundle(PlanFile.read(plan)).canonical_json())
    return path


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        pytest.param([], 65, "no launcher has started this process", id="no launcher"),
        pytest.param(
            ["--directory", "nowhere"], 65, "--directory 'nowhere' is not a directory on this node", id="directory"
        ),
        pytest.param(["--plan", "plan.json"], 65, "add --trace FILE", id="plan without a trace"),
        pytest.param(["--resume", "auto"], 65, "resume needs a checkpoint_directory", id="resume from nowhere"),
        pytest.param(
            ["--check", "--checkpoint", "x", "--resume", "auto"], 65, "leave out --check", id="check a resume"
        ),
        pytest.param(["--device", "tpu"], 64, "'tpu'", id="unknown device"),
        pytest.param(["--steps", "0"], 64, "greater than or equal to 1", id="no step"),
    ],
)
def test_what_cannot_be_is_refused_at_once(
    flags: list[str],
    code: int,
    words: str,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    assert main(["rank", str(job), "--job", "mine:job", "--steps", "3", *flags]) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param(None, "try: penstock export PLAN --to bundle -o job.json, on a file system that all", id="none"),
        pytest.param('{"schema_version": 1, "ranks": [', "is not JSON", id="truncated"),
        pytest.param('{"schema_version": 1, "ranks": []}', "has written, all of it", id="another document"),
    ],
)
def test_a_bundle_that_is_none(
    text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    if text is not None:
        path.write_text(text)
    assert main(["rank", str(path), "--job", "mine:job", "--steps", "3"]) == 65
    assert words in capsys.readouterr().err


def outcome(job: JobBundle) -> Outcome:
    """Return the outcome of rank 0 after two steps, the last of which was traced."""
    report = LaunchReport.parse(
        {
            "plan_hash": job.plan_hash,
            "launcher": "srun",
            "model": "mine:job",
            "state": "succeeded",
            "first_step": 0,
            "steps_done": 2,
            "losses": [2.0, "NaN"],
            "step_times_ns": [7],
            "ranks": [],
        }
    )
    traced = {"rank": 0, "device": "node0/0", "step": 1, "events": []}
    return Outcome(0, report, (traced,))


@pytest.mark.tier("quick")
def test_rank_0_writes_report_and_trace(job: Path, plan: Path, tmp_path: Path) -> None:
    bundle = JobBundle.read(job)
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    files = Files(str(report), str(trace), str(plan))
    files.refuse_unwritable()
    files.write(bundle, Outcome(0))
    assert not report.exists(), "another rank"
    files.write(bundle, outcome(bundle))
    assert LaunchReport.read(report).losses == (2.0, "NaN")
    written = Trace.read(trace)
    assert (written.losses, written.plan_file) == ((2.0,), PlanFile.read(plan))
    with pytest.raises(UnsupportedRequest, match=r"cannot write .*report.json': Not a directory"):
        Files(str(trace / "report.json"), None, None).refuse_unwritable()


@pytest.mark.tier("quick")
def test_progress_is_a_line_a_second_and_all_that_is_rare(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = iter((0.0, 0.4, 1.1, 1.2))
    monkeypatch.setattr("time.monotonic", lambda: next(now_s))
    log = Log(JobBundle.read(job), 4)
    events: list[dict[str, Any]] = [{"kind": "step", "step": i, "loss": 1.5, "time_ns": 10**9} for i in range(4)]
    events += [
        {"kind": "resumed", "step": 2, "directory": "d"},
        {"kind": "checkpoint", "step": 4, "directory": "d/step-4"},
        {"kind": "evaluation", "step": 4, "loss": 0.25},
        {"kind": "rung", "step": 4, "index": 1},
        {"kind": "warning", "step": 4, "text": "a full disk"},
        {"kind": "done"},
    ]
    for event in events:
        log(event)
    assert capsys.readouterr().out.splitlines() == [
        "step 1 of 4, loss 1.5, 16 samples/s",
        "step 3 of 4, loss 1.5, 16 samples/s",
        "step 4 of 4, loss 1.5, 16 samples/s",
        "resuming at step 2 from d",
        "checkpoint after 4 steps: d/step-4",
        "evaluation after 4 steps: loss 0.250000",
        "after 4 steps: δ = 1 forwards in advance",
        "warning: a full disk",
    ]
