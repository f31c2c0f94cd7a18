"""Processes that a command keeps while it works: each in its own group, all ended with it, whatever ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from penstock.schemas.errors import RunFailed, Unreachable

GRACE_S = 10.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Background:
    """Named processes with their logs in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str]) -> Path:
        """Start a process; its output goes to the returned log. It gets SIGTERM when we die by any means."""
        log = self._directory / f"{name}.log"
        parent = os.getpid()
        with log.open("wb") as sink:
            self._running[name] = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=lambda: _end_with(parent),
            )
        return log

    def wait_for(self, name: str, pattern: str, limit_s: float) -> str:
        """Return the first group of ``pattern`` in the process's log, once it appears.

        Raises when the process ends first.
        """
        until = time.monotonic() + limit_s
        while True:
            code = self._running[name].poll()
            match = re.search(pattern, self._log(name))
            if match is not None:
                return match[1]
            if code is not None:
                raise RunFailed(f"{name} ended with {_ending(code)}:\n{self._last_lines(name)}")
            if time.monotonic() > until:
                raise Unreachable(f"{name} did not come up within {limit_s:g} s:\n{self._last_lines(name)}")
            time.sleep(_POLL_S)

    def check(self) -> None:
        """Raise RunFailed when one of the processes has ended."""
        for name, process in self._running.items():
            if (code := process.poll()) is not None:
                raise RunFailed(f"{name} ended with {_ending(code)}:\n{self._last_lines(name)}")

    def stop(self) -> None:
        """Send SIGTERM to all processes, wait a while for them to end, then send SIGKILL to their groups."""
        for process in self._running.values():
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + GRACE_S
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._running.clear()

    def _log(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def _last_lines(self, name: str) -> str:
        return "\n".join(f"    {line}" for line in self._log(name).splitlines()[-15:]) or "    (it said nothing)"


@contextlib.contextmanager
def background(directory: Path) -> Iterator[Background]:
    """Start processes that are stopped at the end of the block, also after SIGTERM, SIGHUP and Ctrl-C."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    started = Background(directory)
    try:
        yield started
    finally:
        ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            started.stop()
        finally:
            signal.signal(signal.SIGINT, ignored)
            for number, handler in before.items():
                signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _end_with(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
