"""A real ``penstock worker`` in a separate process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from logged_process import LoggedProcess


class WorkerProcess(LoggedProcess):
    """``penstock worker`` with the misbehaving solvers, run by the command ``around``."""

    def __init__(self, database: str, *, around: Sequence[str] = (), **settings: Any) -> None:
        values = {"slots": 1, "lease_s": 2, "kill_grace_s": 0.2, "warm_up": False, "log_format": "text", **settings}
        values |= {"database": database, "solve_entry": "solver_entries:entry"}
        super().__init__([*around, sys.executable, "-m", "penstock.cli.main", "worker"], values)
        self._working = threading.Event()
        self._reader.start()
        assert self._working.wait(60), "the worker did not start:\n" + self.text

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "working on" in line:
                self._working.set()
