"""Settings of a Python configuration, by following its statements without running them.

Functions of the same file are entered. An object from another file has only the settings that this file makes. The
targets of a branch with an unknown condition become unknown.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from penstock.layouts.files.expressions import (
    LONGEST,
    binary,
    builtin,
    compared,
    computed,
    opaque,
    unknown,
    written,
)
from penstock.layouts.files.values import Thing, Unknown
from penstock.schemas.bounded.budget import Budget

_DEEPEST = 30
Several = TypeVar("Several", list[Any], tuple[Any, ...], dict[Any, Any], Mapping[str, Any])


class _Returned(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class Reader:
    """One reading of a file; ``elsewhere`` has the functions of other files that got an object, which they may change.

    Every statement and value is a step of the ``budget``. Methods raise InvalidDocument where it is spent.
    """

    def __init__(self, tree: ast.Module, budget: Budget, overrides: Mapping[str, Any]) -> None:
        self.budget = budget
        self.functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        self.overrides = overrides
        self.elsewhere: dict[str, int] = {}
        self._depth = 0
        self.module: dict[str, Any] = {}
        self.run([node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef)], self.module)

    def call(self, function: ast.FunctionDef, arguments: list[Any], named: Mapping[str, Any]) -> Any:
        """Return what a function of the file returns."""
        if self._depth >= _DEEPEST:
            return Unknown(f"{function.name} calls itself", function.lineno)
        local = self._bound(function, arguments, named)
        self._depth += 1
        try:
            self.run(function.body, local)
        except _Returned as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    def _bound(self, function: ast.FunctionDef, arguments: list[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters' values: arguments, defaults, or unknown ones."""
        spec = function.args
        names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
        local: dict[str, Any] = {}
        defaults = [*zip(reversed(names), reversed(spec.defaults), strict=False)]
        defaults += [(each.arg, value) for each, value in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if value]
        for name, value in defaults:
            local[name] = self.value(value, self.module)
        parameters = {*names, *(each.arg for each in spec.kwonlyargs)}
        local |= dict(zip(names, arguments, strict=False))
        local |= {name: value for name, value in named.items() if name in parameters}
        for name in parameters:
            local.setdefault(name, Unknown(f"{name} is a parameter of {function.name}", function.lineno))
            if name in self.overrides and self._depth == 0:
                local[name] = self.overrides[name]
        if spec.kwarg is not None:
            local[spec.kwarg.arg] = {name: value for name, value in named.items() if name not in parameters}
        if spec.vararg is not None:
            local[spec.vararg.arg] = tuple(arguments[len(names) :])
        return local

    def run(self, body: Iterable[ast.stmt], local: dict[str, Any]) -> None:
        """Follow statements one after the other."""
        for node in body:
            self.budget.step()
            match node:
                case ast.Assign():
                    value = self.value(node.value, local)
                    for target in node.targets:
                        self._set(target, value, local)
                case ast.AnnAssign() if node.value is not None:
                    self._set(node.target, self.value(node.value, local), local)
                case ast.AugAssign():
                    operation = ast.BinOp(self._loaded(node.target), node.op, node.value)
                    self._set(node.target, self.value(ast.copy_location(operation, node), local), local)
                case ast.Expr():
                    self.value(node.value, local)
                case ast.Return():
                    raise _Returned(None if node.value is None else self.value(node.value, local))
                case ast.If():
                    self._branch(node, local)
                case ast.For():
                    self._loop(node, local)
                case ast.With() | ast.Try():
                    self.run(node.body, local)
                case _:
                    pass

    def _branch(self, node: ast.If, local: dict[str, Any]) -> None:
        condition = self.value(node.test, local)
        if opaque(condition) is None:
            self.run(node.body if condition else node.orelse, local)
        else:
            why = Unknown(f"it depends on {written(node.test, self.budget)[:60]}", node.lineno)
            self._forget((*node.body, *node.orelse), why, local, "" if node.orelse else self._guarded(node.test))

    def _loop(self, node: ast.For, local: dict[str, Any]) -> None:
        over = self.value(node.iter, local)
        if not isinstance(over, list | tuple) or len(over) > LONGEST:
            self._forget(node.body, Unknown("it is set in a loop", node.lineno), local)
            return
        for each in over:
            self._set(node.target, each, local)
            self.run(node.body, local)

    def _forget(self, body: Iterable[ast.stmt], why: Unknown, local: dict[str, Any], guarded: str = "") -> None:
        """Set the targets of statements to unknown, unless they would keep their values.

        ``guarded`` is an object that exists where the statements run. Settings made in it are known, since otherwise it
        does not exist.
        """
        for statement in body:
            for node in ast.walk(statement):
                self.budget.step()
                targets = node.targets if isinstance(node, ast.Assign) else ()
                for target in targets:
                    if isinstance(node, ast.Assign) and isinstance(target, ast.Name | ast.Attribute):
                        if isinstance(target, ast.Attribute) and written(target.value, self.budget) == guarded:
                            self._set(target, self.value(node.value, local), local)
                            continue
                        old, new = self.value(self._loaded(target), local), self.value(node.value, local)
                        if (
                            isinstance(old, Thing)
                            or computed(node.value, self.budget, operator.eq, old, new) is not True
                        ):
                            self._set(target, why, local)

    def _set(self, target: ast.expr, value: Any, local: dict[str, Any]) -> None:
        match target:
            case ast.Name():
                local[target.id] = self.overrides.get(target.id, value)
            case ast.Attribute():
                owner = self.value(target.value, local)
                if isinstance(owner, Thing):
                    owner.settings[target.attr] = (value, target.lineno)
            case ast.Subscript():
                owner, key = self.value(target.value, local), self.value(target.slice, local)
                if isinstance(owner, dict) and isinstance(key, str | int):
                    owner[key] = value
            case ast.Tuple() | ast.List():
                fits = isinstance(value, list | tuple) and len(value) == len(target.elts)
                for number, each in enumerate(target.elts):
                    self._set(each, value[number] if fits else unknown(each, self.budget), local)
            case _:
                pass

    def value(self, node: ast.expr, local: dict[str, Any]) -> Any:
        """Return the value of an expression: plain, an object, or an Unknown that says why."""
        self.budget.step()
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._named(node, local)
            case ast.Attribute():
                owner = self.value(node.value, local)
                return self._attribute(node, owner)
            case ast.Call():
                return self._called(node, local)
            case ast.BinOp():
                return binary(node, self.budget, self.value(node.left, local), self.value(node.right, local))
            case ast.UnaryOp():
                operand = self.value(node.operand, local)
                if isinstance(node.op, ast.Not):
                    return computed(node, self.budget, lambda value: not value, operand)
                return computed(
                    node, self.budget, lambda value: -value if isinstance(node.op, ast.USub) else value, operand
                )
            case ast.BoolOp():
                return self._both(node, local)
            case ast.Compare():
                return compared(node, self.budget, [self.value(each, local) for each in (node.left, *node.comparators)])
            case ast.IfExp():
                condition = self.value(node.test, local)
                if opaque(condition) is not None:
                    return unknown(node, self.budget)
                return self.value(node.body if condition else node.orelse, local)
            case ast.List():
                return [self.value(each, local) for each in node.elts]
            case ast.Tuple():
                return tuple(self.value(each, local) for each in node.elts)
            case ast.ListComp() if len(node.generators) == 1:
                return self._each(node, local)
            case ast.Dict():
                return self._table(node, local)
            case ast.Subscript():
                owner = self.value(node.value, local)
                return computed(node, self.budget, lambda key: owner[key], self.value(node.slice, local))
            case _:
                return unknown(node, self.budget)

    def _attribute(self, node: ast.Attribute, owner: Any) -> Any:
        if not isinstance(owner, Thing):
            return unknown(node, self.budget)
        self.budget.make(len(owner.origin) + len(node.attr))  # each is called by its whole path
        return owner.get(node.attr, node.lineno)

    def _named(self, node: ast.Name, local: dict[str, Any]) -> Any:
        if node.id in local:
            return local[node.id]
        if node.id in self.overrides:
            return self.overrides[node.id]
        return self.module.setdefault(node.id, Thing(node.id))

    def _both(self, node: ast.BoolOp, local: dict[str, Any]) -> Any:
        value: Any = None
        for each in node.values:
            value = self.value(each, local)
            if opaque(value) is not None or bool(value) == isinstance(node.op, ast.Or):
                return value
        return value

    def _each(self, node: ast.ListComp, local: dict[str, Any]) -> Any:
        """Return the results of a comprehension for the elements of a known list."""
        (of,) = node.generators
        over = self.value(of.iter, local)
        if not isinstance(over, list | tuple) or len(over) > LONGEST:
            return unknown(node, self.budget)
        self.budget.make(len(local))
        inner, results = dict(local), []
        for each in over:
            self.budget.step()
            self._set(of.target, each, inner)
            kept = [self.value(condition, inner) for condition in of.ifs]
            if opaque(*kept) is not None:
                return unknown(node, self.budget)
            results += [self.value(node.elt, inner)] if all(kept) else []
        return results

    def _table(self, node: ast.Dict, local: dict[str, Any]) -> Any:
        table: dict[Any, Any] = {}
        for key, each in zip(node.keys, node.values, strict=True):
            value = self.value(each, local)
            if key is None:
                table |= self._counted(value) if isinstance(value, dict) else {}
            elif isinstance(name := self.value(key, local), str | int | tuple) and not isinstance(name, Unknown):
                table[name] = value
        return table

    def _called(self, node: ast.Call, local: dict[str, Any]) -> Any:
        arguments: list[Any] = []
        for each in node.args:
            value = self.value(each.value if isinstance(each, ast.Starred) else each, local)
            several = isinstance(each, ast.Starred) and isinstance(value, list | tuple)
            arguments += self._counted(value) if several else [value]
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value, local)
            named |= {keyword.arg: value} if keyword.arg else self._counted(value) if isinstance(value, dict) else {}
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in self.functions:
            return self.call(self.functions[name], arguments, named)
        if isinstance(node.func, ast.Attribute) and (done := self._method(node, arguments, named, local)) is not None:
            return done
        return self._foreign(node, name, arguments, named)

    def _method(self, node: ast.Call, arguments: list[Any], named: Mapping[str, Any], local: dict[str, Any]) -> Any:
        """Return the result of a method of a table, a list or a text; None for another object's method."""
        assert isinstance(node.func, ast.Attribute)
        owner, name = self.value(node.func.value, local), node.func.attr
        if isinstance(owner, dict) and name in ("get", "pop") and arguments:
            return owner.get(arguments[0], arguments[1] if len(arguments) > 1 else None)
        if isinstance(owner, dict) and name == "update":
            owner |= self._counted(arguments[0]) if arguments and isinstance(arguments[0], dict) else {}
            owner |= self._counted(named)
            return owner
        if isinstance(owner, list) and name in ("append", "extend") and len(arguments) == 1:
            more = [arguments[0]] if name == "append" else arguments[0] if isinstance(arguments[0], list) else []
            owner += self._counted(more)
            return owner
        if isinstance(owner, str) and name == "join" and len(arguments) == 1 and isinstance(arguments[0], list | tuple):
            too_long = len(owner) * len(arguments[0]) > LONGEST
            return unknown(node, self.budget) if too_long else computed(node, self.budget, owner.join, *arguments)
        return dict(self._counted(owner)) if isinstance(owner, dict) and name == "copy" else None

    def _counted(self, values: Several) -> Several:
        """Return a table or list that is about to be copied, with its elements counted."""
        self.budget.make(len(values))
        return values

    def _guarded(self, test: ast.expr) -> str:
        """Return the expression that a test requires to exist: ``X`` of ``X is not None``, else no text."""
        match test:
            case ast.Compare(left=left, ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
                return written(left, self.budget)
            case _:
                return ""

    def _loaded(self, target: ast.expr) -> ast.expr:
        """Return a target as an expression that reads it."""
        return ast.parse(written(target, self.budget), mode="eval").body

    def _foreign(self, node: ast.Call, name: str, arguments: list[Any], named: Mapping[str, Any]) -> Any:
        """Return the result of another file's function: an object with the named values, or a copy of its argument."""
        first = arguments[0] if arguments else None
        if name == "getattr" and isinstance(first, Thing) and len(arguments) > 1 and isinstance(arguments[1], str):
            default = arguments[2] if len(arguments) > 2 else None
            return first.settings.get(arguments[1], (default, node.lineno))[0]
        if name == "cast" and len(arguments) == 2:
            return arguments[1]
        if name in ("replace", "deepcopy", "copy") and isinstance(first, Thing):
            changes = {key: (value, node.lineno) for key, value in named.items()}
            return Thing(first.origin, self._counted(first.settings) | changes)
        if not named and opaque(result := builtin(node, self.budget, name, arguments)) is None:
            return result
        if name and any(isinstance(each, Thing) and each.settings for each in arguments):
            self.elsewhere.setdefault(name, node.lineno)
        settings = {key: (value, node.lineno) for key, value in named.items()}
        for keyword in node.keywords:
            if keyword.arg in settings:
                settings[keyword.arg] = (settings[keyword.arg][0], keyword.value.lineno)
        plain = all(isinstance(each, str | int | float) for each in arguments)
        return Thing(f"{written(node.func, self.budget)}()", settings, tuple(arguments) if plain else ())
