"""HTTPS with a certificate of one's own: service, client, agent, cookies; and certificates that are wrong."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from service_process import Server

from penstock.client import Client
from penstock.schemas.errors import InvalidDocument, NotFound, Unreachable
from penstock.service.db.database import Database
from penstock.service.http.app import serve
from penstock.service.security.keys import Keys
from penstock.service.settings import Settings

PATIENCE_S = 60


class Secured:
    """A service with keys behind TLS, and what one needs to talk with it."""

    def __init__(self, directory: Path) -> None:
        authority = trustme.CA()
        self.ca = directory / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        certificate = authority.issue_cert("127.0.0.1")
        self.certificate, self.private = directory / "service.pem", directory / "service.key"
        self.certificate.write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(self.private)
        self.database = Database(f"sqlite:///{directory / 'tls.sqlite'}")
        self.database.create()
        self.server = Server(
            directory / "tls.sqlite",
            security="keys",
            slots=0,
            tls_certificate=self.certificate,
            tls_key=self.private,
            agent_hold_s=1,
        )

    def key(self, *scopes: str) -> str:
        """Create a key of tenant blue."""
        return Keys(self.database).create("blue", "test", scopes)[1]

    def client(self, *scopes: str) -> Client:
        """Open a client that trusts the service's authority."""
        return Client(self.server.url, key=self.key(*scopes), ca=self.ca)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    secured = Secured(tmp_path_factory.mktemp("tls"))
    yield secured
    secured.database.close()
    assert secured.server.stop() == 0
    assert "Traceback" not in secured.server.text, secured.server.text


@pytest.mark.tier("nightly")
def test_a_client_that_trusts_the_certificate_is_served(secured: Secured):
    assert secured.server.url.startswith("https://")
    with secured.client("read") as client:
        assert client.jobs.page().items == ()


def test_one_that_does_not_is_told_why(secured: Secured):
    with (
        Client(secured.server.url, key=secured.key("read"), patience_s=0) as client,
        pytest.raises(Unreachable, match="certificate verify failed"),
    ):
        client.jobs.page()


def test_plain_http_gets_nothing(secured: Secured):
    with pytest.raises(httpx.TransportError):
        httpx.get(secured.server.url.replace("https", "http") + "/healthz")


def test_browsers_are_told_to_stay_with_tls(secured: Secured):
    trusted = httpx.create_ssl_context()
    trusted.load_verify_locations(secured.ca)
    with httpx.Client(base_url=secured.server.url, verify=trusted) as browser:
        assert "max-age=" in browser.get("/healthz").headers["Strict-Transport-Security"]
        entered = browser.post("/sign-in", data={"key": secured.key("read")})
        assert "Secure" in entered.headers["Set-Cookie"]


def agent(secured: Secured, project: Path, token: str, *, ca: bool = True) -> subprocess.Popen[str]:
    """Start a real agent process with one CPU device."""
    command = [sys.executable, "-m", "penstock.cli.main", "agent", "--server", secured.server.url, "--name", "node0"]
    command += ["--cpu-devices", "1", "--job", "toy=toy:job", "--directory", str(project)]
    command += ["--ca", str(secured.ca)] if ca else []
    environment = os.environ | {"PENSTOCK_AGENT_TOKEN": token}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def test_an_agent_with_its_own_key_is_taken_up(secured: Secured, tmp_path: Path):
    process = agent(secured, tmp_path, secured.key("agent"))
    try:
        with secured.client("read") as client:
            until = time.monotonic() + PATIENCE_S
            while not any(one.alive for one in client.agents()):
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.2)
            assert [one.id for one in client.agents()] == ["node0"]
        with Client(
            secured.server.url, key=Keys(secured.database).create("red", "r", ["read"])[1], ca=secured.ca
        ) as red:
            assert red.agents() == []
            with pytest.raises(NotFound):
                red.topologies.of_agents()
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("token", "words"),
    [
        ("", "requires a key, and none was sent"),
        ("psk_" + "0" * 12 + "_" + "0" * 64, "with this secret"),
        ("{read}", "needs scope 'agent' or 'admin'"),
    ],
)
def test_an_agent_that_is_not_let_in_says_why_and_ends(secured: Secured, tmp_path: Path, token: str, words: str):
    token = token.replace("{read}", secured.key("read"))
    process = agent(secured, tmp_path, token)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert words in errors
    assert "penstock keys create --scope agent" in errors
    assert token == "" or token.split("_")[2] not in errors


@pytest.mark.parametrize(
    ("certificate", "private", "words"),
    [
        ("/no/such.pem", None, r"such.pem.* cannot be used"),
        ("{ca}", "{key}", "cannot be used"),
        ("{certificate}", None, "cannot be used"),
        (None, "{key}", "tls_key is set without tls_certificate"),
    ],
)
def test_certificates_that_cannot_be_used_are_named(
    secured: Secured, tmp_path: Path, certificate: str | None, private: str | None, words: str
):
    files = {"{ca}": secured.ca, "{key}": secured.private, "{certificate}": secured.certificate}
    names = {"tls_certificate": certificate, "tls_key": private}
    chosen = {name: files.get(value, value) for name, value in names.items() if value is not None}
    with pytest.raises(InvalidDocument, match=words):
        serve(Settings(database=str(tmp_path / "never.sqlite"), port=0, **chosen))
    assert not (tmp_path / "never.sqlite").exists()
