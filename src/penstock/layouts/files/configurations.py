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
"""Names that a misspelt one is compared with."""


class Configuration(NamedTuple):
    """``name``: of the function or variable; ``elsewhere``: what is not followed, since other files have it."""

    name: str
    settings: dict[str, Setting]
    elsewhere: tuple[str, ...]


def is_python(text: str) -> bool:
    """Whether a text is a Python module, and no script that has one inside."""
    return _PYTHON.search(text) is not None and not text.startswith("#!/bin") and _parsed(text) is not None


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def configuration(
    text: str, source: str, wanted: str | None, given: Mapping[str, Any], says: Callable[[str, Setting], bool]
) -> Configuration:
    """The one that is wanted, or the only one. ``says``: whether a setting is one that a layout is read from.

    Raises InvalidDocument for a name that the file lacks, and where it has several and none is wanted.
    """
    tree = _parsed(text)
    assert tree is not None
    budget = Budget(source)
    try:
        found = {each.name: each for each in _all(tree, budget, given, says)}
    except RecursionError:
        raise InvalidDocument(f"{source} has expressions that are nested too deeply") from None
    if wanted is not None and wanted not in found and wanted in _names(tree):
        by = _made_by(tree, wanted, budget, given)
        raise InvalidDocument(
            f"{source}: {wanted} sets no degrees and no batch, which come from other files{by}",
            remedy="the file that sets them",
        )
    if wanted is not None and wanted not in found:
        hint = meant(wanted, islice(found, _MOST_COMPARED), f"it has {_listed(found)}")
        raise InvalidDocument(
            f"{source} has no configuration {wanted!r}; {hint}",
            remedy="--config with one of its names",
        )
    if not found and (plain := [name for name in _names(tree) if not name.startswith("_")]):
        raise InvalidDocument(
            f"{source} sets no degrees and no batch in {_listed(dict.fromkeys(plain))}: they come from other files",
            remedy="the file that sets them",
        )
    if wanted is None and len(found) > 1:
        raise InvalidDocument(
            f"{source} has {len(found)} configurations: {_listed(found)}",
            remedy=f"say which: --config {next(iter(found))}",
        )
    return found[wanted] if wanted is not None else next(iter(found.values()), Configuration("", {}, ()))


def _names(tree: ast.Module, parameters: int = 0) -> list[str]:
    """Functions that need this number of parameters."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            spec = node.args
            needed = len(spec.args) + len(spec.posonlyargs) - len(spec.defaults)
            if needed + sum(default is None for default in spec.kw_defaults) == parameters:
                found.append(node.name)
    return found


def _made_by(tree: ast.Module, name: str, budget: Budget, given: Mapping[str, Any]) -> str:
    """What of another file makes a configuration."""
    reader = Reader(tree, budget, given)
    made = reader.call(reader.functions[name], [], {})
    said = made.said if isinstance(made, Thing) else ""
    return f" (it is made by {said})" if said else ""


def _listed(found: Mapping[str, object]) -> str:
    names = list(found)
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _all(
    tree: ast.Module, budget: Budget, given: Mapping[str, Any], says: Callable[[str, Setting], bool]
) -> list[Configuration]:
    """Every function without parameters of its own, and every object of the module, that says anything of a layout."""
    plain = Reader(tree, budget, given)
    found = []
    for name in _names(tree):
        if name.startswith("_"):
            continue
        reader = Reader(tree, budget, given)
        made = reader.call(plain.functions[name], [], {})
        settings = flattened(made, budget) if isinstance(made, Thing) else {}
        if any(says(path, setting) for path, setting in settings.items()):
            foreign = isinstance(made, Thing) and made.said.lstrip("_")[:1].islower()
            base = [made.said] if isinstance(made, Thing) and foreign else []
            called = [f"{each}, line {line}" for each, line in reader.elsewhere.items()]
            found.append(Configuration(name, settings, (*base, *called)))
    for name in [] if found else _names(tree, parameters=1):
        reader = Reader(tree, budget, given)
        edited = Thing(name)
        reader.call(plain.functions[name], [edited], {})
        if any(says(path, setting) for path, setting in flattened(edited, budget).items()):
            found.append(Configuration(name, flattened(edited, budget), ()))
    for name, value in plain.module.items():
        settings = flattened(value, budget) if isinstance(value, Thing) and not found else {}
        if any(says(path, setting) for path, setting in settings.items()):
            found.append(Configuration(name, settings, ()))
    return found


def refusal(setting: Setting) -> str | None:
    """Why a value is not known; None where it is."""
    if isinstance(setting.value, Symbol) and setting.value.endswith("()"):
        return f"it is computed, {setting.value}"
    return setting.value.why if isinstance(setting.value, Unknown) else None
