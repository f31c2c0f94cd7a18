"""The output of children, in files on the node: bounded, with one older file beside the present one.

::

    <log directory>/<run>/<generation>/rank-0.log      the present file; also check.log and store.log
    <log directory>/<run>/<generation>/rank-0.log.1    the file before it

A full disk loses lines, never a run.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:  # ranks load this module without the documents
    from penstock.executor.node.stimuli import Process


def log_path(directory: Path, run: str, generation: int, process: Process) -> Path:
    """Return the path of a child's log."""
    name = f"rank-{process.rank}" if process.kind == "rank" else process.kind
    return directory / run / str(generation) / f"{name}.log"


class LogFile:
    """The log of one child. ``max_bytes`` limits both files together; ``say`` is called once when writing fails."""

    def __init__(self, path: Path, max_bytes: int, say: Callable[[str], None]) -> None:
        self._path, self._half, self._say = path, max(1, max_bytes // 2), say
        self._file: IO[bytes] | None = None
        self._size = 0
        self._failed = False

    def write(self, line: bytes) -> None:
        """Write a line."""
        try:
            self._write(line[: self._half - 1] + b"\n")
        except OSError as error:
            if not self._failed:
                self._say(f"lines of {self._path} are lost: {error.strerror or error}")
            self._failed = True

    def _write(self, line: bytes) -> None:
        if self._file is not None and self._size + len(line) > self._half:
            self.close()
            self._path.replace(older(self._path))
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            self._size = self._path.stat().st_size
        self._size += self._file.write(line)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def older(path: Path) -> Path:
    """Return the path of the file before ``path``."""
    return path.with_name(path.name + ".1")


def tail(path: Path, max_bytes: int) -> str | None:
    """Return the last ``max_bytes`` of a log, from the beginning of a line; None without a log."""
    parts: list[bytes] = []
    missing = max_bytes
    for file in (path, older(path)):
        part = _end(file, missing)
        if part is None:
            continue
        parts.insert(0, part)
        missing -= len(part)
    if not parts:
        return None
    text = b"".join(parts)
    if missing <= 0:
        text = text[text.find(b"\n") + 1 :]
    return text.decode(errors="replace")


def _end(file: Path, size: int) -> bytes | None:
    try:
        with file.open("rb") as source:
            source.seek(max(0, source.seek(0, os.SEEK_END) - size))
            return source.read(size)
    except OSError:
        return None


def prune(directory: Path, keep: int) -> None:
    """Remove the logs of all runs except the ``keep`` that were written last."""
    try:
        runs = sorted((one for one in directory.iterdir() if one.is_dir()), key=lambda one: one.stat().st_mtime_ns)
    except OSError:
        return
    for run in runs[: max(0, len(runs) - keep)]:
        shutil.rmtree(run, ignore_errors=True)
