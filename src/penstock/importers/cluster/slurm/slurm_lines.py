"""Lines of ``Key=Value`` pairs, as Slurm's files and commands write them, with the place of every value."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.importers.cluster.hostlist import MOST_NAMES, expand_or_report
from penstock.importers.lines import Faults

_COMMENT = re.compile(r"(?<!\\)#.*+")
_CONTINUED = re.compile(r"\\\s*+$")
_KEY = re.compile(r"(?<!\S)([A-Za-z][\w.]*+)\s*+=[ \t]*+")
_WORD = re.compile(r"\S+")
_LISTS = {"Nodes", "Switches", "BlockSizes", "AggregatedBlock"}
_NO_TEXT = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f\ud800-\udfff\ufffd]")

At = tuple[int, int]
"""Line and column, from 1."""


@dataclass(frozen=True, slots=True)
class Line:
    """One logical line. ``starts``: the offset of each physical line in it; ``number``: the first one's line number."""

    text: str
    starts: tuple[int, ...]
    number: int

    def at(self, offset: int) -> At:
        """Return line and column of an offset into the text."""
        index = bisect_right(self.starts, offset) - 1
        return self.number + index, offset - self.starts[index] + 1


@dataclass(frozen=True, slots=True)
class Value:
    """The value after ``Key=``; ``offset``: its offset within its line."""

    key: str
    text: str
    line: Line
    offset: int

    @property
    def at(self) -> At:
        """Line and column of the value."""
        return self.line.at(self.offset)

    def place(self, offset: int) -> At:
        """Return line and column of an offset within the value."""
        return self.line.at(self.offset + offset)


class Hostlists:
    """Reads the hostlists of one text, which may name ``MOST_NAMES`` hosts in all."""

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._left = MOST_NAMES

    def read(self, text: str, place: Callable[[int], At]) -> tuple[str, ...]:
        """Return the names of a hostlist; ``place`` gives line and column of an offset into it, for its faults."""

        def report(offset: int, detail: str) -> None:
            line, column = place(offset)
            self._faults.add(line, detail, column=column)

        names = expand_or_report(text, report, self._left)
        self._left -= len(names)
        return tuple(names)


def refuse_other_than_text(text: str, faults: Faults) -> None:
    """Raise InvalidDocument for an empty text or one that is no text at all, so that no other fault is reported."""
    if not text.strip("\ufeff \t\r\n"):
        faults.add(None, "it is empty", code="missing")
    elif odd := _NO_TEXT.search(text):
        line = text.count("\n", 0, odd.start()) + 1
        column = odd.start() - text.rfind("\n", 0, odd.start())
        faults.add(line, f"the character {odd[0]!r} is none of a text: it is binary, or not UTF-8", column=column)
    faults.stop()


def logical_lines(text: str, faults: Faults) -> Iterator[Line]:
    """Yield the lines of a configuration file without comments; a backslash at a line's end joins it to the next."""
    pieces: list[str] = []
    first = 1
    number = 0
    for number, physical in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        bare = _COMMENT.sub("", physical)
        if not pieces:
            first = number
        continued = _CONTINUED.search(bare)
        pieces.append(f"{bare[: continued.start()]} " if continued else bare)
        if not continued:
            yield _joined(pieces, first)
            pieces = []
    if pieces:
        faults.add(number, "it ends with a backslash, and no line follows: is the text cut off?")
        yield _joined(pieces, first)


def _joined(pieces: list[str], first: int) -> Line:
    starts = [0]
    for piece in pieces[:-1]:
        starts.append(starts[-1] + len(piece))
    return Line("".join(pieces), tuple(starts), first)


def values(line: Line, spellings: Mapping[str, str], faults: Faults) -> dict[str, Value]:
    """Return the pairs of a line by key; ``spellings``: the spelling of each key, by its small letters.

    A list ends where the next ``Key=`` begins, so that hostlists may have blanks; other values end at a blank. Text
    that is no pair, an unknown key and a key that is given twice are faults.
    """
    keys = list(_KEY.finditer(line.text))
    before = line.text[: keys[0].start()] if keys else line.text
    if before.strip():
        number, column = line.at(len(before) - len(before.lstrip()))
        faults.add(number, f"{_short(before.strip())!r} is no Key=Value", column=column)
    pairs: dict[str, Value] = {}
    for index, key in enumerate(keys):
        end = keys[index + 1].start() if index + 1 < len(keys) else len(line.text)
        number, column = line.at(key.start())
        name = spellings.get(key[1].lower())
        if name is None:
            faults.add(number, f"{key[1]} is none of {', '.join(spellings.values())}", column=column, code="unknown")
        elif name in pairs:
            faults.add(number, f"{name} is given twice", column=column, code="double")
        else:
            value = pairs[name] = _value(name, line, key.end(), end)
            words = _WORD.findall(value.text) if name not in _LISTS and line.text[value.offset - 1] != '"' else []
            if len(words) > 1:
                number, column = value.place(value.text.index(words[1], len(words[0])))
                faults.add(number, f"{_short(words[1])!r} is no Key=Value", column=column)
                pairs[name] = replace(value, text=words[0])
    return pairs


def _value(key: str, line: Line, start: int, end: int) -> Value:
    text = line.text[start:end].rstrip()
    if len(text) > 1 and text[0] == text[-1] == '"':
        return Value(key, text[1:-1], line, start + 1)
    return Value(key, text, line, start)


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
