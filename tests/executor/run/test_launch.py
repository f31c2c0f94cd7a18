"""Ranks started on this machine: what they report, how they fail, and that nothing stays behind."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import small_jobs
from orphans import no_orphans
from pipelines import Part, programs_of
from rank_pool import JOBS

from penstock.executor.run.local import RunReport, run_locally
from penstock.schemas.errors import InvalidDocument, ModelMismatch, NotFound, RunFailed
from penstock.schemas.trace import RankTrace

ONE = [Part(4, (0,))]
TWO = [Part(2, (0,)), Part(2, (1,))]


def run(job: str, parts: list[Part], **more: Any) -> RunReport:
    programs = programs_of(getattr(small_jobs, job), parts, 2)
    arguments = {"directory": JOBS, "steps": 3, "seed": 5, **more}
    return run_locally(programs, f"small_jobs:{job}", **arguments)


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Any:
    with no_orphans():
        yield


def test_a_run_reports_losses_times_traces_and_the_check() -> None:
    events: list[dict[str, Any]] = []
    report = run(
        "masked64", TWO, check=True, trace_steps=2, layers=[f"block.{i}" for i in range(4)], on_progress=events.append
    )
    assert report.gradient_check == 0.0
    assert report.check_failure is None
    assert len(report.losses) == 3
    assert report.warmup_steps == 1
    assert len(report.step_times_ns) == 2
    assert all(size > 0 for size in report.peak_memory_bytes)
    traces = [RankTrace.model_validate(one | {"events": tuple(one["events"])}) for one in report.rank_traces]
    assert [(one.step, one.rank) for one in traces] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    for one in (*report.hardware, *(trace.hardware.model_dump() for trace in traces if trace.hardware is not None)):
        assert (one["kind"], one["ranks"]) == ("cpu", 2)
        assert 0 < one["cpu_ns"] < one["wall_ns"] * one["machine_cores"]
    assert len(report.hardware) == 2
    steps = [(event["step"], event["loss"]) for event in events if event["kind"] == "step"]
    assert steps == list(enumerate(report.losses))
    assert sorted(event["rank"] for event in events if event["kind"] == "ready") == [0, 1]


def test_a_rank_that_is_killed_is_named_with_its_last_instruction() -> None:
    """Rank 1 dies in its fourth forward, the second of step 1; rank 0 waits for it then."""
    with pytest.raises(RunFailed, match=r"rank 1 was killed by SIGKILL in step 1 at instruction \d+ \(1F1\)"):
        run("dying", TWO)


@pytest.mark.tier("nightly")
def test_an_exception_is_told_with_its_words_and_place() -> None:
    with pytest.raises(RunFailed, match=r"rank 0 failed in step 3 at instruction \d+ \(0F0\): ValueError: the seventh"):
        run("failing", ONE, steps=5)


@pytest.mark.tier("nightly")
def test_a_rank_that_hangs_is_named_with_its_line() -> None:
    """Rank 1 hangs in a forward, and rank 0 waits for its gradient: rank 1 is named, and its sleeping child ends."""
    words = r"rank 1 failed in step 0 at instruction 2 \(1F0\): has computed for \d+ s, and waits for no peer"
    with pytest.raises(RunFailed, match=words) as caught:
        run("hanging", TWO, timeout_s=3.0)
    assert 'subprocess.run(["sleep", "1000"], check=True)' in str(caught.value)


def test_a_rank_that_is_stopped_is_named_by_the_one_that_waits_for_it() -> None:
    """Its own watchdog is stopped, too; it is killed with the others."""
    with pytest.raises(RunFailed, match=r"rank 0 failed in step 1 at .*timed out: rank 1 sent nothing for") as caught:
        run("stopping", TWO, timeout_s=2.0)
    assert "rank 1 is still in step 1 at instruction" in str(caught.value)


def test_other_layers_are_refused_before_anything_runs() -> None:
    with pytest.raises(ModelMismatch, match=r"layer 1 .*'block.1'.*'stem'"):
        run("masked64", ONE, layers=["block.0", "stem", "block.2", "block.3"])


@pytest.mark.tier("nightly")
def test_a_callback_that_raises_ends_the_run() -> None:
    """As Ctrl-C does: the exception passes through, the ranks are gone."""

    def interrupt(event: dict[str, Any]) -> None:
        if event["kind"] == "step":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("masked64", ONE, steps=10_000, on_progress=interrupt)


@pytest.mark.tier("nightly")
def test_a_job_that_is_not_there_is_said() -> None:
    programs = programs_of(small_jobs.masked64, ONE, 2)
    with pytest.raises(NotFound, match="rank 0: there is no module 'nowhere'"):
        run_locally(programs, "nowhere:job", directory=JOBS, steps=1, seed=0)


def test_no_step_is_no_run() -> None:
    with pytest.raises(InvalidDocument, match="at least one step, not 0"):
        run("masked64", ONE, steps=0)


LAUNCHER = """
import json, sys
from pathlib import Path
sys.path += json.loads(sys.argv[1])
import small_jobs
from pipelines import Part, programs_of
from penstock.executor.run.local import run_locally
programs = programs_of(small_jobs.masked64, [Part(4, (0,))], 2)
run_locally(programs, "small_jobs:masked64", directory=Path(sys.argv[2]), steps=10**6, seed=0,
            on_progress=lambda event: print(event["kind"], flush=True))
"""


@pytest.mark.tier("nightly")
def test_a_launcher_that_is_killed_takes_its_ranks_with_it() -> None:
    command = [sys.executable, "-c", LAUNCHER, json.dumps([str(JOBS), str(JOBS.parent)]), str(JOBS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        ranks = psutil.Process(launcher.pid).children(recursive=True)
        assert len(ranks) == 1
        launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert alive == []


PROJECT = {
    "schemas/__init__.py": "WIDTH = 8",
    "schemas/errors.py": "class InvalidPlan(Exception): pass",
    "service/__init__.py": "from schemas import WIDTH",
    "service/model.py": """
        from torch import nn
        from schemas import WIDTH
        def build():
            return nn.Linear(WIDTH, WIDTH)
    """,
    "tests/__init__.py": "",
    "executor/__init__.py": "raise RuntimeError('the wrong executor')",
    "torch.py": "raise RuntimeError('the wrong torch')",
    "training.py": """
        import torch
        from penstock.executor.run.job import SimpleJob
        from schemas.errors import InvalidPlan
        from service.model import build
        import tests
        class Job(SimpleJob):
            def layers(self):
                return [(f"layer{i}", build) for i in range(4)]
            def batch(self, step, rows):
                print("a job may print")
                x = torch.stack([torch.full((8,), float(row + step)) for row in rows])
                return {"x": x}, x
            def loss(self, outputs, targets):
                return ((outputs["x"] - targets) ** 2).sum(), len(targets)
            def optimizer(self, params):
                return torch.optim.AdamW(params)
        job = Job("foreign", batch_size=4)
    """,
}


@pytest.mark.tier("nightly")
def test_a_project_with_packages_of_our_names_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory comes last on the path, and ours are all under ``penstock``."""
    for name, text in PROJECT.items():
        place = tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(textwrap.dedent(text))
    job = small_jobs.Regression("foreign", lambda: small_jobs.blocks(4), batch_size=4)
    programs = programs_of(job, ONE, 2)
    report = run_locally(programs, "training:job", directory=tmp_path, steps=2, seed=0, check=True)
    assert report.gradient_check == 0.0
