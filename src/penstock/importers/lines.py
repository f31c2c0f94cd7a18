"""Faults of texts, by line and column: collected, so that all of them are reported at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from penstock.schemas.errors import Fault, InvalidDocument

MOST_TOLD = 50

Locate = Callable[[Iterable[str]], Mapping[str, int]]
"""From places in a document's structure to their lines."""


class Faults:
    """The faults of one text, called ``what`` in the message (``the topology.conf 'site.conf'``).

    ``found`` holds the first of them; the others are counted. ``locate`` is asked for the lines of those that have a
    place in the text's structure only.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.found: list[Fault] = []
        self.locate: Locate | None = None
        self._count = 0
        self._without_line: dict[int, str] = {}

    def add(
        self, line: int | None, detail: str, *, column: int | None = None, at: str = "", code: str = "invalid"
    ) -> None:
        """One fault; lines and columns count from 1. ``at``: where in a document's structure (``items/3/metadata``)."""
        self._count += 1
        if self._count > MOST_TOLD:
            return
        if at and line is None:
            self._without_line[len(self.found)] = at
        parts = [at] if at else []
        parts += [f"{word} {number}" for word, number in (("line", line), ("column", column)) if number]
        self.found.append(Fault(", ".join(parts) or "the whole text", detail, code))

    def stop(self, remedy: str | None = None) -> None:
        """Raise InvalidDocument with what was found, if there is anything."""
        if not self.found:
            return
        self._find_lines()
        plural = "s" if self._count > 1 else ""
        more = f"; the first {MOST_TOLD} follow" if self._count > MOST_TOLD else ""
        raise InvalidDocument(
            f"{self.what} has {self._count} fault{plural}{more}", faults=tuple(self.found), remedy=remedy
        )

    def _find_lines(self) -> None:
        lines = self.locate(self._without_line.values()) if self.locate and self._without_line else {}
        for index, at in self._without_line.items():
            if at in lines:
                fault = self.found[index]
                self.found[index] = replace(fault, pointer=f"{fault.pointer}, line {lines[at]}")
        self._without_line.clear()
