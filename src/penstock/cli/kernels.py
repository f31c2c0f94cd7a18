"""Messages on kernels that numba still has to compile: for `doctor`, and for a plan before and while it waits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cli.show import Screen

REMEDY = "python -m penstock.solvers.solve.warm, with PENSTOCK_KERNELS naming a directory that can be written"


def announce_compilation() -> None:
    """Announce on standard error that a first plan takes a minute or two longer, where no kernel is compiled."""
    from penstock.solvers.compiled.kept import kept

    count, place = kept()
    if not count and find_spec("numba"):
        print(
            f"penstock: compiling what plans are searched with, once, into {place}: a minute or two in all",
            file=sys.stderr,
        )


@contextmanager
def compilation_shown(screen: Screen) -> Iterator[None]:
    """Show which kernel is compiled whenever a search first needs one that is not on disk."""
    announce_compilation()
    from penstock.solvers.compiled.progress import listening

    with listening(screen.compiling):
        yield


def one_thread() -> None:
    """Keep numpy from starting threads, which integers have no use for: a process with one thread may fork."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
