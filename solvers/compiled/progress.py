"""Which kernel the compiler is at work on: one that is not on disk yet, for which whoever first needs it waits."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba.core import event

Tell = Callable[[str | None], None]
"""Is called with a kernel when its compilation begins, and with None when it is ready."""


class _Outermost(event.Listener):
    """Hears of every function that numba compiles in this process; tells of those that no other one waits for."""

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
    """Tell ``listener``, and no other, what is compiled in this process, or by workers of its solves."""
    before, _outermost.tell = _outermost.tell, listener
    try:
        yield
    finally:
        _outermost.tell = before


def tell(kernels: str | None) -> None:
    """Pass on what is being compiled, here or in another process."""
    if _outermost.tell is not None:
        _outermost.tell(kernels)
