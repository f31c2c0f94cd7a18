"""How the kernels are compiled: cached on disk, and without reference counts where nothing is allocated.

Numba counts references at every access of an array in a tuple, which costs more than the kernels' own work.
Functions that neither allocate nor return arrays are compiled without (``_nrt``); the small ones are inlined.
"""

from __future__ import annotations

import numba

compiled = numba.njit(cache=True, error_model="numpy")
"""May allocate; keeps arrays in local names where it loops."""

loop = numba.njit(cache=True, error_model="numpy", _nrt=False)
"""A long loop over arrays that its caller has allocated."""

inner = numba.njit(cache=True, error_model="numpy", _nrt=False, forceinline=True)
"""A step of such a loop."""
