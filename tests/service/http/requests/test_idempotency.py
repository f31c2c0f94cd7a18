"""Requests that are sent twice with one ``Idempotency-Key`` are done once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from in_process import in_process
from killed_between import BEFORE_COMMIT, REQUESTS, created_ids, doubled, post_and_die, service, without_processes

from penstock.examples.tiny import tiny_plan_file, tiny_profile, tiny_request, tiny_sweep
from penstock.schemas.errors import Conflict
from penstock.service.db.database import Database
from penstock.service.db.tables import idempotency
from penstock.service.idempotency import KEPT_MS, Creation, Doing, Idempotency, Kept, KeyInUse, WrongKey

KEPT = Kept(201, {"location": "/x"}, b"\x00\xff")


@pytest.fixture
def database(engine_url: str) -> Any:
    opened = Database(engine_url)
    opened.create()
    yield opened
    opened.close()


def begun(keys: Idempotency, tenant: str, request: str) -> Doing:
    """Begin a request with key ``k``, which the caller has to handle."""
    doing = keys.begin(tenant, "k", request)
    assert isinstance(doing, Doing)
    return doing


def age(database: Database, ms: int) -> None:
    """Make all rows older."""
    with database.write() as connection:
        connection.execute(idempotency.update().values(created_ms=idempotency.c.created_ms - ms))


def test_an_answer_is_given_again_for_a_day(database: Database):
    keys = Idempotency(database, lease_s=60)
    keys.keep(begun(keys, "a", "one"), KEPT)
    assert keys.begin("a", "k", "one") == KEPT
    begun(keys, "b", "two")  # another tenant's key is another key
    with pytest.raises(WrongKey, match="'k' was used for another request"):
        keys.begin("a", "k", "two")
    age(database, KEPT_MS + 1000)
    begun(keys, "a", "two")


def test_an_answer_of_a_clock_that_was_ahead_is_kept_for_a_day_too(database: Database):
    keys = Idempotency(database, lease_s=60)
    keys.keep(begun(keys, "a", "one"), KEPT)
    age(database, -3_600_000)
    assert keys.begin("a", "k", "one") == KEPT
    age(database, KEPT_MS + 1000)
    begun(keys, "a", "two")


def test_a_request_under_way_is_not_done_twice(database: Database):
    keys = Idempotency(database, lease_s=60)
    doing = begun(keys, "a", "one")
    with pytest.raises(KeyInUse):
        keys.begin("a", "k", "one")
    keys.forget(doing)
    begun(keys, "a", "one")


def test_a_request_that_was_lost_with_its_process_is_done_again(database: Database):
    keys = Idempotency(database, lease_s=60)
    lost = begun(keys, "a", "one")
    age(database, 59_000)
    assert keys.renew(lost)
    age(database, 59_000)
    with pytest.raises(KeyInUse):
        keys.begin("a", "k", "one")
    age(database, 2_000)
    again = begun(keys, "a", "one")
    with database.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(idempotency)) == 1
    assert not keys.renew(lost)
    keys.forget(lost)
    keys.keep(lost, KEPT)
    with pytest.raises(Conflict, match="another process took it over"), database.write() as connection:
        lost.note(connection, "made too late")
    assert keys.renew(again), "who was taken for lost changes nothing any more"


def test_what_was_made_is_answered_with_and_never_made_again(database: Database):
    keys = Idempotency(database, lease_s=60)
    doing = begun(keys, "a", "one")
    with database.write() as connection, connection.begin_nested() as attempt:
        doing.note(connection, "not made after all")
        attempt.rollback()
    assert keys.renew(doing)
    with database.write() as connection:
        doing.note(connection, "made")
    assert not keys.renew(doing), "what was made needs no lease"
    age(database, 3_600_000)
    keys.forget(doing)
    created = keys.begin("a", "k", "one")
    assert isinstance(created, Creation)
    assert created.id == "made"
    keys.keep(created.doing, KEPT)
    keys.keep(doing, Kept(500, {}, b"too late"))
    assert keys.begin("a", "k", "one") == KEPT


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


@pytest.fixture
def no_processes() -> Any:
    """No service of a test starts a forkserver: it is asked for nothing that needs one, and forked."""
    again = without_processes()
    yield
    again()


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("path", REQUESTS)
def test_nothing_is_done_twice_when_the_service_is_killed_between_commit_and_answer(
    tmp_path: Path, engine_url: str, path: str
):
    assert doubled(tmp_path, engine_url, path, 2) == (0, 0)


@pytest.mark.cases(1)
@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("path", REQUESTS)
def test_what_was_killed_before_it_made_anything_is_done_within_a_lease(tmp_path: Path, path: str):
    url = f"sqlite:///{tmp_path / 'killed.sqlite'}"
    post_and_die(tmp_path, url, path, "k", BEFORE_COMMIT, lease_s=1)
    assert created_ids(url, path) == []

    async def again() -> tuple[list[int], str]:
        statuses = []
        async with service(tmp_path, url, lease_s=1) as client:
            while True:
                answer = await client.post(path, json=REQUESTS[path][0], headers={"Idempotency-Key": "k"})
                statuses.append(answer.status_code)
                if answer.is_success:
                    return statuses, answer.json()["id"]
                assert answer.json()["code"] == "idempotency-key-in-use"
                await asyncio.sleep(0.05)

    _, made_id = asyncio.run(again())
    assert created_ids(url, path) == [made_id]
