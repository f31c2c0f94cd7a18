"""Values that a name of a Python configuration may hold: a plain value, an object with settings, or an unknown."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.schemas.bounded.budget import Budget


class Unknown(NamedTuple):
    """A value that cannot be known without running the text, and why."""

    why: str
    line: int


@dataclass(eq=False)
class Thing:
    """An object of another file: ``origin`` is the expression that makes it; its settings come with their lines.

    ``arguments`` are the arguments of that expression in order, where they are plain.
    """

    origin: str
    settings: dict[str, tuple[Any, int]] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()

    def get(self, name: str, line: int) -> Any:
        """Return an attribute; one that is not set yet is another such object."""
        if name not in self.settings:
            self.settings[name] = (Thing(f"{self.origin}.{name}"), line)
        return self.settings[name][0]


class Symbol(str):
    """The expression that makes an object of another file, in the place of a plain value."""

    __slots__ = ()


class Setting(NamedTuple):
    """A value and the line that gives it."""

    value: Any
    line: int


def flattened(thing: Thing, budget: Budget, deepest: int = 8) -> dict[str, Setting]:
    """Return all settings by their dotted paths; an object without settings is the expression that makes it.

    An object that others share has a path by each of them, and each path is a step. The arguments of that expression
    are ``path.0``, ``path.1`` …
    """
    settings: dict[str, Setting] = {}
    budget.step(len(thing.settings))
    for name, (value, line) in thing.settings.items():
        if isinstance(value, Thing):
            if value.origin and not value.origin.endswith(f".{name}"):
                settings[name] = Setting(Symbol(value.origin), line)
            settings |= {f"{name}.{i}": Setting(each, line) for i, each in enumerate(value.arguments)}
            if deepest:
                inner = flattened(value, budget, deepest - 1)
                settings |= {f"{name}.{path}": setting for path, setting in inner.items()}
        else:
            settings[name] = Setting(value, line)
    return settings
