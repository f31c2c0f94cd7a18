"""The registries of models of a release of torchtitan, run with every import but the standard library's replaced.

A registry, ``models/<family>/__init__.py``, is a table of functions (0.3) or objects (0.2) by flavor. What these call,
torchtitan's own classes, is recorded: each call as its keywords.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

_STANDARD = {"__future__", "collections", "copy", "dataclasses", "functools", "math", "typing"}
_WIDTH = re.compile(r"def compute_ffn_hidden_dim\(.*?\n    return [^\n]*\n", re.DOTALL)


class Recorded:
    """A class, a function or an object of torchtitan's: its name, and the keywords that it was called with."""

    def __init__(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        self.__dict__.update(name=name, arguments=arguments)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.arguments and name in self.arguments:
            return self.arguments[name]
        return Recorded(f"{self.name}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.arguments[name] = value

    def __call__(self, *_values: Any, **arguments: Any) -> Recorded:
        return Recorded(self.name, arguments)

    def __getitem__(self, _key: Any) -> Recorded:
        return self

    def __or__(self, _other: Any) -> Recorded:
        return self

    __ror__ = __or__

    def get(self, name: str) -> Any:
        """Return the argument of that name, however deep within the call; None if there is no such argument."""
        if name in (self.arguments or {}):
            return self.arguments[name]
        inner = (each.get(name) for each in (self.arguments or {}).values() if isinstance(each, Recorded))
        return next((value for value in inner if value is not None), None)


class _Module:
    def __init__(self, constants: dict[str, Any]) -> None:
        self._constants = constants

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._constants.get(name) or Recorded(name)


def _replaced(thing: Any, **changes: Any) -> Any:
    if isinstance(thing, Recorded):
        return Recorded(thing.name, {**(thing.arguments or {}), **changes})
    return dataclasses.replace(thing, **changes)


def _is(thing: Any, kind: Any) -> bool:
    if isinstance(kind, Recorded):
        return isinstance(thing, Recorded) and thing.name == kind.name
    return isinstance(thing, kind)


def registry(release: Path, family: str) -> Iterator[tuple[str, Recorded]]:
    """Yield each flavor of a family, and the object that makes its model."""
    models = release / "torchtitan" / "models"
    namespace: dict[str, Any] = {}
    shared = models / "common" / "feed_forward.py"
    if shared.exists() and (width := _WIDTH.search(shared.read_text())) is not None:
        exec(width[0], namespace)
    copies = ModuleType("dataclasses")
    copies.__dict__.update(vars(dataclasses) | {"replace": _replaced})

    def imported(name: str, a: Any = None, b: Any = None, c: Any = (), level: int = 0) -> Any:
        if level == 0 and name == "dataclasses":
            return copies
        return __import__(name, a, b, c, 0) if level == 0 and name.split(".")[0] in _STANDARD else _Module(namespace)

    names: dict[str, Any] = {
        "__builtins__": vars(builtins) | {"__import__": imported, "isinstance": _is},
        "__name__": family,
    }
    exec(compile((models / family / "__init__.py").read_text(), family, "exec"), names)
    for name, table in names.items():
        if isinstance(table, dict) and name.endswith(("_args", "_configs")):
            for flavor, model in table.items():
                yield flavor, model if isinstance(model, Recorded) else _called(model)


def _called(function: Any) -> Any:
    """Call a function with any text for its required parameters, which are kinds of kernels."""
    needed = [each.name for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    return function(**dict.fromkeys(needed, "any"))
