"""Checkpoints in a directory: complete ones, damaged ones, the newest, and removal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.executor.checkpoints.checkpoint import (
    MARKER,
    About,
    claim,
    create,
    newest,
    partial,
    prepare,
    prune,
    publish,
    read,
    refuse_other_job,
    refuse_superseded,
    survey,
)
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest

pytestmark = pytest.mark.tier("quick")


def about(step: int, batches: int | None = None, *, is_finite: bool = True) -> About:
    batches = step if batches is None else batches
    return About(step, batches, "tiny", 5, "synchronous", 1, 12, None, "2.13.0", is_finite)


def write(
    directory: Path, step: int, batches: int | None = None, text: str = "numbers", *, is_finite: bool = True
) -> Path:
    place = partial(directory, step, "token")
    place.mkdir(parents=True)
    (place / "__0_0.distcp").write_text(text)
    (place / ".metadata").write_text("names")
    return publish(place, about(step, batches, is_finite=is_finite)).directory


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    assert newest(tmp_path / "nowhere") is None
    for step in (9, 10, 2):
        write(tmp_path, step)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.directory == tmp_path / "step-10"
    assert checkpoint.about == about(10)
    assert checkpoint.next_step() == 10
    assert survey(tmp_path).damaged == []


def test_one_that_is_being_written_is_not_seen(tmp_path: Path) -> None:
    place = partial(tmp_path, 3, "token")
    place.mkdir()
    (place / ".metadata").write_text("names")
    assert newest(tmp_path) is None
    assert survey(tmp_path).damaged == []
    prepare(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(
            lambda place: (place / "__0_0.distcp").write_text("num"), "3 of 7 bytes are present", id="truncated"
        ),
        pytest.param(lambda place: (place / "__0_0.distcp").unlink(), "lacks its file '__0_0.distcp'", id="shard-gone"),
        pytest.param(lambda place: (place / MARKER).unlink(), "was not finished", id="no-marker"),
        pytest.param(lambda place: (place / MARKER).write_text("{"), "'complete' is damaged", id="marker-cut"),
        pytest.param(lambda place: (place / MARKER).write_text("{}"), "'complete' is damaged", id="marker-empty"),
    ],
)
def test_a_damaged_one_is_left_out_and_named(tmp_path: Path, harm: object, words: str) -> None:
    write(tmp_path, 1)
    broken = write(tmp_path, 2)
    harm(broken)  # type: ignore[operator]
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.about.step == 1
    (sentence,) = survey(tmp_path).damaged
    assert words in sentence
    assert str(broken) in sentence
    with pytest.raises(InvalidDocument, match="step-2"):
        read(broken)


def test_a_step_written_again_replaces_the_first(tmp_path: Path) -> None:
    write(tmp_path, 4, text="old")
    place = write(tmp_path, 4, text="new")
    assert (place / "__0_0.distcp").read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["step-4"]


def test_old_ones_are_removed_damaged_ones_are_not_counted(tmp_path: Path) -> None:
    for step in range(1, 5):
        write(tmp_path, step)
    (tmp_path / "step-4" / MARKER).unlink()
    (tmp_path / "notes.txt").write_text("mine")
    prune(tmp_path, 2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["notes.txt", "step-2", "step-3", "step-4"]


def test_files_of_the_names_of_what_is_put_aside_are_removed(tmp_path: Path) -> None:
    for name in (".step-3.removed", ".step-4.replaced"):
        (tmp_path / name).write_text("planted")
    for step in (3, 4, 4):
        write(tmp_path, step)
    prune(tmp_path, 1)
    assert [one.name for one in tmp_path.iterdir()] == ["step-4"]


def test_batches_tell_which_is_newer_and_where_to_go_on(tmp_path: Path) -> None:
    """Two pipelines train two global batches a step: their step 6 lies behind step 10 of one pipeline."""
    write(tmp_path, 10)
    write(tmp_path, 6, batches=12)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    assert checkpoint.about.step == 6
    assert checkpoint.next_step() == 12
    assert checkpoint.next_step(5) == 3


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedRequest, match=r"cannot be written to .*file.*: Not a directory"):
        prepare(tmp_path / "file" / "checkpoints")


def test_another_runs_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, 1)
    checkpoint = newest(tmp_path)
    assert checkpoint is not None
    refuse_other_job(checkpoint, job="tiny", seed=5)
    with pytest.raises(InvalidDocument, match="is of a run with seed 5, but this run has 6"):
        refuse_other_job(checkpoint, job="tiny", seed=6)


def test_a_later_generation_fences_the_earlier_ones(tmp_path: Path) -> None:
    claim(tmp_path, "run-1/1")
    refuse_superseded(tmp_path, "run-1/1")
    claim(tmp_path, "run-1/10")
    with pytest.raises(OSError, match="'run-1/10' owns the checkpoints here, not 'run-1/1'"):
        refuse_superseded(tmp_path, "run-1/1")
    with pytest.raises(UnsupportedRequest, match="this is generation 9, which has been replaced"):
        claim(tmp_path, "run-1/9")
    claim(tmp_path, "run-2/1")
    with pytest.raises(OSError, match="'run-2/1' owns"):
        refuse_superseded(tmp_path, "run-1/10")


def test_no_link_in_the_directory_is_written_through(tmp_path: Path) -> None:
    """What could be foreseen of the names of unfinished files is what others may have made links of."""
    place, mine = tmp_path / "saved", tmp_path / "mine"
    place.mkdir()
    mine.mkdir()
    (mine / "file").write_text("mine")
    for name in (f".trial-{os.getpid()}", f".owner.{os.getpid()}", ".owner"):
        (place / name).symlink_to(mine / "file")
    for name in (".step-3.run-1-1", ".step-3.replaced"):
        (place / name).symlink_to(mine)
    prepare(place)
    claim(place, "run-1/1")
    assert not partial(place, 3, "run-1-1").is_symlink()
    write(place, 3)
    (place / "step-3" / "link").symlink_to(mine / "file")
    prune(place, 1)
    assert {one.name: one.read_text() for one in mine.iterdir()} == {"file": "mine"}
    with pytest.raises(FileExistsError):
        create(place / "step-3" / "link", "theirs")


@pytest.mark.tier("ci")
def test_finding_one_needs_no_torch() -> None:
    code = (
        "import sys, penstock.executor.checkpoints.checkpoint; sys.exit(bool({'torch', 'pydantic'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
