"""``scripts/setup`` and the lock files: refusals on a machine that does not fit, before anything is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import scripts_path  # noqa: F401  where locked.py lies
from locked import misfits, requirements
from repository import ROOT

LOCKS = sorted((ROOT / "lock").glob("3.*.txt"))


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with a space in its name and what ``scripts/setup`` reads."""
    directory = tmp_path / "a clone"
    (directory / "scripts").mkdir(parents=True)
    for name in ("scripts/setup", "scripts/locked.py", "pyproject.toml"):
        shutil.copy(ROOT / name, directory / name)
    shutil.copytree(ROOT / "lock", directory / "lock")
    (directory / "src/penstock").mkdir(parents=True)
    (directory / "src/penstock/schemas").symlink_to(directory / "schemas")
    (directory / "schemas").mkdir()
    return directory


def run_setup(clone: Path, **environment: str) -> tuple[int, str]:
    """Return the exit code and standard error of ``scripts/setup``, without root's tools in reach."""
    done = subprocess.run(
        [str(clone / "scripts/setup")], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stderr


def fake_python(directory: Path, version: str) -> str:
    """Return the path of a program that answers as Python of that version."""
    path = directory / f"python{version}"
    path.write_text(f'#!/bin/sh\ncase "$1" in -V) echo "Python {version}.0";; *) echo {version};; esac\n')
    path.chmod(0o755)
    return str(path)


def test_locks_fit_pyproject_and_name_no_index() -> None:
    assert list(misfits(LOCKS, ["3.11", "3.12", "3.13"])) == []
    for lock in LOCKS:
        text = lock.read_text()
        assert "://" not in text, lock.name
        assert "--index" not in text, lock.name
        pins = [line for line in text.splitlines() if "==" in line]
        assert pins
        assert all(line.endswith("\\") for line in pins), f"{lock.name}: a pin without a hash"


def test_parts_of_a_lock_have_its_versions() -> None:
    for part in (each for each in LOCKS if "-" in each.stem):
        whole = (ROOT / "lock" / f"{part.stem.partition('-')[0]}.txt").read_text().splitlines()
        assert {line for line in part.read_text().splitlines() if "==" in line} <= set(whole), part.name


def test_a_lock_that_lacks_or_contradicts_a_requirement_is_reported(tmp_path: Path) -> None:
    lock = tmp_path / "3.11.txt"
    first, *others = (
        f"{each.name}=={next(iter(each.specifier)).version}" for each in requirements(ROOT / "pyproject.toml")
    )
    lock.write_text("\n".join(others).replace("fastapi==0.120", "fastapi==0.1"))
    faults = list(misfits([lock], []))
    assert any(f"{first.partition('==')[0]}" in each and "is not locked; run scripts/lock" in each for each in faults)
    assert any("fastapi==0.1 is locked, fastapi>=0.120 is required" in each for each in faults)
    assert list(misfits([lock], ["3.14"])) == [
        "lock/3.14.txt is missing: Python 3.14 is not locked; use Python 3.11 to 3.13"
    ]


@pytest.mark.tier("ci")
def test_a_python_that_is_too_old_is_refused(clone: Path, tmp_path: Path) -> None:
    code, err = run_setup(clone, PYTHON=fake_python(tmp_path, "3.9"))
    assert code == 1
    assert "is Python 3.9; Penstock needs 3.11 or newer, and lock/ has 3.11 to 3.13" in err
    assert not (clone / ".venv").exists()


@pytest.mark.tier("ci")
def test_a_python_that_is_not_there_is_refused(clone: Path) -> None:
    code, err = run_setup(clone, PYTHON="/nowhere/python3")
    assert code == 1
    assert "PYTHON=/nowhere/python3 does not run; set it to Python 3.11 to 3.13" in err


@pytest.mark.tier("ci")
def test_an_unknown_argument_is_refused(clone: Path) -> None:
    done = subprocess.run([str(clone / "scripts/setup"), "prod"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 64
    assert "unknown: prod; `scripts/setup`, or `scripts/setup dev`" in done.stderr


@pytest.mark.tier("nightly")
def test_without_a_network_pip_says_so_and_what_helps(clone: Path) -> None:
    """A .venv of another version is replaced first, in a path with a space."""
    (clone / ".venv/bin").mkdir(parents=True)
    shutil.copy(fake_python(clone, "3.9"), clone / ".venv/bin/python")
    code, err = run_setup(
        clone,
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_NO_CACHE_DIR="1",
        PIP_RETRIES="0",
        PIP_FIND_LINKS="",
    )
    assert code == 1
    assert ".venv is of Python 3.9" in err
    assert "pip failed" in err
    assert "PIP_INDEX_URL" in err


@pytest.mark.tier("nightly")
def test_a_lock_that_does_not_fit_stops_before_anything_is_installed(clone: Path) -> None:
    project = clone / "pyproject.toml"
    project.write_text(project.read_text().replace('"rich>=13"', '"rich>=1300"'))
    code, err = run_setup(clone)
    assert code == 1
    assert "is locked, rich>=1300 is required; run scripts/lock" in err
    assert "nothing was installed, because lock/ and pyproject.toml differ" in err
