"""Numba's cache of one kernel, in the place that is ours (``kept``) instead of the one that numba was given."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator

from penstock.solvers.compiled.kept import folder, place


class _Place(UserProvidedCacheLocator):
    """Finds the directory of a function's file in our place."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        super().__init__(function, file)
        self._cache_path = os.path.join(str(place()), folder(file) or self.get_suitable_cache_subpath(file))

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> Any:
        """Return the locator, or None where we may not write. The directory is made with the first kernel in it."""
        return None if place() is None else cls(function, file)


class _Results(CompileResultCacheImpl):
    """Numba's files, found by ``_Place`` where it can."""

    def __init__(self, function: Callable[..., Any]) -> None:
        file = inspect.getfile(function)
        found = _Place.from_function(function, file)
        if found is None:
            super().__init__(function)
            return
        self._locator = found
        self._filename_base = self.get_filename_base(f"{Path(file).stem}.{function.__qualname__}", sys.abiflags)


class OnDisk(FunctionCache):
    """The cache of a kernel."""

    _impl_class = _Results


def is_kept(kernel: Any) -> bool:
    """Return whether a kernel was compiled once, so that its use needs no compiler."""
    return os.path.exists(kernel._cache._cache_file._index_path)
