"""What all tests can use, which seeds they try, and the order of files: the long ones come first."""

from __future__ import annotations

from collections import Counter

import pytest
from browser import browser
from hypothesis import settings

__all__ = ["browser"]

LONGEST = ("scripts/test_soak.py", "slurm/test_slurm.py", "test_end_to_end.py")
SHORTEST = "solvers"
"""A folder of many short files, which fill what is left at the end."""


FEW, ONE_IN = 12, 3
"""A test with more seeds than a few tries one in three, unless ``--every-seed`` is given."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-seed", action="store_true", help="every seed, not one in three; what hypothesis draws is new"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis asks for no time, and draws the same each time unless ``--every-seed`` is given."""
    settings.register_profile("penstock", deadline=None, derandomize=not config.getoption("--every-seed"))
    settings.load_profile("penstock")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Longest first; otherwise as they are, with a sample of many seeds."""
    if not config.getoption("--every-seed"):
        _sample(config, items)
    items.sort(key=_turn)


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    tests = [_seeded(item) for item in items]
    many = {test for test, number in Counter(tests).items() if test and number > FEW}
    met: Counter[str] = Counter()
    kept, left = [], []
    for item, test in zip(items, tests, strict=True):
        (left if test in many and met[test] % ONE_IN else kept).append(item)
        met[test] += 1
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def _seeded(item: pytest.Item) -> str:
    """The name of a test that is tried with seeds, else nothing."""
    call = getattr(item, "callspec", None)
    return item.nodeid.partition("[")[0] if call is not None and "seed" in call.params else ""


def _turn(item: pytest.Item) -> int:
    path = item.path.as_posix()
    if path.endswith(LONGEST):
        return 0
    return 2 if item.path.parent.name == SHORTEST else 1
