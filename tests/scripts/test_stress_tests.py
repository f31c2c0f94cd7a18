"""Repeating tests under load: which are repeated, which are named, and that the load ends in every case."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import stress_tests
from orphans import no_orphans
from scripts_path import environment

pytestmark = pytest.mark.tier("ci")

PLANTED = """
import time
from pathlib import Path

def test_fails_every_third_time(tmp_path):
    time.sleep(0)
    count = Path(__file__).with_name("count")
    number = len(count.read_text()) + 1 if count.exists() else 1
    count.write_text("x" * number)
    assert number % 3, "the planted fault"

def test_that_waits_for_nothing():
    assert True
"""
LOADED = """
import sys
import psutil
from stress_tests import load
with load(2):
    print(*[child.pid for child in psutil.Process().children()], flush=True)
    input()
"""


@pytest.mark.tier("nightly")
def test_a_test_that_fails_every_third_time_is_named_with_its_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    words = ["--idle", "1", "--loaded", "0", "--times", "5", "--load", "1", "--workers", "1", "test_planted.py"]
    with no_orphans():
        assert stress_tests.main(words, tier=[], root=tmp_path) == 1
    first, many, failed, total = capsys.readouterr().out.splitlines()
    assert first.startswith("idle, 1 of 1: 2 passed; ")
    assert many.startswith("1 busy tests, 5 times each, under load: 2 failed, 3 passed; ")
    name = "test_planted.py::test_fails_every_third_time"
    assert failed == f"   2 of 6  {name}: AssertionError: the planted fault"
    assert total.startswith("7 runs of 2 tests, 2 failures of 1; ")


@pytest.mark.tier("nightly")
def test_tests_that_do_not_fail_are_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_planted.py").write_text(PLANTED)
    words = ["--idle", "0", "--loaded", "1", "--load", "1", "--workers", "1", "--times", "1", "-k", "nothing"]
    assert stress_tests.main([*words, "test_planted.py"], tier=[], root=tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 runs of 1 tests, 0 failures of 0; ")


def test_the_load_ends_when_it_is_interrupted() -> None:
    with no_orphans(), pytest.raises(KeyboardInterrupt), stress_tests.load(2):
        raise KeyboardInterrupt


def test_the_load_ends_with_the_process_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADED], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        load = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(load) == 2
    assert psutil.wait_procs(load, 30)[1] == []
