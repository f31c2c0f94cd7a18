"""A real service in a separate process, on a port that the system chose."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from logged_process import LoggedProcess

from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.errors import Conflict
from penstock.schemas.plan import PlanFile

LISTENING = re.compile(r"(https?://[^\s\",]+)")


class Server(LoggedProcess):
    """``serve()`` in a child process, run by the command ``around``; ``before`` is done in it first."""

    def __init__(self, database: Path | str, *, around: Sequence[str] = (), before: str = "", **settings: Any) -> None:
        values = {"database": database, "port": 0, "warm_up": False, **settings}
        code = f"{before}\nfrom penstock.service.http.app import serve; serve()"
        super().__init__([*around, sys.executable, "-c", code], values)
        self.url = self._wait_for_url()
        self._reader.start()
        self.client = Client(self.url)
        self.pids_file = Path(os.environ.get("PIDS_FILE", ""))

    def _wait_for_url(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if match := LISTENING.search(line):
                return match[1]
        raise AssertionError("the service did not start:\n" + "".join(self.log))

    def load_judge(self) -> None:
        """Have the judge and the lowering loaded, so that no agent grows old meanwhile."""
        with pytest.raises(Conflict, match="no living agent"):
            self.client.runs.create(PlanFile.parse(tiny_plan_file()), "gpt")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.client.close()
        return super().stop(number)
