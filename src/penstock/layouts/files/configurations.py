"""The configurations of a Python file by name, and the settings of one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from penstock.layouts.files.reader import Reader
from penstock.layouts.files.values import Setting, Symbol, Thing, Unknown, flattened
from penstock.schemas.bounded.budget import Budget
from penstock.schemas.errors import InvalidDocument, meant

_PYTHON = re.compile(r"(?m)^(?:def |from \S+ import |import |class |@)")
_MOST_NAMED = 12
_MOST_COMPARED = 1000
"""The number of names that a misspelt one is compared with."""


class Configuration(NamedTuple):
    """A configuration with the ``name`` of its function or variable; ``elsewhere`` lists calls into other files."""

    name: str
    settings: dict[str, Setting]
    elsewhere: tuple[str, ...]


def is_python(text: str) -> bool:
    """Return whether a text is a Python module, and no script with a module inside."""
    return _PYTHON.search(text) is not None and not text.startswith("#!/bin") and _parsed(text) is not None


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def configuration(
    text: str, source: str, wanted: str | None, overrides: Mapping[str, Any], is_stated: Callable[[str, Setting], bool]
) -> Configuration:
    """Return the configuration with the wanted name, or the only one.

    ``is_stated`` decides whether a layout is read from a setting. Raises InvalidDocument for a name that the file
    lacks, and where it has several and none is wanted.
    """
    tree = _parsed(text)
    assert tree is not None
    budget = Budget(source)
    try:
        by_name = {each.name: each for each in _all(tree, budget, overrides, is_stated)}
    except RecursionError:
        raise InvalidDocument(f"{source} has expressions that are nested too deeply") from None
    if wanted is not None and wanted not in by_name and wanted in _names(tree):
        by = _made_by(tree, wanted, budget, overrides)
        raise InvalidDocument(
            f"{source}: {wanted} sets neither degrees nor batch; other files set them{by}",
            remedy="give the file that sets them",
        )
    if wanted is not None and wanted not in by_name:
        hint = meant(wanted, islice(by_name, _MOST_COMPARED), f"it has {_listed(by_name)}")
        raise InvalidDocument(
            f"{source} has no configuration {wanted!r}; {hint}",
            remedy="--config with one of its names",
        )
    if not by_name and (plain := [name for name in _names(tree) if not name.startswith("_")]):
        raise InvalidDocument(
            f"{source} sets neither degrees nor batch in {_listed(dict.fromkeys(plain))}; other files set them",
            remedy="give the file that sets them",
        )
    if wanted is None and len(by_name) > 1:
        raise InvalidDocument(
            f"{source} has {len(by_name)} configurations: {_listed(by_name)}",
            remedy=f"choose one: --config {next(iter(by_name))}",
        )
    return by_name[wanted] if wanted is not None else next(iter(by_name.values()), Configuration("", {}, ()))


def _names(tree: ast.Module, parameters: int = 0) -> list[str]:
    """Return the names of functions that need this number of parameters."""
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            spec = node.args
            needed = len(spec.args) + len(spec.posonlyargs) - len(spec.defaults)
            if needed + sum(default is None for default in spec.kw_defaults) == parameters:
                names.append(node.name)
    return names


def _made_by(tree: ast.Module, name: str, budget: Budget, overrides: Mapping[str, Any]) -> str:
    """Return words on the function of another file that makes a configuration."""
    reader = Reader(tree, budget, overrides)
    result = reader.call(reader.functions[name], [], {})
    origin = result.origin if isinstance(result, Thing) else ""
    return f" (it is made by {origin})" if origin else ""


def _listed(names: Mapping[str, object]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _MOST_NAMED} more" if len(listed) > _MOST_NAMED else ""
    return ", ".join(listed[:_MOST_NAMED]) + more


def _all(
    tree: ast.Module, budget: Budget, overrides: Mapping[str, Any], is_stated: Callable[[str, Setting], bool]
) -> list[Configuration]:
    """Return every function without required parameters, and every module object, that has settings of a layout."""
    plain = Reader(tree, budget, overrides)
    configurations = []
    for name in _names(tree):
        if name.startswith("_"):
            continue
        reader = Reader(tree, budget, overrides)
        result = reader.call(plain.functions[name], [], {})
        settings = flattened(result, budget) if isinstance(result, Thing) else {}
        if any(is_stated(path, setting) for path, setting in settings.items()):
            foreign = isinstance(result, Thing) and result.origin.lstrip("_")[:1].islower()
            base = [result.origin] if isinstance(result, Thing) and foreign else []
            called = [f"{each}, line {line}" for each, line in reader.elsewhere.items()]
            configurations.append(Configuration(name, settings, (*base, *called)))
    for name in [] if configurations else _names(tree, parameters=1):
        reader = Reader(tree, budget, overrides)
        edited = Thing(name)
        reader.call(plain.functions[name], [edited], {})
        if any(is_stated(path, setting) for path, setting in flattened(edited, budget).items()):
            configurations.append(Configuration(name, flattened(edited, budget), ()))
    for name, value in plain.module.items():
        settings = flattened(value, budget) if isinstance(value, Thing) and not configurations else {}
        if any(is_stated(path, setting) for path, setting in settings.items()):
            configurations.append(Configuration(name, settings, ()))
    return configurations


def refusal(setting: Setting) -> str | None:
    """Return why a value is unknown; None where it is known."""
    if isinstance(setting.value, Symbol) and setting.value.endswith("()"):
        return f"it is computed, {setting.value}"
    return setting.value.why if isinstance(setting.value, Unknown) else None
