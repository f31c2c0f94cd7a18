"""A mark of the named tuples that kernels receive by their address."""

from __future__ import annotations

from abc import ABC


class Fields(ABC):  # noqa: B024  a mark, with nothing to implement
    """Register a class of named tuples, mostly of arrays, that Python makes and whose fields kernels read.

    A mark apart from what numba needs to know of it (``by_address``): modules that hold such tuples do without numba.
    """
