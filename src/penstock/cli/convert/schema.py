"""``penstock schema``: the JSON Schema of a document."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from penstock.cli.panels import CONVERT


def _names(typed: str) -> Iterator[str]:
    from penstock.questions.json_schemas import DOCUMENTS

    return (name for name in DOCUMENTS if name.startswith(typed))


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("schema", rich_help_panel=CONVERT)(schema)


def schema(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A document, as in the list.", autocompletion=_names),
    ] = None,
) -> None:
    """Print the JSON Schema of a document, or list the documents.

    Example: penstock schema plan-request
    """
    from penstock.questions.json_schemas import DOCUMENTS, schema_text

    sys.stdout.write("".join(f"{each}\n" for each in DOCUMENTS) if name is None else schema_text(name))
