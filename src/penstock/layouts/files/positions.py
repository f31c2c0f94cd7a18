"""Lines and columns of a text."""

from __future__ import annotations


def place(text: str, at: int) -> tuple[int, int]:
    """Return line and column of the character ``at``; both count from 1."""
    before = text[:at]
    return before.count("\n") + 1, at - (before.rfind("\n") + 1) + 1
