"""Costs are read in one place: only ``model`` and ``costs`` use a profile's bytes and turn bytes into nanoseconds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.solvers

ROOM = Path(penstock.solvers.__file__).parent
BYTES = {"parameter_bytes", "trainable_bytes", "stash_bytes", "capacity_bytes", "context_bytes"}
INFINITY = re.compile(r"_?(NEVER|FAR|UNLIMITED|ENDLESS|INFINITE|UNREACH|FOREVER)(_(NS|BYTES|COUNT))?$")

ALLOWED = {
    "bounds/first_backward.py bounds/one_pipeline/held_bytes.py": "take the least per sample of what is measured, "
    "before sizes between are rounded up",
    "bounds/over_time.py": "takes the least per sample of what single layers keep, over all sizes of micro-batches",
    "degrees/contract.py degrees/one_stage.py degrees/sharding.py degrees/times.py": "make the problem of cells: they "
    "write the sizes that others read",
    "explanation/binding.py": "times a plan anew as if no parameter were trained: it makes that problem",
}
"""Modules that read prices nevertheless, with the reason; remove a module that no longer does."""


def _prices(tree: ast.Module) -> set[str]:
    """Return the prices that a module reads directly."""
    prices = set()
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.value if isinstance(node, ast.Constant) else None
        if name in BYTES:
            prices.add(str(name))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "transfer_ns":
            prices.add("transfer_ns")
    return prices


def _infinities(tree: ast.Module) -> Iterator[str]:
    """Yield the names of infinities that a module defines by constants."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name) and INFINITY.match(target.id)]
            if any(isinstance(each, ast.Constant) for each in ast.walk(node)):
                yield from names


@pytest.fixture(scope="module")
def modules() -> dict[str, ast.Module]:
    return {path.relative_to(ROOM).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOM.rglob("*.py"))}


def test_only_the_price_list_reads_prices(modules: dict[str, ast.Module]) -> None:
    searches = [(name, tree) for name, tree in modules.items() if not name.startswith(("model/", "costs/"))]
    readers = {name: prices for name, tree in searches if (prices := _prices(tree))}
    allowed = {name for names in ALLOWED for name in names.split()}
    assert {name: prices for name, prices in readers.items() if name not in allowed} == {}, "ask solvers/costs"
    assert allowed - readers.keys() == set(), "these read no prices any more: take them off the list"


def test_there_are_two_infinities(modules: dict[str, ast.Module]) -> None:
    names_of_modules = {name: names for name, tree in modules.items() if (names := list(_infinities(tree)))}
    assert names_of_modules.pop("costs/infinity.py") == ["NEVER_NS", "FAR_NS", "UNLIMITED"]
    assert names_of_modules == {}, "take those of costs/infinity.py"


@pytest.mark.parametrize(
    ("text", "prices"),
    [
        ("room = problem.capacity_bytes(0) - problem.devices[0].context_bytes", {"capacity_bytes", "context_bytes"}),
        ("stash = getattr(costs, 'stash_bytes')", {"stash_bytes"}),
        ("time = transfer_ns(5, 7)", {"transfer_ns"}),
        ("time = rank.transfer_ns", set()),
    ],
)
def test_a_price_is_seen(text: str, prices: set[str]) -> None:
    assert _prices(ast.parse(text)) == prices


def test_an_infinity_is_seen() -> None:
    assert list(_infinities(ast.parse("NEVER = 2**62\nFAR_NS: int = 2**45\nFEW = 2\nNEVER_NS = OTHER"))) == [
        "NEVER",
        "FAR_NS",
    ]
