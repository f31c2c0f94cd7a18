"""Values of Python expressions that need nothing but the text: constants, arithmetic, lists, tables, comparisons."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from typing import Any

from penstock.layouts.files.values import Thing, Unknown
from penstock.schemas.bounded.budget import Budget

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


def written(node: ast.AST, budget: Budget) -> str:
    """Return an expression as text; each of its parts is a step."""
    budget.step(sum(1 for _ in ast.walk(node)))
    return ast.unparse(node)


def unknown(node: ast.expr, budget: Budget) -> Unknown:
    """Return the value of an expression that is not followed."""
    return Unknown(f"it is computed, {written(node, budget)[:60]}", node.lineno)


def computed(node: ast.expr, budget: Budget, operation: Callable[..., Any], *values: Any) -> Any:
    """Return the result of an operation on plain values, or an Unknown where it fails or is too large."""
    if opaque(*values) is not None:
        first = next((value for value in values if isinstance(value, Unknown)), None)
        return unknown(node, budget) if first is None else first
    size = sum(map(_size, values))
    if operation is operator.mul:
        size = max(size, _product(values))
    budget.make(size)
    if size > LONGEST or (operation is operator.mod and isinstance(values[0], str)):  # "%999999d" % 1 is as long
        return unknown(node, budget)
    try:
        return operation(*values)
    except Exception:  # whatever Python itself would raise there
        return unknown(node, budget)


def _size(value: Any) -> int:
    """Return the letters and elements of a value at all levels; counting ends above LONGEST.

    A list that holds another one twice counts its elements twice, as comparing and printing it takes that long.
    """
    size, left = 0, [value]
    while left and size <= LONGEST:
        one = left.pop()
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, list | tuple | dict):
            size += len(one)
            if size <= LONGEST:
                left += one if not isinstance(one, dict) else [each for pair in one.items() for each in pair]
    return size


def _product(values: Sequence[Any]) -> int:
    """Return how long a repetition becomes; 0 of a product of numbers."""
    sequences = [value for value in values if isinstance(value, str | list | tuple)]
    numbers = [value for value in values if isinstance(value, int)]
    if not sequences:
        return LONGEST + 1 if any(abs(number) > 10**15 for number in numbers) else 0
    return max(1, len(sequences[0])) * max([1, *numbers])


def binary(node: ast.BinOp, budget: Budget, left: Any, right: Any) -> Any:
    """Return a sum, a product, …; two tables or a power are not followed."""
    operation = BINARY.get(type(node.op))
    return unknown(node, budget) if operation is None else computed(node, budget, operation, left, right)


def compared(node: ast.Compare, budget: Budget, values: Sequence[Any]) -> Any:
    """Return whether successive values compare so; an object is never None."""
    for kind, left, right in zip(node.ops, values, values[1:], strict=False):
        if right is None and isinstance(left, Thing) and "(" in left.origin and isinstance(kind, ast.Is | ast.IsNot):
            outcome: Any = isinstance(kind, ast.IsNot)
        else:
            outcome = computed(node, budget, _COMPARED[type(kind)], left, right)
        if isinstance(outcome, Unknown) or not outcome:
            return outcome
    return True


def builtin(node: ast.Call, budget: Budget, name: str, arguments: Sequence[Any]) -> Any:
    """Return the result of one of Python's own functions on plain values, or an Unknown if it is not followed."""
    if name == "range" and opaque(*arguments) is None and all(isinstance(each, int) for each in arguments):
        numbers = range(*arguments) if 0 < len(arguments) < 4 else range(0)
        if len(numbers) > LONGEST:
            return unknown(node, budget)
        budget.make(len(numbers))
        return list(numbers)
    if name not in _BUILTINS:
        return unknown(node, budget)
    return computed(node, budget, _BUILTINS[name], *arguments)
