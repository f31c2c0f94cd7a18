"""The compilation of kernels: cached on disk, and without reference counts where nothing is allocated.

A process may interpret them instead (``interpreted``).

Numba counts references at every access of an array in a tuple, which costs more than the kernels' own work. Functions
that neither allocate nor return arrays are compiled without (``_nrt``); the small ones are inlined.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False
# mypy: disallow-untyped-calls=False

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numba
from numba.core import types

import penstock.solvers.compiled.by_address  # noqa: F401  how numba passes named tuples
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.compiled.interpreted import interpreted, interpreting
from penstock.solvers.compiled.on_disk import OnDisk
from penstock.solvers.compiled.parts import InlinedCompiler

if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
    raise UnsupportedRequest(
        "NUMBA_DISABLE_JIT is set, but the solvers' kernels run only when compiled, because they call each other",
        remedy="unset NUMBA_DISABLE_JIT; NUMBA_BOUNDSCHECK=1 checks every index of compiled kernels",
    )

_njit: Any = numba.njit
_unliteral: Any = types.unliteral


def _decorator(*, keep: bool = False, **options: Any) -> Any:
    """Return ``numba.njit`` with these options, compiling one version for all constant arguments; ``keep`` it on disk.

    By default numba compiles a kernel again for each constant that another kernel passes to it, and its callees too.
    """
    if interpreting():
        return interpreted
    compiler = _njit(error_model="numpy", no_cfunc_wrapper=True, **options)

    def decorate(function: Callable[..., Any]) -> Any:
        kernel = _kept(compiler(function)) if keep else compiler(function)
        template, compile_for = kernel.get_call_template, kernel.compile

        def get_call_template(args: Any, kws: Any) -> Any:
            named = {name: _unliteral(each) for name, each in kws.items()}
            return template(tuple(_unliteral(each) for each in args), named)

        def compile_without_pauses(signature: Any) -> Any:
            with _no_collection():
                return compile_for(signature)

        kernel.get_call_template, kernel.compile = get_call_template, compile_without_pauses
        return kernel

    return decorate


def _kept(kernel: Any) -> Any:
    """Return the kernel, which is looked up on disk and written there."""
    kernel._cache = OnDisk(kernel.py_func)
    return kernel


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector from scanning all objects that the compiler makes, which takes a sixth of its time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _part(function: Callable[..., Any]) -> Any:
    if interpreting():
        return function
    kernel = _decorator(_nrt=False, forceinline=True, pipeline_class=InlinedCompiler)(function)

    def refuse(*_args: Any, **_kws: Any) -> Any:
        raise TypeError(f"{function.__name__} is a part of kernels, and can be called only by kernels")

    kernel._insert, kernel._compile_for_args = lambda *_args, **_kws: None, refuse
    return kernel


compiled: Any = _decorator(keep=True)
"""A kernel that may allocate; it keeps arrays in local names where it loops."""

loop: Any = _decorator(keep=True, _nrt=False)
"""A long loop over arrays that its caller has allocated."""

inner: Any = _part
"""A step of such a loop: compiled as a part of each kernel that takes it, never called from Python."""

threaded: Any = _decorator(keep=True, nogil=True)
"""A kernel that may allocate, and runs in several threads at once: for batches of independent plans."""


def plain(function: Callable[..., Any]) -> Any:
    """Compile as numba does by itself: a division by zero raises."""
    return interpreted(function) if interpreting() else _kept(_njit(function))
