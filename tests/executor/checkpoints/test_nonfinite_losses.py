"""A loss or a parameter that is not finite: reported once, and the run fails unless it may go on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import run_jobs
from pipelines import Part, programs_of
from rank_pool import RankPool

from penstock.executor.checkpoints.checkpoint import read
from penstock.executor.run import unattended
from penstock.executor.run.rank_programs import Work
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import NonfiniteLoss

TWO = [Part(3, (0,)), Part(3, (1,))]


def run(pool: RankPool, job: str, steps: int, directory: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the last events of two ranks that save after each step and keep one checkpoint."""
    programs = programs_of(getattr(run_jobs, job), TWO, 4)
    options = {"checkpoint_directory": str(directory), "checkpoint_every": 1, "keep_checkpoints": 1, **options}
    return pool.train(programs, f"run_jobs:{job}", steps=steps, check=False, options=options)


def warnings(results: list[dict[str, Any]]) -> list[str]:
    return [event["text"] for one in results for event in one["events"] if event["kind"] == "warning"]


def kept(directory: Path) -> dict[str, bool]:
    """Return the existing checkpoints, and whether they are finite."""
    return {one.name: read(one).about.is_finite for one in sorted(directory.glob("step-*"))}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("job", "what"), [("nan_at_2", "nan"), ("infinite_at_2", "inf")])
def test_the_run_ends_at_the_first_one(pool: RankPool, tmp_path: Path, job: str, what: str) -> None:
    results = run(pool, job, 5, tmp_path)
    assert [one["kind"] for one in results] == ["failed", "failed"]
    for one in results:
        assert one["error"] == "NonfiniteLoss"
        assert f"the loss of step 2 is {what}: training ends after 3 steps" in one["detail"]
        assert str(tmp_path / "step-2") in one["detail"], "where a run can go on"
        assert "--allow-nonfinite-loss" in one["remedy"]
    assert warnings(results) == [f"the loss of step 2 is {what}"]
    assert kept(tmp_path) == {"step-2": True}


def test_a_run_that_may_goes_on_and_keeps_the_last_finite_one(pool: RankPool, tmp_path: Path) -> None:
    results = run(pool, "nan_at_2", 5, tmp_path / "saved", allow_nonfinite_loss=True, metrics_path=str(tmp_path / "m"))
    assert [one["kind"] for one in results] == ["done", "done"]
    assert [math.isfinite(loss) for loss in results[0]["losses"]] == [True, True, False, False, False]
    assert warnings(results) == ["the loss of step 2 is nan"]
    assert kept(tmp_path / "saved") == {"step-2": True, "step-5": False}
    lines = [json.loads(line)["loss"] for line in (tmp_path / "m").read_text().splitlines()]
    assert lines[2:] == ["NaN", "NaN", "NaN"]
    assert math.isnan(float(lines[2]))


def test_a_single_infinite_loss_is_over_with_the_next_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    run(pool, "infinite_at_2", 3, tmp_path, allow_nonfinite_loss=True)
    assert kept(tmp_path) == {"step-2": True, "step-3": False}
    run(pool, "infinite_at_2", 4, tmp_path, allow_nonfinite_loss=True, resume=True)
    assert kept(tmp_path) == {"step-4": True}


def test_parameters_that_are_not_finite_end_the_run_too(pool: RankPool, tmp_path: Path) -> None:
    """The loss of the step that spoils them is finite: they would be the last thing that is saved."""
    results = run(pool, "exploding", 3, tmp_path)
    assert [one["kind"] for one in results] == ["failed", "failed"]
    assert "a parameter is not finite after 3 steps" in results[0]["detail"]
    assert kept(tmp_path) == {"step-2": True, "step-3": False}


def test_it_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same steps would come to the same."""
    tries: list[Any] = []

    def diverge(*arguments: Any, **more: Any) -> Any:
        tries.append(arguments)
        raise NonfiniteLoss("the loss of step 2 is nan")

    monkeypatch.setattr(unattended, "run_locally", diverge)
    options = RunOptions(checkpoint_directory=str(tmp_path), checkpoint_every=1)
    with pytest.raises(NonfiniteLoss):
        unattended.run_unattended(
            lambda checkpoint: Work((), None, 0), "run_jobs:nan_at_2", options=options, restarts=3
        )
    assert len(tries) == 1
