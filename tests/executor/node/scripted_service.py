"""A service whose answers a test chooses: the sync call over real HTTP, with a record of everything received."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from penstock.schemas.api.agents import AgentEvent, Assignment, LogRequest, SyncReply, SyncRequest

LIMIT_S = 180.0
"""The longest wait for an event: it only ends a test whose event never comes."""
HOLD_S = 20.0


class ScriptedService:
    """``wish`` says what the agent shall have, ``wait_for`` waits for events, ``close`` hangs up, ``open`` comes back.

    ``answer_with`` (status, body) answers every call so; ``forget_acks`` leaves that many replies without their ack.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._wishes: tuple[Assignment, ...] = ()
        self._version = 1
        self._closing = False
        self.requests: list[SyncRequest] = []
        self.events: list[AgentEvent] = []
        self.answer_with: tuple[int, bytes] | None = None
        self.forget_acks = 0
        self.log_wishes: tuple[LogRequest, ...] = ()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.open()
        self._port = self._server.server_address[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                status, body = service._answer(self.path, self.rfile.read(length))
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.send_header("connection", "close")
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = False

            def handle_error(self, *_: object) -> None:
                """Ignore that the agent hung up, which is the purpose of a held call."""

        self._closing = False
        self._server = Server(("127.0.0.1", self._port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        if self._server is None:
            return
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._server = None

    def wish(self, *assignments: Assignment) -> None:
        with self._news:
            self._wishes = assignments
            self._version += 1
            self._news.notify_all()

    def wait_for(self, kind: str, count: int = 1) -> list[AgentEvent]:
        """Wait for the first ``count`` events of this kind, and return them."""
        return self.wait_until(lambda: [event for event in self.events if event.kind == kind], count, kind)

    def wait_until(self, select: Callable[[], list], count: int = 1, what: str = "") -> list:
        with self._news:
            arrived = self._news.wait_for(lambda: len(select()) >= count, LIMIT_S)
            assert arrived, f"no {what} within {LIMIT_S} s; there were {self.events}"
            return select()

    def _answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        request = SyncRequest.model_validate_json(body)
        with self._news:
            self.requests.append(request)
            assert path == "/v1/agents/node:sync"
            if self.answer_with is not None:
                self._news.notify_all()
                return self.answer_with
            ack = self.events[-1].sequence if self.events else 0
            self.events += [event for event in request.events if event.sequence > ack]
            self._news.notify_all()
            if request.hold and not request.events and request.state_version == self._version:
                until, version, calls = time.monotonic() + HOLD_S, self._version, len(self.requests)
                self._news.wait_for(
                    lambda: self._closing or self._version != version or len(self.requests) > calls,
                    until - time.monotonic(),
                )
            ack = self.events[-1].sequence if self.events else 0
            wishes = () if request.log_tails else self.log_wishes
            if request.events and self.forget_acks:
                self.forget_acks -= 1
                ack = 0
            return 200, SyncReply(
                state_version=self._version, assignments=self._wishes, ack=ack, log_wishes=wishes
            ).model_dump_json().encode()


def problem(status: int, detail: str) -> tuple[int, bytes]:
    return status, json.dumps({"status": status, "detail": detail}).encode()
