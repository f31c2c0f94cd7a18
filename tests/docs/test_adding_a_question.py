"""The page on adding a question, word for word: with its two files and its row, every surface has the question."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from pages import ROOT, pieces_of_section

pytestmark = pytest.mark.tier("ci")

PAGE = ROOT / "docs/extending.md"
ADDED = [piece for piece in pieces_of_section(PAGE, "Adding a question") if piece.file]
IMPORT = "from penstock.schemas.api.legal import LegalAnswer, LegalRequest\n"

SCRIPT = """
import io, json, sys
from pathlib import Path
import penstock.planning, penstock.questions, penstock.schemas.api

for package, place in ((penstock.schemas.api, "schemas/api"), (penstock.planning, "src/penstock/planning"),
                       (penstock.questions, "src/penstock/questions")):
    package.__path__.insert(0, str(Path(place).resolve()))
sys.path.insert(0, sys.argv[1])

from fastapi.testclient import TestClient
from penstock.cli.main import main
from penstock.questions.json_schemas import DOCUMENTS
from penstock.service.http.app import create_app
from penstock.service.settings import Settings
import questions

asked = {"model": "gpt2-small", "cluster": "1x4xV100"}
said = {"documents": [name for name in DOCUMENTS if "legal" in name]}
app = create_app(Settings(database="questions.sqlite", slots=0))
said["openapi"] = "post" in app.openapi()["paths"].get("/v1/plans:legal", {})
said["names"] = "model" in app.openapi()["components"]["schemas"].get("LegalRequest", {}).get("properties", {})
with TestClient(app, base_url="http://localhost") as http:
    answer = http.post("/v1/plans:legal", json=asked)
    said["http"] = answer.json() if answer.status_code == 200 else answer.status_code
    said["typing"] = http.post("/v1/plans:legal", json={**asked, "cluster": "1x4xV10"}).text
    said["page"] = "/questions?name=legal" in http.get("/questions").text
    said["form"] = http.post("/questions?name=legal", data={"request": json.dumps(asked)}).text.count("tensor 2")
said["client"] = "async def legal(self, request: LegalRequest | Named) -> LegalAnswer:" in questions.client()
said["table"] = "`legal`" in questions.with_table(Path(sys.argv[2]).read_text())
sys.stdin = io.StringIO(json.dumps(asked))
said["code"] = main(["ask", "legal", "-"])
Path("said.json").write_text(json.dumps(said))
"""


def surfaces(place: Path, *, row: bool) -> dict[str, Any]:
    """Return what every surface shows in a fresh interpreter, with the page's files, and its row or without."""
    for piece in ADDED:
        path = place / piece.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(piece.text if path.name != "table.py" else table(piece.text if row else ""))
    paths = [str(ROOT / "src"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-c", SCRIPT, str(ROOT / "scripts"), str(ROOT / "docs/questions.md")]
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    shown: dict[str, Any] = json.loads((place / "said.json").read_text())
    return shown | {"printed": ended.stdout}


def table(row: str) -> str:
    """Return the table of questions with a row more."""
    text = (ROOT / "src/penstock/questions/table.py").read_text()
    begun, end, rest = text.partition('\n}\n"""All of them by name."""')
    assert end
    first, future, imports = begun.partition("from __future__ import annotations\n")
    return f"{first}{future}{IMPORT}{imports}\n{textwrap.indent(row, '    ')}{end}{rest}"


def test_a_row_is_a_question_on_every_surface(tmp_path: Path) -> None:
    shown = surfaces(tmp_path, row=True)
    assert shown["documents"] == ["legal-request", "legal-answer"]
    assert {name: shown[name] for name in ("openapi", "names", "page", "client", "table")} == dict.fromkeys(
        ("openapi", "names", "page", "client", "table"), True
    )
    choices = shown["http"]["choices"]
    assert any("tensor 2" in choice for choice in choices)
    assert json.loads(shown["printed"])["choices"] == choices
    assert shown["form"] == sum("tensor 2" in choice for choice in choices)
    assert "did you mean 'V100'?" in shown["typing"]
    assert shown["code"] == 0


def test_without_its_row_nothing_mentions_it(tmp_path: Path) -> None:
    shown = surfaces(tmp_path, row=False)
    assert shown["documents"] == []
    assert not any(shown[name] for name in ("openapi", "names", "page", "client", "table"))
    assert shown["http"] == 404
    assert shown["code"] == 64


def test_the_page_shows_two_files_and_a_row() -> None:
    assert [Path(piece.file).name for piece in ADDED] == ["legal.py", "legal.py", "table.py"]
