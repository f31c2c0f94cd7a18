"""The two clients: the same calls over a blocking connection and over one that is awaited."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import httpx

from penstock.client.calls import WAIT_S, Calls
from penstock.client.flows import Flow, Item, Listing, NextLine, Open, Pause, Send, Step
from penstock.schemas.errors import InvalidDocument

LOCAL = "http://127.0.0.1:8642"
CONNECT_S = 10.0

T = TypeVar("T")


class Client(Calls):
    """One connection to a service. Raises Unreachable when it does not answer, and PenstockError for its refusals.

    ``key``: the API key, by default ``PENSTOCK_API_KEY``. ``ca``: a file with the certificates to trust, beside the
    system's. ``patience_s``: how long to try again while the service is busy, or where a story's connection is lost;
    a service that does not answer at all is Unreachable at once. ``timeout_s``: for one answer.
    """

    def __init__(
        self,
        server: str = LOCAL,
        *,
        key: str | None = None,
        ca: str | Path | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 20.0,
    ) -> None:
        super().__init__(server, patience_s)
        self._http = httpx.Client(**_settings(server, key, ca, timeout_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def run_flow(self, flow: Flow[T]) -> T:
        """Take a flow to its end."""
        answers = _Answers(flow)
        with _Line(self._http) as line:
            while (step := answers.step()) is not None:
                try:
                    answers.come = line.take(step)
                except httpx.TransportError as error:
                    answers.come = error
        result: T = answers.result
        return result

    def iterate(self, listing: Listing[T]) -> Iterator[T]:
        """The items of a listing, as they come."""
        answers = _Answers(listing)
        with _Line(self._http) as line:
            while (step := answers.step()) is not None:
                if isinstance(step, Item):
                    yield step.value
                    continue
                try:
                    answers.come = line.take(step)
                except httpx.TransportError as error:
                    answers.come = error


class AsyncClient(Calls):
    """The same for programs with an event loop (asyncio or trio); arguments as of `Client`."""

    def __init__(
        self,
        server: str = LOCAL,
        *,
        key: str | None = None,
        ca: str | Path | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 20.0,
    ) -> None:
        super().__init__(server, patience_s)
        self._http = httpx.AsyncClient(**_settings(server, key, ca, timeout_s))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    async def run_flow(self, flow: Flow[T]) -> T:
        """Take a flow to its end."""
        answers = _Answers(flow)
        async with _AsyncLine(self._http) as line:
            while (step := answers.step()) is not None:
                try:
                    answers.come = await line.take(step)
                except httpx.TransportError as error:
                    answers.come = error
        result: T = answers.result
        return result

    async def iterate(self, listing: Listing[T]) -> AsyncIterator[T]:
        """The items of a listing, as they come."""
        answers = _Answers(listing)
        async with _AsyncLine(self._http) as line:
            while (step := answers.step()) is not None:
                if isinstance(step, Item):
                    yield step.value
                    continue
                try:
                    answers.come = await line.take(step)
                except httpx.TransportError as error:
                    answers.come = error


class _Answers:
    """Drives a generator: ``step`` gives its next step and hands in what came of the last one."""

    def __init__(self, flow: Any) -> None:
        self._flow = flow
        self.come: Any = None
        self.result: Any = None

    def step(self) -> Any:
        come, self.come = self.come, None
        try:
            return self._flow.throw(come) if isinstance(come, Exception) else self._flow.send(come)
        except StopIteration as end:
            self.result = end.value
            return None


class _Line:
    """Takes the steps of one flow with blocking calls."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._open: httpx.Response | None = None
        self._lines: Iterator[str] = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *ended: object) -> None:
        if self._open is not None:
            self._open.close()

    def take(self, step: Step) -> Any:
        match step:
            case Send():
                return self._http.send(_built(self._http, step))
            case Open(send):
                self.__exit__()
                self._open = self._http.send(_built(self._http, send), stream=True)
                self._lines = self._open.iter_lines()
                if self._open.is_error:
                    self._open.read()
                return self._open
            case NextLine():
                return next(self._lines, None)
            case Pause(seconds):
                return time.sleep(seconds)


class _AsyncLine:
    """Takes the steps of one flow without blocking."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._open: httpx.Response | None = None
        self._lines: AsyncIterator[str] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ended: object) -> None:
        if self._open is not None:
            await self._open.aclose()

    async def take(self, step: Step) -> Any:
        match step:
            case Send():
                return await self._http.send(_built(self._http, step))
            case Open(send):
                await self.__aexit__()
                self._open = await self._http.send(_built(self._http, send), stream=True)
                self._lines = self._open.aiter_lines()
                if self._open.is_error:
                    await self._open.aread()
                return self._open
            case NextLine():
                assert self._lines is not None
                return await anext(self._lines, None)
            case Pause(seconds):
                return await anyio.sleep(seconds)


def _settings(server: str, key: str | None, ca: str | Path | None, timeout_s: float) -> dict[str, Any]:
    """What both kinds of connection are made with."""
    settings: dict[str, Any] = {"base_url": server, "timeout": httpx.Timeout(timeout_s, read=timeout_s + WAIT_S)}
    if key := (os.environ.get("PENSTOCK_API_KEY", "") if key is None else key).strip():
        if not (key.isascii() and key.isprintable()):
            raise InvalidDocument("the API key holds characters that no key has", remedy="copy it anew: psk_…")
        settings["headers"] = {"Authorization": f"Bearer {key}"}
    if ca is not None:
        trusted = ssl.create_default_context()
        trusted.load_verify_locations(ca)
        settings["verify"] = trusted
    return settings


def _built(http: httpx.Client | httpx.AsyncClient, send: Send) -> httpx.Request:
    content, headers = send.packed()
    timeout = httpx.Timeout(CONNECT_S, read=None) if send.patient else httpx.USE_CLIENT_DEFAULT
    return http.build_request(
        send.method, send.path, content=content, headers=headers, params=dict(send.params) or None, timeout=timeout
    )
