"""JSON text that came from outside, as the document that it is to be."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from penstock.schemas.document import Document, faults_of, load_json
from penstock.schemas.errors import InvalidDocument

M = TypeVar("M", bound=BaseModel)

SHOWN_FAULTS = 50


def parse(model: type[M], body: bytes) -> M:
    """A body as ``model``. Raises InvalidDocument with a fault per mistake."""
    data = load_json(body)
    if issubclass(model, Document):
        return model.parse(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = faults_of(error.errors(), data)
        raise InvalidDocument(f"the body has {len(faults)} faults", faults=tuple(faults[:SHOWN_FAULTS])) from None
