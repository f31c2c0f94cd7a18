"""A process of the service's with its settings, and what it writes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).parent


class LoggedProcess:
    """A command that finds the misbehaving solvers; ``log`` holds the lines that it has written so far."""

    def __init__(self, command: Sequence[str], settings: Mapping[str, Any]) -> None:
        environment = {f"PENSTOCK_{name.upper()}": str(value) for name, value in settings.items()}
        paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        self.process = subprocess.Popen(
            list(command),
            env={**os.environ, **environment, "PYTHONPATH": paths},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(30)
        self._reader.join(30)
        assert not self._reader.is_alive(), f"processes that outlive this one hold its stderr: {self._holders()}"
        assert self.process.stderr is not None
        self.process.stderr.close()
        return code

    def _holders(self) -> list[list[str]]:
        """Return the command lines of processes that can write to the pipe that is read here."""
        assert self.process.stderr is not None
        pipe = os.readlink(f"/proc/self/fd/{self.process.stderr.fileno()}")
        command_lines = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid != os.getpid() and pipe == os.readlink(f"/proc/{process.pid}/fd/2"):
                    command_lines.append(process.cmdline())
        return command_lines

    @property
    def text(self) -> str:
        """All that it has logged."""
        return "".join(self.log)
