"""The HTML report: one file, nothing from outside, and a script that draws what the judge said.

The page's own script runs in V8 against a small stand-in for a browser's document that records what is drawn.
"""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from py_mini_racer import MiniRacer

from penstock.report.page import html_report
from penstock.schemas.plan import PlanFile
from penstock.schemas.trace import Trace
from penstock.solvers.problem import Problem
from penstock.solvers.timeline import Timeline

DOCUMENT = """
"use strict";
var drawn = [], texts = [], listeners = {}, frames = [], nodes = {};
function pen(owner) {
  return { setTransform() {}, strokeRect(...box) { owner.selection = box; }, lineWidth: 1, font: "", textBaseline: "",
    fillRect(x, y, w, h) { drawn.push([owner.name, this.fillStyle, x, y, w, h]); },
    fillText(text, x, y) { texts.push([owner.name, text]); } };
}
function element(name) {
  const made = { name, style: {}, clientWidth: 950, hidden: false, textContent: "", handlers: {},
    addEventListener(kind, handler) { made.handlers[kind] = handler; },
    setPointerCapture() {}, getContext() { return made.pen || (made.pen = pen(made)); } };
  nodes[name] = made;
  return made;
}
function figure(name) {
  const parts = { "canvas.timeline": element(name + " timeline"), "canvas.memory": element(name + " memory"),
    ".about": element(name + " about") };
  return { getAttribute() { return name; }, querySelector(which) { return parts[which]; } };
}
var document = { documentElement: {}, querySelectorAll() { return Object.keys(embedded).map(figure); },
  getElementById(name) { return { textContent: embedded[name] }; } };
var window = { devicePixelRatio: 2, addEventListener() {}, matchMedia() { return { addEventListener() {} }; },
  requestAnimationFrame(step) { frames.push(step); },
  getComputedStyle() { return { getPropertyValue(name) { return name; } }; } };
function settle() { drawn = []; texts = []; while (frames.length) frames.shift()(); }
function press(key) {
  nodes["timeline-predicted timeline"].handlers.keydown({ key, preventDefault() {} });
  settle();
}
function move(x, y) {
  nodes["timeline-predicted timeline"].handlers.pointermove({ offsetX: x, offsetY: y });
  settle();
}
"""


class Parts(HTMLParser):
    """Collects scripts by id (the page's own under ``code``) and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, str] = {}
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self._open: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.fetched += [str(given[name]) for name in ("src", "href", "data", "action") if name in given]
        self._open = (given.get("id") or "code") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.scripts[self._open] = self.scripts.get(self._open, "") + data


@pytest.fixture
def page(file: PlanFile, problem: Problem, timeline: Timeline) -> str:
    return html_report(file, file.plan, problem, timeline)


def _parts(page: str) -> Parts:
    parts = Parts()
    parts.feed(page)
    return parts


def _browser(page: str) -> MiniRacer:
    parts = _parts(page)
    code = parts.scripts.pop("code")
    browser = MiniRacer()
    browser.eval(f"var embedded = {json.dumps(parts.scripts)};")
    browser.eval(DOCUMENT)
    browser.eval(code)
    return browser


def _value(browser: MiniRacer, expression: str) -> Any:
    return json.loads(str(browser.eval(f"JSON.stringify({expression})")))


def test_nothing_is_fetched(page: str) -> None:
    parts = _parts(page)
    assert parts.fetched == []
    assert "link" not in parts.tags
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)", page)


def test_names_cannot_break_out(page: str) -> None:
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert len(_parts(page).scripts) == 2


def test_tables_hold_what_the_timeline_shows(page: str) -> None:
    for text in ("node0/2", "forward", "all plans of this request", "25.0 %", "80 ns", "round robin", "100 ns"):
        assert text in page


def test_the_script_draws_every_block_where_it_belongs(page: str) -> None:
    """950 pixels less 150 for labels and 4 of margin for 100 ns: 7.96 pixels a nanosecond."""
    with _browser(page) as browser:
        assert _value(browser, "window.penstock.views[0].drawn") == (5 + 4) + 2 * (3 + 3)
        forward = [box for box in _value(browser, "drawn") if box[:2] == ["timeline-predicted timeline", "--F"]]
        assert [box[2] for box in forward] == pytest.approx([150, 150 + 79.6, 150 + 12 * 7.96, 150 + 22 * 7.96])
        assert [box[4] for box in forward] == pytest.approx([78.6] * 4)
        assert ["timeline-predicted timeline", "node0/1 [1]"] in _value(browser, "texts")
        memory = [box for box in _value(browser, "drawn") if box[:2] == ["timeline-predicted memory", "--F"]]
        assert len(memory) == 3


def test_keys_zoom_move_and_choose(page: str) -> None:
    with _browser(page) as browser:
        browser.eval('press("+")')
        assert _value(browser, "[window.penstock.views[0].from, window.penstock.views[0].to]") == [25, 75]
        browser.eval('press("ArrowRight")')
        assert _value(browser, "window.penstock.views[0].from") == 35
        browser.eval('press("0")')
        assert _value(browser, "[window.penstock.views[0].from, window.penstock.views[0].to]") == [0, 100]
        browser.eval('press("ArrowDown")')
        browser.eval('press("n")')
        assert _value(browser, 'nodes["timeline-predicted about"].textContent') == (
            "node0/1: forward, micro-batch 0, stage 1, 12 ns to 22 ns (10 ns)"
        )
        browser.eval('press("n")')
        assert "backward, micro-batch 0" in _value(browser, 'nodes["timeline-predicted about"].textContent')
        browser.eval('for (let i = 0; i < 99; i++) press("-")')
        browser.eval('for (let i = 0; i < 99; i++) press("+")')
        assert _value(browser, "window.penstock.views[0].to - window.penstock.views[0].from") == 20


def test_hovering_describes_the_block_below(page: str) -> None:
    with _browser(page) as browser:
        height = _value(browser, "window.penstock.views[0].laneHeight")
        browser.eval(f"move({150 + 7.96 * 70}, {height * 0.4})")
        assert _value(browser, 'nodes["timeline-predicted about"].textContent') == (
            "node0/0: backward, micro-batch 1, stage 0, 64 ns to 84 ns (20 ns)"
        )
        browser.eval(f"move({150 + 7.96 * 55}, {height * 1.9})")
        assert "all-reduce, bucket 0" in _value(browser, 'nodes["timeline-predicted about"].textContent')
        browser.eval(f"move({150 + 7.96 * 98}, {height * 1.4})")
        assert _value(browser, 'nodes["timeline-predicted about"].textContent') == ""


def test_a_trace_adds_the_measured_timeline(file: PlanFile, problem: Problem, timeline: Timeline) -> None:
    trace = Trace.parse(
        {
            "plan_hash": file.plan.content_hash(),
            "predicted_time_per_global_batch_ns": 100,
            "measured_times_per_global_batch_ns": [125, 120, 130],
            "ranks": [
                {
                    "rank": 0,
                    "device": "node0/0",
                    "step": 1,
                    "events": [{"instruction": "0F0", "start_ns": 0, "end_ns": 11}],
                }
            ],
        }
    )
    page = html_report(file, file.plan, problem, timeline, trace=trace)
    assert "125 ns" in page
    assert "-20.0 %" in page
    with _browser(page) as browser:
        assert _value(browser, "window.penstock.views.length") == 2
        assert _value(browser, "window.penstock.views[1].drawn") == 1
        assert _value(browser, 'nodes["timeline-measured memory"].hidden') is True


def test_the_map_shows_who_holds_what(page: str) -> None:
    assert "<title>node0/1 (cpu): stage 1</title>" in page
    assert page.count('<rect class="device"') == 3
