"""The common parts of the blocking and the awaited client: requests, when they are sent again, and errors."""

from __future__ import annotations

import gzip
import json
import os
import ssl
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.schemas.errors import InvalidDocument, Unreachable

LOCAL = "http://127.0.0.1:8642"
CONNECT_S = 10.0
WAIT_S = 20
"""The longest time that the service may hold an answer for which a client waits."""

COMPRESS_FROM_BYTES = 1 << 18
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0

ENDED = ("succeeded", "failed", "cancelled")
STREAM = "text/event-stream"

T = TypeVar("T")
Named = Mapping[str, Any]
"""A request as plain data, which may name shipped documents: ``{"model": "llama-3-8b", "cluster": "2x8xH100", …}``."""


@dataclass(frozen=True)
class Send:
    """A request to the service."""

    method: str
    path: str
    body: BaseModel | Mapping[str, Any] | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    """Drop parameters without a value."""
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: int = 0
    patient: bool = False
    """Wait for the answer as long as it takes."""
    again: bool = True
    """Whether it may be sent again at all."""
    is_safe: bool = False
    """Whether sending it twice does what sending it once does; GETs and requests with an Idempotency-Key are."""

    @property
    def is_repeatable(self) -> bool:
        """The request may be sent again where it is unknown whether the service received it."""
        return self.again and (self.is_safe or self.method == "GET" or "Idempotency-Key" in self.headers)

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        """Return the request as a connection sends it; a long body is compressed."""
        content, headers = self._content(), dict(self.headers)
        if self.wait_s:
            headers["Prefer"] = f"wait={self.wait_s}"
        if content is not None:
            headers["Content-Type"] = "application/json"
            if len(content) >= COMPRESS_FROM_BYTES:
                headers["Content-Encoding"] = "gzip"
                content = gzip.compress(content, 3)
        params = {name: value for name, value in self.params.items() if value is not None}
        timeout = httpx.Timeout(CONNECT_S, read=None) if self.patient else httpx.USE_CLIENT_DEFAULT
        return http.build_request(
            self.method, self.path, content=content, headers=headers, params=params or None, timeout=timeout
        )

    def _content(self) -> bytes | None:
        if self.body is None:
            return None
        if isinstance(self.body, BaseModel):
            return self.body.model_dump_json(exclude_unset=True, exclude_none=True).encode()
        return json.dumps(self.body).encode()


class Patience:
    """The rule for retries of a request, with the pause before each; for ``patience_s`` in all.

    The service answers 429 and 503 when it has done nothing, and a connection that was not made has carried nothing:
    then any request is sent again. After a broken connection, and a proxy's 502 and 504, only requests that do no harm
    twice are sent again.
    """

    def __init__(self, patience_s: float) -> None:
        self._until = time.monotonic() + patience_s
        self._pause_s = FIRST_PAUSE_S

    @property
    def is_over(self) -> bool:
        """Whether ``patience_s`` have passed."""
        return time.monotonic() > self._until

    def after(self, send: Send, response: httpx.Response) -> float | None:
        """Return seconds until the next try; None where this answer is the last one."""
        status, is_ours = response.status_code, response.headers.get("content-type") == "application/problem+json"
        from_a_proxy = status in (httpx.codes.BAD_GATEWAY, httpx.codes.GATEWAY_TIMEOUT) and not is_ours
        busy = status in (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
        if not (busy and send.again) and not (from_a_proxy and send.is_repeatable):
            return None
        wanted = response.headers.get("retry-after", "")
        return self.next_pause(float(wanted) if wanted.isdecimal() else None)

    def after_error(self, send: Send, error: httpx.TransportError) -> float | None:
        """Return seconds until the next try; None where the request is not sent again."""
        was_not_sent = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        may = not isinstance(error, httpx.UnsupportedProtocol) and ((was_not_sent and send.again) or send.is_repeatable)
        return self.next_pause() if may else None

    def next_pause(self, wanted_s: float | None = None) -> float | None:
        """Return seconds until the next try, twice as long each time unless others are wanted; None when it is over."""
        pause_s = self._pause_s if wanted_s is None else wanted_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return pause_s if time.monotonic() + pause_s <= self._until else None


def once() -> dict[str, str]:
    """Return a header that makes the service do a request once, however often it is sent."""
    return {"Idempotency-Key": str(uuid.uuid4())}


def read(server: str, model: type[T], send: Send, response: httpx.Response) -> T:
    """Parse the body of an answer as ``model``, a type that pydantic knows. Raises Unreachable for something else."""
    try:
        return TypeAdapter(model).validate_json(response.content)
    except ValidationError as error:
        name = getattr(model, "__name__", str(model))
        raise Unreachable(
            f"{server} answered {send.method} {send.path} with something other than a {name}: "
            f"{error.errors()[0]['msg']}",
            remedy="check that the server is a Penstock service of the same version",
        ) from None


def unreachable(server: str, send: Send, error: Exception) -> Unreachable:
    """Build the error for a service that did not answer."""
    has_scheme = server.startswith(("http://", "https://"))
    return Unreachable(
        f"{server} does not answer {send.method} {send.path}: {str(error) or type(error).__name__}",
        remedy="start it with `penstock serve`, or name another server"
        if has_scheme
        else f"name it with its scheme: http://{server}",
    )


def settings(server: str, key: str | None, ca: str | Path | None, timeout_s: float) -> dict[str, Any]:
    """Check and return the arguments of both kinds of connection. Raises InvalidDocument for an impossible key."""
    arguments: dict[str, Any] = {"base_url": server, "timeout": httpx.Timeout(timeout_s, read=timeout_s + WAIT_S)}
    if key := (os.environ.get("PENSTOCK_API_KEY", "") if key is None else key).strip():
        if not (key.isascii() and key.isprintable()):
            raise InvalidDocument("the API key has invalid characters", remedy="copy the key again: psk_…")
        arguments["headers"] = {"Authorization": f"Bearer {key}"}
    if ca is not None:
        trusted = ssl.create_default_context()
        trusted.load_verify_locations(ca)
        arguments["verify"] = trusted
    return arguments
