"""The demonstration: Ctrl-C in the middle leaves no process behind. (``scripts/demo`` runs it whole.)"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from demo import main
from scripts_path import SCRIPTS

pytestmark = pytest.mark.tier("ci")


@pytest.mark.tier("nightly")
def test_an_interrupt_leaves_nothing_running(tmp_path: Path) -> None:
    """Interrupted while it measures, with service, agents and measuring processes alive."""
    demo = subprocess.Popen(
        [sys.executable, "-u", str(SCRIPTS / "demo.py"), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert demo.stdout is not None
    assert demo.stderr is not None
    for line in demo.stdout:
        if "busy at once" in line:
            break
    children = psutil.Process(demo.pid).children(recursive=True)
    assert len(children) >= 3, "the service and two agents"
    os.kill(demo.pid, signal.SIGINT)
    assert demo.wait(60) == 130
    assert "nothing is left running" in demo.stderr.read()
    demo.stdout.close()
    demo.stderr.close()
    _, left = psutil.wait_procs(children, timeout=30)
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []
    here = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in here if str(tmp_path) in " ".join(command or ())]


def test_an_unknown_option_is_refused_and_makes_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, code, words in (
        (["--help"], 0, "usage: scripts/demo"),
        (["--fast"], 2, "--fast"),
        (["a", "b"], 2, "b"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
        printed = capsys.readouterr()
        assert words in printed.out + printed.err
    assert list(tmp_path.iterdir()) == []


def test_a_failure_names_the_logs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_LEASE_S", "never")
    assert main([str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "service ended with exit code" in err
    assert f"logs: {tmp_path / 'logs'}" in err
