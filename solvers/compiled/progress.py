"""The kernel that the compiler is at work on: one that is not on disk yet, for which its first user waits."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

Tell = Callable[[str | None], None]
"""A function called with a kernel's name when its compilation begins, and with None when it is ready."""


class _Outermost(event.Listener):
    """A listener to numba's compilations in this process; it reports functions that no other compilation waits for."""

    def __init__(self) -> None:
        self.tell: Tell | None = None
        self._depth = 0

    def on_start(self, event: Any) -> None:
        if self._depth == 0:
            function = event.data["dispatcher"].py_func
            tell(f"{function.__module__.removeprefix('penstock.solvers.')}.{function.__name__}")
        self._depth += 1

    def on_end(self, event: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            tell(None)


_outermost = _Outermost()
event.register("numba:compile", _outermost)


@contextmanager
def listening(listener: Tell) -> Iterator[None]:
    """Report compilations in this process, or in workers of its solves, to ``listener`` and no other listener."""
    before, _outermost.tell = _outermost.tell, listener
    try:
        yield
    finally:
        _outermost.tell = before


def tell(kernels: str | None) -> None:
    """Report the kernels that are being compiled, here or in another process."""
    if _outermost.tell is not None:
        _outermost.tell(kernels)
