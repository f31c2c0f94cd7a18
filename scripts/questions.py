"""Texts that ``scripts/make-client`` writes from the table of questions: an awaited client, the table of its page."""

from __future__ import annotations

import re
from textwrap import dedent, indent, wrap
from typing import Any, get_args

from penstock.questions.json_schemas import DOCUMENTS
from penstock.questions.table import QUESTIONS, Question

TABLE = re.compile(r"^\| question \|.*?(?=\n\n)", re.MULTILINE | re.DOTALL)
"""The table of docs/questions.md."""


def spelled(kind: Any) -> str:
    """Return a type as it is written."""
    return f"tuple[{spelled(get_args(kind)[0])}, ...]" if get_args(kind) else kind.__name__


def imports(kinds: list[Any]) -> str:
    """Return the lines that import the parts of the types."""
    classes = {each for kind in kinds for each in (get_args(kind) or (kind,)) if each not in (Ellipsis, str)}
    return "\n".join(sorted(f"from {each.__module__} import {each.__name__}" for each in classes))


def method(name: str, question: Question) -> str:
    """Return the method of a client that asks a question."""
    request, answer = spelled(question.request), spelled(question.answer)
    how_sent = "is_safe=True" if question.is_quick else "patient=True"
    send = f'Send("POST", "{question.path}", request, {how_sent})'
    event = question.event
    listener = f", *, on_{event[0]}: Callable[[{spelled(event[1])}], None] | None = None" if event else ""
    how = f"document({answer}, send)"
    if event:
        how = f'with_events({answer}, send, "{event[0]}", {spelled(event[1])}, on_{event[0]})'
    summary = f"Return {question.summary[0].lower()}{question.summary[1:]}"
    about = [f"``on_{event[0]}`` is called with each {event[0]} before the answer."] if event else []
    words = "\n\n".join(
        "\n".join(wrap(part, 112)) for part in (summary, question.about.replace("`", "``"), *about) if part
    )
    end = "\n        " if "\n" in words else ""
    body = f'''
    async def {name.replace("-", "_")}(self, request: {request} | Named{listener}) -> {answer}:
        """{indent(words, " " * 8).strip()}{end}"""
        send = {send}
        return await self._connection.{how}
    '''
    return indent(dedent(body), "    ")


def client() -> str:
    """Return the awaited client of all questions."""
    kinds = [kind for row in QUESTIONS.values() for kind in (row.request, row.answer, *(row.event or ())[1:])]
    head = f'''
"""The questions that a service answers at once, a method for each."""

from __future__ import annotations

from collections.abc import Callable

from penstock.client.async_connection import AsyncConnection
from penstock.client.messages import Named, Send
{imports(kinds)}


class AsyncQuestions:
    """Questions to a service; nothing that they hold is stored, but an imported topology."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
'''
    return (
        "# Made from questions/table.py by scripts/make-client: change that one."
        + head
        + "".join(method(name, question) for name, question in QUESTIONS.items())
    )


def with_table(page: str) -> str:
    """Return the page of the questions with the table as it is now."""
    names = {kind: name for name, kind in DOCUMENTS.items()}
    rows = ["| question | answers | request, answer | messages before | route |", "|---|---|---|---|---|"]
    for name, question in QUESTIONS.items():
        several = get_args(question.answer)
        answer = f"list of `{names[several[0]]}`" if several else f"`{names[question.answer]}`"
        event = "" if question.event is None else f"`{question.event[0]}`"
        documents = f"`{names[question.request]}`, {answer}"
        rows.append(f"| `{name}` | {question.summary[:-1]} | {documents} | {event} | `POST {question.path}` |")
    return TABLE.sub(lambda _: "\n".join(rows), page)
