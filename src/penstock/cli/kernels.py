"""Whether what numba compiles is compiled: what `doctor` shows, and what the first plan says before it waits."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

REMEDY = "python -m penstock.solvers.solve.warm, with NUMBA_CACHE_DIR naming a directory that can be written"


def compiled() -> tuple[int, Path]:
    """How many kernels lie ready, and where."""
    import penstock.solvers  # says where kernels are kept

    place = Path(os.environ.get("NUMBA_CACHE_DIR") or penstock.solvers.__path__[0])
    return sum(1 for _ in place.rglob("*.nbi")), place


def announce_compilation() -> None:
    """Say on standard error that a first plan takes a minute or two longer, where it will."""
    found, place = compiled()
    if not found and find_spec("numba"):
        print(f"penstock: compiling what plans are searched with, once, into {place}: a minute or two", file=sys.stderr)
