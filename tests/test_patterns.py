"""No regular expression takes time that grows faster than the text it reads, whoever sends that text.

Each one in the package is given texts that repeat a piece of itself behind each of its beginnings, which is how servers
are stopped by regular expressions (Davis et al., "The Impact of Regular Expression Denial of Service in Practice",
ESEC/FSE 2018). pydantic runs its own patterns in Rust's engine, which is linear.
"""

from __future__ import annotations

import ast
import importlib
import re
import re._constants as constants  # type: ignore[import-not-constant]
import re._parser as parser  # type: ignore[import-not-constant]
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pytest
from repository import ROOT

pytestmark = pytest.mark.tier("nightly")

PACKAGES = (
    *("schemas", "solvers", "executor", "service", "calibration", "cli"),
    *("convert", "examples", "importers", "layouts", "manifests", "report"),
)
METHODS = {"match", "fullmatch", "search", "sub", "split", "findall", "finditer"}
CHARACTERS = 20_000
MOST_S = 0.05
"""A linear pattern takes about a millisecond for so many characters, a quadratic one about a second."""

MOST_GROWTH = 8
"""The limit for a text four times as long: a linear pattern takes four times as long, a quadratic one sixteen times."""

CATEGORIES = {
    constants.CATEGORY_DIGIT: "0",
    constants.CATEGORY_SPACE: " ",
    constants.CATEGORY_WORD: "a",
    constants.CATEGORY_NOT_DIGIT: "x",
    constants.CATEGORY_NOT_SPACE: "x",
    constants.CATEGORY_NOT_WORD: "-",
}
REPEATS = {constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT}


def uses() -> Iterator[tuple[str, re.Pattern[Any], str]]:
    """Yield the place of each use, the pattern and the method: patterns that a module names, and literals in calls."""
    for package in PACKAGES:
        yield from _uses_below(package)


def _uses_below(package: str) -> Iterator[tuple[str, re.Pattern[Any], str]]:
    folder = (ROOT / "src" / "penstock" / package).resolve()
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(("penstock", package, *path.relative_to(folder).with_suffix("").parts))
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
                continue
            owner, method = call.func.value, call.func.attr
            if method not in METHODS or not isinstance(owner, ast.Name):
                continue
            place = f"{module}:{call.lineno}"
            if owner.id == "re":
                if isinstance(call.args[0], ast.Constant):
                    yield place, re.compile(call.args[0].value), method
            elif isinstance(constant := getattr(importlib.import_module(module), owner.id, None), re.Pattern):
                yield place, constant, method


def pieces(tree: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    """Yield characters of which the pattern is made, and some that it refuses."""
    for kind, value in tree:
        if kind is constants.LITERAL:
            yield chr(value)
        elif kind is constants.NOT_LITERAL:
            yield "a" if chr(value) != "a" else "b"
        elif kind is constants.ANY:
            yield "x"
        elif kind is constants.IN:
            yield from _of_class(value)
        else:
            for inner in _inner(kind, value):
                yield from pieces(inner)


def _of_class(parts: Iterable[tuple[Any, Any]]) -> Iterator[str]:
    for kind, value in parts:
        if kind is constants.LITERAL:
            yield chr(value)
        elif kind is constants.RANGE:
            yield chr(value[0])
        elif kind is constants.CATEGORY:
            yield CATEGORIES[value]
        elif kind is constants.NEGATE:
            yield from "x~"


def _inner(kind: Any, value: Any) -> list[Any]:
    if kind in REPEATS:
        return [value[2]]
    if kind is constants.SUBPATTERN:
        return [value[3]]
    if kind is constants.BRANCH:
        return list(value[1])
    if kind in (constants.ASSERT, constants.ASSERT_NOT):
        return [value[1]]
    return [value] if kind is constants.ATOMIC_GROUP else []


def beginnings(tree: Iterable[tuple[Any, Any]], so_far: str = "") -> Iterator[str]:
    """Yield what the pattern takes up to each of its parts: each repetition once, each alternative."""
    for kind, value in tree:
        if kind in (constants.ASSERT, constants.ASSERT_NOT):
            continue
        if ways := [list(beginnings(inner, so_far)) for inner in _inner(kind, value)]:
            yield from (text for way in ways for text in way)
            so_far = ways[0][-1] if ways[0] else so_far
        elif constant := next(iter(pieces([(kind, value)])), ""):
            so_far += constant
            yield so_far


@cache
def attacks(pattern: re.Pattern[Any]) -> list[tuple[str, str, str]]:
    """Return the beginning, the piece to repeat, and the end of each text."""
    source = pattern.pattern.decode() if isinstance(pattern.pattern, bytes) else pattern.pattern
    tree = parser.parse(source, pattern.flags & ~re.DEBUG)
    heads = ["", *dict.fromkeys(beginnings(tree))]
    repeated = [*dict.fromkeys((*pieces(tree), " ", "\n"))][:24] + heads[-1:]
    some = heads if len(heads) <= 24 else [*heads[:: -(-len(heads) // 22)], *heads[-2:]]
    return [(head, piece, tail) for head in some for piece in repeated if piece for tail in ("~", "\x00")]


def seconds(pattern: re.Pattern[Any], method: str, text: str) -> float:
    read: Any = text.encode() if isinstance(pattern.pattern, bytes) else text
    used: Callable[..., Any] = getattr(pattern, method)
    began = time.thread_time()
    if method == "sub":
        used(read[:0], read)
    elif method == "finditer":
        list(used(read))
    else:
        used(read)
    return time.thread_time() - began


def slow_text(pattern: re.Pattern[Any], method: str) -> str | None:
    """Return a text for which the method takes more than linear time, shortened, and the seconds, if there is one."""
    for head, piece, tail in attacks(pattern):
        long, short = (head + piece * (characters // len(piece)) + tail for characters in (CHARACTERS, CHARACTERS // 4))
        if (taken_s := seconds(pattern, method, long)) < MOST_S:
            continue
        growths = [seconds(pattern, method, long) / seconds(pattern, method, short) for _ in range(3)]
        if sorted(growths)[1] > MOST_GROWTH:
            return f"{taken_s:.2f} s for {len(long)} characters {long[:40]!r}…{tail!r}"
    return None


def test_no_pattern_takes_more_than_linear_time() -> None:
    tried: dict[tuple[str, int, str], str] = {}
    slow = []
    for place, pattern, method in uses():
        if tried.setdefault((str(pattern.pattern), pattern.flags, method), place) != place:
            continue
        if text := slow_text(pattern, method):
            slow.append(f"{place} {method} {pattern.pattern!r}: {text}")
    assert len(tried) > 100
    assert not slow, "\n".join(slow)


@pytest.mark.parametrize(
    ("source", "method"),
    [(r"\s*b", "search"), (r"x(a|b)\w*\d\w*;", "match"), (r"\d+g", "search"), (r"(?m)^\s*if", "finditer")],
)
def test_a_slow_pattern_is_found(source: str, method: str) -> None:
    assert slow_text(re.compile(source), method) is not None


@pytest.mark.parametrize(
    ("source", "method"), [(r"a\s*+b", "match"), (r"(?<!\d)\d+g", "search"), (r"(?m)^[ \t]*if", "finditer")]
)
def test_a_linear_pattern_is_none(source: str, method: str) -> None:
    assert slow_text(re.compile(source), method) is None
