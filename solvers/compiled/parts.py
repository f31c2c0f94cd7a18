"""Numba's compilation of functions that are parts of kernels: only up to inlining, since nothing else ever runs them.

By itself numba optimises every function that it meets, makes machine code of it, and a wrapper that Python can call;
and does all but the last again for each function that it is inlined in.
"""

# mypy: disallow-untyped-calls=False

from __future__ import annotations

from typing import Any

from numba.core.codegen import CPUCodeLibrary
from numba.core.compiler import Compiler


class _Library(CPUCodeLibrary):
    """The code of a part and of the parts in it, as it was written: kernels are optimised with all their parts."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


class InlinedCompiler(Compiler):
    """Numba's compiler up to the code that is inlined."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        flags = self.state.flags
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True

    def compile_extra(self, function: Any) -> Any:
        """Return the result that kernels need which call the function."""
        context = self.state.targetctx
        self.state.library = _Library(context.codegen(), function.__qualname__)
        result = super().compile_extra(function)._replace(entry_point=object())
        context.insert_user_function(result.entry_point, result.fndesc, [result.library])
        return result
