"""Pages for people: they name what is there, and nothing that a document holds becomes markup."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import httpx

from penstock.client import Client
from penstock.schemas.request import PlanRequest
from penstock.service.samples import tiny_profile, tiny_request


class Page(HTMLParser):
    """The tags and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]


def test_the_index_leads_to_the_report(client: Client):
    http: httpx.Client = client._http
    profile: Any = tiny_profile() | {"name": "</script><script>alert(1)</script><b>"}
    job = client.plan(PlanRequest.parse(tiny_request() | {"profile": profile}))
    index = http.get("/")
    assert index.status_code == 200
    page = Page(index.text)
    assert f"/plans/{job.id}" in page.links
    assert "script" not in page.tags
    assert all(link.startswith("/") for link in page.links)
    assert "default-src 'none'" in index.headers["content-security-policy"]
    plain = client.plan(PlanRequest.parse(tiny_request()))
    tags = [Page(http.get(f"/plans/{one.id}").raise_for_status().text).tags for one in (job, plain)]
    assert tags[0].count("script") == tags[1].count("script") > 0
    assert "b" not in tags[0]


def test_a_report_that_is_not_there(client: Client):
    assert client._http.get("/plans/nobody").status_code == 404
    assert client._http.get("/runs/nobody").status_code == 404
