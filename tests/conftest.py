"""What all tests can use, and the order of files: with two processes the long ones have to begin first."""

from __future__ import annotations

import pytest
from browser import browser

__all__ = ["browser"]

LONGEST = ("cli/test_soak.py", "test_end_to_end.py")
SHORTEST = "solvers"
"""A folder of many short files, which fill what is left at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Longest first; otherwise as they are."""
    items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    path = item.path.as_posix()
    if path.endswith(LONGEST):
        return 0
    return 2 if item.path.parent.name == SHORTEST else 1
