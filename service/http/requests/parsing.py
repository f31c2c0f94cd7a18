"""Parses bodies of requests as documents in linear time, as they are untrusted."""

from __future__ import annotations

from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, FailFast, ValidationError, create_model, model_validator

from penstock.schemas.document import load_json, refusal
from penstock.service.jobs.naming import NAMING, with_documents, with_ways

M = TypeVar("M", bound=BaseModel)

LARGE_BYTES = 2**17
"""A body from this size on is read up to the first wrong entry of each of its lists.

Each fault takes some hundred bytes until it is sent, and its entry may have two.
"""


class _Stop(FailFast):
    """The same as FailFast, but hashable, as the members of a union have to be."""

    __hash__ = object.__hash__


_STOP = _Stop()


def parse(model: type[M], body: bytes) -> M:
    """Return a body as ``model``. Raises InvalidDocument with a fault per mistake, in time linear in the body."""
    data = with_documents(model, load_json(body))
    try:
        reader = model if len(body) < LARGE_BYTES else _hasty(model)
        return reader.model_validate(data, context={"units": False})
    except ValidationError as error:
        remedy = (
            None if len(body) < LARGE_BYTES else "in a body of this size each list is read to its first wrong entry"
        )
        refused = refusal(model, error, data, remedy=remedy)
        raise (with_ways(refused) if model in NAMING else refused) from None


@cache
def _hasty(model: type[M]) -> type[M]:
    """Return a model that reads the same documents as the same objects, but each list to its first wrong entry."""

    def as_model(self: Any) -> Any:
        object.__setattr__(self, "__class__", model)  # the fields are the same; to validate twice takes twice as long
        return self

    fields: dict[str, Any] = {name: (_stopping(field.annotation), field) for name, field in model.model_fields.items()}
    validators: dict[str, Any] = {"as_model": model_validator(mode="after")(as_model)}
    return create_model(model.__name__, __base__=model, __validators__=validators, **fields)


def _stopping(annotation: Any) -> Any:
    """Return the annotation of a field, with hasty models, and lists that stop."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _hasty(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None or origin is Literal:
        return annotation
    if origin is Annotated:
        return Annotated[(_stopping(arguments[0]), *arguments[1:])]
    inner = tuple(map(_stopping, arguments))
    if origin is UnionType:
        return reduce(or_, inner)
    return Annotated[origin[inner], _STOP] if origin in (tuple, list, set, frozenset) else origin[inner]
