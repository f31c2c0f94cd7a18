"""On which line of a JSON or YAML text a pointer's value stands; looked for only where there is a fault to tell."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from penstock.importers.cluster.yaml_loader import YAML_LOADER

_LONGEST = 16 << 20
"""Characters; a million of them take about a second."""
_EMPTY = ("", "~", "null")
"""Documents of a stream that hold nothing are not counted."""


@dataclass(slots=True)
class _Open:
    """A mapping or list that is being read; ``path`` is None where no pointer leads through it."""

    path: str | None
    is_mapping: bool
    count: int = 0
    key: str | None = None


def lines_of(text: str, pointers: Iterable[str]) -> dict[str, int]:
    """Line of each pointer (``items/3/metadata``), or of what is nearest around it; none where the text is too long."""
    wanted = set(pointers)
    if len(text) > _LONGEST:
        return {}
    ways = {"/".join(pointer.split("/")[:depth]) for pointer in wanted for depth in range(pointer.count("/") + 2)}
    try:
        found = _found(text, ways)
    except yaml.YAMLError:
        return {}
    lines = {}
    for pointer in wanted:
        parts = pointer.split("/")
        near = next((way for depth in range(len(parts), 0, -1) if (way := "/".join(parts[:depth])) in found), None)
        if near is not None:
            lines[pointer] = found[near]
    return lines


def _found(text: str, ways: set[str]) -> dict[str, int]:
    """Line of every value that is on the way to one that is wanted."""
    found: dict[str, int] = {}
    around: list[_Open] = []
    documents = 0
    several = any(way.startswith("document ") for way in ways)
    for event in yaml.parse(text, Loader=YAML_LOADER):
        if isinstance(event, yaml.CollectionEndEvent):
            around.pop()
        elif isinstance(event, yaml.NodeEvent):
            documents += not around and getattr(event, "value", None) not in _EMPTY
            path = _path(event, around, f"document {documents}" if several else "")
            if path is not None and path in ways:
                assert event.start_mark is not None
                found.setdefault(path, event.start_mark.line + 1)
            if isinstance(event, yaml.CollectionStartEvent):
                is_here = path is not None and (not path or path in ways)
                around.append(_Open(path if is_here else None, isinstance(event, yaml.MappingStartEvent)))
    return found


def _path(event: Any, around: list[_Open], start: str) -> str | None:
    """The pointer of a value; None for a key, and for what is nowhere near a pointer."""
    if not around:
        return start
    here = around[-1]
    if here.is_mapping and here.key is None:
        here.key = event.value if isinstance(event, yaml.ScalarEvent) else ""
        return None
    name, here.key = (here.key or "", None) if here.is_mapping else (str(here.count), None)
    here.count += 1
    return None if here.path is None else f"{here.path}/{name}".lstrip("/")
