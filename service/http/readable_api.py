"""The OpenAPI document in readable form: routes grouped by subject, with their inputs and outputs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

TITLES = {
    "plans": "Plans",
    "jobs": "Jobs",
    "questions": "Questions that keep nothing",
    "sweeps": "Sweeps",
    "documents": "Documents",
    "runs": "Runs",
    "agents": "Agents",
    "health": "The service itself",
}
"""The groups, in this order; others follow."""

HIDDEN_HEADERS = frozenset({"Idempotency-Key"})
"""Headers that the page explains once, above all POST routes."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a route."""

    name: str
    where: str
    kind: str
    required: bool
    words: str


@dataclass(frozen=True)
class Operation:
    """One route and method. ``curl`` runs as it is where the path has no parameter."""

    method: str
    path: str
    anchor: str
    words: str
    parameters: tuple[Parameter, ...]
    body: str | None
    answers: tuple[tuple[str, str], ...]
    example: str | None
    curl: str


def groups(document: dict[str, Any], url: str) -> list[tuple[str, list[Operation]]]:
    """Return title and operations of each group of an OpenAPI document, for a service at ``url``."""
    by_group: dict[str, list[Operation]] = {name: [] for name in TITLES}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            group = (operation.get("tags") or ["health"])[0]
            by_group.setdefault(group, []).append(_operation(method, path, operation, url))
    return [(TITLES.get(name, name.capitalize()), operations) for name, operations in by_group.items() if operations]


def _operation(method: str, path: str, operation: dict[str, Any], url: str) -> Operation:
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    example = json.dumps(content["example"], indent=1, ensure_ascii=False) if "example" in content else None
    return Operation(
        method=method.upper(),
        path=path,
        anchor=re.sub(r"\W+", "-", f"{method} {path}").strip("-"),
        words=operation.get("description") or operation.get("summary", ""),
        parameters=tuple(_parameters(operation)),
        body=_kind(content["schema"]) if "schema" in content else None,
        answers=tuple((status, _answer(one)) for status, one in sorted(operation["responses"].items())),
        example=example,
        curl=_curl(method, path, url, example is not None),
    )


def _parameters(operation: dict[str, Any]) -> Iterator[Parameter]:
    for parameter in operation.get("parameters", ()):
        if parameter["name"] not in HIDDEN_HEADERS:
            words = parameter.get("description", "")
            kind = _kind(parameter.get("schema", {}))
            yield Parameter(parameter["name"], parameter["in"], kind, parameter.get("required", False), words)


def _answer(response: dict[str, Any]) -> str:
    kinds = [_kind(content.get("schema", {})) or name for name, content in response.get("content", {}).items()]
    return " – ".join(filter(None, (response.get("description", ""), ", ".join(dict.fromkeys(kinds)))))


def _kind(schema: dict[str, Any]) -> str:
    """Return a schema's type in a word or two."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(kind for each in schema["anyOf"] if (kind := _kind(each)) != "null")
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {})) or 'anything'}"
    return str(schema.get("const", schema.get("type", "")))


def _curl(method: str, path: str, url: str, has_body: bool) -> str:
    words = ["curl"] + ([] if method == "get" else ["-X", method.upper()])
    words += ["-H", "'Content-Type: application/json'", "-d", "@body.json"] if has_body else []
    return " ".join([*words, f"'{url}{path}'"])
