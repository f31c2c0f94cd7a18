"""Compressed bodies mean the same as plain ones, within the same limits; other media types are refused."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process import in_process

from penstock.examples.tiny import tiny_profile
from penstock.service.http.requests import media
from penstock.service.http.requests.media import STEP_BYTES
from penstock.service.security.held_bytes import FREE_BYTES, HeldBytes, TooMuchHeld

LIMIT_BYTES = 50_000
JSON = {"Content-Type": "application/json"}

Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ask one service that takes bodies up to ``LIMIT_BYTES``."""
    with asyncio.Runner() as runner:
        opened = in_process(tmp_path_factory.mktemp("bodies"), max_body_bytes=LIMIT_BYTES)
        client = runner.run(opened.__aenter__())

        def ask(method: str, path: str, **options: Any) -> httpx.Response:
            return runner.run(_awaited(client.request, method, path, **options))

        yield ask
        runner.run(opened.__aexit__(None, None, None))


async def _awaited(call: Callable[..., Awaitable[httpx.Response]], *args: Any, **options: Any) -> httpx.Response:
    return await call(*args, **options)


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_body_is_the_same_body(ask: Ask, coding: str, pack: Callable[[bytes], bytes]):
    body = pack(json.dumps(tiny_profile()).encode())
    plain = ask("POST", "/v1/profiles", json=tiny_profile())
    packed = ask("POST", "/v1/profiles", content=body, headers=JSON | {"Content-Encoding": coding})
    assert packed.status_code == 201
    assert packed.json() == plain.json()


def _gigabyte() -> bytes:
    """Return a gigabyte of zeros as one gzip stream, without compressing more than two megabytes of it."""
    packer = zlib.compressobj(9, wbits=31)
    first, repeated = (packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    return first + repeated * 1000 + packer.flush()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        pytest.param(gzip.compress(b" " * (LIMIT_BYTES + 1)), 413, "more than 48.8 KiB (50,000 bytes)", id="bomb"),
        pytest.param(_gigabyte(), 413, "more than 48.8 KiB (50,000 bytes)", id="large bomb"),
        pytest.param(gzip.compress(b"{}")[:-4], 422, "cut off", id="cut off"),
        pytest.param(gzip.compress(b"{}") + b"more", 422, "after its end", id="more after the end"),
        pytest.param(gzip.compress(b"{}") + gzip.compress(b"{}"), 422, "after its end", id="two in one"),
        pytest.param(b"{}", 422, "does not match its Content-Encoding", id="not compressed"),
    ],
)
def test_compressed_bodies_that_are_refused(ask: Ask, body: bytes, status: int, words: str):
    answer = ask("POST", "/v1/profiles", content=body, headers=JSON | {"Content-Encoding": "gzip"})
    assert answer.status_code == status
    assert words in answer.json()["detail"]


def test_a_compressed_body_of_just_the_limit_is_read(ask: Ask):
    body = json.dumps(tiny_profile()).encode().ljust(LIMIT_BYTES)
    headers = JSON | {"Content-Encoding": "gzip"}
    assert ask("POST", "/v1/profiles", content=gzip.compress(body), headers=headers).status_code == 201
    assert ask("POST", "/v1/profiles", content=gzip.compress(body + b" "), headers=headers).status_code == 413


def test_an_unknown_encoding_is_refused_with_the_known_ones(ask: Ask):
    answer = ask("POST", "/v1/profiles", content=b"", headers=JSON | {"Content-Encoding": "br"})
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")


def test_what_the_client_has_already_is_not_sent_again(ask: Ask):
    stored = ask("POST", "/v1/profiles", json=tiny_profile()).json()["href"]
    tag = ask("GET", stored).headers["etag"]
    unchanged = ask("GET", stored, headers={"If-None-Match": f'"other", W/{tag}'})
    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", tag)


@pytest.mark.parametrize("kind", ["application/msgpack", "text/csv", ""])
def test_other_media_types_are_refused_with_the_one_that_is_read(ask: Ask, kind: str):
    answer = ask("POST", "/v1/profiles", content=b"{}", headers={"Content-Type": kind})
    assert (answer.status_code, answer.headers["accept"]) == (415, "application/json")
    assert repr(kind) in answer.json()["detail"]


def test_long_answers_are_compressed_and_short_ones_are_not(ask: Ask):
    long, short = ask("GET", "/v1/planners"), ask("GET", "/version")
    assert long.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in short.headers
    assert "content-encoding" not in ask("GET", "/v1/planners", headers={"Accept-Encoding": "identity"}).headers


def test_a_body_that_unpacks_to_far_more_than_itself_is_refused(tmp_path: Path) -> None:
    body = gzip.compress(b"[" + b"0," * 2**22 + b"0]")

    async def run() -> None:
        async with in_process(tmp_path) as client:
            refused = await client.post("/v1/profiles", content=body, headers=JSON | {"Content-Encoding": "gzip"})
            assert (refused.status_code, refused.json()["code"]) == (413, "too-large")
            assert "unpacks to more than 200 times its" in refused.json()["detail"]

    asyncio.run(run())


def test_a_body_that_would_unpack_to_a_gigabyte_is_refused_before_much_of_it_is_made(tmp_path: Path) -> None:
    body = _gigabyte()

    async def run() -> None:
        async with in_process(tmp_path, max_held_body_bytes=2**22) as client:
            await client.post("/v1/profiles", json=tiny_profile())
            tracemalloc.start()
            before = tracemalloc.get_traced_memory()[0]
            refused = await client.post("/v1/profiles", content=body, headers=JSON | {"Content-Encoding": "gzip"})
            peak = tracemalloc.get_traced_memory()[1] - before
            tracemalloc.stop()
            assert (refused.status_code, refused.json()["code"]) == (503, "too-many-bytes")
            assert peak < 2**23

    asyncio.run(run())


def test_what_a_step_leaves_comes_with_the_next_one() -> None:
    """Also where the end of the stream comes in a separate piece, and the last step has just the step's size."""
    text = bytes(2 * STEP_BYTES)
    body = gzip.compress(text)
    unpacker = media.unpacker("gzip")
    assert unpacker is not None
    steps = []
    for piece in (body[:20], body[20:-3], body[-3:]):
        steps.append(unpacker.take(piece))
        while unpacker.has_more:
            steps.append(unpacker.take(b""))
    unpacker.close()
    assert b"".join(steps) == text
    assert max(map(len, steps)) == STEP_BYTES


def test_bodies_under_way_hold_no_more_together_than_they_may(tmp_path: Path) -> None:
    """A tenant's first large body is held; the second one is to come again, a small one is not in its way."""
    large = json.dumps({"x": "y" * (FREE_BYTES + 600)}).encode()
    begun, rest = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield large[:-1]
        begun.set()
        await rest.wait()
        yield large[-1:]

    async def run() -> None:
        async with in_process(tmp_path, max_held_body_bytes=2048) as client:
            first = asyncio.create_task(client.post("/v1/profiles", content=slowly(), headers=JSON))
            await begun.wait()
            second = await client.post("/v1/profiles", content=large, headers=JSON)
            small = await client.post("/v1/profiles", json=tiny_profile())
            rest.set()
            assert (second.status_code, second.json()["code"]) == (503, "too-many-bytes")
            assert second.headers["Retry-After"] == "5"
            assert small.status_code == 201
            assert (await first).status_code == 422
            third = await client.post("/v1/profiles", content=large, headers=JSON)
            assert third.status_code == 422, "what the first one held is free again"

    asyncio.run(run())


def test_a_tenant_holds_half_at_most() -> None:
    counter = HeldBytes(1000)
    assert [counter.grow("a", 0, FREE_BYTES), counter.grow("a", FREE_BYTES, FREE_BYTES + 500)] == [0, 500]
    with pytest.raises(TooMuchHeld):
        counter.grow("a", 0, FREE_BYTES + 1)
    assert counter.grow("b", 0, FREE_BYTES + 500) == 500
    with pytest.raises(TooMuchHeld):
        counter.grow("c", 0, FREE_BYTES + 1)
    counter.release("a", 500)
    assert counter.grow("c", 0, FREE_BYTES + 1) == 1
