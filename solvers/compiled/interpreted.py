"""Kernels as the Python functions that they are written as, for a process that must not wait for the compiler.

A kernel that Python calls reads its arrays' elements as Python's integers, which are as exact as the 64-bit integers of
compiled kernels; numpy's scalars of 32 bits would not be. Interpreted kernels are one to three hundred times slower.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

COMPILES = "penstock.solvers.compiled.decorators"

_chosen = False
_calls = threading.local()


def interpret() -> None:
    """Have this process interpret all kernels; to be called before anything that holds kernels is imported."""
    global _chosen
    assert COMPILES not in sys.modules, "kernels were decorated already"
    _chosen = True


def interpreting() -> bool:
    """Return whether this process interprets kernels."""
    return _chosen


def interpreted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel that computes as if it were compiled, whether Python or another kernel calls it."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        if getattr(_calls, "running", False):
            return function(*arguments)
        _calls.running = True
        try:
            with np.errstate(all="ignore"):  # compiled kernels wrap around silently
                return _outside(function(*map(_inside, arguments)))
        finally:
            _calls.running = False

    return call


class _Exact(np.ndarray):
    """An array whose elements are read as Python's numbers."""

    def __getitem__(self, index: Any) -> Any:
        element = super().__getitem__(index)
        return element.item() if isinstance(element, np.generic) else element


def _inside(value: Any) -> Any:
    """Return an argument as kernels read it; it shares its memory with the caller's."""
    return value.view(_Exact) if type(value) is np.ndarray else _each(value, _inside)


def _outside(value: Any) -> Any:
    return value.view(np.ndarray) if type(value) is _Exact else _each(value, _outside)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    if not isinstance(value, tuple):
        return value
    parts = map(change, value)
    return value._make(parts) if hasattr(value, "_make") else tuple(parts)
