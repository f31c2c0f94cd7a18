"""A real service in a process of its own, on a port that the system chose."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.client import Client
from penstock.schemas.errors import Conflict
from penstock.schemas.plan import PlanFile
from penstock.service.samples import tiny_plan_file

HERE = Path(__file__).parent
LISTENING = re.compile(r"(https?://[^\s\",]+)")


class Server:
    """``serve()`` in a child process, run by the command ``around``; ``log`` holds what it has written so far."""

    def __init__(self, database: Path | str, *, around: Sequence[str] = (), **settings: Any) -> None:
        given = {"database": database, "port": 0, "warm_up": False, **settings}
        environment = {f"PENSTOCK_{name.upper()}": str(value) for name, value in given.items()}
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            [*around, sys.executable, "-c", "from penstock.service.app import serve; serve()"],
            env={**os.environ, **environment, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.url = self._wait_for_url()
        self._reader = threading.Thread(target=self._read, daemon=True)
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

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.log.extend(self.process.stderr)

    def load_judge(self) -> None:
        """Have the judge and the lowering loaded, so that no agent grows old meanwhile."""
        with pytest.raises(Conflict, match="no living agent"):
            self.client.run(PlanFile.parse(tiny_plan_file()), "gpt")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.client.close()
        self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(10)
        assert not self._reader.is_alive(), "a process that outlives the service holds its stderr"
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    @property
    def text(self) -> str:
        """All that it has logged."""
        return "".join(self.log)
