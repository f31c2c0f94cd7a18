"""A question has one answer: of this machine, over HTTP, of both clients, on its page and of ``penstock ask``."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import Server

from penstock.cli.main import main
from penstock.client import Client
from penstock.questions.table import QUESTIONS, json_of, question_of
from penstock.schemas.errors import UnknownName

pytestmark = pytest.mark.tier("ci")


def without_times(answer: Any) -> Any:
    """Return plain data without what differs from call to call: how long it took, and the hash that a service adds."""
    if isinstance(answer, dict):
        return {name: without_times(value) for name, value in answer.items() if name not in ("seconds", "hash")}
    return [without_times(each) for each in answer] if isinstance(answer, list) else answer


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_surface_gives_the_same_answer(
    name: str, shared_server: Server, client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = QUESTIONS[name]
    request = question.request.parse(question.example())
    wanted = without_times(json.loads(json_of(question.answer, question.here(request))))
    text = json.dumps(question.example())

    url = f"{shared_server.url}{question.path}"
    over_http = httpx.post(url, content=text, headers={"Content-Type": "application/json"}, timeout=60)
    assert over_http.status_code == 200, over_http.text
    assert without_times(over_http.json()) == wanted

    method = getattr(client, name.replace("-", "_"))
    assert without_times(json.loads(json_of(question.answer, method(request)))) == wanted
    if question.event is not None:
        heard: list[Any] = []
        listening = method(question.example(), **{f"on_{question.event[0]}": heard.append})
        assert without_times(json.loads(json_of(question.answer, listening))) == wanted
        assert heard

    file = tmp_path / "request.json"
    file.write_text(text)
    assert main(["ask", name, str(file)]) == 0
    assert without_times(json.loads(capsys.readouterr().out)) == wanted
    assert main(["ask", name, str(file), "--server", shared_server.url]) == 0
    assert without_times(json.loads(capsys.readouterr().out)) == wanted

    page = httpx.post(f"{shared_server.url}/questions?name={name}", data={"request": text}, timeout=60)
    shown = re.search(r'id="answer">.*?<code>(.*?)</code>', page.text, re.DOTALL)
    assert shown is not None, page.text
    assert without_times(json.loads(html.unescape(shown[1]))) == wanted


def test_an_example_is_shown_and_can_be_asked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["ask", "fits"]) == 0
    file = tmp_path / "fits.json"
    file.write_text(capsys.readouterr().out)
    assert main(["ask", "fits", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["fitting"] > 0
    assert main(["ask"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(QUESTIONS)


def test_names_of_models_and_clusters_are_understood_here(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "fits.yaml"
    file.write_text("model: llama-3-8b\ncluster: 1x8xH100\ntensor: [8]\n")
    assert main(["ask", "fits", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == "llama-3-8b"
    file.write_text("model: llama-3-9b\ncluster: 1x8xH100\n")
    assert main(["ask", "fits", str(file)]) == 65
    assert "llama-3-8b" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "nearest"), [("expain", "explain"), ("verfy", "verify")])
def test_an_unknown_question_is_refused_with_the_nearest(
    http: httpx.Client, name: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownName, match=name) as caught:
        question_of(name)
    assert caught.value.remedy == f"did you mean '{nearest}'?"
    assert main(["ask", name]) == 64
    assert f"did you mean '{nearest}'?" in capsys.readouterr().err
    assert http.get("/questions", params={"name": name}).status_code == 404


def test_a_wrong_request_is_refused_in_the_same_words(
    shared_server: Server, http: httpx.Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also on the page, where the faults are listed above the form."""
    wrong = json.dumps(QUESTIONS["fits"].example() | {"tensor": [3], "pipeline": [1]})
    file = tmp_path / "request.json"
    file.write_text(wrong)
    refused = http.post("/v1/fits", content=wrong, headers={"Content-Type": "application/json"})
    assert refused.status_code == 422
    detail = refused.json()["detail"]
    for server in ((), ("--server", shared_server.url)):
        assert main(["ask", "fits", str(file), *server]) == 65
        assert detail in capsys.readouterr().err
    page = http.post("/questions", params={"name": "fits"}, data={"request": wrong})
    assert page.status_code == 422
    assert detail in html.unescape(page.text)
