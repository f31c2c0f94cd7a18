# Made from async_connection.py by scripts/make-client: change that one.
"""Requests to a service and their answers: documents, streams of events, lists of pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import TypeAdapter

from penstock.client.messages import STREAM, WAIT_S, Patience, Send, read, unreachable
from penstock.client.refusals import error_of, refusal
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import PenstockError

READY_AGAIN_S = 0.1


class Numbered(Protocol):
    """An event of a job or a run."""

    @property
    def sequence(self) -> int: ...


T = TypeVar("T")
M = TypeVar("M")
E = TypeVar("E", bound=Numbered)


class Connection:
    """One service, asked again while it is busy or away, for ``patience_s`` at most."""

    def __init__(self, http: httpx.Client, server: str, patience_s: float) -> None:
        self._http, self._server, self._patience_s = http, server, patience_s

    def answer(self, send: Send) -> httpx.Response:
        """Return the service's answer. Raises Unreachable when nothing answers, and PenstockError for a refusal."""
        patience = Patience(self._patience_s)
        while True:
            try:
                response = self._http.send(send.request(self._http))
                pause_s = patience.after(send, response)
            except httpx.TransportError as error:
                pause_s = patience.after_error(send, error)
                if pause_s is None:
                    raise unreachable(self._server, send, error) from None
            else:
                if response.is_error and pause_s is None:
                    raise refusal(response)
                if pause_s is None:
                    return response
            time.sleep(pause_s)

    def document(self, model: type[T], send: Send) -> T:
        """Return the service's answer as ``model``. Raises Unreachable for something else."""
        return read(self._server, model, send, self.answer(send))

    def pages(self, model: type[Any], path: str, params: Mapping[str, Any]) -> Iterator[Any]:
        """Yield the items of a list, over all of its pages."""
        cursor: str | None = None
        while True:
            page = self.document(model, Send("GET", path, params={**params, "cursor": cursor}))
            yield from page.items
            cursor = page.next_cursor
            if cursor is None:
                return

    def events(self, model: type[E], path: str, after: int) -> Generator[E, None, None]:
        """Yield the events of a job or a run after number ``after`` until it ends; survives a broken connection."""
        patience = Patience(self._patience_s)
        while True:
            send = Send("GET", path, headers={"Accept": STREAM, "Last-Event-ID": str(after)})
            began_after = after
            try:
                with self._opened(send) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    if response.is_error:
                        pause_s = patience.after(send, response)
                        if pause_s is None:
                            response.read()
                            raise refusal(response)
                    elif not response.headers.get("content-type", "").startswith(STREAM):
                        break  # something in between does not let streams through
                    else:
                        for sent in EventSource(response).iter_sse():
                            if sent.data:
                                event = TypeAdapter(model).validate_json(sent.data)
                                after, patience = event.sequence, Patience(self._patience_s)
                                yield event
                        pause_s = patience.next_pause() if after == began_after else 0.0
                        if pause_s is None:
                            raise unreachable(self._server, send, EOFError("each answer ends before the job does"))
            except httpx.TransportError as error:
                pause_s = patience.after_error(send, error)
                if pause_s is None:
                    raise unreachable(self._server, send, error) from None
            time.sleep(pause_s)
        for event in self._polled(model, path, after):
            yield event

    def streamed(self, send: Send) -> Generator[ServerSentEvent, None, None]:
        """Yield the events of one answer, without the one that ends it.

        Raises Unreachable where the connection breaks, PenstockError for a refusal, before the answer or within it.
        """
        patience = Patience(self._patience_s)
        stream = replace(send, headers={**send.headers, "Accept": STREAM})
        while True:
            try:
                with self._opened(stream) as response:
                    pause_s = patience.after(send, response)
                    if pause_s is None:
                        if response.is_error:
                            response.read()
                            raise refusal(response)
                        for event in EventSource(response).iter_sse():
                            if event.event == "end":
                                return
                            if event.event == "problem":
                                raise error_of(ProblemDetails.model_validate_json(event.data))
                            yield event
                        raise unreachable(self._server, send, EOFError("the answer was cut off"))
            except httpx.TransportError as error:
                raise unreachable(self._server, send, error) from None
            time.sleep(pause_s)

    def with_events(
        self, model: type[T], send: Send, name: str, kind: type[M], on_message: Callable[[M], None] | None
    ) -> T:
        """Return the service's answer as ``model``; ``on_message`` is called with each event ``name`` before it."""
        if on_message is None:
            return self.document(model, send)
        answer: list[T] = []
        with closing(self.streamed(send)) as events:
            for event in events:
                if event.event == name:
                    on_message(TypeAdapter(kind).validate_json(event.data))
                else:
                    answer.append(TypeAdapter(model).validate_json(event.data))
        return answer[-1]

    def until_ready(self, timeout_s: float) -> None:
        """Return once the service is ready. Raises Unreachable, or the service's reason, when it is not in time."""
        send = Send("GET", "/readyz", again=False)
        patience = Patience(timeout_s)
        while True:
            try:
                self.answer(send)
                return
            except PenstockError:
                if patience.is_over:
                    raise
            time.sleep(READY_AGAIN_S)

    def _polled(self, model: type[E], path: str, after: int) -> Iterator[E]:
        """Yield the same events, requested page by page."""
        done = False
        while not done:
            send = Send("GET", path, params={"poll": 1, "after": after}, wait_s=WAIT_S)
            page = (self.answer(send)).json()
            for each in page["items"]:
                yield TypeAdapter(model).validate_python(each)
            after, done = page["last"], page["done"] and not page["items"]

    @contextmanager
    def _opened(self, send: Send) -> Iterator[httpx.Response]:
        """Open an answer whose body is read as it comes."""
        response = self._http.send(send.request(self._http), stream=True)
        try:
            yield response
        finally:
            response.close()
