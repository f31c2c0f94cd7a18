"""Limits in the CustomResourceDefinitions of Kubernetes objects beyond types: numbers, lengths, patterns, rules.

``schemas/limits.json`` has them by kind and path; ``*`` is every element of a list, and every value of a map.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_FILE = Path(__file__).parent / "schemas" / "limits.json"
CEL = "cel"


class LimitedValue(NamedTuple):
    """A limit, and a value that it is for."""

    path: str
    keyword: str
    limit: Any
    value: Any


@cache
def _limits(kind: str) -> list[tuple[list[str], str, Any]]:
    tables = json.loads(_FILE.read_text())
    rows = [(path, keyword, limit) for path, limits in tables[kind] for keyword, limit in limits.items()]
    named = {"quantity": tables["quantity"]}
    return [
        (path.split("/")[1:], keyword, named.get(limit, limit) if keyword == "pattern" else limit)
        for path, keyword, limit in rows
    ]


def limited_values(kind: str, job: dict[str, Any]) -> Iterator[LimitedValue]:
    """Yield every limit of a kind with every value of a job to which it applies; each rule in CEL is a limit."""
    for path, keyword, limit in _limits(kind):
        for value in _at(job, path):
            for one in limit if keyword == CEL else [limit]:
                yield LimitedValue("/".join(path), keyword, one, value)


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    if not path:
        yield value
    elif path[0] == "*":
        inner = value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
        for each in inner:
            yield from _at(each, path[1:])
    elif isinstance(value, dict) and path[0] in value:
        yield from _at(value[path[0]], path[1:])


def broken(one: LimitedValue) -> bool:
    """Return whether a value is beyond its limit, by the meaning of the keyword in OpenAPI; rules in CEL never are."""
    match one.keyword:
        case "minimum":
            return bool(one.value < one.limit)
        case "minLength" | "minItems":
            return len(one.value) < one.limit
        case "maxLength" | "maxItems":
            return len(one.value) > one.limit
        case "enum":
            return one.value not in one.limit
        case "pattern":  # numbers may stand for quantities
            return re.search(one.limit, str(one.value)) is None
    raise AssertionError(one.keyword)
