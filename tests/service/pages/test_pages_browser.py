"""The service in Chromium, as people use it: from the form to the plan, the comparison and a run that trains."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Watched, barriers
from pages_read import PAGES
from played_agent import Agent, prepare
from playwright.sync_api import Browser, Locator, Page, expect
from service_process import Server

from penstock.client import Client
from penstock.examples.tiny import tiny_plan_file, tiny_request
from penstock.schemas.api.jobs import JobOut
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest

MOST_BYTES = 300_000
MOST_PX = 3000
NARROW = {"width": 375, "height": 700}


@pytest.fixture(scope="module")
def shared_server(own_server: Server) -> Server:
    """Agents are played on it, and its lists are looked at."""
    return own_server


@pytest.fixture(scope="module")
def planned(shared_server: Server) -> JobOut:
    """A job whose plan is there."""
    return shared_server.client.plans.create(PlanRequest.parse(tiny_request() | {"planner": "dp"}))


@pytest.fixture
def agents(shared_server: Server) -> Iterator[list[Agent]]:
    """node0 and node1, as the tiny plan names them."""
    players = [Agent(shared_server.url, "node0"), Agent(shared_server.url, "node1")]
    for agent in players:
        agent.sync()
    yield players
    for agent in players:
        agent.sync(leaving=True)
        agent.http.close()


def watched(browser: Browser, server: Server, **options: Any) -> Watched:
    """Open a page of the service that must not complain, nor fetch from anywhere else."""
    expect.set_options(timeout=60_000)
    return Watched(browser, allowed=(server.url,), base_url=server.url, **options)


def drawn(chart: Locator) -> int:
    """Return how many lines and points a chart has."""
    return chart.locator("path, circle").count()


def test_from_the_form_to_a_plan(browser: Browser, shared_server: Server):
    with watched(browser, shared_server) as page:
        received = Received(page)
        page.goto("/")
        page.get_by_role("link", name="a profile and a cluster as JSON").click()
        page.get_by_label("Global batch", exact=True).fill("8")
        expect(page.get_by_text("Options of dapple")).to_be_hidden()
        page.get_by_text("Planner", exact=True).first.click()
        page.get_by_label("Planner", exact=True).select_option("dapple")
        expect(page.get_by_text("Options of dapple")).to_be_visible()
        assert page.get_by_label("Schedule", exact=True).locator("option:not([hidden])").all_inner_texts() == [
            "auto",
            "early-backward",
            "gpipe",
            "advance-forward",
        ]
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url(re.compile("/jobs/"))
        expect(page.get_by_role("link", name="Look at the plan")).to_be_visible()
        expect(page.locator("[data-events] tr").last).to_contain_text("succeeded")
        assert drawn(page.locator("[data-chart]")) >= 2, "the best plan and the bound are drawn"
        expect(page.locator("[data-figure=gap]")).to_contain_text("%")
        received.begin()
        page.get_by_role("link", name="Look at the plan").click()
        page.wait_for_selector("figure[data-mounted]")
        assert received.total() <= MOST_BYTES, received.sizes
        assert page.evaluate("window.penstockTimeline.views.length") == 1
        expect(page.locator("svg.map-svg")).to_be_visible()
        page.get_by_role("link", name="Plan again with changes").click()
        expect(page.get_by_label("Global batch", exact=True)).to_have_value("8")
        expect(page.get_by_label("Planner", exact=True)).to_have_value("dapple")


@pytest.mark.cases(1)
@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 800}, NARROW], ids=["laptop", "phone"])
def test_a_plan_is_there_to_be_used(browser: Browser, shared_server: Server, planned: JobOut, viewport: Any):
    with watched(browser, shared_server, viewport=viewport) as page:
        page.goto(f"/plans/{planned.id}")
        page.wait_for_selector("figure[data-mounted]")
        assert page.evaluate("document.documentElement.scrollHeight") <= MOST_PX, "until something is opened"
        assert page.locator("main .primary").all_inner_texts() == ["Use this plan"]
        expect(page.locator("#run")).to_be_hidden()
        page.get_by_role("link", name="Use this plan").press("Enter")
        expect(page.locator("#take > summary")).to_be_focused()
        expect(page.locator("#run")).to_have_text("penstock run plan.json --job mytrain:job --check")
        expect(page.locator("#slurm")).to_be_visible()
        assert barriers(page) == []


def test_all_with_the_keyboard(browser: Browser, shared_server: Server):
    with watched(browser, shared_server) as page:
        page.goto("/plan?example=tiny&planner=dp&global_batch_size=4")
        page.keyboard.press("Tab")
        expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
        page.keyboard.press("Enter")
        for _ in range(60):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement.textContent") == "Plan":
                break
        page.keyboard.press("Enter")
        page.wait_for_url(re.compile("/(jobs|plans)/"))
        if "/jobs/" in page.url:
            page.get_by_role("link", name="Look at the plan").press("Enter")
        page.wait_for_selector("figure[data-mounted]")
        head = page.get_by_role("columnheader", name="parameters").first.get_by_role("button")
        head.press("Enter")
        expect(page.locator("th[aria-sort=ascending]")).to_have_count(1)
        head.press("Enter")
        expect(page.locator("th[aria-sort=descending]")).to_have_count(1)


def test_what_is_wrong_is_said_and_focused(browser: Browser, shared_server: Server):
    watching = watched(browser, shared_server)
    with watching as page:
        page.goto("/plan?example=tiny&planner=dp")
        page.get_by_text("Search", exact=True).click()
        page.get_by_label("Time limit").fill("soon")
        page.get_by_label("Profile as JSON").fill("{}")
        with page.expect_response(lambda answer: answer.request.method == "POST") as sent:
            page.evaluate("document.querySelector('form.form').requestSubmit()")
        assert sent.value.status == 422
        expect(page.get_by_role("alert")).to_be_focused()
        limit = page.get_by_label("Time limit")
        expect(limit).to_have_attribute("aria-invalid", "true")
        expect(limit).to_have_accessible_description(re.compile("soon"))
        assert len(watching.complaints) == 1, "Chromium itself tells of an answer that is a 422"
        assert "422" in watching.complaints.pop()


@pytest.mark.tier("nightly")
def test_a_browser_that_goes_away_and_back(browser: Browser, shared_server: Server):
    """Back leads to the form as it was sent; a job goes on without its tab, and other tabs and a reload show it."""
    with watched(browser, shared_server) as page:
        page.goto("/plan?example=tiny&planner=dp")
        page.get_by_label("Global batch", exact=True).fill("12")
        page.get_by_text("Training", exact=True).click()
        page.get_by_label("weight stashing").check()
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url(re.compile("/(jobs|plans)/"))
        page.go_back()
        expect(page.get_by_label("Global batch", exact=True)).to_have_value("12")
        expect(page.get_by_label("weight stashing")).to_be_checked()
        expect(page.get_by_label("synchronous")).to_be_checked()
        page.goto("/plan?model=gpt2-small&cluster=1x4xV100&global_batch_size=48&effort=quick")
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url(re.compile("/jobs/"))
        address = page.url
    with watched(browser, shared_server) as page:
        page.goto(address)
        page.reload()
        expect(page.get_by_role("link", name="Look at the plan")).to_be_visible()
        expect(page.locator("[data-events] tr").last).to_contain_text("succeeded")
    assert "Traceback" not in "".join(shared_server.log)


def test_a_plan_file_is_opened(browser: Browser, shared_server: Server, tmp_path: Path):
    """A file chosen in Chromium: cut off, and then whole; what is wrong is said and focused."""
    watching = watched(browser, shared_server)
    whole = PlanFile.parse(tiny_plan_file()).text()
    with watching as page:
        page.goto("/jobs")
        page.get_by_role("link", name="Open a plan file").click()
        for text, status in ((whole[:-20], 422), (whole, 303)):
            (tmp_path / "plan.json").write_text(text)
            page.get_by_label("Plan file", exact=True).set_input_files(tmp_path / "plan.json")
            expect(page.get_by_label("Plan file as JSON")).to_have_value(text)
            with page.expect_response(lambda answer: answer.request.method == "POST") as sent:
                page.get_by_role("button", name="Open").press("Enter")
            assert sent.value.status == status
            if status == 422:
                expect(page.get_by_role("alert")).to_be_focused()
                expect(page.get_by_role("alert")).to_contain_text("this file is not JSON")
                assert barriers(page) == []
                assert "422" in watching.complaints.pop(), "Chromium itself tells of an answer that is a 422"
        page.wait_for_selector("figure[data-mounted]")
        expect(page.get_by_role("heading", name="tiny on two-nodes")).to_be_visible()


@pytest.mark.tier("nightly")
def test_a_comparison_fills_in(browser: Browser, shared_server: Server):
    with watched(browser, shared_server) as page:
        page.goto("/plan?example=tiny&planner=dp&planners=dp,gpipe,model-parallel,wpipe")
        page.get_by_role("button", name="Compare").click()
        page.wait_for_url(re.compile("/sweeps/"))
        expect(page.get_by_role("status")).to_contain_text("4 of 4 have ended")
        points = page.locator("[data-pareto] a")
        expect(points).to_have_count(3)
        expect(page.locator("[data-rows] tbody tr")).to_have_count(4)
        expect(page.get_by_text("unsupported")).to_be_visible()
        page.get_by_label("Throughput against", exact=True).select_option("devices")
        points.first.focus()
        expect(page.locator("[data-pareto] .label")).to_contain_text("samples/s")
        page.get_by_role("button", name="samples/s").click()
        rates = page.locator("[data-rows] tbody tr").evaluate_all("rows => rows.map(r => Number(r.dataset.throughput))")
        assert rates[:3] == sorted(rates[:3])
        assert rates[3] == 0, "rows without a value stay last"
        with page.expect_navigation():
            points.first.press("Enter")
        assert "/plans/sha256:" in page.url


def test_a_run_as_it_trains(browser: Browser, shared_server: Server, agents: list[Agent], client: Client):
    run = client.runs.create(PlanFile.parse(tiny_plan_file()), "gpt", wait=False, steps=4, trace_steps=1)
    prepare(agents, run.id)
    with watched(browser, shared_server) as page:
        page.goto("/agents")
        expect(page.get_by_role("row")).to_have_count(3)
        page.goto(f"/runs/{run.id}")
        expect(page.get_by_text("0 of 4", exact=True)).to_be_visible()
        agents[1].tell("progress", run.id, rank=1, step=0, losses=[2.5, 2.25], times_ns=[900_000, 800_000])
        agents[1].tell("evaluation", run.id, step=2, loss=2.375)
        agents[1].sync()
        expect(page.get_by_text("2 of 4", exact=True)).to_be_visible()
        assert drawn(page.locator("[data-chart=loss]")) >= 1
        for rank, agent in enumerate(agents):
            events = [{"instruction": f"{rank}F0", "start_ns": 0, "end_ns": 5_000_000}]
            trace = {"rank": rank, "device": f"node{rank}/0", "step": 3, "events": events}
            agent.tell("trace", run.id, rank_trace=trace)
            losses = [2.5, 2.25, 2.0, 1.75] if rank else [None] * 4
            agent.tell("rank_done", run.id, rank=rank, losses=losses, step_times_ns=[900_000] * 4)
            agent.sync()
        expect(page.get_by_role("status").first).to_contain_text("succeeded")
        expect(page.get_by_text("4 of 4", exact=True)).to_be_visible()
        page.reload()
        page.wait_for_selector("figure[data-mounted]")
        page.goto("/cluster")
        expect(page.get_by_role("cell", name="node0/0")).to_be_visible()


@pytest.mark.tier("nightly")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_in_each_scheme_are_narrow_enough(browser: Browser, shared_server: Server, planned: JobOut, scheme: Any):
    with watched(browser, shared_server, color_scheme=scheme, viewport=NARROW) as page:
        received = Received(page)
        for address in (*PAGES, f"/jobs/{planned.id}", f"/plans/{planned.id}", f"/compare?job={planned.id}"):
            received.begin()
            page.goto(address, wait_until="networkidle" if address.startswith("/plans") else "load")
            assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], address
            assert received.total() <= MOST_BYTES, (address, received.sizes)
            back, ink = page.evaluate(
                "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
            )
            assert (lightness(back) < lightness(ink)) == (scheme == "dark"), address
        page.get_by_role("button", name="light" if scheme == "dark" else "dark").click()
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (lightness(back) > 128) == (scheme == "dark"), "the button chooses the other colours"
        page.reload()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == back, "and they are kept"


def test_pages_are_readable_without_a_script(browser: Browser, shared_server: Server, planned: JobOut):
    with watched(browser, shared_server, java_script_enabled=False) as page:
        page.goto(f"/plans/{planned.id}")
        expect(page.get_by_role("heading", name="tiny on two-nodes")).to_be_visible()
        expect(page.get_by_role("row").nth(1)).to_be_visible()
        page.goto("/plan?example=tiny&planner=dp")
        page.get_by_role("button", name="Plan", exact=True).click()
        page.wait_for_url(re.compile("/plans/|/jobs/"))
        if "/jobs/" in page.url:  # a slower machine: the page of the job loads itself again until the plan is there
            page.get_by_role("link", name="Look at the plan").click()
        expect(page.get_by_role("heading", name="tiny on two-nodes")).to_be_visible()
        assert "/plans/" in page.url


class Received:
    """The sizes of what a page has fetched, as it came over the wire."""

    def __init__(self, page: Page) -> None:
        self.sizes: dict[str, int] = {}
        page.on("requestfinished", self._take)

    def begin(self) -> None:
        """Count from here."""
        self.sizes.clear()

    def total(self) -> int:
        """Return all bytes of bodies so far."""
        return sum(self.sizes.values())

    def _take(self, request: Any) -> None:
        self.sizes[request.url] = request.sizes()["responseBodySize"]


def lightness(colour: str) -> float:
    """Return the mean of ``rgb(r, g, b)``."""
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3
