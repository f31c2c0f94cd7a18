"""Options of allocators, schedules and planners, as GET /v1/planners lists them, and their validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

from penstock.schemas.errors import Fault, InvalidDocument, UnknownMethod, meant

Value = str | int | float | bool
V = TypeVar("V", bound=Value)


@dataclass(frozen=True)
class Option(Generic[V]):
    """One setting: its type is the type of ``default``; ``choices`` or ``low`` … ``high`` limit its values."""

    name: str
    default: V
    help: str
    choices: tuple[V, ...] = ()
    low: int | None = None
    high: int | None = None

    @property
    def type(self) -> str:
        """Return the JSON Schema type: ``string``, ``integer``, ``number`` or ``boolean``."""
        return {str: "string", int: "integer", float: "number", bool: "boolean"}[type(self.default)]

    def of(self, values: Mapping[str, object]) -> V:
        """Return this option's value among the values of all options (``checked``)."""
        return cast(V, values[self.name])

    def fault(self, value: object) -> str | None:
        """Return the fault of a value; None if it is valid."""
        wanted = (int, float) if isinstance(self.default, float) else type(self.default)
        if not isinstance(value, wanted) or (isinstance(value, bool) and not isinstance(self.default, bool)):
            return f"{value!r} is not of type {self.type}"
        if self.choices and value not in self.choices:
            return f"{value!r} is none of {', '.join(map(repr, self.choices))}"
        if isinstance(value, int | float) and self.low is not None and value < self.low:
            return f"{value!r} is below {self.low}"
        if isinstance(value, int | float) and self.high is not None and value > self.high:
            return f"{value!r} is above {self.high}"
        return None


EFFORTS = ("effort",)
"""Options that set how long to search."""
PAPER = Option("paper", False, "run the algorithm as its paper prints it, without what was added since")
"""The option of every planner that improves on its paper."""

Options = tuple[Option[Any], ...]
"""All settings of a planner."""


def checked(owner: str, options: Options, values: Mapping[str, object]) -> dict[str, Value]:
    """Return all options with their values, defaults filled in.

    Raises ``UnsupportedRequest`` for a name that ``owner`` does not have, ``InvalidDocument`` for a wrong value.
    """
    by_name = {option.name: option for option in options}
    for name in values:
        if name not in by_name:
            raise UnknownMethod(
                f"{owner!r} has no option {name!r}; it has {', '.join(by_name) or 'none'}", remedy=meant(name, by_name)
            )
    faults = [
        Fault(f"/options/{name}", fault)
        for name, value in values.items()
        if (fault := by_name[name].fault(value)) is not None
    ]
    if faults:
        raise InvalidDocument(f"invalid options for {owner!r}", faults=tuple(faults))
    return {option.name: values.get(option.name, option.default) for option in options}  # type: ignore[misc]


def unlimited(options: Options, values: Mapping[str, object]) -> bool:
    """Return whether no option limits a planner to some of its plans; options on effort do not limit it."""
    return all(values[each.name] == each.default for each in options if each.name not in EFFORTS)
