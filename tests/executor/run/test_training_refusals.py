"""The refusals of a run, and the places where it stops: one rank, in this process."""

from __future__ import annotations

import gc
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import run_jobs
import small_jobs
import torch.distributed as dist
from assigned import assigned
from pipelines import Part, programs_of
from rank_pool import JOBS
from torch._C._distributed_c10d import TCPStore

from penstock.executor.checkpoints.checkpoint import CheckpointFailed, newest
from penstock.executor.checkpoints.outputs import Outputs
from penstock.executor.run import chain, rank_main
from penstock.executor.run.rank_main import Rank
from penstock.executor.torch_versions import refuse_unfit_torch, untried
from penstock.schemas.errors import InvalidDocument, ModelMismatch, NotFound, PenstockError, UnsupportedRequest

ONE = [Part(6, (0,))]


def run(job: Any, where: str, *, steps: int = 1, **options: Any) -> list[dict[str, Any]]:
    """Run one rank in this process; return its events."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    fields = {name: options.pop(name) for name in ("seed", "first_step", "segments", "outputs") if name in options}
    events: list[dict[str, Any]] = []
    assignment = assigned(
        store=f"127.0.0.1:{store.port}",
        prefix="alone",
        programs=(programs_of(job, ONE, 2)[0].to_json(),),
        job=where,
        directory=str(JOBS),
        steps=steps,
        options=options,
        **fields,
    )
    try:
        Rank(assignment, events.append, give_up=lambda error: None).run()
    finally:
        gc.unfreeze()
        if dist.is_initialized():
            dist.destroy_process_group()
    return events


def trained(job: str, **more: Any) -> list[dict[str, Any]]:
    return run(getattr(run_jobs, job), f"run_jobs:{job}", **more)


@contextmanager
def unlimited_afterwards() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    trained("momentum", checkpoint_directory=str(place))
    return place


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("job", "more", "error", "words"),
    [
        pytest.param("widened", {}, ModelMismatch, r"parameter 'block.3.up.weight' is \(16, 8\)", id="other-shape"),
        pytest.param("renamed", {}, ModelMismatch, r"it has no parameter 'head.norm.weight'", id="other-layer"),
        pytest.param(
            "adam",
            {},
            ModelMismatch,
            r"parameter 'block.* has optimizer SGD in the checkpoint, but Adam in the job",
            id="other-optimizer",
        ),
        pytest.param("momentum", {"seed": 6}, InvalidDocument, "a run with seed 5, but this run has 6", id="seed"),
        pytest.param("momentum", {"first_step": 4}, InvalidDocument, "start at step 4", id="other-step"),
        pytest.param(
            "momentum", {"segments": [0, 0, 0]}, InvalidDocument, "has 2 segments; .* there are 1", id="segments"
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    saved: Path, job: str, more: dict[str, Any], error: type[PenstockError], words: str
) -> None:
    with pytest.raises(error, match=words):
        trained(job, steps=3, resume=True, checkpoint_directory=str(saved), **more)


def test_what_is_trained_already_is_not_trained_again(saved: Path) -> None:
    events = trained("momentum", steps=1, resume=True, checkpoint_directory=str(saved))
    assert [event["kind"] for event in events] == ["resumed", "ready", "done"]
    assert events[-1]["losses"] == []


def test_nothing_to_resume_from_is_said(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no complete checkpoint in"):
        trained("momentum", resume=True, checkpoint_directory=str(tmp_path))
    assert trained("momentum", resume="auto", checkpoint_directory=str(tmp_path))[-1]["first_step"] == 0


def test_a_damaged_checkpoint_is_told_and_an_older_one_taken(tmp_path: Path) -> None:
    trained("momentum", steps=2, checkpoint_every=1, checkpoint_directory=str(tmp_path))
    shard = tmp_path / "step-2" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-100])
    events = trained("momentum", steps=3, resume=True, checkpoint_directory=str(tmp_path))
    warned = [event["text"] for event in events if event["kind"] == "warning"]
    assert len(warned) == 1
    assert "'__0_0.distcp' is damaged" in warned[0]
    assert events[-1]["first_step"] == 1


def test_a_checkpoint_whose_numbers_are_gone_is_refused(tmp_path: Path) -> None:
    """As long as before, but not what was written."""
    trained("momentum", checkpoint_directory=str(tmp_path))
    numbers = tmp_path / "step-1" / "__0_0.distcp"
    numbers.write_bytes(bytes(numbers.stat().st_size))
    with pytest.raises(NotFound, match=r"step-1' is damaged: its SHA-256 says that '__0_0\.distcp' changed"):
        trained("momentum", steps=2, resume=True, checkpoint_directory=str(tmp_path))


def test_a_last_checkpoint_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    with unlimited_afterwards(), pytest.raises(CheckpointFailed, match=r"of step 2 could not be written .*too large"):
        trained("full_disk", steps=2, checkpoint_every=1, checkpoint_directory=str(tmp_path))
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.about.step == 1


@pytest.mark.cases(1)
@pytest.mark.parametrize("option", ["checkpoint_directory", "metrics_path", "tensorboard_directory"])
def test_a_place_that_cannot_be_written_is_refused_before_training(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedRequest, match=r"cannot be written to '.*/file/x': Not a directory"):
        trained("momentum", **{option: str(tmp_path / "file" / "x")})


@pytest.mark.cases(1)
@pytest.mark.parametrize("option", ["checkpoint_directory", "metrics_path", "tensorboard_directory"])
def test_a_link_out_of_the_allowed_directories_is_refused(tmp_path: Path, option: str) -> None:
    """The agent's check is past: the link may have been made since."""
    outside, shared = tmp_path / "outside", tmp_path / "shared"
    outside.mkdir()
    shared.mkdir()
    (shared / "link").symlink_to(outside)
    with pytest.raises(UnsupportedRequest, match=r"link/here' leads to '.*/outside/here', which is outside of"):
        trained("momentum", outputs=[str(shared)], **{option: str(shared / "link" / "here")})
    assert list(outside.iterdir()) == []
    trained("momentum", outputs=[str(shared)], **{option: str(shared / "here")})
    assert (shared / "here").exists()


def test_a_directory_that_became_a_link_is_not_written_to(tmp_path: Path) -> None:
    outputs = Outputs.parse([str(tmp_path / "shared")])
    place = outputs.place(str(tmp_path / "shared" / "run"))
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "run").symlink_to(tmp_path / "shared" / "other")
    with pytest.raises(UnsupportedRequest, match="has been replaced by a symbolic link to"):
        outputs.refuse_moved(place)
    Path(place).unlink()
    Path(place).symlink_to(tmp_path / "outside")
    with pytest.raises(UnsupportedRequest, match="which is outside of"):
        outputs.refuse_moved(place)


def test_a_job_without_evaluation_is_refused() -> None:
    with pytest.raises(UnsupportedRequest, match="'plain' cannot be evaluated"):
        run(small_jobs.plain, "small_jobs:plain", evaluate_every=1)


def test_a_torch_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "refuse_unfit_torch", partial(refuse_unfit_torch, "2.8.0"))
    with pytest.raises(UnsupportedRequest, match=r"^torch 2\.8\.0 is too old"):
        trained("momentum")


def test_a_torch_that_was_not_tried_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_main, "untried", partial(untried, "2.99.0"))
    events = trained("momentum", steps=2)
    assert [event["text"] for event in events if event["kind"] == "warning"] == [untried("2.99.0")]
    assert events[-1]["kind"] == "done"


def test_options_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InvalidDocument, match=r"(?s)resume needs a checkpoint_directory"):
        trained("momentum", resume=True)
    with pytest.raises(InvalidDocument, match=r"(?s)/precision: .*fp8"):
        trained("momentum", precision="fp8")


def test_a_loss_that_is_not_finite_is_written_as_such(tmp_path: Path) -> None:
    trained("diverging", steps=1, allow_nonfinite_loss=True, metrics_path=str(tmp_path / "run.jsonl"))
    assert json.loads((tmp_path / "run.jsonl").read_text())["loss"] == "NaN"
