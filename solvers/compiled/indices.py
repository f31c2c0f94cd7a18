"""Kernels whose indices are never negative, so that numba need not check each for counting from the end.

The check takes five instructions at every access, which is a fifth to a third of the time of a clock or a merge. A
module that calls ``never_negative(__name__)`` promises for all its kernels that every index counts from the front,
``a[a.size - 1]`` instead of ``a[-1]``. ``scripts/check-indices`` has numba raise IndexError where the promise is
broken.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False

from __future__ import annotations

import operator
from typing import Any

from numba.core import cgutils, types
from numba.core.typing import templates
from numba.extending import lower_builtin
from numba.np import arrayobj

_promised: set[str] = set()
_lower: Any = lower_builtin
_signature: Any = templates.signature
_tuple: Any = types.Tuple
_tuples: Any = types.BaseTuple
_unpacked: Any = cgutils.unpack_tuple


def never_negative(module: str) -> None:
    """Compile all kernels of ``module`` without checks for negative indices."""
    _promised.add("_ZN" + "".join(f"{len(part)}{part}" for part in module.split(".")))


def _unsigned(context: Any, builder: Any, kind: Any, index: Any) -> tuple[Any, Any]:
    """Return type and value of an index as kernels that have promised it use them: integers are unsigned."""
    if not builder.function.name.startswith(tuple(_promised)):
        return kind, index
    if isinstance(kind, types.Integer):
        return types.uintp, context.cast(builder, index, kind, types.intp)
    if isinstance(kind, _tuples):
        parts = zip(kind.types, _unpacked(builder, index, len(kind)), strict=True)
        kinds, values = zip(*(_unsigned(context, builder, *part) for part in parts), strict=True)
        unsigned = _tuple(kinds)
        return unsigned, context.make_tuple(builder, unsigned, values)
    return kind, index


@_lower(operator.getitem, types.Array, types.Integer)
def _get(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind, index = _unsigned(context, builder, sig.args[1], args[1])
    signature = _signature(sig.return_type, sig.args[0], kind)
    return arrayobj.getitem_arraynd_intp(context, builder, signature, (args[0], index))


@_lower(operator.getitem, types.Array, types.BaseTuple)
def _get_at(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind, index = _unsigned(context, builder, sig.args[1], args[1])
    signature = _signature(sig.return_type, sig.args[0], kind)
    return arrayobj.getitem_array_tuple(context, builder, signature, (args[0], index))


@_lower(operator.setitem, types.Array, types.Any, types.Any)
def _set(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    kind, index = _unsigned(context, builder, sig.args[1], args[1])
    signature = _signature(sig.return_type, sig.args[0], kind, sig.args[2])
    return arrayobj.setitem_array(context, builder, signature, (args[0], index, args[2]))
