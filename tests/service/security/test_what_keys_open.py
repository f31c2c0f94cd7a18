"""A service with keys: what ends with a key, and what a key does not open costs nothing; who hangs up is no error."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from in_process import in_process
from service_process import Server

from penstock.examples.tiny import tiny_import, tiny_request
from penstock.schemas.errors import InvalidDocument
from penstock.service.db.database import Database
from penstock.service.db.tables import idempotency
from penstock.service.http.app import create_app
from penstock.service.http.requests.access import every_route, scope_of
from penstock.service.http.routes.agents import SYNC_EXAMPLE
from penstock.service.security.keys import Keys
from penstock.service.security.principals import OPENS
from penstock.service.settings import Settings

LIMIT_S = 60.0


class House:
    """A service with keys, and a job that waits for ever."""

    def __init__(self, directory: Path) -> None:
        self.database = Database(f"sqlite:///{directory / 'house.sqlite'}")
        self.database.create()
        self.keys = Keys(self.database)
        self.server = Server(directory / "house.sqlite", security="keys", slots=0)
        with self.http(self.key("solve")) as http:
            self.job = http.post("/v1/plans", json=tiny_request()).json()["id"]

    def key(self, *scopes: str, **more: Any) -> str:
        return self.keys.create("blue", "test", scopes, **more)[1]

    def http(self, key: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.server.url, headers={"Authorization": f"Bearer {key}"}, timeout=httpx.Timeout(LIMIT_S)
        )


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    yield house
    house.database.close()
    assert house.server.stop() == 0
    assert "Traceback" not in house.server.text, house.server.text


@pytest.mark.tier("nightly")
def test_keys_that_nobody_is_asked_for_are_said_aloud_at_the_start(tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path / 'open.sqlite'}")
    database.create()
    for keys, expected in ((0, False), (1, True)):
        for number in range(keys):
            Keys(database).create("blue", f"test {number}", ["read"])
        for security in ("off", "keys"):
            server = Server(tmp_path / "open.sqlite", slots=0, security=security)
            assert server.stop() == 0
            warned = "security is off: 1 key of this database is not asked for" in server.text
            assert warned is (expected and security == "off"), server.text
    database.close()


class Stream:
    """The events of a job as they are read in a thread."""

    def __init__(self, house: House, key: str) -> None:
        self.begun, self.text = threading.Event(), ""
        self._house, self._key = house, key
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        assert self.begun.wait(LIMIT_S)

    def _read(self) -> None:
        with (
            self._house.http(self._key) as http,
            http.stream("GET", f"/v1/jobs/{self._house.job}/events") as answer,
        ):
            for line in answer.iter_lines():
                self.text += line + "\n"
                self.begun.set()


def test_a_key_that_ends_ends_its_streams_and_no_others(house: House):
    revoked, brief, lasting = house.key("read"), house.key("read", lifetime_s=3), house.key("read")
    streams = [Stream(house, key) for key in (revoked, revoked, brief, lasting)]
    house.keys.revoke(revoked.split("_")[1])
    for stream in streams[:3]:
        stream.thread.join(LIMIT_S)
        assert not stream.thread.is_alive()
        assert stream.text.rstrip().endswith(": the key that opened this stream has ended")
    assert streams[3].thread.is_alive()
    with house.http(revoked) as http:
        assert http.get(f"/v1/jobs/{house.job}/events").status_code == 401
    house.keys.revoke(lasting.split("_")[1])
    streams[3].thread.join(LIMIT_S)
    assert not streams[3].thread.is_alive()


def test_a_key_that_ends_ends_its_held_requests(house: House) -> None:
    """A wait, a poll, a sync and a body that is not sent to its end: all are answered 401 although nothing came."""
    requests: dict[str, tuple[str, str, dict[str, Any]]] = {
        "wait": ("GET", f"/v1/jobs/{house.job}", {"headers": {"Prefer": "wait=60"}}),
        "poll": ("GET", f"/v1/jobs/{house.job}/events?poll=1&after=9", {"headers": {"Prefer": "wait=60"}}),
        "sync": ("POST", "/v1/agents/held:sync", {"json": SYNC_EXAMPLE | {"hold": True}}),
    }
    key = house.key("admin")
    answers: dict[str, httpx.Response] = {}

    def ask(name: str) -> None:
        method, path, more = requests[name]
        with house.http(key) as http:
            while name not in answers or answers[name].status_code == 200:  # a first sync has news
                answers[name] = http.request(method, path, **more)
                if name == "sync" and answers[name].status_code == 200:
                    more["json"]["state_version"] = answers[name].json()["state_version"]
                    synced.set()

    synced = threading.Event()
    threads = [threading.Thread(target=ask, args=(name,)) for name in requests]
    for thread in threads:
        thread.start()
    assert synced.wait(LIMIT_S)
    with house.http(house.key("admin")) as http:  # all three are held
        while "penstock_http_requests_active 4.0" not in http.get("/metrics").text:
            pass
    house.keys.revoke(key.split("_")[1])
    for thread in threads:
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()
    assert {name: answer.status_code for name, answer in answers.items()} == dict.fromkeys(requests, 401)
    assert all("has ended" in answer.json()["detail"] for answer in answers.values())


def test_a_key_of_a_node_syncs_that_agent_only(house: House) -> None:
    key = house.key("agent", node="node1")
    body = SYNC_EXAMPLE | {"hold": False}
    with house.http(key) as http:
        assert http.post("/v1/agents/node1:sync", json=body).status_code == 200
        refused = http.post("/v1/agents/node2:sync", json=body)
    assert (refused.status_code, "is for the agent 'node1', not for 'node2'" in refused.text) == (403, True)
    rotated, _text = house.keys.rotate(key.split("_")[1], 0)
    assert rotated.node == "node1"
    for scopes, node in ((("agent", "read"), "node1"), (("agent",), "no name")):
        with pytest.raises(InvalidDocument, match="needs a valid node name, and scope 'agent' alone"):
            house.key(*scopes, node=node)


@pytest.mark.parametrize("name", ["..", "a b", "%3Cb%3E", "%C3%A9", "-a", "a" * 101])
def test_an_agent_has_a_name_that_agents_may_have(house: House, name: str) -> None:
    with house.http(house.key("agent")) as http:
        assert http.post(f"/v1/agents/{name}:sync", json=SYNC_EXAMPLE).status_code == 422


def test_a_request_with_two_lengths_is_refused_and_closed(house: House) -> None:
    host, port = house.server.url.removeprefix("http://").split(":")
    head = f"POST /v1/plans HTTP/1.1\r\nHost: {host}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), LIMIT_S) as connection:
        connection.sendall(f"{head}0\r\n\r\nGET /version HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1, "nothing that follows is taken for a request"


def test_who_hangs_up_within_a_body_is_no_error(house: House):
    key = house.key("solve")
    host, port = house.server.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/plans HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
    )
    before = len(house.server.log)
    for more in ("", "Idempotency-Key: k\r\n"):
        with socket.create_connection((host, int(port))) as line:
            line.sendall(f"{head}{more}Content-Length: 1000\r\n\r\n{{".encode())
    until = time.monotonic() + LIMIT_S
    while sum(" 499" in line for line in house.server.log[before:]) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    lines = [line for line in house.server.log[before:] if "/v1/plans" in line]
    assert len([line for line in lines if " 499" in line]) == 2, lines
    assert not [line for line in house.server.log[before:] if "ERROR" in line.upper() or "Traceback" in line]
    with house.database.read() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(idempotency)) == 0


def routes(directory: Path) -> list[tuple[str, str, str | None]]:
    """Return method, path and scope of every route."""
    settings = {"database": str(directory / "in-process.sqlite"), "slots": 0, "warm_up": False}
    rows = []
    for route in every_route(create_app(Settings.load(**settings)).routes):
        path = route.path.replace("{verb}", "cancel").replace(":job}", "}")
        rows += [(method, path, scope_of(route)) for method in sorted(route.methods or ())]
    return rows


@pytest.mark.parametrize("scope", ["agent", "read"])
def test_a_key_is_refused_before_its_body_is_read_or_a_row_is_written(tmp_path: Path, scope: str):
    """Every route that the table of scopes does not name for it, with a body that is never asked for."""
    asyncio.run(_refused(tmp_path, scope))


async def _refused(directory: Path, scope: str) -> None:
    read: list[str] = []

    async def body(path: str) -> AsyncIterator[bytes]:
        read.append(path)
        yield b"{}"

    refused, opened = [], []
    async with in_process(directory, security="keys") as client:
        database = Database(f"sqlite:///{directory / 'in-process.sqlite'}")
        headers = {"Authorization": f"Bearer {Keys(database).create('blue', 'n', [scope])[1]}"}
        for number, (method, path, needed) in enumerate(routes(directory)):
            if needed is None or method == "HEAD":
                continue
            if needed in OPENS[scope]:
                opened.append((method, path))
                continue
            more = {"Idempotency-Key": f"k{number}", "Content-Encoding": "gzip", "Content-Type": "application/json"}
            answer = await client.request(method, path, content=body(path), headers=headers | more)
            assert answer.status_code == 403, (method, path, answer.status_code, answer.text)
            refused.append(path)
        with database.read() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(idempotency)) == 0
        database.close()
    assert read == []
    assert len(refused) > 20
    of_agents = {("POST", "/v1/agents/{id}:sync")}
    assert set(opened) == of_agents if scope == "agent" else {method for method, _ in opened} == {"GET"}


def test_an_import_with_a_key_is_done_once(tmp_path: Path):
    asyncio.run(_imported(tmp_path))


async def _imported(directory: Path) -> None:
    async with in_process(directory) as client:
        answers = [
            await client.post("/v1/topologies:import", json=tiny_import(), headers={"Idempotency-Key": "k"})
            for _ in range(2)
        ]
        assert answers[0].status_code == 200, answers[0].text
        assert answers[0].content == answers[1].content
        assert answers[1].headers["idempotency-replayed"] == "true"
        assert json.loads(answers[1].content)["topology"]


def test_a_wrong_key_is_refused_where_none_is_asked_for(tmp_path: Path) -> None:
    """It is for another service; what others send, such as a proxy, is none of ours."""

    async def ask() -> None:
        async with in_process(tmp_path) as http:
            database = Database(f"sqlite:///{tmp_path / 'in-process.sqlite'}")
            _key, right = Keys(database).create("blue", "test", ("read",))
            database.close()
            for header in ("", f"Bearer {right}", "Bearer of-a-proxy", "Basic dTpw"):
                answer = await http.get("/v1/jobs", headers={"Authorization": header} if header else {})
                assert answer.status_code == 200, header
            for wrong in (right[:-1] + ("0" if right[-1] != "0" else "1"), "psk_short"):
                answer = await http.get("/v1/jobs", headers={"Authorization": f"Bearer {wrong}"})
                assert answer.status_code == 401
                assert "its security is off" in answer.json()["detail"]
                assert "unset PENSTOCK_API_KEY" in answer.json()["remedy"]
                assert wrong not in answer.text

    asyncio.run(ask())
