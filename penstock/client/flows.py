"""Calls of the service as generators that do no input or output of their own.

A flow yields steps and is sent what came of them; `transports` takes the steps, once with blocking calls and once
without. So every method is described once, and is a plain method of `Client` and a coroutine of `AsyncClient`.
"""

from __future__ import annotations

import gzip
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import update_wrapper, wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from penstock.client.refusals import error_of, refusal
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import Unreachable

if TYPE_CHECKING:
    from penstock.client.transports import AsyncClient, Client

COMPRESS_FROM_BYTES = 1 << 18
POLL_S = 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
BUSY = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Send:
    """Send a request; what comes back is its `httpx.Response`, or an `httpx.TransportError` is raised here."""

    method: str
    path: str
    body: BaseModel | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    wait_s: int = 0
    patient: bool = False
    """Wait for the answer as long as it takes."""
    again: bool = True
    """Whether it may be sent again when the service says that it is busy."""

    def content(self) -> bytes | None:
        """The body as it is sent, before compression."""
        return None if self.body is None else self.body.model_dump_json(exclude_none=True).encode()

    def packed(self) -> tuple[bytes | None, dict[str, str]]:
        """The body and all headers."""
        content, headers = self.content(), dict(self.headers)
        if self.wait_s:
            headers["Prefer"] = f"wait={self.wait_s}"
        if content is not None:
            headers["Content-Type"] = "application/json"
            if len(content) >= COMPRESS_FROM_BYTES:
                headers["Content-Encoding"] = "gzip"
                content = gzip.compress(content, 3)
        return content, headers


@dataclass(frozen=True)
class Open:
    """Send a request and keep its answer open; what comes back is its `httpx.Response`, without a body."""

    send: Send


@dataclass(frozen=True)
class NextLine:
    """The next line of the open answer, None at its end."""


@dataclass(frozen=True)
class Pause:
    """Let time pass."""

    seconds: float


@dataclass(frozen=True)
class Item(Generic[T]):
    """One of the things that a listing gives."""

    value: T


Step = Send | Open | NextLine | Pause
Flow = Generator[Step, Any, T]
Listing = Generator[Step | Item[T], Any, None]


class call(Generic[P, T]):  # noqa: N801  (a decorator)
    """A method that is described as a flow: it blocks in a `Client`, and is awaited in an `AsyncClient`."""

    def __init__(self, describe: Callable[Concatenate[Any, P], Flow[T]]) -> None:
        self.describe = describe
        update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        if client is None:
            return self

        @wraps(self.describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.run_flow(self.describe(client, *args, **kwargs))

        return method


class listing(Generic[P, T]):  # noqa: N801  (a decorator)
    """A method that is described as a listing: an iterator in a `Client`, an async one in an `AsyncClient`."""

    def __init__(self, describe: Callable[Concatenate[Any, P], Listing[T]]) -> None:
        self.describe = describe
        update_wrapper(self, describe)  # type: ignore[arg-type]

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: Client, owner: type) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, client: AsyncClient, owner: type) -> Callable[P, AsyncIterator[T]]: ...
    def __get__(self, client: Client | AsyncClient | None, owner: type) -> Any:
        if client is None:
            return self

        @wraps(self.describe)
        def method(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.iterate(self.describe(client, *args, **kwargs))

        return method


def answer(server: str, send: Send, patience_s: float) -> Flow[httpx.Response]:
    """The service's answer; sent again while the service is busy, for ``patience_s`` at most.

    Raises Unreachable when nothing answers, and PenstockError for a refusal.
    """
    for attempt in itertools.count():
        try:
            found: httpx.Response = yield send
        except httpx.TransportError as error:
            raise unreachable(server, send, error) from None
        pause_s = pause_before_next(found, attempt)
        if found.status_code not in BUSY or not send.again or pause_s > patience_s:
            break
        patience_s -= pause_s
        yield Pause(pause_s)
    if found.is_error:
        raise refusal(found)
    return found


def document(server: str, model: Any, send: Send, patience_s: float) -> Flow[Any]:
    """The service's answer as ``model``, a type that pydantic knows. Raises Unreachable for something else."""
    found = yield from answer(server, send, patience_s)
    try:
        return TypeAdapter(model).validate_json(found.content)
    except ValidationError as error:
        name = getattr(model, "__name__", str(model))
        raise Unreachable(
            f"{server} answered {send.method} {send.path} with something else than a {name}: "
            f"{error.errors()[0]['msg']}",
            remedy="is it a Penstock service of the same version?",
        ) from None


def story(server: str, model: type[T], path: str, after: int, patience_s: float) -> Listing[T]:
    """The events of a job or a run from number ``after`` on, until it has ended; survives a broken connection."""
    left_s, attempt = patience_s, 0
    while True:
        send = Send("GET", path, headers={"Accept": "text/event-stream", "Last-Event-ID": str(after)})
        try:
            found: httpx.Response = yield Open(send)
            if found.status_code == httpx.codes.NO_CONTENT:
                return
            if found.is_error and found.status_code not in BUSY:
                raise refusal(found)
            if found.headers.get("content-type", "").startswith("text/event-stream"):
                parser = EventParser()
                while (line := (yield NextLine())) is not None:
                    if (data := parser.take(line)) is not None:
                        event = TypeAdapter(model).validate_json(data)
                        after, left_s, attempt = event.sequence, patience_s, 0  # type: ignore[attr-defined]
                        yield Item(event)
            elif not found.is_error:  # something in between does not let streams through
                yield from _pages(server, model, path, after, patience_s)
                return
        except httpx.TransportError as error:
            if left_s <= 0:
                raise unreachable(server, send, error) from None
        pause_s = pause_before_next(None, attempt)
        left_s, attempt = left_s - pause_s, attempt + 1
        yield Pause(pause_s if attempt > 1 else 0.0)


def _pages(server: str, model: type[T], path: str, after: int, patience_s: float) -> Listing[T]:
    """The same story, asked for page by page."""
    done = False
    while not done:
        send = Send("GET", path, params={"poll": 1, "after": after}, wait_s=POLL_S)
        page = (yield from answer(server, send, patience_s)).json()
        for each in page["items"]:
            yield Item(TypeAdapter(model).validate_python(each))
        after, done = page["last"], page["done"] and not page["items"]


def heard(events: Listing[T], hear: Callable[[T], None]) -> Flow[None]:
    """Tell ``hear`` of every item of a listing."""
    come: Any = None
    with closing(events):
        while True:
            try:
                step = events.throw(come) if isinstance(come, Exception) else events.send(come)
            except StopIteration:
                return
            come = None
            if isinstance(step, Item):
                hear(step.value)
                continue
            try:
                come = yield step
            except httpx.TransportError as error:
                come = error


def told(server: str, send: Send, patience_s: float) -> Listing[tuple[str, str]]:
    """The events of one answer by name, with their data; sent again while the service is busy.

    Raises Unreachable where the connection breaks, PenstockError for a refusal, before the answer or within it.
    """
    asked = replace(send, headers={**send.headers, "Accept": "text/event-stream"})
    try:
        for attempt in itertools.count():
            found: httpx.Response = yield Open(asked)
            pause_s = pause_before_next(found, attempt)
            if found.status_code not in BUSY or pause_s > patience_s:
                break
            patience_s -= pause_s
            yield Pause(pause_s)
        if found.is_error:
            raise refusal(found)
        parser = EventParser()
        while (line := (yield NextLine())) is not None:
            if (data := parser.take(line)) is None:
                continue
            if parser.name == "end":
                return
            if parser.name == "problem":
                raise error_of(ProblemDetails.model_validate_json(data))
            yield Item((parser.name, data))
    except httpx.TransportError as error:
        raise unreachable(server, send, error) from None
    raise unreachable(server, send, EOFError("the answer has no end"))


class EventParser:
    """Reads server-sent events line by line; of a job's or a run's story only the data matters, which has its number.

    ``name``: of the event that ended last.
    """

    def __init__(self) -> None:
        self._data: list[str] = []
        self.name = ""

    def take(self, line: str) -> str | None:
        """The data of the event that this line ends, if it ends one."""
        if not line:
            data, self._data = "\n".join(self._data), []
            return data or None
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        elif name == "event":
            self.name = value.removeprefix(" ")
        return None


def pause_before_next(found: httpx.Response | None, attempt: int) -> float:
    """Seconds until the next try: what the service asks for, else twice as long each time."""
    asked = "" if found is None else found.headers.get("retry-after", "")
    return float(asked) if asked.isdecimal() else min(FIRST_PAUSE_S * 2.0 ** min(attempt, 10), LONGEST_PAUSE_S)


def unreachable(server: str, send: Send, error: Exception) -> Unreachable:
    """The error for a service that did not answer."""
    has_scheme = server.startswith(("http://", "https://"))
    return Unreachable(
        f"{server} does not answer {send.method} {send.path}: {str(error) or type(error).__name__}",
        remedy="start it with `penstock serve`, or name another server"
        if has_scheme
        else f"name it with its scheme: http://{server}",
    )
