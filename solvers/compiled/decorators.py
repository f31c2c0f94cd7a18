"""How the kernels are compiled: cached on disk, and without reference counts where nothing is allocated.

Numba counts references at every access of an array in a tuple, which costs more than the kernels' own work.
Functions that neither allocate nor return arrays are compiled without (``_nrt``); the small ones are inlined.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from numba.core import types

_unliteral: Any = types.unliteral


def _decorator(**options: Any) -> Any:
    """``numba.njit(cache=True)`` with these options, for any constant arguments the same code.

    Else numba compiles a kernel again for each constant that another kernel passes to it, and all that it calls too.
    """
    compiler: Any = numba.njit(cache=True, error_model="numpy", **options)

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = compiler(function)
        template = kernel.get_call_template

        def get_call_template(args: Any, kws: Any) -> Any:
            named = {name: _unliteral(each) for name, each in kws.items()}
            return template(tuple(_unliteral(each) for each in args), named)

        kernel.get_call_template = get_call_template
        return kernel

    return decorate


compiled: Any = _decorator()
"""May allocate; keeps arrays in local names where it loops."""

loop: Any = _decorator(_nrt=False)
"""A long loop over arrays that its caller has allocated."""

inner: Any = _decorator(_nrt=False, forceinline=True)
"""A step of such a loop."""

beside: Any = _decorator(nogil=True)
"""May allocate, and runs beside other threads: the door of a batch, whose plans have nothing to do with each other."""
