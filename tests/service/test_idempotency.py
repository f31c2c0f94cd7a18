"""Requests that are sent twice with one ``Idempotency-Key`` are done once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from in_process import in_process

from penstock.service.database import Database
from penstock.service.idempotency import KEPT_MS, Idempotency, Kept, KeyInUse, WrongKey
from penstock.service.samples import tiny_plan_file, tiny_profile, tiny_request, tiny_sweep
from penstock.service.tables import idempotency

KEPT = Kept(201, {"location": "/x"}, b"\x00\xff")


@pytest.fixture
def database(engine_url: str) -> Any:
    opened = Database(engine_url)
    opened.create()
    yield opened
    opened.close()


def test_an_answer_is_given_again_for_a_day(database: Database):
    keys = Idempotency(database, lost_s=60)
    assert keys.begin("a", "k", "one") is None
    keys.keep("a", "k", KEPT)
    assert keys.begin("a", "k", "one") == KEPT
    assert keys.begin("b", "k", "two") is None, "another tenant's key is another key"
    with pytest.raises(WrongKey, match="'k' came with another request"):
        keys.begin("a", "k", "two")
    with database.write() as connection:
        connection.execute(idempotency.update().values(created_ms=idempotency.c.created_ms - KEPT_MS - 1000))
    assert keys.begin("a", "k", "two") is None


def test_a_request_under_way_is_not_done_twice(database: Database):
    keys = Idempotency(database, lost_s=60)
    assert keys.begin("a", "k", "one") is None
    with pytest.raises(KeyInUse):
        keys.begin("a", "k", "one")
    keys.forget("a", "k")
    assert keys.begin("a", "k", "one") is None


def test_a_request_that_was_lost_with_its_process_is_done_again(database: Database):
    keys = Idempotency(database, lost_s=60)
    assert keys.begin("a", "k", "one") is None
    with database.write() as connection:
        connection.execute(idempotency.update().values(created_ms=idempotency.c.created_ms - 61_000))
    assert keys.begin("a", "k", "one") is None
    with database.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(idempotency)) == 1


def test_over_http(tmp_path: Path):
    asyncio.run(_over_http(tmp_path))


async def _over_http(directory: Path) -> None:
    async with in_process(directory) as client:

        async def post(path: str, body: Any, key: str) -> httpx.Response:
            return await client.post(path, json=body, headers={"Idempotency-Key": key})

        for path, body in (
            ("/v1/plans", tiny_request()),
            ("/v1/sweeps", tiny_sweep()),
            ("/v1/profiles", tiny_profile()),
        ):
            first, second = await post(path, body, path), await post(path, body, path)
            assert first.is_success
            assert "idempotency-replayed" not in first.headers
            assert second.headers["idempotency-replayed"] == "true"
            assert (second.status_code, second.content) == (first.status_code, first.content)
            assert second.headers["location"] == first.headers["location"]
            other = await post(path, body | {"seed": 7}, path)
            assert (other.status_code, other.json()["code"]) == (422, "wrong-idempotency-key")
        assert len((await client.get("/v1/sweeps")).json()["items"]) == 1

        refused = await post("/v1/runs", {"plan": tiny_plan_file(), "model": "gpt"}, "run")
        again = await post("/v1/runs", {"plan": tiny_plan_file(), "model": "gpt"}, "run")
        assert (refused.status_code, again.status_code) == (409, 409)
        assert "idempotency-replayed" not in again.headers, "a refusal is not kept"

        at_once = await asyncio.gather(*(post("/v1/sweeps", tiny_sweep(), "once") for _ in range(5)))
        assert {answer.status_code for answer in at_once} <= {201, 409}
        assert len((await client.get("/v1/sweeps")).json()["items"]) == 2

        for key in ("", "with blank", "x" * 256):
            assert (await post("/v1/plans", tiny_request(), key)).json()["code"] == "wrong-idempotency-key"
