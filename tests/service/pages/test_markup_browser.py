"""Markup in the name of everything, on all pages and reports in Chromium: nothing runs, and nothing is fetched.

The browser ignores the pages' content security policy here, so that only what the pages write protects them.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from browser import Watched
from pages_read import PAGES
from played_agent import Agent, prepare
from playwright.sync_api import Browser, Page
from service_process import Server

from penstock.examples.tiny import tiny_request
from penstock.service.db.database import Database
from penstock.service.security.keys import Keys

pytestmark = pytest.mark.tier("nightly")

MARKUP = (
    "'\"></script></title></textarea><svg onload=window.pwned=1><script>window.pwned=2</script>"
    "<img src=//pwned.invalid/x onerror=window.pwned=3>"
)
LINK = "javascript:window.pwned=4//"
ADDRESSES = """
[...document.querySelectorAll("*")].flatMap(e => ["href", "src", "action", "formaction", "xlink:href"]
    .map(name => e.getAttribute(name) || "")).filter(value => /^\\s*(javascript:|.*pwned\\.invalid)/i.test(value))
"""
"""Attributes from which a browser fetches, or runs, what a name says."""

HARMLESS = re.compile("status of 4(04|09|22)|cannot be parsed, or is out of range")
"""Chromium's words on refusals, and of a text in an address that a field for a number does not take."""


class Marked:
    """A service all of whose names are ``mark``, with and without a number, and the addresses of its pages."""

    def __init__(self, directory: Path, mark: str) -> None:
        self.mark = mark
        path = directory / "penstock.sqlite"
        database = Database(f"sqlite:///{path}")
        database.create()
        self.key = Keys(database).create("default", mark[:128], ["admin"])[1]
        database.close()
        self.server = Server(path, security="keys", slots=1, agent_timeout_s=600)
        headers = {"Authorization": f"Bearer {self.key}", "Prefer": "wait=60"}
        self.http = httpx.Client(base_url=self.server.url, headers=headers, timeout=90)
        self.agents = [self._agent(name) for name in ("node0", "node1")]

    def _agent(self, name: str) -> Agent:
        agent = Agent(self.server.url, name, models=(self.mark,))
        agent.http.headers.update({"Authorization": f"Bearer {self.key}"})
        number = int(name[-1])
        agent.devices = [{"id": f"{self.mark}{number}/0", "kind": self.mark, "memory_bytes": 16 * 10**9}]
        agent.sync()
        return agent

    def request(self) -> dict[str, Any]:
        """Return the tiny request with marks for names."""
        marked = copy.deepcopy(tiny_request()) | {"planner": "dp"}
        profile, uniform = marked["profile"], marked["topology"]["uniform"]
        profile["name"] = marked["topology"]["name"] = uniform["kind"] = self.mark
        uniform["node_names"] = f"{self.mark}{{}}"
        profile["source"]["description"] = self.mark
        profile["assumptions"] = [self.mark]
        for number, layer in enumerate(profile["layers"]):
            layer |= {"name": f"{self.mark}{number}", "kind": self.mark}
        for tensors in profile["boundaries"]:
            tensors[0]["name"] = self.mark
        profile["measurements"][0]["device_kind"] = self.mark
        return marked

    def post(self, path: str, body: Any) -> Any:
        """Return the answer to a request that is accepted."""
        answer = self.http.post(path, json=body)
        assert answer.status_code in (200, 201, 202), answer.text
        return answer.json()

    def addresses(self) -> Iterator[str]:
        """Yield the pages of all objects, and of missing ones."""
        job = self.post(f"/v1/plans?tag={quote(self.mark[:40], safe='')}", self.request())
        assert job["state"] == "succeeded", job
        sweep = self.post(
            "/v1/sweeps", {"schema_version": 1, "request": self.request(), "over": {"planners": ["dp", "gpipe"]}}
        )
        run = self._run(job["result"]["plan_hash"])
        yield from PAGES
        plan = f"/plans/{job['id']}"
        yield from (f"/jobs/{job['id']}", plan, f"{plan}/report", f"/compare?job={job['id']}", f"/sweeps/{sweep['id']}")
        yield from (f"/runs/{run}", f"/plan?from={job['result']['plan_hash']}", "/runs", "/agents", "/cluster")
        odd = quote(self.mark, safe="")
        yield from (f"/plan?model={odd}&cluster={odd}&planner={odd}&global_batch_size={odd}", f"/fits?model={odd}")
        yield from (f"/plans/{odd}", f"/jobs?tag={odd}", f"/sign-in?next={odd}", f"/{odd}", f"/compare?plan={odd}")

    def _run(self, plan_hash: str) -> str:
        for agent in self.agents:
            agent.sync()
        file = self.http.get(f"/v1/plans/{plan_hash}/plan-file").json()
        run: str = self.post("/v1/runs", {"schema_version": 1, "plan": file, "model": self.mark, "steps": 3})["id"]
        prepare(self.agents, run)
        self.agents[0].tell("warning", run, rank=0, step=1, text=self.mark)
        failed = {"reason": self.mark, "instruction": self.mark, "last_lines": [self.mark], "is_final": True}
        self.agents[0].tell("rank_failed", run, rank=0, **failed)
        self.agents[0].sync()
        return run

    def close(self) -> None:
        """End it; it met no internal error."""
        for agent in self.agents:
            agent.http.close()
        self.http.close()
        assert self.server.stop() == 0
        assert "Traceback" not in self.server.text, self.server.text


def look(page: Page, where: str) -> None:
    """Open all that is folded, point at all that has something to say, and look what that has done."""
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true })")
    for place in page.locator("figure svg rect, figure canvas, [title], svg a, th button").all()[:12]:
        place.dispatch_event("mouseover")
        place.dispatch_event("mousemove")
        place.dispatch_event("focus")
    page.wait_for_timeout(100)
    assert page.evaluate("window.pwned") is None, where
    assert page.evaluate(ADDRESSES) == [], where


def test_the_markup_would_run(browser: Browser):
    page = browser.new_page()
    page.set_content(f"<p>{MARKUP}")
    assert page.evaluate("window.pwned") is not None
    page.set_content(f"<a href='{LINK}'>a</a>")
    assert page.evaluate(ADDRESSES) == [LINK]
    page.close()


@pytest.mark.parametrize("mark", [MARKUP, LINK], ids=["markup", "link"])
def test_no_name_is_markup(browser: Browser, tmp_path: Path, mark: str):
    marked = Marked(tmp_path, mark)
    try:
        url = marked.server.url
        watching = Watched(browser, allowed=(url, "file:", "data:", "blob:"), base_url=url, bypass_csp=True)
        with watching as page:
            page.on("dialog", lambda dialog: watching.complaints.append(f"dialog {dialog.message}"))
            page.goto("/sign-in")
            page.get_by_label(re.compile("key", re.IGNORECASE)).first.fill(marked.key)
            page.keyboard.press("Enter")
            page.wait_for_url(f"{url}/")
            shown = 0
            for address in marked.addresses():
                page.goto(address, wait_until="networkidle" if address.startswith("/plans/") else "load")
                shown += mark[:20] in page.content() or mark[:20] in page.evaluate("document.body.innerText")
                look(page, address)
            assert shown > 10, "the names are there to be seen"
            watching.complaints = [one for one in watching.complaints if not HARMLESS.search(one)]
    finally:
        marked.close()
