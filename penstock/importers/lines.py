"""Faults of texts, by line and column: collected, so that a reader hears of all of them at once."""

from __future__ import annotations

from penstock.schemas.errors import Fault, InvalidDocument

MOST_TOLD = 50


class Faults:
    """The faults of one text, called ``what`` in the message (``the topology.conf 'site.conf'``).

    ``found`` holds the first of them; the others are counted.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self.found: list[Fault] = []
        self._count = 0

    def add(
        self, line: int | None, detail: str, *, column: int | None = None, at: str = "", code: str = "invalid"
    ) -> None:
        """One fault; lines and columns count from 1. ``at``: where in a document's structure (``items/3/metadata``)."""
        self._count += 1
        if self._count > MOST_TOLD:
            return
        parts = [at] if at else []
        parts += [f"{word} {number}" for word, number in (("line", line), ("column", column)) if number]
        self.found.append(Fault(", ".join(parts) or "the whole text", detail, code))

    def stop(self, remedy: str | None = None) -> None:
        """Raise InvalidDocument with what was found, if there is anything."""
        if not self.found:
            return
        plural = "s" if self._count > 1 else ""
        more = f"; the first {MOST_TOLD} follow" if self._count > MOST_TOLD else ""
        raise InvalidDocument(
            f"{self.what} has {self._count} fault{plural}{more}", faults=tuple(self.found), remedy=remedy
        )
