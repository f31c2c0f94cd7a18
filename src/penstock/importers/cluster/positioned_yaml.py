"""YAML as mappings, lists and words that know their line and column; words become no numbers, dates or truth values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import yaml

from penstock.importers.cluster.slurm.slurm_lines import At
from penstock.importers.cluster.structured import MOST_LEVELS, yaml_faults
from penstock.importers.cluster.yaml_loader import YAML_LOADER
from penstock.importers.lines import Faults


@dataclass(frozen=True, slots=True)
class Word:
    """A scalar as it is written; ``exact``: columns within it can be counted, as it is on one line without escapes."""

    text: str
    at: At
    exact: bool = True

    def place(self, offset: int) -> At:
        """Return line and column of an offset into the word."""
        return (self.at[0], self.at[1] + offset) if self.exact else self.at


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Item, ...]
    at: At


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping; ``keys``: where each key stands."""

    items: dict[str, Item]
    keys: dict[str, At]
    at: At


Item = Word | Sequence | Mapping


def read_yaml(text: str, faults: Faults) -> Item:
    """Return the one document of a YAML text.

    Raises InvalidDocument where it does not parse, is nested deeper than 100 levels, has aliases (which may grow
    without bound), tags, keys that are no words or there twice, or more than one document.
    """
    with yaml_faults(faults):
        # Through events, not nodes: libyaml's composer recurses in C without a bound.
        item = _Events(yaml.parse(text, Loader=YAML_LOADER), faults).document()
    faults.stop("see topology.yaml(5) for the form")
    return item


class _Events:
    def __init__(self, events: Iterator[Any], faults: Faults) -> None:
        self._events = events
        self._faults = faults

    def document(self) -> Item:
        item: Item | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent) and item is not None:
                self._stop(event, "a second document begins; one text has one")
            elif not isinstance(event, (yaml.StreamStartEvent, yaml.DocumentStartEvent)) and item is None:
                if isinstance(event, yaml.StreamEndEvent):
                    self._stop(event, "it has comments only")
                item = self._item(event, 1)
        assert item is not None  # a stream has an end, which is looked at above
        return item

    def _item(self, event: Any, level: int) -> Item:
        at = _at(event)
        if level > MOST_LEVELS:
            self._stop(event, f"it is nested deeper than {MOST_LEVELS} levels")
        if isinstance(event, yaml.AliasEvent):
            self._stop(event, f"the alias *{event.anchor} is not read; write the value out")
        if isinstance(event, yaml.ScalarEvent):
            quotes = event.style in ("'", '"')
            start, end = cast(yaml.Mark, event.start_mark), cast(yaml.Mark, event.end_mark)
            as_long = end.index - start.index == len(event.value) + 2 * quotes
            exact = as_long and start.line == end.line
            return Word(event.value, (at[0], at[1] + quotes * exact), exact)
        if isinstance(event, yaml.SequenceStartEvent):
            return Sequence(tuple(self._items(yaml.SequenceEndEvent, level)), at)
        return self._mapping(at, level)

    def _items(self, end: type, level: int) -> Iterator[Item]:
        for event in self._events:
            if isinstance(event, end):
                return
            yield self._item(event, level + 1)

    def _mapping(self, at: At, level: int) -> Mapping:
        items: dict[str, Item] = {}
        keys: dict[str, At] = {}
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._item(event, level + 1)
            value = self._item(next(self._events), level + 1)
            if not isinstance(key, Word):
                self._faults.add(key.at[0], "a key is not a word", column=key.at[1])
            elif key.text in items:
                detail = f"{key.text} is given twice, first on line {keys[key.text][0]}"
                self._faults.add(key.at[0], detail, column=key.at[1], code="double")
            else:
                items[key.text] = value
                keys[key.text] = key.at
        return Mapping(items, keys, at)

    def _stop(self, event: Any, detail: str) -> None:
        line, column = _at(event)
        self._faults.add(line, detail, column=column)
        self._faults.stop()


def _at(event: Any) -> At:
    return event.start_mark.line + 1, event.start_mark.column + 1
