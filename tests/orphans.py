"""Processes that a test leaves behind, without the processes that fixtures of the whole session keep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def family() -> set[psutil.Process]:
    """Return the living descendants of this process."""
    return {p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


@contextmanager
def no_orphans(within_s: float = 0.0) -> Iterator[None]:
    """Check that processes which begin in the block have ended at its end, or within the time after it."""
    before = family()
    yield
    assert psutil.wait_procs(family() - before, within_s)[1] == []
