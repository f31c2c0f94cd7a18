"""The application, and the server that runs it."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from penstock.schemas.errors import Unreachable
from penstock.schemas.jobs import ProblemDetails
from penstock.service import problems
from penstock.service.routes import agents, documents, health, pages, plans, runs
from penstock.service.routes.bodies import BODY_MODELS
from penstock.service.security import answers
from penstock.service.services import Service
from penstock.service.settings import Settings

GRACE_S = 5

log = logging.getLogger("penstock.service")


def create_app(settings: Settings | None = None) -> FastAPI:
    """The application; its parts start and stop with its lifespan."""
    service = Service(settings or Settings.load())

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
        description="Plans pipeline-parallel training, proves how good the plan is, and runs it.",
        lifespan=lifespan,
        separate_input_output_schemas=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    problems.install(app)
    answers.install(app, service.settings)
    for routes in (plans, documents, runs, agents, health, pages):
        app.include_router(routes.router)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def serve(settings: Settings | None = None) -> None:
    """Serve until SIGINT or SIGTERM; logs one line with the URL when it listens.

    Raises UnsupportedRequest for an address beyond loopback that was not allowed, Conflict or Unreachable when the
    database or the port cannot be used.
    """
    settings = settings or Settings.load()
    settings.refuse_open_doors()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    app = create_app(settings)
    service: Service = app.state.service
    service.database.create()
    listener = _listen(settings)
    host, port = listener.getsockname()[:2]
    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=60
    )
    _Server(config, service).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Wakes everybody who waits before it waits for their connections to end."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End at SIGINT and SIGTERM; unlike uvicorn's own, without raising them again when all is done."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.notifier.close()
        await super().shutdown(sockets)


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
            remedy="choose another port, or end what uses this one",
        ) from None
    return listener


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        known = schema.setdefault("components", {}).setdefault("schemas", {})
        models: list[type[BaseModel]] = [ProblemDetails, *BODY_MODELS.values()]
        _, extra = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        schema["components"]["schemas"] = extra["$defs"] | known
        app.openapi_schema = schema
    return app.openapi_schema
