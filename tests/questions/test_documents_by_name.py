"""Every document has a name, a JSON Schema, and a line on the page of documents."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pkgutil import walk_packages

import pytest
from repository import ROOT

from penstock import schemas
from penstock.cli.main import main
from penstock.questions.json_schemas import DOCUMENTS, schema_of
from penstock.schemas.document import Document
from penstock.schemas.errors import UnknownName


def test_every_document_has_a_name() -> None:
    modules = [import_module(each.name) for each in walk_packages(schemas.__path__, f"{schemas.__name__}.")]
    kinds = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Document) and kind is not Document
    }
    assert len(kinds) > 10
    assert kinds <= set(DOCUMENTS.values())


def test_the_pages_of_documents_and_questions_have_each_of_them() -> None:
    page = (ROOT / "docs" / "documents.md").read_text(encoding="utf-8")
    rows = "\n".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| "))
    named = set(re.findall(r"\(`([\w-]+)`\)", rows))
    of_questions = set(re.findall(r"`([\w-]+)`", (ROOT / "docs" / "questions.md").read_text(encoding="utf-8")))
    assert named <= set(DOCUMENTS) <= named | of_questions


@pytest.mark.tier("ci")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_closed(name: str) -> None:
    schema = schema_of(name)
    assert schema["$schema"].endswith("2020-12/schema")
    assert name == "problem-details" or schema["additionalProperties"] is False


def test_the_command_prints_a_schema_and_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "plan"]) == 0
    assert json.loads(capsys.readouterr().out) == schema_of("plan")
    assert main(["schema"]) == 0
    assert capsys.readouterr().out.split() == list(DOCUMENTS)


def test_an_unknown_name_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownName, match="there is no document 'plan-reqest'"):
        schema_of("plan-reqest")
    assert main(["schema", "plan-reqest"]) == 64
    assert "did you mean 'plan-request'?" in capsys.readouterr().err
