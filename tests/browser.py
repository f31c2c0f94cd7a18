"""Debian's Chromium for tests of pages, without a window and without a separate network.

``browser`` lives for one file of tests: Playwright's synchronous interface keeps an event loop running in the thread
that started it, so that a browser of the whole session would break every later test that calls ``asyncio.run``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 60_000
"""Longest time that anything may take on a busy machine, in milliseconds."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a file; each test makes its own context or page."""
    if not CHROMIUM.exists():
        pytest.skip("install Debian's chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS), timeout=PATIENCE_MS)
        yield started
        started.close()


class Watched:
    """A page that must neither complain nor fetch from elsewhere: leaving the block fails with what it did.

    ``with Watched(browser) as page: page.goto(…)``; options go to a browser context (``color_scheme``,
    ``viewport``, …). Addresses that begin with one of ``allowed`` may be fetched: the page's own server.
    """

    def __init__(self, browser: Browser, *, allowed: tuple[str, ...] = ("file:", "data:"), **options: object) -> None:
        self.complaints: list[str] = []
        self._allowed = allowed
        self._context = browser.new_context(**options)  # type: ignore[arg-type]

    def __enter__(self) -> Page:
        self._context.set_default_timeout(PATIENCE_MS)
        page = self._context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("request", lambda request: self._fetch(request.url))
        return page

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()
        if error is None:
            assert self.complaints == []

    def _hear(self, level: str, text: str) -> None:
        if level in ("error", "warning"):
            self.complaints.append(f"console {level}: {text}")

    def _fetch(self, address: str) -> None:
        if not address.startswith(self._allowed):
            self.complaints.append(f"fetched {address}")


def barriers(page: Page) -> list[str]:
    """Return what axe finds serious or critical for people who cannot see, point or tell colours apart."""
    violations = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {node['html'][:120]}"
        for each in violations
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"][:3]
    ]
