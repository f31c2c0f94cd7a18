"""The warm-up calls all kernels that a plan needs, so that no user waits for a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

import penstock.solvers
from penstock.solvers.compiled.kept import _complete, all_kept, folder
from penstock.solvers.solve import warm as warm_up
from penstock.solvers.solve.warm import warm


@pytest.mark.tier("nightly")
def test_warm_up_solves_its_toys() -> None:
    assert warm() > 0


READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
"""A command that runs where a directory is read-only, in another mount namespace."""
ONE_KERNEL = """
from penstock.solvers.compiled.kept import note_all_kept, sole_compiler
from penstock.solvers.planners.dapple.cost_kernel import rounded_up

with sole_compiler(lambda: None):
    assert rounded_up(1.5) == 2
note_all_kept()
print(sum(rounded_up.stats.cache_hits.values()))
"""


def test_kernels_are_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    def hits(place: Path, *around: str) -> str:
        done = subprocess.run(
            [*around, sys.executable, "-P", "-c", ONE_KERNEL],
            env=os.environ | {"PENSTOCK_KERNELS": str(place)},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert hits(Path("/proc/penstock")) == "0", "there no directory can be made, nor by root"
    assert hits(tmp_path) == "0"
    files = sorted(tmp_path.rglob("*"))
    assert hits(tmp_path, "unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, str(tmp_path)) == "1"
    assert sorted(tmp_path.rglob("*")) == files


def test_kernels_are_kept_where_we_may_write(tmp_path: Path) -> None:
    code = "from penstock.solvers.compiled.kept import place; print(place())"
    bare = {name: value for name, value in os.environ.items() if name != "PENSTOCK_KERNELS"}

    def chosen(**environment: str) -> str:
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run(command, env=bare | environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    assert chosen(XDG_CACHE_HOME=str(tmp_path)).startswith(str(tmp_path / "penstock" / "kernels-"))
    assert chosen(PENSTOCK_KERNELS="/given") == "/given"
    assert chosen(XDG_CACHE_HOME=str(tmp_path), NUMBA_CACHE_DIR="/theirs").startswith(str(tmp_path / "penstock"))


@pytest.mark.tier("nightly")
def test_what_a_program_tells_numba_moves_only_its_own_functions(tmp_path: Path) -> None:
    """This holds whether the program imported numba before us or not, and we do not move what it compiles."""
    (tmp_path / "theirs.py").write_text(THEIRS)
    bare = {name: value for name, value in os.environ.items() if name != "PENSTOCK_KERNELS"}
    settings = {"XDG_CACHE_HOME": str(tmp_path / "ours"), "NUMBA_CACHE_LOCATOR_CLASSES": "InTreeCacheLocator"}
    environment = bare | settings
    command = [sys.executable, "-c", "import theirs"]
    subprocess.run(command, env=environment, cwd=tmp_path, timeout=300, check=True)
    kernels = {(path.parent.name, path.name.partition("-")[0]) for path in (tmp_path / "ours").rglob("*.nbi")}
    assert kernels == {("planners.dapple", "cost_kernel.rounded_up")}
    assert [path.name.partition("-")[0] for path in (tmp_path / "__pycache__").glob("*.nbi")] == ["theirs.half"]
    assert not list((tmp_path / "elsewhere").rglob("*"))


@pytest.mark.tier("nightly")
def test_kernels_that_are_not_to_be_compiled_are_refused_in_words() -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "penstock.cli.main",
        "plan",
        "--example",
        "resnet-50",
        "--cluster",
        "1x2xV100",
    ]
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [*command, "-b", "8"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 65
    assert "NUMBA_DISABLE_JIT is set" in done.stderr
    assert "unset NUMBA_DISABLE_JIT" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.tier("quick")
def test_installations_of_one_version_share_their_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache folder is named after the contents of sources, so kernel names need not contain the installation."""
    monkeypatch.delenv("PENSTOCK_KERNELS", raising=False)
    here = Path(penstock.solvers.__path__[0])
    (tmp_path / "solvers" / "judge").mkdir(parents=True)
    assert folder(str(here / "judge" / "clocks" / "events.py")) == "judge.clocks"
    assert folder(str(here.resolve() / "judge" / "clocks" / "events.py")) == "judge.clocks"
    elsewhere = str(tmp_path / "solvers" / "judge" / "events.py")
    assert folder(elsewhere) is None
    monkeypatch.setattr(penstock.solvers, "__path__", [str(tmp_path / "solvers")])
    assert folder(elsewhere) == "judge"


def test_installations_that_share_no_place_do_not_vouch_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that the environment names holds kernels of any version, by the paths of their files."""
    monkeypatch.setenv("PENSTOCK_KERNELS", str(tmp_path / "kept"))
    here = Path(penstock.solvers.__path__[0])
    assert folder(str(here / "judge" / "clocks" / "events.py")) is None
    monkeypatch.setattr(warm_up, "_toys", list)
    try:
        _complete.cache_clear()
        warm()
        assert all_kept()
        copied = tmp_path / "copied"
        copied.symlink_to(here)
        monkeypatch.setattr(penstock.solvers, "__path__", [str(copied)])
        _complete.cache_clear()
        assert not all_kept()
    finally:
        monkeypatch.undo()
        _complete.cache_clear()


THEIRS = """
import numba

numba.config.CACHE_DIR = "elsewhere"

from penstock.solvers.planners.dapple.cost_kernel import rounded_up

assert rounded_up(1.5) == 2


@numba.njit(cache=True)
def half(number):
    return number / 2


assert half(3) == 1.5
"""


def test_only_a_finished_warm_up_says_that_every_kernel_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_KERNELS", str(tmp_path))
    assert [step.apart for step in islice(warm_up.steps(), 3)] == [True, False, False]
    monkeypatch.setattr(warm_up, "_toys", lambda: [lambda: 1 / 0])
    with pytest.raises(ZeroDivisionError):
        warm()
    assert not all_kept()
    monkeypatch.setattr(warm_up, "_toys", list)
    warm()
    assert all_kept()
    assert list(warm_up.steps()) == []
    monkeypatch.setenv("NUMBA_CPU_NAME", "another")
    _complete.cache_clear()
    assert not all_kept()
    monkeypatch.undo()
    _complete.cache_clear()
