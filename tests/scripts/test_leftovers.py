"""Files that lie about in a clone change no answer of the checks and of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.tier("ci")

PLANTED = {
    "demo/__init__.py": "main = None\n",
    "job/__init__.py": "",
    "locked.py": "raise SystemExit('a leftover was imported')\n",
    "tests.py": "raise SystemExit('a leftover was imported')\n",
    "conftest.py": "raise SystemExit('a leftover was imported')\n",
    "broken.py": "def (:\n",
    "out/broken.py": "def (:\n",
}
"""Files at the top of a clone, named like modules of ours, or not even Python."""
COMMANDS = (
    "git ls-files -z -- 'scripts/*.py' 'tests/scripts/*.py' | xargs -0 .venv/bin/ruff check",
    "git ls-files -z -- 'scripts/*.py' 'tests/scripts/*.py' | xargs -0 .venv/bin/ruff format --check",
    ".venv/bin/python -m pytest -q -p no:cacheprovider --tier quick tests/scripts/test_setup.py",
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of HEAD with the tracked files as they are in the working tree, and this installation."""
    directory = tmp_path_factory.mktemp("leftovers") / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(directory)], check=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file() and not source.is_symlink():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, directory / name)
    (directory / ".venv").symlink_to(ROOT / ".venv")
    subprocess.run(["git", "add", "-A", "--", ".", ":!.venv"], cwd=directory, check=True)
    return directory


def _answers(clone: Path) -> list[tuple[int, str]]:
    environment = os.environ | {"PYTHONPATH": str(clone / "src"), "COLUMNS": "120"}
    answers = []
    for command in COMMANDS:
        done = subprocess.run(
            ["bash", "-c", command], cwd=clone, env=environment, capture_output=True, text=True, timeout=240
        )
        passed = [line for line in done.stdout.splitlines() if "passed" in line or "error" in line.lower()]
        answers.append((done.returncode, passed[-1].partition(" in ")[0] if passed else ""))
    return answers


def test_checks_and_tests_answer_the_same_with_leftovers(clone: Path) -> None:
    before = _answers(clone)
    assert [code for code, _ in before] == [0] * len(COMMANDS), before
    for name, text in PLANTED.items():
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).write_text(text)
    assert _answers(clone) == before
