"""The documentation as a site: every page is reached, every link and anchor leads somewhere, and it can be read."""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Watched, barriers
from playwright.sync_api import Browser
from repository import ROOT

pytestmark = pytest.mark.tier("ci")

DECISIONS = ROOT / "docs/decisions"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built without a warning."""
    place = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(place)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return place


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log no line per request."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The address of a server of the site."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_every_page_is_there(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= {path.parent.name for path in site.glob("*/index.html")}


@pytest.mark.cases(1)
@pytest.mark.parametrize(("page", "scheme"), [("", "light"), ("placing/", "dark"), ("operating/", "light")])
def test_a_page_can_be_read(browser: Browser, address: str, page: str, scheme: str) -> None:
    """With links, tables, shell, Python and comments; in either colours, without anything from elsewhere."""
    with Watched(browser, allowed=(address, "data:"), color_scheme=scheme) as seen:
        seen.goto(address + page)
        assert barriers(seen) == []


def test_a_phone_scrolls_down_only_and_a_search_finds(browser: Browser, address: str) -> None:
    with Watched(browser, allowed=(address, "data:"), viewport={"width": 375, "height": 740}) as seen:
        for page in ("cli/", "glossary/"):
            seen.goto(address + page)
            assert seen.evaluate("document.documentElement.scrollWidth") <= 375
        seen.get_by_text("Type to start searching").wait_for(state="attached")  # hidden, until the search is opened
        seen.locator("label[for=__search].md-header__button").click()
        seen.get_by_placeholder("Search").press_sequentially("hostlist")
        seen.locator(".md-search-result__link").first.wait_for()


@pytest.mark.tier("quick")
def test_every_decision_is_listed() -> None:
    listed = (DECISIONS / "index.md").read_text()
    for path in DECISIONS.glob("0*.md"):
        title = path.read_text().splitlines()[0].removeprefix("# ")
        assert f"- [{title}]({path.name})" in listed
