"""Ranks that die are started again from the newest checkpoint, and the loss curve goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import run_jobs
from orphans import no_orphans
from pipelines import Part, programs_of
from rank_pool import JOBS, SEED
from test_training import plain

from penstock.executor.checkpoints.checkpoint import Checkpoint
from penstock.executor.run.rank_programs import Work
from penstock.executor.run.unattended import run_unattended
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument, RunFailed

pytestmark = pytest.mark.tier("nightly")

TWO = [Part(3, (0,)), Part(3, (1,))]
STEPS = 6


def train(tmp_path: Path, restarts: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[dict[str, Any]]]:
    """Run ranks that die once in step 3, when steps 0 and 1 are saved; return the report and the events."""
    note = tmp_path / "death"
    note.write_text("")
    monkeypatch.setenv("PENSTOCK_TEST_DEATH", str(note))
    events: list[dict[str, Any]] = []
    programs = tuple(programs_of(run_jobs.dies_once, TWO, 4))

    def work_after(checkpoint: Checkpoint | None) -> Work:
        return Work((programs,), None, 0 if checkpoint is None else checkpoint.next_step())

    report = run_unattended(
        work_after,
        "run_jobs:dies_once",
        options=RunOptions(checkpoint_directory=str(tmp_path / "saved"), checkpoint_every=2),
        restarts=restarts,
        steps=STEPS,
        seed=SEED,
        directory=JOBS,
        on_progress=events.append,
    )
    return report, events


def test_training_goes_on_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with no_orphans():
        report, events = train(tmp_path, 1, monkeypatch)
    losses, _ = plain(run_jobs.momentum, STEPS, STEPS)
    assert report.losses == pytest.approx(losses, rel=1e-6)
    assert report.first_step == 0
    rare = [(event["kind"], event.get("step")) for event in events if event["kind"] in ("restart", "resumed")]
    assert rare == [("restart", None), ("resumed", 2)]
    (reason,) = [event["reason"] for event in events if event["kind"] == "restart"]
    assert "was killed by SIGKILL in step 3" in reason


@pytest.mark.tier("nightly")
def test_a_death_too_many_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match="was killed by SIGKILL in step 3"):
        train(tmp_path, 0, monkeypatch)
    assert sorted(one.name for one in (tmp_path / "saved").glob("step-*")) == ["step-2"]


@pytest.mark.tier("quick")
def test_restarts_need_checkpoints() -> None:
    with pytest.raises(InvalidDocument, match="no checkpoint directory"):
        run_unattended(lambda _: Work(()), "job:job", options=RunOptions(), restarts=1)
