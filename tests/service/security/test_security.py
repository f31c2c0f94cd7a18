"""A service with keys: who is let in, what a key opens, how much it may ask for, and whose things are whose."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from played_agent import Agent
from service_process import Server

from penstock.client import Client
from penstock.examples.tiny import tiny_layout, tiny_plan_file, tiny_profile, tiny_request, tiny_topology
from penstock.schemas.errors import Forbidden, InvalidDocument, Unauthenticated
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology
from penstock.service.db.database import Database
from penstock.service.http.app import create_app
from penstock.service.http.requests.access import every_route, scope_of
from penstock.service.security.keys import Keys
from penstock.service.settings import Settings

RATE_PER_S = 60
MOST_OPEN = 3
KEYLESS = {
    "/healthz", "/readyz", "/version", "/openapi.json", "/favicon.ico", "/static/{edition}/{name}", "/docs", "/sign-in",
    "/sign-out",
}  # fmt: skip


class House:
    """A service with keys, and the keys of its tenants."""

    def __init__(self, directory: Path, requests_per_s: float = RATE_PER_S) -> None:
        self.database = Database(f"sqlite:///{directory / 'house.sqlite'}")
        self.database.create()
        self.keys = Keys(self.database)
        self.server = Server(
            directory / "house.sqlite",
            security="keys",
            slots=0,
            requests_per_s=requests_per_s,
            max_open_requests=MOST_OPEN,
            max_body_bytes=200_000,
            max_devices=8,
            max_layers=10,
            max_solve_s=100,
            agent_hold_s=1,
            agent_timeout_s=600,
        )
        self.url = self.server.url
        self.opened: list[httpx.Client] = []
        self.secrets: list[str] = []

    def key(self, tenant: str, *scopes: str, **more: Any) -> str:
        """Create a key."""
        text = self.keys.create(tenant, "test", scopes, **more)[1]
        self.secrets.append(text.split("_")[2])
        return text

    def http(self, key: str | None = None, **headers: str) -> httpx.Client:
        """Open a connection that shows a key, or no key."""
        shown = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.opened.append(httpx.Client(base_url=self.url, headers=shown | headers, timeout=60))
        return self.opened[-1]

    def connected(self) -> socket.socket:
        """Open a bare connection that buffers little."""
        host, port = self.url.removeprefix("http://").split(":")
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.settimeout(60)
        line.connect((host, int(port)))
        return line

    def close(self) -> None:
        for one in self.opened:
            one.close()
        self.database.close()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("house"))
    yield house
    house.close()
    assert house.server.stop() == 0
    text = house.server.text
    assert "Traceback" not in text, text[text.find("Traceback") - 500 :][:5000]
    assert not [secret for secret in house.secrets if secret in text], "a key was logged"


def refused(http: httpx.Client, headers: dict[str, str] | None = None) -> httpx.Response:
    """Return the answer to a wrong key; an address may show ten at once, later on two a second."""
    while (answer := http.get("/v1/jobs", headers=headers or {})).status_code == 429:
        time.sleep(int(answer.headers["Retry-After"]))
    return answer


# ---- who is let in ---------------------------------------------------------------------------------------------------


def test_each_kind_of_wrong_key_has_its_own_words(house: House):
    good = house.key("blue", "read")
    expired = house.key("blue", "read", lifetime_s=0)
    revoked = house.key("blue", "read")
    house.keys.revoke(revoked.split("_")[1])
    wrong = good[:-4] + ("0000" if good[-4:] != "0000" else "1111")
    cases = [
        (None, "requires a key, and none was sent"),
        ("Basic dXNlcjpwYXNz", "not of the form `Bearer psk_…`"),
        ("Bearer", "not have the form psk_<id>_<secret>"),
        ("Bearer hunter2", "not have the form psk_<id>_<secret>"),
        (f"Bearer {wrong}", "with this secret"),
        (f"Bearer psk_{'0' * 12}_{'0' * 64}", "with this secret"),
        (f"Bearer {expired}", "has expired"),
        (f"Bearer {revoked}", "was revoked"),
    ]
    http = house.http()
    for header, words in cases:
        answer = refused(http, {} if header is None else {"Authorization": header})
        problem = answer.json()
        assert (answer.status_code, problem["code"]) == (401, "unauthenticated"), header
        assert words in problem["detail"]
        assert problem["remedy"]
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
        assert ("invalid_token" in answer.headers["WWW-Authenticate"]) == (header is not None)
        for key in (good, wrong, expired, revoked):
            assert key.split("_")[2] not in answer.text
    assert http.get("/v1/jobs", headers={"Authorization": f"bearer  {good}"}).status_code == 200


def test_a_key_opens_its_scopes(house: House):
    keys = {scope: house.http(house.key("blue", scope)) for scope in ("read", "solve", "run", "agent", "admin")}
    sync = {"incarnation": "i", "state_version": 0, "devices": [], "models": [], "address": "a", "hold": False}
    scopes_of_route = {
        ("GET", "/v1/jobs"): ({"read", "solve", "run", "admin"}, None),
        ("POST", "/v1/plans:validate"): ({"solve", "admin"}, tiny_request()),
        ("POST", "/v1/runs"): ({"run", "admin"}, {"plan": tiny_plan_file(), "model": "gpt"}),
        ("POST", "/v1/agents/scoped:sync"): ({"agent", "admin"}, sync),
        ("GET", "/metrics"): ({"admin"}, None),
        ("GET", "/v1/planners"): ({"read", "solve", "run", "admin"}, None),
    }
    for (method, path), (opening, body) in scopes_of_route.items():
        for scope, http in keys.items():
            answer = http.request(method, path, json=body)
            if scope in opening:
                assert answer.status_code not in (401, 403), (scope, path, answer.text)
            else:
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), (scope, path)
                assert "which needs scope" in answer.json()["detail"]


def test_a_revoked_key_closes_within_seconds(house: House):
    key = house.key("blue", "read")
    http = house.http(key)
    assert http.get("/v1/jobs").status_code == 200
    house.keys.revoke(key.split("_")[1])
    while (answer := http.get("/v1/jobs")).status_code == 200:  # a key is looked up again after seconds
        time.sleep(0.3)
    assert "was revoked" in answer.json()["detail"]


def test_a_body_is_not_read_for_who_may_not_send_it(house: House):
    for key, status in ((None, 401), (house.key("blue", "read"), 403)):
        with house.connected() as line:
            shown = "" if key is None else f"Authorization: Bearer {key}\r\n"
            line.sendall(f"POST /v1/runs HTTP/1.1\r\nHost: a\r\n{shown}Content-Length: 9999\r\n\r\n".encode())
            assert line.recv(4096).startswith(f"HTTP/1.1 {status} ".encode()), "although no byte of the body was sent"


def test_the_client_shows_its_key_and_nobody_else(house: House, monkeypatch: pytest.MonkeyPatch):
    key = house.key("blue", "read")
    with Client(house.url, key=key) as client:
        assert client.jobs.page().items is not None
        with pytest.raises(Forbidden, match="needs scope 'run'"):
            client.runs.cancel("x")
    monkeypatch.setenv("PENSTOCK_API_KEY", key)
    with Client(house.url) as client:
        client.jobs.page()
    with Client(house.url, key="") as client, pytest.raises(Unauthenticated, match="none was sent") as refused:
        client.jobs.page()
    assert key not in str(refused.value)
    with Client(house.url, key=f"{key}\n") as client:
        client.jobs.page()
    for bad in (f"{key}\nX-Other: 1", f"{key}\x00", f"{key}é"):
        with pytest.raises(InvalidDocument, match="has invalid characters") as malformed:
            Client(house.url, key=bad)
        assert key.split("_")[2] not in str(malformed.value)


# ---- whose is what ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blue(house: House) -> dict[str, list[str]]:
    """All kinds of things that a tenant can have; ids by the name of the parameter that takes them."""
    http = house.http(house.key("blue", "admin"))
    agents = [Agent(house.url, name) for name in ("node0", "node1")]
    house.opened += [agent.http for agent in agents]
    for agent in agents:
        agent.http.headers["Authorization"] = f"Bearer {house.key('blue', 'agent')}"
        agent.sync()
    job = http.post("/v1/plans", json=tiny_request()).json()
    profile = http.post("/v1/profiles", json=tiny_profile()).json()["hash"]
    topology = http.post("/v1/topologies", json=tiny_topology()).json()["hash"]
    run = http.post("/v1/runs", json={"plan": tiny_plan_file(), "model": "gpt"})
    assert run.status_code == 201, run.text
    sweep = http.post("/v1/sweeps", json={"request": tiny_request(), "over": {"global_batch_sizes": [8, 16]}})
    assert sweep.status_code in (200, 201, 202), sweep.text
    return {
        "job": [job["id"], run.json()["plan_hash"]],
        "run": [run.json()["id"]],
        "sweep": [sweep.json()["id"]],
        "profile": [profile],
        "topology": [topology],
    }


def ids_for(path: str, blue: dict[str, list[str]]) -> list[str]:
    """Return the other tenant's ids that a path takes."""
    kinds = {"plans": "job", "jobs": "job", "runs": "run", "sweeps": "sweep", "profiles": "profile"}
    kinds["topologies"] = "topology"
    return blue[kinds[path.removeprefix("/v1").split("/")[1]]]


SHARED = {"/v1/planners", "/v1/examples", "/metrics", "/", "/plan", "/cluster", "/health", "/agents", "/compare"}
"""Routes for everybody, and pages with lists: these must not name anything of the other tenant."""

OWN_DOCUMENTS = {
    "/v1/profiles:calibrate",
    "/v1/profiles:calibrate-throughput",
    "/v1/profiles",
    "/v1/topologies",
    "/v1/topologies:import",
    "/v1/names:list",
}
"""Routes that take whole documents and no ids."""


def test_another_tenants_things_are_not_there(house: House, blue: dict[str, list[str]], tmp_path: Path):
    red = house.http(house.key("red", "admin"), Accept="*/*")
    others = [one for ids in blue.values() for one in ids]
    by_hash = tiny_request() | {"profile": blue["profile"][0], "topology": blue["topology"][0]}
    bodies: dict[str, Any] = {
        "/v1/plans": by_hash,
        "/v1/plans:validate": by_hash,
        "/v1/plans:compare": {"request": by_hash},
        **{f"/v1/plans:{name}": {"plan": blue["job"][1]} for name in ("verify", "simulate", "explain")},
        "/v1/sweeps": {"request": by_hash},
        "/v1/placements": {
            "topology": by_hash["topology"],
            "jobs": [{"name": "job", "profile": by_hash["profile"], "global_batch_size": 16}],
        },
        "/v1/runs": {"plan": blue["job"][1], "model": "gpt"},
        "/v1/layouts:import": tiny_layout() | {"request": by_hash},
        "/v1/fits": {"model": "gpt2-small", "topology": by_hash["topology"]},
    }
    checked = 0
    app = create_app(Settings(database=str(tmp_path / "routes.sqlite"), slots=0))
    for route in every_route(app.routes):
        if route.path in KEYLESS | OWN_DOCUMENTS and route.methods != {"GET"}:
            continue
        for method in route.methods or ():
            if route.path in KEYLESS or route.path in ("/v1/agents/{id}:sync", "/v1/schemas/{name}"):
                continue
            if "{" not in route.path:
                body = bodies.get(route.path)
                if method == "POST" and body is None:
                    assert not route.include_in_schema, f"say what {route.path} is sent in this test"
                    continue
                answer = red.request(method, route.path, json=body)
                listed = json.dumps(answer.json()) if "json" in answer.headers["content-type"] else answer.text
                assert not [one for one in others if one in listed and body is None], route.path
                if method == "POST":
                    assert answer.status_code == 404, (route.path, answer.text)
                elif route.path == "/v1/topologies/agents":
                    assert answer.status_code == 404
                elif route.path not in SHARED and route.path.startswith("/v1"):
                    page = answer.json()
                    assert (page if isinstance(page, list) else page["items"]) in ([], ()), route.path
                checked += 1
                continue
            for one in ids_for(route.path, blue):
                path = route.path.replace("{id}", one).replace("{hash}", one).replace("{rank}", "0")
                path = path.replace("{verb}", "cancel")
                answer = red.request(method, path, params={"to": "csv"} if path.endswith("export") else {})
                assert answer.status_code == 404, (method, path, answer.status_code, answer.text[:300])
                checked += 1
    assert checked > 40
    reply = red.post(
        "/v1/agents/node0:sync",
        json={"incarnation": "red", "state_version": 0, "devices": [], "models": [], "address": "a", "hold": False},
    )
    assert reply.status_code == 200, "names of agents are each tenant's own"
    assert reply.json()["assignments"] == []
    mine = house.http(house.key("blue", "read"))
    for kind, path in (("job", "jobs"), ("run", "runs"), ("sweep", "sweeps"), ("profile", "profiles")):
        assert mine.get(f"/v1/{path}/{blue[kind][0]}").status_code == 200, "and they are still there"


def test_every_route_says_what_a_key_must_open(house: House, tmp_path: Path):
    app = create_app(Settings(database=str(tmp_path / "routes.sqlite"), slots=0, security="keys"))
    nobody = house.http()
    open_to_all = {route.path for route in every_route(app.routes) if scope_of(route) is None}
    assert open_to_all <= KEYLESS
    for route in every_route(app.routes):
        if route.path in KEYLESS:
            continue
        path = route.path.replace("{verb}", "cancel")
        for method in route.methods or ():
            answer = nobody.request(method, path)
            assert answer.status_code in (401, 303), (method, path, answer.status_code)
    paths = app.openapi()["paths"]
    assert "`solve`" in paths["/v1/plans"]["post"]["description"]
    assert paths["/v1/plans"]["post"]["security"] == [{"key": []}]
    assert "security" not in paths["/healthz"]["get"]


def test_an_agent_syncs_under_its_own_tenant(house: House, blue: dict[str, list[str]]):
    for http in (house.http(), house.http(house.key("blue", "run"))):
        answer = http.post("/v1/agents/node0:sync", json={})
        assert answer.status_code in (401, 403)
    names = [agent["id"] for agent in house.http(house.key("blue", "read")).get("/v1/agents").json()]
    assert {"node0", "node1"} <= set(names)
    assert house.http(house.key("green", "read")).get("/v1/agents").json() == []


def long_profile() -> dict[str, Any]:
    """Return the tiny profile with eleven layers."""
    tiny = tiny_profile()
    (measured,) = tiny["measurements"]
    return tiny | {
        "layers": [tiny["layers"][0] | {"name": f"block{i}"} for i in range(11)],
        "boundaries": [[tiny["boundaries"][0][0] | {"name": f"hidden{i}"}] for i in range(10)],
        "measurements": [measured | {"layers": measured["layers"][:1] * 11}],
    }


# ---- how much --------------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_house(tmp_path: Path) -> Iterator[House]:
    """One that lets a key ask once a second: slower than any machine."""
    house = House(tmp_path, requests_per_s=1)
    yield house
    house.close()
    assert house.server.stop() == 0


@pytest.mark.tier("nightly")
def test_a_key_that_asks_too_often_is_told_to_wait(slow_house: House):
    house = slow_house
    http = house.http(house.key("blue", "read"))
    first = http.get("/v1/planners")
    assert first.headers["RateLimit-Policy"] == '"requests";q=5;w=5'
    assert first.headers["RateLimit"] == '"requests";r=4;t=1'
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: http.get("/v1/planners"), range(60)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused
    assert {answer.status_code for answer in answers} == {200, 429}
    assert refused[0].json()["code"] == "quota-exceeded"
    assert int(refused[0].headers["Retry-After"]) >= 1
    assert house.http(house.key("blue", "read")).get("/v1/planners").status_code == 200, "another key has its own share"


def test_wrong_keys_are_few(house: House):
    http = house.http("psk_" + "0" * 12 + "_" + "0" * 64)
    seen = [http.get("/v1/planners").status_code for _ in range(60)]
    assert set(seen) == {401, 429}
    assert house.http(house.key("blue", "read")).get("/v1/planners").status_code == 200, "right ones come in"


def test_a_key_holds_so_many_requests_open(house: House):
    key = house.key("blue", "solve")
    http = house.http(key)
    job = http.post("/v1/plans", json=tiny_request()).json()["id"]
    holders = [house.http(key) for _ in range(MOST_OPEN)]

    def hold(one: httpx.Client) -> None:
        while one.get(f"/v1/jobs/{job}", headers={"Prefer": "wait=300"}, timeout=None).status_code == 429:
            time.sleep(0.2)  # the question below was open at that moment, too

    threads = [threading.Thread(target=hold, args=(one,)) for one in holders]
    for thread in threads:
        thread.start()
    while (answer := http.get("/v1/planners")).status_code == 200:
        time.sleep(0.1)
    assert answer.status_code == 429
    assert f"{MOST_OPEN} requests of this key are already open" in answer.json()["detail"]
    canceller = house.http(house.key("blue", "solve"))
    assert canceller.post(f"/v1/jobs/{job}:cancel").status_code == 200
    for thread in threads:
        thread.join()
    assert http.get("/v1/planners").status_code == 200


def test_jobs_of_a_key_that_wait_are_limited(house: House):
    http = house.http(house.key("green", "solve", max_queued=2))
    answers = [http.post("/v1/plans", json=tiny_request() | {"seed": seed}) for seed in range(1, 4)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert answers[2].headers["Retry-After"]


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"topology": {"schema_version": 1, "name": "big", "uniform": {
            "nodes": 10**12, "devices_per_node": 8, "kind": "a", "memory_bytes": 1}}},
         "/topology/uniform", "8e+12 devices exceed the limit of 8 (max_devices)"),
        ({"profile": long_profile()},
         "/profile/layers", "11 layers exceed the limit of 10 (max_layers)"),
        ({"global_batch_size": 2**40, "micro_batch_sizes": [1]},
         "/global_batch_size", "1.09951e+12 micro-batches exceed the limit of 1.04858e+06 (max_micro_batches)"),
        ({"termination": {"time_limit_ns": 101 * 10**9}},
         "/termination/time_limit_ns", "101 seconds exceed the limit of 100 (max_solve_s)"),
    ],
)  # fmt: skip
def test_sizes_beyond_the_limits_are_named(house: House, change: dict[str, Any], pointer: str, words: str):
    http = house.http(house.key("blue", "admin"))
    request = tiny_request() | change
    posts = [("/v1/plans", request), ("/v1/plans:validate", request), ("/v1/sweeps", {"request": request})]
    for path, body in posts:
        answer = http.post(path, json=body)
        assert answer.status_code == 422, (path, answer.text)
        prefix = "/request" if path == "/v1/sweeps" else ""
        assert {"pointer": prefix + pointer, "detail": words, "code": "beyond-limit"} in answer.json()["errors"], path


def test_bodies_are_limited_by_what_they_unpack_to(house: House):
    http = house.http(house.key("blue", "solve"))
    assert (
        http.post("/v1/profiles", content=b" " * 200_001, headers={"Content-Type": "application/json"}).status_code
        == 413
    )
    bomb = gzip.compress(b"[" * 50_000_000)
    assert len(bomb) < 200_000
    before = _resident_bytes(house.server.process.pid)
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = http.post("/v1/profiles", content=bomb, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (413, "too-large")
    assert _resident_bytes(house.server.process.pid) - before < 20_000_000


@pytest.mark.parametrize(
    ("body", "words", "pointer"),
    [
        ('{"a": {"b": [1, {"c": 1, "c": 2}]}}', "['c'] are given twice", "/a/b/1"),
        ("[" * 100_000, "nested", None),
        ('{"a":' * 200 + "1" + "}" * 200, "nested", "/a" * 64),
    ],
)
def test_json_that_is_a_trap_is_refused_where_it_is(house: House, body: str, words: str, pointer: str | None):
    http = house.http(house.key("blue", "solve"))
    answer = http.post("/v1/profiles", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert words in answer.json()["detail"]
    if pointer is not None:
        assert pointer in [fault["pointer"] for fault in answer.json()["errors"]]


# ---- broken clients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431),
        (b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Longer: " + b"x" * 400_000 + b"\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00 this is TLS\r\n\r\n", 400),
        (b"GET /healthz HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_heads_that_are_too_long_or_not_http_are_refused(house: House, sent: bytes, status: int):
    with house.connected() as line:
        with suppress(OSError):
            line.sendall(sent)
            line.shutdown(socket.SHUT_WR)
        head, _, body = _until_closed(line).partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"application/problem+json" in head or status == 400
    assert status == 400 or json.loads(body)["status"] == status


# ---- browsers --------------------------------------------------------------------------------------------------------


def test_a_browser_signs_in_and_out(house: House):
    key = house.key("blue", "admin")
    browser = house.http(None, Accept="text/html,*/*;q=0.8")
    turned = browser.get("/runs")
    assert (turned.status_code, turned.headers["Location"]) == (303, "/sign-in?next=/runs")
    form = browser.get("/sign-in?next=/runs")
    assert form.status_code == 200
    assert 'name="key"' in form.text
    assert "frame-ancestors 'none'" in form.headers["Content-Security-Policy"]
    same_origin = {"Origin": house.url, "Sec-Fetch-Site": "same-origin"}
    wrong = browser.post("/sign-in", data={"key": "psk_x", "next": "/runs"}, headers=same_origin)
    assert wrong.status_code == 401
    assert "not have the form" in wrong.text
    entered = browser.post("/sign-in", data={"key": key, "next": "/runs"}, headers=same_origin)
    assert (entered.status_code, entered.headers["Location"]) == (303, "/runs")
    cookie = entered.headers["Set-Cookie"]
    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict", "Path=/"))
    assert key.split("_")[2] not in cookie
    page = browser.get("/runs")
    assert page.status_code == 200
    assert "Sign out" in page.text
    assert browser.get("/v1/jobs").status_code == 200
    left = browser.post("/sign-out", headers=same_origin)
    assert left.status_code == 303
    assert browser.get("/v1/jobs", headers={"Accept": "application/json"}).status_code == 401


def test_a_session_is_over_with_its_key_and_cannot_be_made_up(house: House):
    key = house.key("blue", "read")
    browser = house.http()
    browser.post("/sign-in", data={"key": key})
    token = browser.cookies["penstock_session"]
    other = house.http()
    other.cookies["penstock_session"] = token[:-1] + ("0" if token[-1] != "0" else "1")
    assert "session has expired" in refused(other).json()["detail"]
    house.keys.revoke(key.split("_")[1])
    while (answer := browser.get("/v1/jobs")).status_code == 200:  # a key is looked up again after seconds
        time.sleep(0.3)
    assert "was revoked" in answer.json()["detail"]


def test_pages_of_others_change_nothing(house: House):
    key = house.key("blue", "admin")
    browser = house.http()
    browser.post("/sign-in", data={"key": key})
    hostile = [
        {"Sec-Fetch-Site": "cross-site", "Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ]
    for headers in hostile:
        answer = browser.post("/v1/plans", json=tiny_request(), headers=headers)
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), headers
    same_origin = browser.post("/v1/plans:validate", json=tiny_request(), headers={"Origin": house.url})
    assert same_origin.status_code == 200
    with_key = house.http(key).post("/v1/plans:validate", json=tiny_request(), headers=hostile[0])
    assert with_key.status_code == 200, "a key in a header is not what a browser sends by itself"


@pytest.mark.parametrize(
    "target", ["https://evil.example", "//evil.example", "/\\evil.example", "javascript:alert(1)", "/a\nb", ""]
)
def test_signing_in_leads_nowhere_else(house: House, target: str):
    answer = house.http().post("/sign-in", data={"key": house.key("blue", "read"), "next": target})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")


def test_every_answer_carries_what_browsers_keep_to(house: House):
    http = house.http(house.key("blue", "read"))
    for path in ("/v1/jobs", "/healthz", "/nothing", "/v1/jobs/none"):
        headers = http.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert "Strict-Transport-Security" not in headers


def test_a_service_without_keys_answers_to_its_own_names_only(tmp_path: Path):
    """Another site's name that is pointed at loopback (DNS rebinding) gets nothing; its page changes nothing."""
    settings = Settings(database=str(tmp_path / "open.sqlite"), slots=0, allowed_hosts=("planner.example",))
    allowed_hosts = ("127.0.0.1", "localhost", "localhost:8642", "[::1]:8642", "planner.example", "PLANNER.example:1")
    others = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example")

    async def ask() -> None:
        transport = httpx.ASGITransport(create_app(settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for host in allowed_hosts:
                assert (await http.get("/healthz", headers={"Host": host})).status_code == 200, host
            for host in others:
                answer = await http.get("/healthz", headers={"Host": host})
                assert (answer.status_code, answer.json()["code"]) == (403, "forbidden"), host
            posted = await http.post("/v1/plans", json=tiny_request(), headers={"Origin": "https://evil.example"})
            assert posted.status_code == 403

    asyncio.run(ask())


def _until_closed(line: socket.socket) -> bytes:
    heard = b""
    try:
        while part := line.recv(2**16):
            heard += part
    except ConnectionResetError:
        pass
    return heard


def _resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.tier("quick")
def test_the_tiny_documents_are_what_this_test_takes_them_for():
    assert len(ModelProfile.parse(tiny_profile()).layers) == 4
    assert len(ClusterTopology.parse(tiny_topology()).expanded().nodes) == 2
