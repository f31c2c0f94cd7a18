"""A real ``penstock worker`` in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class WorkerProcess:
    """``penstock worker`` with the misbehaving solvers; ``log`` holds what it has written so far."""

    def __init__(self, database: str, **settings: Any) -> None:
        given = {"slots": 1, "lease_s": 2, "kill_grace_s": 0.2, "warm_up": False, "log_format": "text", **settings}
        given |= {"database": database, "solve_entry": "solver_entries:entry"}
        environment = {f"PENSTOCK_{name.upper()}": str(value) for name, value in given.items()}
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "worker"],
            env={**os.environ, **environment, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._working = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._working.wait(60), "the worker did not start:\n" + self.text

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "working on" in line:
                self._working.set()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(10)
        assert not self._reader.is_alive(), "a process that outlives the worker holds its stderr"
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    @property
    def text(self) -> str:
        """All that it has logged."""
        return "".join(self.log)
