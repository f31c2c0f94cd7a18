"""Whether what numba compiles is compiled: what `doctor` shows, and what the first plan says before it waits."""

from __future__ import annotations

import sys
from importlib.util import find_spec

REMEDY = "python -m penstock.solvers.solve.warm, with NUMBA_CACHE_DIR naming a directory that can be written"


def announce_compilation() -> None:
    """Say on standard error that a first plan takes a minute or two longer, where it will."""
    from penstock.solvers.compiled.kept import kept

    found, place = kept()
    if not found and find_spec("numba"):
        print(
            f"penstock: compiling what plans are searched with, once, into {place}: a minute or two in all",
            file=sys.stderr,
        )
