"""How the kernels are compiled: cached on disk, and without reference counts where nothing is allocated.

Numba counts references at every access of an array in a tuple, which costs more than the kernels' own work.
Functions that neither allocate nor return arrays are compiled without (``_nrt``); the small ones are inlined.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any

import numba

compiled: Any = numba.njit(cache=True, error_model="numpy")
"""May allocate; keeps arrays in local names where it loops."""

_WITHOUT_COUNTS: dict[str, Any] = {"cache": True, "error_model": "numpy", "_nrt": False}

loop: Any = numba.njit(**_WITHOUT_COUNTS)
"""A long loop over arrays that its caller has allocated."""

inner: Any = numba.njit(**_WITHOUT_COUNTS, forceinline=True)
"""A step of such a loop."""

beside: Any = numba.njit(cache=True, error_model="numpy", nogil=True)
"""May allocate, and runs beside other threads: the door of a batch, whose plans have nothing to do with each other."""
