"""Faults of texts, by line and column: collected, so that a reader hears of all of them at once."""

from __future__ import annotations

from penstock.schemas.errors import Fault, InvalidDocument

MOST_TOLD = 50


class Faults:
    """The faults of one text, called ``what`` in the message (``the topology.conf 'site.conf'``)."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.found: list[Fault] = []

    def add(
        self, line: int | None, detail: str, *, column: int | None = None, at: str = "", code: str = "invalid"
    ) -> None:
        """One fault; lines and columns count from 1. ``at``: where in a document's structure (``items/3/metadata``)."""
        parts = [at] if at else []
        parts += [f"{word} {number}" for word, number in (("line", line), ("column", column)) if number]
        self.found.append(Fault(", ".join(parts) or "the whole text", detail, code))

    def stop(self, remedy: str | None = None) -> None:
        """Raise InvalidDocument with what was found, if there is anything."""
        if not self.found:
            return
        count = len(self.found)
        shown = self.found[:MOST_TOLD]
        more = f"; the first {MOST_TOLD} follow" if count > MOST_TOLD else ""
        raise InvalidDocument(
            f"{self.what} has {count} fault{'s' if count > 1 else ''}{more}", faults=tuple(shown), remedy=remedy
        )
