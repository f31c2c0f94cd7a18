"""``/v1/fits``: the answer that Python gives, by name or with documents; what is illegal is 422 with its rule."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process import in_process
from pages_read import Page
from service_process import Server

import penstock
from penstock.cli.main import main
from penstock.client import Client
from penstock.examples import catalogue
from penstock.examples.tiny import tiny_fits, tiny_topology
from penstock.schemas.api.fits import FitsAnswer, FitsRequest
from penstock.schemas.topology import ClusterTopology

NAMED = {"model": "llama-3-70b", "cluster": "8x8xH100", "tensor": [8]}
TINY = tiny_fits()["shape"]


def ask(directory: Path, body: Any) -> httpx.Response:
    async def request() -> httpx.Response:
        async with in_process(directory) as http:
            return await http.post("/v1/fits", json=body)

    return asyncio.run(request())


def test_a_name_stands_for_its_document(tmp_path: Path) -> None:
    for body in (NAMED, _of_llama()):
        answer = ask(tmp_path, body)
        assert answer.status_code == 200, answer.text
        fits_answer = FitsAnswer.model_validate_json(answer.content)
        assert fits_answer == penstock.fits("llama-3-70b", "8x8xH100", tensor=8)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"tensor": [5]}, "/tensor", "does not divide 64 attention heads"),
        ({"tensor": [0]}, "/tensor/0", "greater than or equal to 1"),
        ({"model": "llama-4"}, "/model", "llama-3-8b"),
        ({"shape": TINY}, "/model", "give either 'model' or 'shape', not both"),
        ({"precision": "fp8"}, "/precision", "precision"),
        ({"hugging_face": {"model_type": "bloom"}}, "", "either `shape` or `hugging_face`"),
    ],
)
def test_refusals_name_the_field(tmp_path: Path, change: dict[str, Any], pointer: str, words: str) -> None:
    answer = ask(tmp_path, {**NAMED, **change})
    assert answer.status_code == 422
    assert pointer in {fault["pointer"] for fault in answer.json()["errors"]}
    assert words in answer.text


def test_a_model_beyond_all_memory_is_refused(tmp_path: Path) -> None:
    wild = {**TINY, "hidden": 2**24, "ffn": 2**24, "layers": 4096}
    answer = ask(tmp_path, {**tiny_fits(), "shape": wild})
    assert answer.status_code == 422
    assert "(2^53)" in answer.text


def test_the_client_asks_and_a_hash_stands_for_its_topology(client: Client) -> None:
    fits_answer = client.fits(NAMED)
    assert fits_answer == client.fits(FitsRequest.parse(tiny_fits() | _of_llama()))
    by_hash = {**tiny_fits(), "topology": client.topologies.create(ClusterTopology.parse(tiny_topology())).hash}
    assert client.fits(by_hash) == client.fits(tiny_fits())


def test_the_command_asks_a_service(shared_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["fits", "--example", "llama-3-70b", "--cluster", "8x8xH100", "--tensor", "8"]
    assert main(command) == 0
    here = capsys.readouterr().out
    assert main([*command, "--server", shared_server.url]) == 0
    assert capsys.readouterr().out == here
    assert main([*command, "--pipeline", "3", "--server", shared_server.url]) == 65
    assert "tensor 8 × pipeline 3 = 24 does not divide 64 GPUs" in capsys.readouterr().err


def _of_llama() -> dict[str, Any]:
    topology = catalogue.cluster("8x8xH100").model_dump(mode="json", exclude_none=True)
    return {"shape": catalogue.shape("llama-3-70b").model_dump(mode="json"), "topology": topology, "tensor": [8]}


def look(directory: Path, query: dict[str, str]) -> httpx.Response:
    async def request() -> httpx.Response:
        async with in_process(directory) as http:
            return await http.get("/fits", params=query)

    return asyncio.run(request())


def test_the_page_shows_the_answer_and_keeps_what_was_asked(tmp_path: Path) -> None:
    fits_answer = penstock.fits("llama-3-8b", "1x8xH100", tensor=[2, 4])
    answer = look(tmp_path, {"model": "llama-3-8b", "cluster": "1x8xH100", "tensor": "2,4"})
    assert answer.status_code == 200
    page = Page(answer.text)
    assert f"{fits_answer.fitting} of {fits_answer.legal} legal layouts fit" in answer.text
    assert all(f"{row.memory.total_bytes / 2**30:,.1f}" in answer.text for row in fits_answer.rows)
    assert all(one.sentence in answer.text for one in fits_answer.refused)
    fields = dict(next(form for form in page.forms if form.action == "/fits").fields)
    assert (fields["model"], fields["tensor"], fields["sharding"]) == ("llama-3-8b", "2,4", "optimizer")
    assert (page.inline, page.unnamed) == ([], [])


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"tensor": "5"}, "tensor 5 does not divide 64 attention heads; nearest: tensor 2, 4, 8"),
        ({"tensor": "x"}, "valid integer"),
        ({"tensor": "<b>"}, "&lt;b&gt;"),
        ({"model": "llama-4"}, "llama-3-8b"),
        ({"cluster": "8x8xFOO"}, "no device kind"),
        ({"recompute": "everything"}, "attention"),
    ],
)
def test_the_page_says_what_is_wrong(tmp_path: Path, query: dict[str, str], words: str) -> None:
    answer = look(tmp_path, query)
    assert answer.status_code == 200
    assert words in answer.text
    assert "<b>" not in answer.text
