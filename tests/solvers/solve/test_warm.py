"""The warm-up touches what a plan needs, so that nobody waits for a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from penstock.solvers.solve.warm import warm


def test_warm_up_solves_its_toys() -> None:
    assert warm() > 0


def test_kernels_are_kept_where_we_may_write(tmp_path: Path) -> None:
    code = "import os, penstock.solvers; print(os.environ.get('NUMBA_CACHE_DIR', ''))"
    bare = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}

    def chosen(**environment: str) -> str:
        command = [sys.executable, "-P", "-c", code]
        done = subprocess.run(command, env=bare | environment, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout.strip()

    assert chosen(XDG_CACHE_HOME=str(tmp_path)).startswith(str(tmp_path / "penstock" / "kernels-"))
    assert chosen(NUMBA_CACHE_DIR="/given") == "/given"
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert chosen(XDG_CACHE_HOME=str(blocked)) == "", "numba then finds a place of its own"
