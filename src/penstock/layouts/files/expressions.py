"""Values of Python expressions that need nothing but the text: constants, arithmetic, lists, tables, comparisons."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

from penstock.layouts.files.values import Thing, Unknown

LONGEST = 100_000
"""Elements of a list, letters of a text."""
BINARY: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: lambda a, b: a is b or a == b,
    ast.IsNot: lambda a, b: a is not b and a != b,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_BUILTINS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "bool": bool,
    "dict": dict,
    "divmod": divmod,
    "float": float,
    "int": int,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "str": str,
    "tuple": tuple,
}


def opaque(*values: Any) -> Any:
    """Return the first of some values that is not plain; None where all are."""
    return next((value for value in values if isinstance(value, Thing | Unknown)), None)


def unknown(node: ast.expr) -> Unknown:
    """Return the value of an expression that is not followed."""
    return Unknown(f"it is computed, {ast.unparse(node)[:60]}", node.lineno)


def computed(node: ast.expr, operation: Callable[..., Any], *values: Any) -> Any:
    """Return what an operation makes of plain values; an Unknown where it makes nothing of them."""
    if opaque(*values) is not None:
        return next((value for value in values if isinstance(value, Unknown)), unknown(node))
    if operation is operator.mul and _product(values) > LONGEST:
        return unknown(node)
    try:
        return operation(*values)
    except Exception:  # whatever Python itself would raise there
        return unknown(node)


def _product(values: Sequence[Any]) -> int:
    """Return how long a repetition becomes; 0 of a product of numbers."""
    sequences = [value for value in values if isinstance(value, str | list | tuple)]
    numbers = [value for value in values if isinstance(value, int)]
    if not sequences:
        return LONGEST + 1 if any(abs(number) > 10**15 for number in numbers) else 0
    return max(1, len(sequences[0])) * max([1, *numbers])


def binary(node: ast.BinOp, left: Any, right: Any) -> Any:
    """Return a sum, a product, …; two tables or a power are not followed."""
    operation = BINARY.get(type(node.op))
    return unknown(node) if operation is None else computed(node, operation, left, right)


def compared(node: ast.Compare, values: Sequence[Any]) -> Any:
    """Return whether values that follow each other compare so. An object is not None."""
    for kind, left, right in zip(node.ops, values, values[1:], strict=False):
        if right is None and isinstance(left, Thing) and "(" in left.said and isinstance(kind, ast.Is | ast.IsNot):
            outcome: Any = isinstance(kind, ast.IsNot)
        else:
            outcome = computed(node, _COMPARED[type(kind)], left, right)
        if isinstance(outcome, Unknown) or not outcome:
            return outcome
    return True


def builtin(node: ast.Call, name: str, arguments: Sequence[Any]) -> Any:
    """Return what one of Python's own functions makes of plain values; an Unknown where it is none that is followed."""
    if name == "range" and opaque(*arguments) is None and all(isinstance(each, int) for each in arguments):
        found = range(*arguments) if 0 < len(arguments) < 4 else range(0)
        return list(found) if len(found) <= LONGEST else unknown(node)
    if name not in _BUILTINS:
        return unknown(node)
    return computed(node, _BUILTINS[name], *arguments)
