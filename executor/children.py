"""Processes that die with the agent. Each leads a process group, writes JSON lines, and is ended by TERM, then KILL.

A child gets SIGKILL from the kernel when the agent is killed (``PR_SET_PDEATHSIG``); its stdin also ends then. The
child's own children are killed with its group once it is gone.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.executor.node.rank_log import LogFile

KEPT_LINES = 30
"""Last lines of a child's output that the report of its failure has."""

_CHUNK_BYTES = 2**16
_LEFTOVER_S = 2.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)

OnMessage = Callable[[dict[str, Any]], None]
OnExit = Callable[[int, tuple[str, ...]], None]


def die_with(parent: int) -> None:
    """Make a new child die when ``parent`` dies, also if it has died already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Child:
    """A process. ``on_message`` gets each JSON object of its stdout; ``log`` gets every other line that it writes.

    ``on_exit`` gets its code and its last lines. It is called once, after every message, also when the command cannot
    be started (code 127).
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        line: Mapping[str, Any],
        environment: Mapping[str, str],
        directory: str,
        limit_s: float | None,
        log: LogFile,
        on_message: OnMessage,
        on_exit: OnExit,
    ) -> None:
        self._command = command
        self._line = line
        self._environment = dict(environment)
        self._directory = directory
        self._limit_s = limit_s
        self._log = log
        self._on_message = on_message
        self._on_exit = on_exit
        self._last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._stop_grace_s: float | None = None
        self._stopping = asyncio.Event()
        self.task = asyncio.create_task(self._run(), name=" ".join(command[-2:]))

    @property
    def pid(self) -> int | None:
        """The process id, after the process has been started."""
        return self._process.pid if self._process is not None else None

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to the group now, and SIGKILL after ``grace_s``."""
        if self._stop_grace_s is None:
            self._stop_grace_s = grace_s
            self._stopping.set()

    def kill(self) -> None:
        """Send SIGKILL to the group now."""
        self.stop(0)
        self._signal(signal.SIGKILL)

    async def _run(self) -> None:
        try:
            code = await self._live()
        except OSError as error:
            self._keep(f"cannot start {self._command[0]!r}: {error}".encode())
            code = 127
        self._log.close()
        self._on_exit(code, tuple(self._last_lines))

    async def _live(self) -> int:
        parent = os.getpid()
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            cwd=self._directory,
            process_group=0,
            preexec_fn=lambda: die_with(parent),
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            asyncio.create_task(_read_lines(process.stdout, self._on_line)),
            asyncio.create_task(_read_lines(process.stderr, self._keep)),
        ]
        ender = asyncio.create_task(self._end_when_asked(process))
        process.stdin.write(json.dumps(dict(self._line)).encode() + b"\n")
        code = await process.wait()
        self._signal(signal.SIGKILL)
        ender.cancel()
        _, late = await asyncio.wait(readers, timeout=_LEFTOVER_S)
        for reader in late:
            reader.cancel()
        await asyncio.gather(ender, *readers, return_exceptions=True)
        process.stdin.close()
        return code

    async def _end_when_asked(self, process: asyncio.subprocess.Process) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), self._limit_s)
        except TimeoutError:
            self._keep(f"not done after {self._limit_s:g} s".encode())
            self._signal(signal.SIGKILL)
            return
        self._signal(signal.SIGTERM)
        await asyncio.sleep(self._stop_grace_s or 0)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except (ProcessLookupError, PermissionError):
                return

    def _on_line(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if isinstance(message, dict):
            self._on_message(message)
        elif line.strip():
            self._keep(line)

    def _keep(self, line: bytes) -> None:
        self._last_lines.append(line.decode(errors="replace").rstrip())
        self._log.write(line)


async def _read_lines(stream: asyncio.StreamReader, each: Callable[[bytes], None]) -> None:
    """Pass each line to ``each``, whatever its length: a trace is one line of megabytes."""
    parts: list[bytes] = []
    while chunk := await stream.read(_CHUNK_BYTES):
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            each(b"".join([*parts, line]))
            parts = []
        parts.append(rest)
    if any(parts):
        each(b"".join(parts))
