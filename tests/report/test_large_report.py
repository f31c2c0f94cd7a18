"""The report of 1,024 devices: one screen says what the plan is, equal devices are one row, the rest is on demand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Watched, barriers
from large_plans import large_plan_file
from playwright.sync_api import Browser
from test_page import _parts

from penstock.report.drawing.picture import Lane, Picture, Strip
from penstock.report.memory_curves import peaks
from penstock.report.plan_files import page

MOST_PX = 3000
LAPTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def report() -> str:
    """992 of 1,024 devices hold four stages."""
    return page(large_plan_file())


@pytest.fixture(scope="module")
def address(report: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report, encoding="utf-8")
    return path.as_uri()


def test_equal_devices_are_counted_and_idle_ones_named(report: str) -> None:
    assert "4 stages on 992 devices; 32 of the cluster&#39;s 1,024 stay idle" in report
    assert "32 of 1,024 devices stay idle: node124 … node127." in report
    assert report.count("<th scope=row>node0/0 ×248</th>") == 1 + 8, "a row of devices, and one for each operation"
    assert "<title>stage 3: node93 … node123 (248 devices)</title>" in report
    assert "<title>not used: node124 … node127 (32 devices)</title>" in report
    lanes: list[dict[str, Any]] = json.loads(_parts(report).scripts["timeline-data"])["lanes"]
    assert len(lanes) == 992
    assert [number for number, lane in enumerate(lanes) if "like" not in lane] == [0, 248, 496, 744]


def test_no_row_of_numbers_is_a_headline(report: str) -> None:
    text = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]+>", " ", report, flags=re.DOTALL)
    assert not re.search(r"\d+(:\d+){2,}", text)


@pytest.mark.cases(1)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("viewport", [LAPTOP, PHONE], ids=["laptop", "phone"])
def test_it_is_short_until_something_is_opened(browser: Browser, address: str, viewport: Any) -> None:
    with Watched(browser, viewport=viewport) as seen:
        seen.goto(address)
        seen.wait_for_selector("figure[data-mounted]")
        assert seen.evaluate("document.documentElement.scrollHeight") <= MOST_PX
        assert seen.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        assert seen.evaluate("penstockTimeline.views[0].rows.rows.map((row) => row.alike)") == [248] * 4
        assert barriers(seen) == []
        if viewport is LAPTOP:
            assert seen.locator(".lanes-scroller").bounding_box()["y"] < viewport["height"]  # type: ignore[index]
        part = seen.locator("details#cluster")
        part.locator("summary").first.press("Enter")
        assert part.locator("svg.map-svg").is_visible()
        seen.keyboard.press("Tab")
        assert seen.evaluate("document.activeElement.getAttribute('aria-label')") == "Cluster map"
        seen.keyboard.press("Escape")
        assert part.get_attribute("open") is None, "Escape closes the part, and its heading has the focus"
        assert seen.evaluate("document.activeElement.parentElement.id") == "cluster"
        seen.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        highest = "Math.max(...[...document.querySelectorAll('.scroll:not(.map)')].map((each) => each.offsetHeight))"
        assert seen.evaluate(highest) <= 36 * 16, "long tables scroll in a frame"
        assert seen.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        assert barriers(seen) == []


def test_all_cards_have_one_scale() -> None:
    """Two kinds of devices, one with half of the other's peak: its curve is half as high, on the same 105 bytes."""
    times = np.array([0, 50])
    lanes = tuple(
        Lane(f"n/{i}", i, (i,), times, np.array([0, peak]), 100, np.zeros(2, np.int64))
        for i, peak in enumerate((100, 50))
    )
    shown = peaks(Picture(100, 1, (Strip.nothing(), Strip.nothing()), lanes))
    tops = [
        min(map(float, re.findall(r"V([\d.]+)H", path))) for path in re.findall(r'class="curve" d="([^"]+)"', shown)
    ]
    assert tops == pytest.approx([30 * (1 - 100 / 105), 30 * (1 - 50 / 105)], abs=0.06)
    assert len(set(re.findall(r'class="capacity" d="([^"]+)"', shown))) == 1
