"""``penstock ask``: any question of the table, by its document; other commands call `ask`, too."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.groups import grouped
from penstock.cli.input_files import read_raw
from penstock.cli.kernels import one_thread
from penstock.cli.panels import PLAN
from penstock.cli.service.remote import Server, connect, refuse_here

if TYPE_CHECKING:
    from penstock.schemas.document import Document


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("ask", rich_help_panel=PLAN)(grouped(ask_by_document))


def ask(
    name: str,
    request: Document,
    server: str | None,
    notify: Callable[[Any], None] | None = None,
    *,
    workers: int | None = None,
) -> Any:
    """Return the answer to a question, from this machine or from a service.

    ``notify`` is called with each message before the answer. Raises typer.BadParameter for ``workers`` with a service.
    """
    from penstock.questions.table import question_of
    from penstock.schemas.api.terms import Terms

    question = question_of(name)
    if server is None:
        one_thread()
        terms = Terms(workers=workers)
        return question.here(request, terms if notify is None else replace(terms, notify=notify))
    refuse_here(workers=workers)
    listener = {} if notify is None or question.event is None else {f"on_{question.event[0]}": notify}
    with connect(server) as client:
        return getattr(client, name.replace("-", "_"))(request, **listener)


def ask_by_document(
    *,
    name: Annotated[str | None, typer.Argument(metavar="QUESTION", help="Its name (default: list them).")] = None,
    request: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="The request as JSON or YAML, or - (default: show a request as example)."),
    ] = None,
    server: Server = None,
) -> None:
    """Answer a question by its document, and print the answer as JSON.

    A request may name shipped models and clusters by `model` and `cluster`.
    Without FILE an example of a request is printed, without QUESTION a list.

    Example: penstock ask verify plan.json
    """
    from penstock.questions.naming import document_of
    from penstock.questions.table import QUESTIONS, json_of, question_of

    if name is None:
        for each, row in QUESTIONS.items():
            print(f"{each:21}{row.summary}")
        return
    question = question_of(name)
    if request is None:
        print(json.dumps(question.example(), indent=1, ensure_ascii=False))
        return
    document = document_of(question.request, read_raw(request), partial(question.request.parse, units=True))
    print(json_of(question.answer, ask(name, document, server), indent=1).decode())
