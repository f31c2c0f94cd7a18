"""Faults of texts, by line and column: collected, so that all of them are reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from penstock.schemas.errors import Fault, InvalidDocument

MOST_REPORTED = 50

Locate = Callable[[Iterable[str]], Mapping[str, int]]
"""A function from places in a document's structure to their lines."""


class Faults:
    """The faults of one text, called ``what`` in the message (``the topology.conf 'site.conf'``).

    ``entries`` holds the first of them; the others are counted. ``locate`` returns the lines of faults whose place is
    known in the text's structure only.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.entries: list[Fault] = []
        self.locate: Locate | None = None
        self._count = 0
        self._without_line: dict[int, str] = {}

    def add(
        self, line: int | None, detail: str, *, column: int | None = None, at: str = "", code: str = "invalid"
    ) -> None:
        """Add one fault; lines and columns count from 1. ``at``: the place in the structure (``items/3/metadata``)."""
        self._count += 1
        if self._count > MOST_REPORTED:
            return
        if at and line is None:
            self._without_line[len(self.entries)] = at
        parts = [at] if at else []
        parts += [f"{word} {number}" for word, number in (("line", line), ("column", column)) if number]
        self.entries.append(Fault(", ".join(parts) or "the whole text", detail, code))

    def stop(self, remedy: str | None = None) -> None:
        """Raise InvalidDocument with the faults, if there are any."""
        if not self.entries:
            return
        self._find_lines()
        plural = "s" if self._count > 1 else ""
        more = f"; the first {MOST_REPORTED} follow" if self._count > MOST_REPORTED else ""
        raise InvalidDocument(
            f"{self.what} has {self._count} fault{plural}{more}", faults=tuple(self.entries), remedy=remedy
        )

    def _find_lines(self) -> None:
        lines = self.locate(self._without_line.values()) if self.locate and self._without_line else {}
        for index, at in self._without_line.items():
            if at in lines:
                fault = self.entries[index]
                self.entries[index] = replace(fault, pointer=f"{fault.pointer}, line {lines[at]}")
        self._without_line.clear()
