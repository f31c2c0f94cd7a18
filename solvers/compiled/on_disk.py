"""Numba's cache of one kernel, in our place (``kept``) instead of numba's default."""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator

from penstock.solvers.compiled.kept import folder, place


class _Place(UserProvidedCacheLocator):
    """A locator of a function's file in our place; the directory is made with the first kernel in it."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        super().__init__(function, file)
        self._cache_path = os.path.join(str(place()), folder(file) or self.get_suitable_cache_subpath(file))


class _Results(CompileResultCacheImpl):
    """Numba's files, found by ``_Place``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        file = inspect.getfile(function)
        self._locator = _Place(function, file)
        self._filename_base = self.get_filename_base(f"{Path(file).stem}.{function.__qualname__}", sys.abiflags)


class OnDisk(FunctionCache):
    """The cache of a kernel; where nothing can be written, kernels are compiled again by each process."""

    _impl_class = _Results

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compiled kernel where that is possible."""
        with suppress(OSError):
            super().save_overload(signature, result)


def is_kept(kernel: Any) -> bool:
    """Return whether a kernel was compiled once, so that its use needs no compiler."""
    return os.path.exists(kernel._cache._cache_file._index_path)
