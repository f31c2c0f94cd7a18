"""Warm-ups for ``test_warming``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

from penstock.solvers.solve.warm import Step


def endless() -> Iterator[Step]:
    """Compile for ever."""
    yield Step(_pause, apart=True)
    raise AssertionError("the step before has ended")


def failing() -> Iterator[Step]:
    """Fail at the first step."""
    yield Step(lambda: 1 // 0)


def _pause() -> None:
    Path(os.environ["PIDS_FILE"]).write_text(str(os.getpid()))
    while True:
        signal.pause()
