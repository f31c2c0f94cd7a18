"""Bodies in other forms: MessagePack and compression mean the same as plain JSON, within the same limits."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import in_process

from penstock.schemas.errors import InvalidDocument
from penstock.service.http import media
from penstock.service.http.samples import tiny_profile, tiny_request

LIMIT_BYTES = 50_000
JSON = {"Content-Type": "application/json"}
MSGPACK = {"Content-Type": "application/msgpack"}

Ask = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Ask one service that takes bodies up to ``LIMIT_BYTES``."""
    with asyncio.Runner() as runner:
        opened = in_process(tmp_path_factory.mktemp("bodies"), max_body_bytes=LIMIT_BYTES)
        client = runner.run(opened.__aenter__())

        def ask(method: str, path: str, **given: Any) -> httpx.Response:
            return runner.run(_awaited(client.request, method, path, **given))

        yield ask
        runner.run(opened.__aexit__(None, None, None))


async def _awaited(call: Callable[..., Awaitable[httpx.Response]], *args: Any, **given: Any) -> httpx.Response:
    return await call(*args, **given)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200)
@given(VALUES)
def test_messagepack_is_the_json_that_it_stands_for(value: Any):
    assert json.loads(media.json_of_msgpack(msgpack.packb(value))) == json.loads(json.dumps(value))
    assert msgpack.unpackb(media.msgpack_of_json(json.dumps(value).encode())) == json.loads(json.dumps(value))


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xc1", id="unused byte"),
        pytest.param(msgpack.packb({"a": 1})[:-1], id="cut off"),
        pytest.param(msgpack.packb({"a": 1}) + b"\x00", id="more after the end"),
        pytest.param(msgpack.packb({"a": b"bytes"}), id="bytes"),
        pytest.param(msgpack.packb({"a": float("nan")}), id="NaN"),
        pytest.param(msgpack.packb({1: 1}), id="a number as key"),
        pytest.param(b"\x82\xa1a\x01\xa1a\x02", id="a key twice"),
        pytest.param(msgpack.packb(msgpack.ExtType(5, b"x")), id="extension"),
        pytest.param(msgpack.packb(msgpack.Timestamp(1)), id="time"),
        pytest.param(b"\xdd\xff\xff\xff\xff", id="four thousand million items"),
        pytest.param(b"\x91" * 100_000 + b"\xc0", id="deep"),
    ],
)
def test_messagepack_that_is_no_document(packed: bytes):
    with pytest.raises(InvalidDocument, match="MessagePack"):
        media.json_of_msgpack(packed)


def test_a_request_in_messagepack_is_the_same_request(ask: Ask):
    plain = ask("POST", "/v1/plans:validate", json=tiny_request())
    packed = ask("POST", "/v1/plans:validate", content=msgpack.packb(tiny_request()), headers=MSGPACK)
    assert (plain.status_code, packed.status_code) == (200, 200)
    assert plain.json() == packed.json()


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
def test_a_compressed_body_is_the_same_body(ask: Ask, coding: str, pack: Callable[[bytes], bytes]):
    body = pack(json.dumps(tiny_profile()).encode())
    plain = ask("POST", "/v1/profiles", json=tiny_profile())
    packed = ask("POST", "/v1/profiles", content=body, headers=JSON | {"Content-Encoding": coding})
    assert packed.status_code == 201
    assert packed.json() == plain.json()


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        pytest.param(gzip.compress(b" " * (LIMIT_BYTES + 1)), 413, "more than 48.8 KiB (50,000 bytes)", id="bomb"),
        pytest.param(gzip.compress(b" " * 10**9, 9), 413, "more than 48.8 KiB (50,000 bytes)", id="large bomb"),
        pytest.param(gzip.compress(b"{}")[:-4], 422, "cut off", id="cut off"),
        pytest.param(gzip.compress(b"{}") + b"more", 422, "after its end", id="more after the end"),
        pytest.param(gzip.compress(b"{}") + gzip.compress(b"{}"), 422, "after its end", id="two in one"),
        pytest.param(b"{}", 422, "not what its Content-Encoding says", id="not compressed"),
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


def test_answers_in_the_form_that_is_asked_for(ask: Ask):
    stored = ask("POST", "/v1/profiles", json=tiny_profile()).json()["href"]
    plain = ask("GET", stored)
    packed = ask("GET", stored, headers={"Accept": "application/msgpack, application/json;q=0.5"})
    assert packed.headers["content-type"] == "application/msgpack"
    assert "Accept" in packed.headers["vary"]
    assert msgpack.unpackb(packed.content) == plain.json()
    assert packed.headers["etag"] != plain.headers["etag"]
    for answer in (plain, packed):
        again = {"If-None-Match": f'"other", W/{answer.headers["etag"]}', "Accept": answer.headers["content-type"]}
        unchanged = ask("GET", stored, headers=again)
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert unchanged.headers["etag"] == answer.headers["etag"]


def test_long_answers_are_compressed_and_short_ones_are_not(ask: Ask):
    long, short = ask("GET", "/v1/planners"), ask("GET", "/version")
    assert long.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in short.headers
    assert "content-encoding" not in ask("GET", "/v1/planners", headers={"Accept-Encoding": "identity"}).headers


@pytest.mark.parametrize(
    ("method", "accept", "status"),
    [
        ("GET", "text/csv", 406),
        ("GET", "application/json;q=0", 406),
        ("GET", "text/html, application/*;q=0.1", 200),
        ("GET", "nonsense", 406),
        ("GET", "", 200),
        ("POST", "text/csv", 406),
        ("POST", "application/msgpack", 200),
    ],
)
def test_a_form_that_is_not_there_is_refused(ask: Ask, method: str, accept: str, status: int):
    path = "/v1/planners" if method == "GET" else "/v1/plans:validate"
    answer = ask(method, path, headers={"Accept": accept}, json=None if method == "GET" else tiny_request())
    assert answer.status_code == status
    if status == 406:
        assert answer.headers["content-type"] == "application/problem+json"
        assert repr(accept) in answer.json()["detail"]
