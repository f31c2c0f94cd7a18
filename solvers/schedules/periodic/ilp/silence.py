"""A context in which HiGHS prints nothing on standard output."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence() -> Iterator[None]:
    """Discard standard output while HiGHS solves.

    HiGHS 1.12 prints a line when it repairs a solution, whatever its options say (its issue 2783). The line goes
    through C's buffers, so only file descriptor 1 can keep it from a caller who reads the output.
    """
    flush = ctypes.CDLL(None).fflush
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
        flush(None)
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
