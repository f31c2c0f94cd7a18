"""A process that is killed at any moment of replacing, publishing and removing checkpoints leaves a complete one."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from test_checkpoint import about, write

from penstock.executor.checkpoints.checkpoint import Checkpoint, partial, prepare, prune, publish, survey

CALLS = ("os.rename", "os.remove", "os.rmdir", "open", "os.mkdir", "os.listdir", "os.scandir", "shutil.rmtree")
"""Python's names of what changes, or looks at, a directory; a process is killed right before one of them."""


def killed_before(call: int, work: Callable[[], object]) -> bool:
    """Do ``work`` in a forked process that is killed before its ``call``-th call; whether it came to that."""
    child = os.fork()
    if child == 0:
        _work_and_die(call, work)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def _work_and_die(call: int, work: Callable[[], object]) -> NoReturn:
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event in CALLS:
            seen += 1
            if seen == call:
                os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(hook)
        work()
        os._exit(0)
    finally:
        os._exit(1)


def replace(directory: Path) -> Checkpoint:
    """Write step 4 once more, with other numbers."""
    place = partial(directory, 4, "again")
    place.mkdir()
    (place / "__0_0.distcp").write_text("new numbers")
    (place / ".metadata").write_text("names")
    return publish(place, about(4))


def text(checkpoint: Checkpoint) -> str:
    return (checkpoint.directory / "__0_0.distcp").read_text()


def kills(directory: Path, work: Callable[[Path], object]) -> int:
    """Kill ``work`` before each of its calls in turn; at least one checkpoint is complete then, and after a start."""
    count = 0
    while True:
        place = shutil.copytree(directory, directory.parent / f"killed-{count}")
        if not killed_before(count + 1, lambda place=place: work(place)):
            return count
        count += 1
        before = survey(place)
        assert before.newest is not None, f"lost before call {count}"
        numbers = text(before.newest)
        assert numbers in ("numbers", "new numbers")
        assert before.damaged == []
        prepare(place)
        after = survey(place)
        assert after.newest is not None, f"lost by the start after a kill before call {count}"
        assert (text(after.newest), after.newest.about) == (numbers, before.newest.about)
        assert not [one.name for one in place.iterdir() if one.name.startswith(".step")]


def test_replacing_a_checkpoint_never_loses_both(tmp_path: Path) -> None:
    write(tmp_path / "saved", 4)
    count = kills(tmp_path / "saved", replace)
    assert count >= 15
    assert text(survey(tmp_path / f"killed-{count}").newest) == "new numbers"  # type: ignore[arg-type]


def test_replacing_the_only_one_that_is_kept_never_loses_it(tmp_path: Path) -> None:
    """As a save does: replaced, and what is too old removed."""
    for step in (2, 3, 4):
        write(tmp_path / "saved", step)
    count = kills(tmp_path / "saved", lambda place: prune(place, 1, replace(place)))
    assert count >= 25
    assert [one.name for one in (tmp_path / f"killed-{count}").iterdir()] == ["step-4"]


def test_a_start_after_a_kill_may_be_killed_too(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    write(saved, 4)
    (saved / "step-4").rename(partial(saved, 4, "replaced"))
    assert survey(saved).newest.about.step == 4  # type: ignore[union-attr]
    assert kills(saved, prepare) >= 5


def test_what_was_written_last_is_not_removed(tmp_path: Path) -> None:
    """A run from the start in the directory of a longer one keeps what it has just saved."""
    for step in (7, 8):
        write(tmp_path, step)
    first = replace(tmp_path)
    prune(tmp_path, 2, first)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["step-4", "step-7", "step-8"]


@pytest.mark.parametrize("steps", [["finite", "not", "not", "not"], ["not", "finite", "not", "not"]])
def test_the_last_finite_one_is_kept(tmp_path: Path, steps: list[str]) -> None:
    for step, is_finite in enumerate(steps, 1):
        write(tmp_path, step, is_finite=is_finite == "finite")
        prune(tmp_path, 1)
    last = steps.index("finite") + 1
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted({f"step-{last}", "step-4"})
    write(tmp_path, 5)
    prune(tmp_path, 1)
    assert [one.name for one in tmp_path.iterdir()] == ["step-5"]
