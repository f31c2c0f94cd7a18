"""Processes that a soak starts, kills and starts again, and all of their descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.schemas.errors import RunFailed
from penstock.workers.child import die_with

MARK = "PENSTOCK_SOAK"
"""Variable in the environment of every process that a soak starts: the soak's process id."""

ORPHANS_S = 10.0
"""Longest time in which a process may notice its parent's death, in seconds."""

STOP_S = 20.0


class Processes:
    """Named processes with their logs in ``directory``; each is started again under its name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process; it dies with this process."""
        parent = os.getpid()
        with self.log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | environment | {MARK: str(parent)},
                process_group=0,
                preexec_fn=lambda: die_with(parent),
            )

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.directory / f"{name}.log"

    def kill(self, name: str) -> None:
        """Send SIGKILL to this one process alone; its children have to end by themselves."""
        self._running[name].kill()
        self._running.pop(name).wait()

    def pid(self, name: str) -> int | None:
        """Return the process id of a process that lives; None for any other."""
        process = self._running.get(name)
        return process.pid if process is not None and process.poll() is None else None

    def refuse_dead(self) -> None:
        """Raise RunFailed when a process has ended that was not killed."""
        for name, process in self._running.items():
            if process.poll() is not None:
                raise RunFailed(f"{name} ended by itself with {process.returncode}; see {self.log(name)}")

    def stop(self, last: Sequence[str] = (), number: signal.Signals = signal.SIGTERM) -> None:
        """End all processes by a signal, the ones named in ``last`` after the others; kill the rest after a while."""
        for name in sorted(self._running, key=lambda name: last.index(name) if name in last else -1):
            process = self._running[name]
            process.send_signal(number)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()


def marked() -> Iterator[int]:
    """Yield processes that were started by this soak, or by its processes."""
    mark = f"{MARK}={os.getpid()}".encode()
    for place in Path("/proc").iterdir():
        if place.name.isdigit():
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    yield int(place.name)


def refuse_orphans() -> None:
    """Raise RunFailed unless each process with our mark has a living ancestor among this process's children."""
    until = time.monotonic() + ORPHANS_S
    while left := [pid for pid in marked() if not _has_parent(pid)]:
        if time.monotonic() > until:
            lines = [f"{pid}: {command_of(pid)}" for pid in left]
            raise RunFailed(f"{len(left)} processes are left without their parents: {'; '.join(lines)}")
        time.sleep(0.1)


def command_of(pid: int) -> str:
    """Return a process's command line; empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def parent_of(pid: int) -> int:
    """Return the process id of a process's parent; 0 when the process is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _has_parent(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parent_of(pid)
    return False
