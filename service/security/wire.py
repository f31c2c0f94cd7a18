"""How connections are taken: over TLS or not, and dropped when they cost too much.

That is: heads that never end or are too long, and answers that nobody reads. uvicorn bounds what it buffers of an
answer, and then waits for the client for ever; it waits for ever, too, for the head of a first request. A held answer
is not slow: nothing waits to be sent.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.schemas.amounts import exact
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import InvalidDocument
from penstock.service.http.problems import MEDIA_TYPE
from penstock.service.security.guard import MAX_HEAD_BYTES, LongHead
from penstock.service.settings import Settings


def options(settings: Settings) -> dict[str, Any]:
    """What uvicorn is told about connections. Raises InvalidDocument for a certificate that cannot be used."""
    chosen: dict[str, Any] = {
        "http": patient(settings.slow_client_s),
        "ws": "none",
        "h11_max_incomplete_event_size": MAX_HEAD_BYTES,
    }
    if settings.tls_certificate is None:
        if settings.tls_key is not None:
            raise InvalidDocument("tls_key is of no use alone", remedy="set tls_certificate as well")
        return chosen
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidDocument(
            f"tls_certificate {str(settings.tls_certificate)!r} and its key cannot be used: {error}",
            remedy="give PEM files that the service may read: the certificate with its chain, and the key that fits it",
        ) from None
    return chosen | {"ssl_certfile": settings.tls_certificate, "ssl_keyfile": settings.tls_key}


def patient(slow_s: float) -> type[asyncio.Protocol]:
    """uvicorn's protocol, for clients that may be idle for ``slow_s`` while it is their turn."""

    class Patient(H11Protocol):  # type: ignore[misc,no-any-unimported,unused-ignore]
        """One connection."""

        _their_turn: asyncio.TimerHandle | None = None
        """Runs while the client owes a head, or takes nothing of an answer."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._go_on()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before:
                self._go_on()
            elif self._their_turn is None and (self.cycle is None or self.cycle.response_complete):
                self._wait()  # a later head begins

        def send_400_response(self, msg: str) -> None:
            """Answer what is no HTTP: problem details, as everywhere."""
            status = getattr(sys.exception(), "error_status_hint", 400)
            body = _problem(status).model_dump_json(exclude_none=True).encode()
            headers = [("content-type", MEDIA_TYPE), ("content-length", str(len(body))), ("connection", "close")]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def pause_writing(self) -> None:
            self.flow.pause_writing()
            self._wait()

        def resume_writing(self) -> None:
            self.flow.resume_writing()
            self._go_on()

        def _wait(self) -> None:
            self._go_on()
            self._their_turn = self.loop.call_later(slow_s, self.transport.abort)

        def _go_on(self) -> None:
            if self._their_turn is not None:
                self._their_turn.cancel()
                self._their_turn = None

    return Patient


def _problem(status: int) -> ProblemDetails:
    if status == 431:
        return ProblemDetails.of(LongHead(f"request line and headers have more than {exact(MAX_HEAD_BYTES)}"))
    detail = "what was sent is no HTTP request"
    return ProblemDetails(title="Bad request", status=status, code="bad-request", detail=detail)
