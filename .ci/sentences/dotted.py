"""Dotted names of our modules, classes, functions and attributes."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from functools import cache

ROOMS = ("schemas", "solvers", "executor", "service", "examples")
"""Folders at the root that are imported below ``penstock``."""

FILE_ENDINGS = ("py", "md", "json", "yaml", "yml", "toml", "log", "sqlite", "service", "db", "env", "svg")
"""Last parts that make a file name of a name with dots, such as ``penstock.service`` of systemd."""


class Modules:
    """The modules that git tracks, by the name that they are imported by."""

    def __init__(self, files: Iterable[str], read: Callable[[str], str]) -> None:
        self._read = read
        self._files: dict[str, str] = {}
        for file in files:
            parts = file.removesuffix(".py").removesuffix("/__init__").removeprefix("src/").split("/")
            if file.endswith(".py") and (parts[0] == "penstock" or parts[0] in ROOMS):
                self._files[".".join(parts if parts[0] == "penstock" else ("penstock", *parts))] = file
        self._members = cache(self._read_members)

    def resolves(self, name: str) -> bool:
        """Return whether a dotted name is a file name, or a module of ours with attributes that exist."""
        parts = name.removeprefix("penstock.").split(".")
        if parts[-1] in FILE_ENDINGS and len(parts) < 3:
            return True
        parts = ["penstock", *parts]
        at = next(at for at in range(len(parts), -1, -1) if not at or ".".join(parts[:at]) in self._files)
        if at < 2 and name.startswith(ROOMS):
            return True  # a variable with the name of a room, such as the service's ``service.url``
        members = self._members(".".join(parts[:at])) if at else {}
        inner = parts[at:]
        if not inner or None in members or ".".join(parts[: at + 1]) in self._files:
            return True
        attributes = members.get(inner[0], set())
        return inner[0] in members and (attributes is None or not inner[1:] or inner[1] in attributes)

    def _read_members(self, module: str) -> dict[str | None, set[str] | None]:
        """Read the names of a module, each with its attributes, or None where they may be any."""
        members: dict[str | None, set[str] | None] = {}
        for node in ast.walk(ast.parse(self._read(self._files[module]))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                members.setdefault(None if node.name == "__getattr__" else node.name, None)
            elif isinstance(node, ast.ClassDef):
                members[node.name] = None if node.bases or node.keywords else _attributes(node)
            elif isinstance(node, ast.Import | ast.ImportFrom):
                members |= {(alias.asname or alias.name).partition(".")[0]: None for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                members.setdefault(node.id, None)
        return members


def _attributes(definition: ast.ClassDef) -> set[str]:
    names = {each.name for each in ast.walk(definition) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    for each in ast.walk(definition):
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Store):
            names.add(each.id if isinstance(each, ast.Name) else each.attr)
    return names
