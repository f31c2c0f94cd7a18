"""A budget of work for the reading of one text from outside: a short text may stand for a very long one."""

from __future__ import annotations

from penstock.schemas.errors import InvalidDocument

MOST_STEPS = 200_000
"""Most statements, values and look-ups. Trainers' longest recipes take about 10,000; each step takes microseconds."""
MOST_CHARACTERS = 4_000_000
"""Most characters of texts and elements of lists that are created: four times the longest text that is accepted."""


class Budget:
    """Steps and characters that the reading of ``source`` may still take; every part of the reading draws on it."""

    def __init__(self, source: str, *, steps: int = MOST_STEPS, characters: int = MOST_CHARACTERS) -> None:
        self.source = source
        self.steps = 0
        self.characters = 0
        self._most_steps, self._most_characters = steps, characters

    def step(self, number: int = 1) -> None:
        """Count steps. Raise InvalidDocument above the limit."""
        self.steps += number
        if self.steps > self._most_steps:
            raise self._spent(f"{self._most_steps:,} steps")

    def make(self, number: int) -> None:
        """Count characters or elements before or as they are made. Raise InvalidDocument above the limit."""
        self.characters += number
        if self.characters > self._most_characters:
            raise self._spent(f"{self._most_characters:,} characters and values made from its variables")

    def _spent(self, what: str) -> InvalidDocument:
        return InvalidDocument(
            f"reading {self.source} takes more than the allowed {what}",
            remedy="write values out instead of building them from other values, and delete what the layout does not "
            "need",
        )
