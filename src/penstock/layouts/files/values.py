"""What a name of a Python configuration may hold: a plain value, an object with settings, or something unknown."""

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
    """An object of another file's: ``said`` is the text that makes it; its settings come with their lines.

    ``arguments``: what that text is called with in order, where the values are plain.
    """

    said: str
    settings: dict[str, tuple[Any, int]] = field(default_factory=dict)
    arguments: tuple[Any, ...] = ()

    def get(self, name: str, line: int) -> Any:
        """Return an attribute; one that is not set yet is another such object."""
        if name not in self.settings:
            self.settings[name] = (Thing(f"{self.said}.{name}"), line)
        return self.settings[name][0]


class Symbol(str):
    """The text that makes an object of another file's, in the place of a plain value."""

    __slots__ = ()


class Setting(NamedTuple):
    """A value and the line that gives it."""

    value: Any
    line: int


def flattened(thing: Thing, budget: Budget, deepest: int = 8) -> dict[str, Setting]:
    """Return all settings by their dotted paths; an object without settings of its own is the text that makes it.

    An object that others share has a path by each of them, and each path is a step.

    The arguments of that text are ``path.0``, ``path.1`` …
    """
    found: dict[str, Setting] = {}
    budget.step(len(thing.settings))
    for name, (value, line) in thing.settings.items():
        if isinstance(value, Thing):
            if value.said and not value.said.endswith(f".{name}"):
                found[name] = Setting(Symbol(value.said), line)
            found |= {f"{name}.{i}": Setting(each, line) for i, each in enumerate(value.arguments)}
            if deepest:
                inner = flattened(value, budget, deepest - 1)
                found |= {f"{name}.{path}": setting for path, setting in inner.items()}
        else:
            found[name] = Setting(value, line)
    return found
