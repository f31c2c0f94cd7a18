"""A wheel holds what git tracks: from a clone, from an sdist, and from a checkout without symbolic links."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from repository import ROOT

pytestmark = pytest.mark.tier("nightly")

FOLDERS = ("schemas", "solvers", "executor", "service", "examples")
PLAN = (
    "import penstock; "
    "print(penstock.__file__, penstock.plan('resnet-50', '1x2xV100', global_batch_size=8, planner='dp').status)"
)


def run(*command: str, directory: Path, **variables: str) -> str:
    done = subprocess.run(
        command, cwd=directory, env=os.environ | variables, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def clone(target: Path, *options: str) -> Path:
    """Clone HEAD, with the working tree's pyproject.toml."""
    run("git", "clone", "-q", *options, str(ROOT), str(target), directory=target.parent)
    (target / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    return target


def build(source: Path, kind: str) -> Path:
    """Build a wheel or an sdist without a network; return its path."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", "built", directory=source)
    (built,) = (source / "built").iterdir()
    return built


def tracked() -> set[str]:
    """Return the names that git's files of the package have in a wheel."""
    listed = run("git", "ls-files", "-z", "src/penstock", *FOLDERS, directory=ROOT).split("\0")
    names = {name.removeprefix("src/") for name in listed if name.startswith("src/")}
    names |= {f"penstock/{name}" for name in listed if name.partition("/")[0] in FOLDERS}
    links = {f"penstock/{name}" for name in FOLDERS}
    return {name for name in names - links if "/schedulers/" not in name}


@pytest.mark.parametrize("origin", ["clone", "sdist", "no-links"])
def test_a_wheel_holds_the_package_and_plans(tmp_path: Path, origin: str) -> None:
    source = clone(tmp_path / "source", *(("-c", "core.symlinks=false") if origin == "no-links" else ()))
    assert (source / "src/penstock/schemas").is_symlink() == (origin != "no-links")
    if origin == "sdist":
        with tarfile.open(build(source, "sdist")) as archive:
            archive.extractall(tmp_path, filter="data")
        (source,) = tmp_path.glob("penstock-*")
    with zipfile.ZipFile(build(source, "wheel")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        wheel.extractall(tmp_path / "installed")
    assert names == tracked()
    out = run(sys.executable, "-P", "-c", PLAN, directory=tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    assert out.split()[0].startswith(str(tmp_path / "installed"))
    assert out.split()[1] in ("optimal", "feasible")


def test_setup_says_what_helps_in_a_checkout_without_links(tmp_path: Path) -> None:
    source = clone(tmp_path / "source", "-c", "core.symlinks=false")
    (source / "scripts/setup").write_bytes((ROOT / "scripts/setup").read_bytes())
    done = subprocess.run(["scripts/setup"], cwd=source, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    remedy = done.stderr.strip().rpartition("run: ")[2]
    run("bash", "-c", remedy, directory=source)
    assert (source / "src/penstock/schemas").is_symlink()
    assert not (source / ".venv").exists()
