"""The client against servers that are there, that are not, and that are something else."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from penstock.client import Client, error_of
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import Conflict, Fault, InvalidDocument, NotFound, PenstockError, Unreachable


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """A web server that is no Penstock service."""

    def do_GET(self) -> None:
        status = 200 if self.path.startswith("/v1/plans/") else 418
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
        Client(f"http://127.0.0.1:{gone.server_port}") as client,
    ):
        gone.server_close()
        with pytest.raises(Unreachable, match=r"does not answer GET /v1/plans/x") as caught:
            client.job("x")
        assert "penstock serve" in (caught.value.remedy or "")
        with pytest.raises(Unreachable):
            client.wait_until_ready(0)
    assert port != gone.server_port


def test_a_server_that_is_something_else(elsewhere: str):
    with Client(elsewhere) as client:
        with pytest.raises(Unreachable, match="with something else than a JobOut"):
            client.job("x")
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
