"""docs/schemas holds the JSON Schema of every document, as the code has it now."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages

import pytest
from repository import ROOT

from penstock import schemas
from penstock.schemas.api.documents import DOCUMENTS, schema_text, write_schemas
from penstock.schemas.document import Document

SCHEMAS = ROOT / "docs" / "schemas"


@pytest.mark.tier("ci")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_up_to_date(name: str) -> None:
    written = (SCHEMAS / f"{name}.json").read_text(encoding="utf-8")
    assert written == schema_text(name), "run scripts/make-schemas"


def test_nothing_else_lies_there() -> None:
    assert {path.stem for path in SCHEMAS.iterdir()} == set(DOCUMENTS)


def test_every_document_has_one() -> None:
    names = [found.name for found in walk_packages(schemas.__path__, f"{schemas.__name__}.")]
    modules = [import_module(name) for name in names]
    found = {
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Document) and kind is not Document
    }
    assert len(found) > 10
    assert found <= set(DOCUMENTS.values())


def test_the_page_of_documents_has_each_of_them() -> None:
    page = (SCHEMAS.parent / "documents.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(schemas/([\w-]+)\.json\)", page)) == set(DOCUMENTS)


def test_writing_removes_what_is_no_document_any_more(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    paths = write_schemas(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    closed = json.loads((tmp_path / "plan.json").read_text())
    assert closed["additionalProperties"] is False
