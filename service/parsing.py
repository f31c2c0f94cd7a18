"""Parsing of requests' bodies as documents in linear time, as they are untrusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import SchemaValidator

from penstock.questions.naming import document_of
from penstock.schemas.document import Document, load_json, refusal
from penstock.schemas.plan import PlanFile, PlanQuestion, is_plan_file

M = TypeVar("M", bound=Document)

LARGE_BYTES = 2**17
"""A body from this size on is read up to the first wrong entry of each of its lists.

Each fault takes some hundred bytes until it is sent, and its entry may have two.
"""

_REPEATING = frozenset({"list", "tuple", "set", "frozenset"})
_ANEW: dict[str, Any] = (
    {"_use_prebuilt": False} if "_use_prebuilt" in (SchemaValidator.__text_signature__ or "") else {}
)
"""The option with which newer versions of pydantic build the validators of inner models again."""

_PLAIN = frozenset({"metadata", "serialization", "default", "expected", "cls", "config"})
"""Parts of a core schema that hold values, and no schemas."""


def parse(model: type[M], body: bytes, stored: Callable[[M], M]) -> M:
    """Return a body as ``model``; ``stored`` puts stored documents in place of hashes.

    Raises InvalidDocument with a fault per mistake, in time linear in the body, and otherwise as ``document_of``.
    """
    return document_of(model, load_json(body), partial(_parsed, model, body), stored)


def _parsed(model: type[M], body: bytes, data: Any) -> M:
    if issubclass(model, PlanQuestion) and is_plan_file(data):
        return model(plan=_parsed(PlanFile, body, data))
    try:
        if len(body) < LARGE_BYTES:
            return model.model_validate(data, context={"units": False})
        document: M = _hasty(model).validate_python(data, context={"units": False})
        return document
    except ValidationError as error:
        remedy = (
            None if len(body) < LARGE_BYTES else "in a body of this size each list is read to its first wrong entry"
        )
        raise refusal(model, error, data, remedy=remedy) from None


@cache
def _hasty(model: type[BaseModel]) -> SchemaValidator:
    """Return a validator that accepts the same as the model's own, but stops in each list at the first wrong entry."""
    return SchemaValidator(_stopping(model.__pydantic_core_schema__), **_ANEW)


def _stopping(schema: Any) -> Any:
    if isinstance(schema, list | tuple):
        return type(schema)(_stopping(one) for one in schema)
    if not isinstance(schema, Mapping):
        return schema
    inner = {name: one if name in _PLAIN else _stopping(one) for name, one in schema.items()}
    return inner | {"fail_fast": True} if inner.get("type") in _REPEATING else inner
