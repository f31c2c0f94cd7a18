"""Services that end while they are starting: nothing of them stays, nobody waits, and the log has no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.schemas.errors import Unreachable
from penstock.workers.forkserver import Forkserver

HERE = Path(__file__).parent
LIMIT_S = 30.0
"""Far less than the import of ``stuck_preload`` takes."""

SERVICE = """
import sys, time
from penstock.workers.forkserver import Forkserver
forkserver = Forkserver(preload=("stuck_preload",))
forkserver.start()
print(forkserver._process.pid, flush=True)
time.sleep(600)
"""
STARTING = """
import sys, time
sys.argv = ["penstock", "serve", "--database", "x.sqlite"]
import penstock.service.http.app as app
app.serve = lambda settings, forkserver: (print("starting", flush=True), time.sleep(600))
from penstock.cli.main import main
main()
"""


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("PYTHONPATH", paths)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a script; what still runs in the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(script: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", script]
        started.append(subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.communicate()


def test_a_forkserver_that_loads_dies_with_its_service(run: Callable[[str], Any]):
    service = run(SERVICE)
    forkserver = psutil.Process(int(service.stdout.readline()))
    try:
        assert service.stderr.readline() == "stuck\n", "it is inside the import"
        service.kill()
        assert psutil.wait_procs([forkserver], LIMIT_S)[1] == []
        assert service.communicate(timeout=LIMIT_S)[1] == ""
    finally:
        if forkserver.is_running():
            forkserver.kill()


def test_nobody_waits_for_a_forkserver_that_is_told_to_end_while_it_loads(capfd: pytest.CaptureFixture[str]):
    forkserver = Forkserver(preload=("stuck_preload",))
    refused: list[Unreachable] = []

    def ask() -> None:
        try:
            forkserver.spawn()
        except Unreachable as error:
            refused.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while "stuck" not in capfd.readouterr().err:
        pass
    stopping = threading.Thread(target=forkserver.stop, daemon=True)
    stopping.start()
    for thread in (stopping, asking):
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert "the service is shutting down" in str(refused[0])
    assert not forkserver.wait_ready(0)
    with pytest.raises(Unreachable):
        forkserver.spawn()


def test_a_child_reads_nothing_and_a_forkserver_starts_again_after_its_end():
    forkserver = Forkserver(preload=())
    for _ in range(2):
        forkserver.start()
        assert forkserver.wait_ready(LIMIT_S)
        child = forkserver.spawn()
        assert os.readlink(f"/proc/{child.pid}/fd/0") == os.devnull
        child.close()
        forkserver.stop()


@pytest.mark.tier("nightly")
def test_told_to_end_before_it_serves_it_ends_well(run: Callable[[str], Any]):
    service = run(STARTING)
    assert service.stdout.readline() == "starting\n"
    service.send_signal(signal.SIGTERM)
    assert service.wait(LIMIT_S) == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_service_that_ends_while_it_warms_up(
    start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
):
    """With no kernel compiled, so that there is much to do; what it started is gone when its log ends."""
    monkeypatch.setenv("PENSTOCK_KERNELS", str(tmp_path / "kernels"))
    server = start_server(warm_up=True, slots=1, drain_s=0)
    while not (children := psutil.Process(server.process.pid).children(recursive=True)):
        pass
    assert server.stop(number) == code
    assert psutil.wait_procs(children, LIMIT_S)[1] == []
    assert "Traceback" not in server.text, server.text
