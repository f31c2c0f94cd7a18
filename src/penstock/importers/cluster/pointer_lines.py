"""The line of a JSON or YAML text on which a pointer's value stands; computed only to report a fault."""

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
    """Return the line of each pointer (``items/3/metadata``), or of the nearest value around; empty for long text."""
    wanted = set(pointers)
    if len(text) > _LONGEST:
        return {}
    ways = {"/".join(pointer.split("/")[:depth]) for pointer in wanted for depth in range(pointer.count("/") + 2)}
    try:
        line_of = _lines_on_paths(text, ways)
    except yaml.YAMLError:
        return {}
    lines = {}
    for pointer in wanted:
        parts = pointer.split("/")
        near = next((way for depth in range(len(parts), 0, -1) if (way := "/".join(parts[:depth])) in line_of), None)
        if near is not None:
            lines[pointer] = line_of[near]
    return lines


def _lines_on_paths(text: str, ways: set[str]) -> dict[str, int]:
    """Return the line of every value on the path to a wanted one."""
    line_of: dict[str, int] = {}
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
                line_of.setdefault(path, event.start_mark.line + 1)
            if isinstance(event, yaml.CollectionStartEvent):
                is_here = path is not None and (not path or path in ways)
                around.append(_Open(path if is_here else None, isinstance(event, yaml.MappingStartEvent)))
    return line_of


def _path(event: Any, around: list[_Open], start: str) -> str | None:
    """Return the pointer of a value; None for a key, and for a value that is on no wanted path."""
    if not around:
        return start
    here = around[-1]
    if here.is_mapping and here.key is None:
        here.key = event.value if isinstance(event, yaml.ScalarEvent) else ""
        return None
    name, here.key = (here.key or "", None) if here.is_mapping else (str(here.count), None)
    here.count += 1
    return None if here.path is None else f"{here.path}/{name}".lstrip("/")
