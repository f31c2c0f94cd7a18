"""Counts of faults per file, which only fall, also when git moves or splits a file."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from sentences.command import main

pytestmark = pytest.mark.tier("ci")  # each case makes a git repository

FAULTY = ("The plan.", "Whether it fits.", "Of each rank.", "By stage.")
"""Docstrings of functions that each break the rule of first words."""


class Clone:
    """A git repository in the working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.git("init", "--quiet", "--initial-branch=main")

    def git(self, *arguments: str) -> str:
        """Run git and return its output."""
        identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout

    def write(self, file: str, *docstrings: str) -> None:
        """Write a module with a function for each docstring, and track it."""
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        body = ""
        for text in docstrings:
            word = text.strip(".").split()[-1]
            body += f'def of_{word}(stage):\n    """{text}"""\n    return stage.{word}_value\n\n'
        path.write_text(body, encoding="utf-8")
        self.git("add", file)

    def commit(self, *paths: str) -> None:
        """Commit what is staged."""
        self.git("commit", "--quiet", "--allow-empty", "-m", "tree: change", *paths)

    def record(self) -> dict[str, dict[str, int]]:
        """Return the recorded counts."""
        counts: dict[str, dict[str, int]] = json.loads((self.folder / ".ci/sentences.json").read_text("utf-8"))
        return counts


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clone:
    """A repository with one file, which has four recorded faults."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    monkeypatch.chdir(tmp_path)
    clone = Clone(tmp_path)
    (tmp_path / ".ci").mkdir()
    clone.write("old.py", *FAULTY)
    assert main(["--update"]) == 0
    clone.git("add", ".ci/sentences.json")
    clone.commit()
    assert clone.record() == {"old.py": {"first-word": 4}}
    return clone


def test_a_count_may_not_rise(clone: Clone, capsys: pytest.CaptureFixture[str]) -> None:
    clone.write("old.py", *FAULTY, "From start.")
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "old.py: 5 × first-word, at most 4: begin a function's docstring with an imperative verb" in printed
    assert "old.py:18: first-word: 'From': From start." in printed
    assert "Whether" not in printed, "only the new place is shown"
    assert main(["--update"]) == 1
    assert clone.record() == {"old.py": {"first-word": 4}}


def test_a_count_that_falls_passes_and_update_records_it(clone: Clone, capsys: pytest.CaptureFixture[str]) -> None:
    clone.write("old.py", *FAULTY[:2], "Return the rank.")
    assert main([]) == 0
    assert "2 faults fewer than recorded" in capsys.readouterr().out
    assert main(["--update"]) == 0
    assert clone.record() == {"old.py": {"first-word": 2}}
    clone.write("old.py", *FAULTY[:3])
    assert main([]) == 1


def test_the_record_has_a_line_for_each_file_with_faults(clone: Clone) -> None:
    (clone.folder / ".ci/sentences.json").unlink()
    clone.write("b.py", *FAULTY[:1])
    clone.write("a.py", *FAULTY[:2])
    clone.write("clean.py", "Return the rank.")
    assert main([]) == 2
    assert main(["--update"]) == 0
    assert (clone.folder / ".ci/sentences.json").read_text("utf-8").splitlines() == [
        "{",
        '"a.py": {"first-word": 2},',
        '"b.py": {"first-word": 1},',
        '"old.py": {"first-word": 4}',
        "}",
    ]


@pytest.mark.parametrize("committed", [False, True])
def test_a_new_file_starts_at_zero(clone: Clone, committed: bool) -> None:
    clone.write("new.py", "The answer in its own words, unlike any other.")
    if committed:
        clone.commit()
    assert main([]) == 1


@pytest.mark.parametrize("committed", [False, True])
def test_a_file_that_is_moved_brings_its_count_along(clone: Clone, committed: bool) -> None:
    (clone.folder / "room").mkdir()
    clone.git("mv", "old.py", "room/moved.py")
    if committed:
        clone.commit()
        clone.git("mv", "room/moved.py", "again.py")
        clone.commit()
    assert main([]) == 0
    file = "again.py" if committed else "room/moved.py"
    clone.write(file, *FAULTY, "From start.")
    assert main([]) == 1
    clone.write(file, *FAULTY)
    assert main(["--update"]) == 0
    assert clone.record() == {file: {"first-word": 4}}


@pytest.mark.parametrize("committed", [False, True])
def test_the_pieces_of_a_file_share_its_count(clone: Clone, committed: bool) -> None:
    clone.write("old.py", *FAULTY[:2])
    clone.write("piece.py", *FAULTY[2:])
    if committed:
        clone.commit()
    assert main([]) == 0
    clone.write("piece.py", *FAULTY[1:])
    assert main([]) == 1
    clone.write("piece.py", *FAULTY[2:])
    assert main(["--update"]) == 0
    assert clone.record() == {"old.py": {"first-word": 2}, "piece.py": {"first-word": 2}}


def test_a_move_is_seen_although_the_record_changed_after_it(clone: Clone) -> None:
    """A rebase puts the record of another branch after the commit of the move."""
    clone.git("mv", "old.py", "moved.py")
    clone.commit()
    (clone.folder / ".ci/sentences.json").write_text('{"old.py": {"first-word": 4}, "x.py": {}}', encoding="utf-8")
    clone.git("add", ".ci/sentences.json")
    clone.commit()
    assert main([]) == 0


def test_only_tracked_files_are_read_and_links_once(clone: Clone) -> None:
    (clone.folder / "left.py").write_text('def f():\n    """The rest."""\n', encoding="utf-8")
    (clone.folder / "link.py").symlink_to("old.py")
    (clone.folder / "room").symlink_to(".")
    clone.git("add", "link.py", "room")
    clone.write("gone.py", "The plan.")
    (clone.folder / "gone.py").unlink()
    assert main([]) == 0


def test_places_are_listed_by_file_folder_and_rule(clone: Clone, capsys: pytest.CaptureFixture[str]) -> None:
    clone.write("room/names.py")
    (clone.folder / "room/names.py").write_text("found = 1\n", encoding="utf-8")
    assert main(["--where", "old.py"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    for name in ("name", "room", "room/names.py"):
        assert main(["--where", name]) == 0
        assert capsys.readouterr().out == "room/names.py:1: name: `found`\n"
    assert main(["--where"]) == 2
    assert "usage" in capsys.readouterr().err


def test_a_shallow_clone_is_refused_only_where_history_is_needed(
    clone: Clone, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clone.git("mv", "old.py", "moved.py")
    clone.commit()
    clone.commit()
    clone.git("clone", "--quiet", "--depth=1", clone.folder.as_uri(), "shallow")
    monkeypatch.chdir(clone.folder / "shallow")
    assert main([]) == 2
    assert "run git fetch --unshallow" in capsys.readouterr().err
    (clone.folder / "shallow/moved.py").write_text("x = 1\n", encoding="utf-8")
    assert main([]) == 0


def test_what_prevents_the_check_is_one_sentence(
    clone: Clone,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    clone.write("wrong.py")
    (clone.folder / "wrong.py").write_text("def", encoding="utf-8")
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("wrong.py cannot be read: ")
    (clone.folder / "wrong.py").unlink()
    (clone.folder / ".ci/sentences.json").write_text("<<<<<<< ours", encoding="utf-8")
    assert main([]) == 2
    assert "take one side of a merge" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path_factory.mktemp("outside"))
    assert main([]) == 2
    assert "is not in a git repository" in capsys.readouterr().err
    monkeypatch.setenv("PATH", "")
    assert main([]) == 2
    assert capsys.readouterr().err == "git is not installed: this check reads only the files that git tracks.\n"
