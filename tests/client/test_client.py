"""The client: retries, old methods, and servers that do not answer or are something else."""

from __future__ import annotations

import http.server
import inspect
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from repository import ROOT

from penstock.client import AsyncClient, Client, error_of, messages
from penstock.client.connection import Connection
from penstock.client.messages import Send
from penstock.client.resources import Jobs
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import Conflict, Fault, InvalidDocument, NotFound, PenstockError, Unreachable


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A web server that is not a Penstock service."""

    def do_GET(self) -> None:
        status = 200 if self.path.startswith("/v1/jobs/") else 418
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def elsewhere() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_server_that_is_not_there(elsewhere: str):
    port = int(elsewhere.rpartition(":")[2])
    with (
        http.server.HTTPServer(("127.0.0.1", 0), Elsewhere) as gone,
        Client(f"http://127.0.0.1:{gone.server_port}", patience_s=0) as client,
    ):
        gone.server_close()
        with pytest.raises(Unreachable, match=r"does not answer GET /v1/jobs/x") as caught:
            client.jobs.get("x")
        assert "penstock serve" in (caught.value.remedy or "")
        with pytest.raises(Unreachable):
            client.wait_until_ready(0)
    assert port != gone.server_port


def test_a_server_that_is_something_else(elsewhere: str):
    with Client(elsewhere) as client:
        with pytest.raises(Unreachable, match="with something other than a JobOut"):
            client.jobs.get("x")
        with pytest.raises(Unreachable, match="answered 418"):
            client.agents()


@pytest.mark.parametrize("kind", [InvalidDocument, NotFound, Conflict])
def test_an_error_comes_back_as_it_was(kind: type[PenstockError]):
    error = kind("what happened", faults=(Fault("/a/0", "too small", "range"),), remedy="do this")
    back = error_of(ProblemDetails.of(error))
    assert type(back) is kind
    assert (back.detail, back.faults, back.remedy) == (error.detail, error.faults, error.remedy)


def test_an_error_that_only_the_service_knows():
    problem = ProblemDetails(title="t", status=500, detail="the solver died", code="solver-failed")
    assert type(error_of(problem)) is PenstockError
    assert str(error_of(problem)) == "the solver died"


# ---- sent again ------------------------------------------------------------------------------------------------------

PROBLEM = {"content-type": "application/problem+json"}
GET, POST = Send("GET", "/x"), Send("POST", "/x")
ONCE = Send("POST", "/x", headers={"Idempotency-Key": "k"})
JOIN = Send("POST", "/x", is_safe=True)
DELETE = Send("DELETE", "/x", again=False)


def refused(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused", request=request)


def broken(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadError("reset", request=request)


def status(code: int, **headers: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(code, headers={name.replace("_", "-"): v for name, v in headers.items()})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that were made, on a clock that only they move."""
    pauses: list[float] = []
    monkeypatch.setattr(messages.time, "monotonic", lambda: sum(pauses))
    monkeypatch.setattr("penstock.client.connection.time.sleep", pauses.append)
    return pauses


def play(send: Send, *answers: Callable[[httpx.Request], httpx.Response], patience_s: float = 20) -> httpx.Response:
    """Send a request to a server that gives these answers in turn, the last one for ever, and return the outcome."""
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        return (left.pop(0) if len(left) > 1 else left[0])(request)

    with httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x") as http:
        return Connection(http, "http://x", patience_s).answer(send)


@pytest.mark.parametrize("trouble", [refused, broken, status(502), status(503), status(504), status(429)])
@pytest.mark.parametrize("send", [GET, ONCE, JOIN], ids=["GET", "with a key", "safe"])
def test_what_does_no_harm_twice_is_sent_again(clock: list[float], send: Send, trouble: Any):
    assert play(send, trouble, trouble, trouble, status(200)).status_code == 200
    assert clock == [0.25, 0.5, 1.0]


@pytest.mark.parametrize("trouble", [refused, status(503), status(429)])
def test_a_post_that_was_not_done_is_sent_again(clock: list[float], trouble: Any):
    assert play(POST, trouble, status(200)).status_code == 200
    assert clock == [0.25]


@pytest.mark.parametrize(
    ("send", "trouble"),
    [
        (POST, broken),
        (POST, status(502)),
        (DELETE, broken),
        (DELETE, status(503)),
        (GET, status(500)),
        (GET, status(404)),
        (GET, status(504, content_type="application/problem+json")),
    ],
)
def test_what_may_have_been_done_or_will_not_change_is_not_sent_again(clock: list[float], send: Send, trouble: Any):
    with pytest.raises(PenstockError):
        play(send, trouble, status(200))
    assert clock == []


def test_the_service_says_when_to_come_back(clock: list[float]):
    assert play(GET, status(429, retry_after="3"), status(503), status(200)).status_code == 200
    assert clock == [3.0, 0.5]


@pytest.mark.parametrize(
    ("trouble", "patience_s", "pauses"),
    [(refused, 0, 0), (refused, 2, 3), (status(503, retry_after="5"), 12, 2), (status(503, retry_after="60"), 20, 0)],
)
def test_patience_ends(clock: list[float], trouble: Any, patience_s: float, pauses: int):
    with pytest.raises(Unreachable):
        play(GET, trouble, patience_s=patience_s)
    assert len(clock) == pauses


# ---- lists and events ------------------------------------------------------------------------------------------------


def connected(answer: Callable[[httpx.Request], httpx.Response]) -> Client:
    """Return a client of a server that answers every request by ``answer``."""
    client = Client("http://x")
    http = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x")
    client.jobs = Jobs(Connection(http, "http://x", 20))
    return client


def test_a_list_goes_over_all_pages():
    queries: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        queries.append(request.url.query.decode())
        number = len(queries)
        job = {"id": f"job{number}", "state": "queued", "request_hash": "sha256:" + "0" * 64, "created_at": "now"}
        return httpx.Response(200, json={"items": [job], "next_cursor": f"c{number}" if number < 3 else None})

    assert [job.id for job in connected(answer).jobs.list(tag="night")] == ["job1", "job2", "job3"]
    assert queries == ["tag=night", "tag=night&cursor=c1", "tag=night&cursor=c2"]


def sse(*numbers: int) -> bytes:
    """Return events with these numbers, with a comment between them."""
    data = ('{"sequence": %d, "kind": "log", "at": "now", "data": {}}' % number for number in numbers)  # noqa: UP031
    return b": still here\n\n".join(f"event: log\ndata: {each}\n\n".encode() for each in data)


def test_events_go_on_after_a_broken_connection(clock: list[float]):
    def torn() -> Iterator[bytes]:
        yield sse(1, 2)
        raise httpx.ReadError("reset")

    stream = {"content-type": "text/event-stream"}
    answers = [
        httpx.Response(200, headers=stream, content=torn()),
        httpx.Response(503),
        httpx.Response(200, headers=stream, content=sse(3)),
        httpx.Response(204),
    ]
    after: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        after.append(request.headers["last-event-id"])
        return answers.pop(0)

    assert [event.sequence for event in connected(answer).jobs.events("x")] == [1, 2, 3]
    assert after == ["0", "2", "2", "3"]


def test_events_are_polled_where_streams_do_not_get_through():
    def answer(request: httpx.Request) -> httpx.Response:
        if "poll" not in request.url.params:
            return httpx.Response(200, json={})
        after = int(request.url.params["after"])
        items = [{"sequence": after + 1, "kind": "log", "at": "now", "data": {}}] if after < 2 else []
        return httpx.Response(200, json={"items": items, "last": after + len(items), "done": not items})

    assert [event.sequence for event in connected(answer).jobs.events("x")] == [1, 2]


# ---- two clients from one source -------------------------------------------------------------------------------------


@pytest.mark.tier("ci")
def test_the_blocking_client_is_current():
    done = subprocess.run(["scripts/make-client", "--check"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_signatures_and_documentation_are_those_of_the_source():
    blocking, awaited = Client("http://x").jobs, AsyncClient("http://x").jobs
    assert inspect.signature(blocking.get) == inspect.signature(awaited.get)
    assert list(inspect.signature(Client("http://x").explain).parameters) == ["request", "on_progress"]
    assert "best plan" in (blocking.incumbent.__doc__ or "")
    assert inspect.getsourcefile(blocking.get) == str(ROOT / "src" / "penstock" / "client" / "resources.py")


# ---- old methods -----------------------------------------------------------------------------------------------------


class Recorder:
    """Stands for a resource, and names the method that is called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Callable[..., str]:
        return lambda *args, **named: f"{self._name}.{method}"


class Document:
    """A document to post."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
