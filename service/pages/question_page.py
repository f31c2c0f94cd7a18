"""The page of questions: a form for each row of the table, which takes the request as a document."""

from __future__ import annotations

import json
from typing import Any

from penstock.questions.table import QUESTIONS, question_of
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.document import Document
from penstock.service.db.document_store import Store
from penstock.service.parsing import parse
from penstock.service.security.sizes import Sizes

MOST_SHOWN = 200_000
"""Characters of a request that are shown again."""


def form(
    name: str | None, text: str | None = None, answer: bytes | None = None, error: ProblemDetails | None = None
) -> dict[str, Any]:
    """Return the list of questions, and the form of one with its answer, or with what is wrong. Raises UnknownName."""
    shown: dict[str, Any] = {"questions": QUESTIONS, "name": name, "error": error}
    if name is None:
        return shown
    question = question_of(name)
    request = _text(question.example()) if text is None else text[:MOST_SHOWN]
    return shown | {
        "question": question,
        "text": request,
        "answer": None if answer is None else _text(json.loads(answer)),
    }


def read(store: Store, sizes: Sizes, name: str, text: str) -> Document:
    """Return the request that a form holds. Raises as ``parse``, and UnknownName."""
    request: Document = parse(question_of(name).request, text.encode(), store.resolve)
    sizes.check(request)
    return request


def _text(document: Any) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False)
