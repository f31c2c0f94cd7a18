"""Python's garbage collector, paused for work that makes many objects and hardly a cycle."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Pause the collector, which looks again and again through objects that all live: a third of the time of a report.

    It pauses for all threads of the process; whoever pauses it first lets it go on. What was made meanwhile then counts
    as old, as it would if the collector had looked through it.
    """
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            if not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()
            gc.enable()
