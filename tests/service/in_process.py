"""A service within the test's own process: no port, no worker, and every answer at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from penstock.service.http.app import create_app
from penstock.service.settings import Settings


@asynccontextmanager
async def in_process(directory: Path, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of an app with a separate database; errors of the app are answers, as strangers see them."""
    values = {"database": str(directory / "in-process.sqlite"), "slots": 0, "warm_up": False, **settings}
    app = create_app(Settings.load(**values))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
    ):
        yield client
