"""The process of a rank as its parent sees it: its events, its last lines, its end. Loads no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from penstock.executor.node.agent_state import lost_a_peer

_KEPT_LINES = 40
_CHUNK_BYTES = 1 << 16


class RankProcess:
    """A rank's process, and its output."""

    def __init__(self, rank: int, popen: subprocess.Popen[bytes], mark: Path) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.rank = rank
        self.popen = popen
        self.mark = mark
        self.streams: tuple[IO[bytes], IO[bytes]] = (popen.stdout, popen.stderr)
        self.exit_descriptor = os.pidfd_open(popen.pid)
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.has_ended = False
        self.failed: dict[str, Any] | None = None
        self.done: dict[str, Any] | None = None
        self._rests = dict.fromkeys(self.streams, b"")

    @property
    def has_failed(self) -> bool:
        """True if it reported a failure, or ended before its work was done."""
        return self.failed is not None or (self.has_ended and self.done is None)

    @property
    def is_root_cause(self) -> bool:
        """True if it failed by itself, by a signal or an error, not by the loss of a peer."""
        if self.failed is not None:
            return not lost_a_peer(str(self.failed["reason"]))
        return self.has_failed

    def read(self, stream: IO[bytes]) -> tuple[bool, list[dict[str, Any]]]:
        """Read the lines of a stream that have arrived; return whether it is at its end, and the events among them."""
        text, at_end = self._rests[stream], False
        with suppress(BlockingIOError):
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                text += chunk
            at_end = True
        *lines, self._rests[stream] = text.split(b"\n")
        events = []
        for line in lines:
            event = _event(line) if stream is self.streams[0] else None
            if event is None:
                self.last_lines.append(line.decode(errors="replace"))
                continue
            events.append(event)
            if event["kind"] == "failed":
                self.failed = event
            elif event["kind"] == "done":
                self.done = event
        return at_end, events

    def close(self) -> None:
        """Kill the process's group, wait for it, and close its pipes."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        os.close(self.exit_descriptor)
        for stream in (self.popen.stdin, *self.streams):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None
