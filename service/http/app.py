"""The application, and the server that runs it."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from types import FrameType

import uvicorn
from anyio.to_thread import run_sync
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from penstock.schemas.errors import Unreachable
from penstock.service import logs, problems
from penstock.service.db.alone import OtherServices
from penstock.service.http import openapi
from penstock.service.http.observing import Observing
from penstock.service.http.routes import (
    agents,
    documents,
    exports,
    health,
    jobs,
    pages,
    plans,
    questions,
    reference,
    runs,
    sessions,
    sweeps,
)
from penstock.service.jobs import judging
from penstock.service.pages.templating import unknown_address
from penstock.service.security import refusals, wire
from penstock.service.security.keys import UNHEEDED_REMEDY, unheeded
from penstock.service.services import Service
from penstock.service.settings import Settings
from penstock.workers.forkserver import Forkserver

END_S = 2.0
"""Seconds from a signal and ``drain_s`` until the process ends, whatever its threads and responses do."""
GRACE_S = 5
"""Seconds until the process ends without a signal."""
COMPRESS_FROM_BYTES = 1024
SHARED = (
    "another service, %s, uses the database %s too: both show and solve the same jobs; "
    "for one of its own give this service another --database"
)
ROUTES = (
    jobs,
    exports,
    questions,
    plans,
    sweeps,
    documents,
    runs,
    agents,
    health,
    sessions,
    pages,
    reference,
)
"""Modules with a router, in the order in which they are asked: verbs of a plan come before the plan itself."""

log = logging.getLogger("penstock.service")


def create_app(settings: Settings | None = None, forkserver: Forkserver | None = None) -> FastAPI:
    """Return the application; its parts start and stop with its lifespan."""
    service = Service(settings or Settings.load(), forkserver)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.open()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="Penstock",
        version=version("penstock"),
        description="Plans distributed training, proves how good the plan is, and runs it.",
        lifespan=lifespan,
        separate_input_output_schemas=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    problems.install(app)
    app.add_exception_handler(HTTPException, unknown_address)
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESS_FROM_BYTES, compresslevel=4)
    refusals.install(app, service.authenticator, service.settings)
    openapi.install(app)
    app.add_middleware(Observing, service=service)
    routers = [routes.router for routes in ROUTES]
    for router in routers:
        app.include_router(router)
    return app


def serve(settings: Settings | None = None, forkserver: Forkserver | None = None) -> None:
    """Serve until SIGINT or SIGTERM; logs one line with the URL when it listens. ``forkserver``: one that has started.

    Raises UnsupportedRequest for an address other than loopback that was not allowed, Conflict or Unreachable when
    the database or the port cannot be used.
    """
    settings = settings or Settings.load()
    settings.refuse_unprotected()
    logs.configure(settings.log_format, settings.log_level)
    connections = wire.options(settings)
    app = create_app(settings, forkserver)
    service: Service = app.state.service
    service.database.create(wait_s=settings.database_wait_s)
    if settings.security == "off" and (words := unheeded(service.database)) is not None:
        log.warning("%s; %s", words, UNHEEDED_REMEDY)
    if settings.warm_up:
        judging.load()
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.tls_certificate is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=60, **connections
    )
    server = _Server(config, service)
    with server.capture_signals():  # who reads the next line may end us at once
        log.info("listening on %s", url)
        others = OtherServices(service.database)
        if (other := others.enter(f"process {os.getpid()} at {url}")) is not None:
            log.warning(SHARED, other, service.database.name)
        server.run(sockets=[listener])
    others.leave()


class _Server(uvicorn.Server):
    """A server that shuts down in order: not ready, waiters answered and jobs returned, connections closed."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._handing_back: asyncio.Task[None] | None = None
        self._stop_listening_at = math.inf

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at SIGINT and SIGTERM; unlike uvicorn's own method, do not raise them again at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a graceful shutdown; at the second signal end at once: children die too, leases expire.

        Before it serves nothing was taken that could be lost, and it ends at once as well.
        """
        if self._service.ending:
            os._exit(128 + sig)
        if not self.started:
            os._exit(0)
        self._service.ending = True
        last = threading.Timer(self._service.settings.drain_s + END_S, _end_anyway)
        last.daemon = True
        last.start()
        self._stop_listening_at = time.monotonic() + self._service.settings.drain_s

    async def on_tick(self, counter: int) -> bool:
        """Return whether to stop listening; called ten times a second."""
        if self._service.ending and self._handing_back is None:
            log.info("ending: what waits is answered, running jobs go back to the queue")
            self._service.notifier.close()
            self._service.forkserver.end_loading()
            self._handing_back = asyncio.create_task(run_sync(self._service.worker.stop))
        return await super().on_tick(counter) or time.monotonic() >= self._stop_listening_at


def _end_anyway() -> None:
    """End the process although a thread is still at work, such as in the judge: it has nothing that could be lost."""
    log.warning("ended before all work in progress was done")
    os._exit(0)


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only then
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise Unreachable(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}",
            remedy="choose another port, or stop the program that uses this one",
        ) from None
    return listener
