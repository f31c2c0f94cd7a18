"""Record of exchanges: a separate service answers each one of ``exchange_list``; varying values are left out."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import httpx
from answer_record import Record, digest
from exchange_list import EXCHANGES, Exchange
from normalised import Normaliser
from service_process import Server

ENDS = ("succeeded", "failed", "cancelled")
TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)


def exchanged(directory: Path, exchanges: Iterable[Exchange] = EXCHANGES) -> dict[str, Record]:
    """Return the normalised answers of a new service, by the name of the exchange."""
    server = Server(directory / "recorded.sqlite", slots=1, max_wait_s=300, agent_timeout_s=600)
    try:
        kept: dict[str, str] = {}
        with httpx.Client(base_url=server.url, timeout=None) as client:
            return {each.name: _exchange(client, each, kept) for each in exchanges}
    finally:
        server.stop()


def _exchange(client: httpx.Client, each: Exchange, kept: dict[str, str]) -> Record:
    """Send an exchange, keep values that later exchanges need, and normalise."""
    answer = _answer(client, each, kept)
    for name, place in each.keep.items():
        value = answer.json()
        for key in place.split("."):
            value = value[key]
        kept[name] = value
    kind = answer.headers.get("content-type", "").partition(";")[0]
    return {"status": answer.status_code, "type": kind, "body": _body(each, answer, kind, Normaliser(kept))}


def _answer(client: httpx.Client, each: Exchange, kept: dict[str, str]) -> httpx.Response:
    body = each.body if each.body is None or isinstance(each.body, str) else json.dumps(each.body)
    for name, value in kept.items():
        body = body and body.replace(f"{{{name}}}", value)
    headers = {"Content-Type": "application/json", **each.headers} if body is not None else each.headers
    path = each.path.format(**kept)
    while True:
        answer = client.request(each.method, path, content=body, headers=headers)
        if not each.settle or answer.json()["state"] in ENDS:
            return answer
        time.sleep(0.2)


def _body(each: Exchange, answer: httpx.Response, kind: str, normaliser: Normaliser) -> Any:
    """Return JSON as it is, pages by their title, and other long texts by a digest."""
    if kind.endswith("json") and answer.content:
        lines = answer.text.splitlines() if kind.endswith("ndjson") else None
        body = normaliser.document(answer.json() if lines is None else [json.loads(line) for line in lines])
        if each.name == "operations":
            return sorted(f"{verb.upper()} {path}" for path, verbs in body["paths"].items() for verb in verbs)
        if each.name == "a job's events":  # how many plans and bounds are reported depends on the time between them
            return [event["data"] for event in body["items"] if event["kind"] == "state"]
        if each.name == "sweep":  # whether a worker has taken the first of its jobs, too
            body["rows"] = [{**row, "state": row["state"].replace("running", "queued")} for row in body["rows"]]
        return {"digest": digest(body)} if each.digested else body
    if kind == "text/html":
        title = TITLE.search(answer.text)
        return {"title": normaliser.text(title[1].strip()) if title else None}
    return normaliser.text(answer.text)
