"""The report in Chromium: what stands where, what keys and pointers do, and that everybody can read it.

Pixels are probed on the canvas; the rest is read from ``penstockTimeline``, the script's own state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
from browser import Watched, barriers
from playwright.sync_api import Browser, Page
from test_runs import averaging, periodic, several

from penstock.examples.tiny import tiny_plan_file
from penstock.planning.explain import explain, judged
from penstock.report.drawing.assets import script, style
from penstock.report.drawing.figure import fetched_figure
from penstock.report.drawing.payload import MAX_BLOCKS, finer, payload
from penstock.report.drawing.picture import LETTERS, Blocks, Lane, Picture, Strip
from penstock.report.plan_files import page, picture
from penstock.schemas.plan import PlanFile
from penstock.schemas.trace import Trace

pytestmark = pytest.mark.tier("ci")

__all__ = ["averaging", "periodic", "several"]

LABEL_PX, RIGHT_PX = 150, 6
SLOWER = 1.25
"""Ratio of the made-up ranks' times to the predicted time."""
LAPTOP = {"width": 1280, "height": 720}


@pytest.fixture(scope="module")
def file() -> PlanFile:
    return PlanFile.parse(tiny_plan_file())


@pytest.fixture(scope="module")
def drawn(file: PlanFile) -> Picture:
    return picture(judged(file))


@pytest.fixture(scope="module")
def trace(file: PlanFile, drawn: Picture) -> Trace:
    """Every predicted operation on both ranks, slower and later."""
    ranks = []
    for number, lane in enumerate(drawn.lanes):
        blocks = drawn.strips[lane.strip].compute
        events = [
            {
                "instruction": f"{blocks.stage[i]}{LETTERS[blocks.kind[i]]}{blocks.number[i]}",
                "start_ns": int(SLOWER * blocks.start_ns[i]),
                "end_ns": int(SLOWER * blocks.end_ns[i]),
            }
            for i in range(len(blocks))
            if blocks.number[i] >= 0
        ]
        ranks.append({"rank": number, "device": lane.device, "step": 3, "events": events})
    total = judged(file).judgement.plan.prediction
    assert total is not None
    return Trace.parse(
        {
            "plan_hash": file.plan.content_hash(),
            "predicted_time_per_global_batch_ns": total.time_per_global_batch_ns,
            "measured_times_per_global_batch_ns": [int(SLOWER * total.time_per_global_batch_ns)],
            "ranks": ranks,
        }
    )


@pytest.fixture(scope="module")
def report(file: PlanFile, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page(file), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def compared(file: PlanFile, trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("compared") / "report.html"
    path.write_text(page(file, trace), encoding="utf-8")
    return path.as_uri()


def _open(page: Page, address: str) -> Callable[[str], Any]:
    """Open a page; return a function that evaluates an expression with ``v``, its first view, and ``d``, a drawing."""
    page.goto(address)
    page.wait_for_function(
        "window.penstockTimeline && penstockTimeline.views.length && penstockTimeline.views[0].firstDrawMs"
    )

    def value(expression: str) -> Any:
        return page.evaluate(
            "(text) => { const v = penstockTimeline.views[0], d = v.controls.drawing; d.draw(); return eval(text); }",
            expression,
        )

    return value


def _colour(value: Callable[[str], Any], x: float, y: float) -> list[int]:
    """Return the colour of the lanes' canvas at a place in CSS pixels."""
    probe = f"[...d.parts.main.getContext('2d').getImageData({x} * d.ratio, {y} * d.ratio, 1, 1).data].slice(0, 3)"
    return list(value(probe))


def test_blocks_stand_where_the_judge_put_them(browser: Browser, report: str, drawn: Picture) -> None:
    """Their place by the formula, and the colour of their kind in their middle, light and dark."""
    for scheme in ("light", "dark"):
        with Watched(browser, viewport=LAPTOP, color_scheme=scheme) as page:
            value = _open(page, report)
            scale = (value("d.width") - LABEL_PX - RIGHT_PX) / drawn.end_ns
            value("v.layers.path = false")
            for number, lane in enumerate(drawn.lanes):
                blocks = drawn.strips[lane.strip].compute
                for i in range(len(blocks)):
                    place = f"{{strip: {lane.strip}, part: 'compute', index: {i}}}"
                    left, right, _top, bottom = value(f"d.box({place}, {number})")
                    assert left == pytest.approx(LABEL_PX + blocks.start_ns[i] * scale, abs=0.01)
                    assert right == pytest.approx(LABEL_PX + blocks.end_ns[i] * scale, abs=0.01)
                    if right - left > 3:
                        shown = _colour(value, (left + 3 * right) / 4, bottom - 2)
                        assert shown == value(f"d.theme.kinds[{blocks.kind[i]}]"), (lane.device, i)
            assert _colour(value, LABEL_PX + 1, value("d.height") - 1) != _colour(value, left + 1, bottom - 3)


@pytest.mark.tier("nightly")
def test_nothing_is_drawn_where_a_device_idles_unless_it_is_asked_why(
    browser: Browser, file: PlanFile, report: str, drawn: Picture
) -> None:
    """The idle layer's pieces are the bubble that ``explain`` splits, to the nanosecond."""
    with Watched(browser, viewport=LAPTOP) as page:
        value = _open(page, report)
        idle_of = {device: each for each in explain(file, what_if=()).idle for device in each.devices}
        for number, lane in enumerate(drawn.lanes):
            pieces = value(
                f"(() => {{ const b = v.strips[{lane.strip}].idle; return Array.from(b.kind, (k, i) => "
                "[KINDS_OF(k), b.start[i], b.end[i]]); })()".replace("KINDS_OF(k)", '"FBIWRUfba<>tgsom"[k]')
            )
            idle = idle_of[lane.device]
            split = {
                "<": idle.fill_ns, ">": idle.drain_ns, "t": idle.transfer_ns, "g": idle.all_reduce_ns,
                "s": idle.other_stages_ns, "o": idle.order_ns, "m": idle.memory_ns,
            }  # fmt: skip
            for letter, total in split.items():
                assert sum(end - start for kind, start, end in pieces if kind == letter) == total
            kind, start, end = max(pieces, key=lambda piece: piece[2] - piece[1])
            x = value(f"d.x({(start + end) / 2})")
            box = value(f"v.rows.bars(v.rows.rowOf.get({number}), true)[0].compute")
            places = [(x + dx, 24 + box[0] + dy) for dx in range(6) for dy in range(3, 9)]
            ground = value("d.theme.ground")
            assert {tuple(_colour(value, *each)) for each in places} == {tuple(ground)}
            value("v.layers.idle = true")
            assert len({tuple(_colour(value, *each)) for each in places}) == 2, "a hatch has two tones"
            page.mouse.move(*_on(page, x, 24 + box[0] + 5))
            page.wait_for_selector(".tip:not([hidden])")
            assert value(f"v.data.names['{kind}']") in page.inner_text(".tip")
            value("v.layers.idle = false")


def _on(page: Page, x: float, y: float, canvas: str = "canvas.lanes") -> tuple[float, float]:
    box = page.locator(canvas).bounding_box()
    assert box is not None
    return box["x"] + x, box["y"] + y


def test_keys(browser: Browser, report: str, drawn: Picture) -> None:
    with Watched(browser, viewport=LAPTOP) as page:
        value = _open(page, report)
        end = drawn.end_ns
        page.focus(".lanes-scroller")

        def seen() -> list[float]:
            return list(value("[v.from, v.to]"))

        page.keyboard.press("+")
        assert seen() == [end / 4, 3 * end / 4]
        page.keyboard.press("ArrowRight")
        assert seen() == pytest.approx([end / 4 + end / 10, 3 * end / 4 + end / 10])
        page.keyboard.press("Home")
        assert seen() == pytest.approx([0, end / 2])
        page.keyboard.press("End")
        assert seen() == pytest.approx([end / 2, end])
        for _ in range(60):
            page.keyboard.press("+")
        assert seen()[1] - seen()[0] == pytest.approx(max(20, end / 1e7))
        page.keyboard.press("0")
        assert seen() == [0, end]
        page.keyboard.press("ArrowDown")
        assert value("v.lane") == 1
        for _ in range(2):
            page.keyboard.press("n")
        about = page.inner_text(".about")
        assert about.startswith("node1/0: backward of micro-batch 0, stage 1; ")
        assert "its device was busy until then with forward of micro-batch 0, stage 1" in about
        page.keyboard.press("[")
        assert "node1/0: forward of micro-batch 0, stage 1" in page.inner_text(".about")
        page.keyboard.press("[")
        assert "activations sent of micro-batch 0, stage 0" in page.inner_text(".about")
        page.keyboard.press("[")
        assert "node0/0: forward of micro-batch 0, stage 0" in page.inner_text(".about")
        page.keyboard.press("m")
        page.keyboard.press("m")
        lasts = drawn.strips[drawn.lanes[0].strip].compute
        assert value("v.measure[1] - v.measure[0]") == lasts.end_ns[0] - lasts.start_ns[0]
        for key, layer in (("c", "path"), ("i", "idle"), ("k", "communication"), ("l", "links")):
            before = value(f"v.layers.{layer}")
            page.keyboard.press(key)
            assert value(f"v.layers.{layer}") is not before
        assert value("d.stats.links") > 0
        page.keyboard.press("/")
        page.keyboard.type("2")
        assert value("v.only") == 2
        assert "micro-batch 2: 4 blocks" in page.inner_text(".about")
        page.keyboard.type("9")
        assert "there are 0 to 3" in page.inner_text(".about")
        page.keyboard.press("Enter")
        page.keyboard.press("Escape")
        assert value("[v.only, v.selected, v.measure]") == [-1, None, None]


def test_pointers(browser: Browser, report: str, drawn: Picture) -> None:
    """Zoom keeps the place under the pointer, and a drag moves it; the small picture's window follows and leads."""
    with Watched(browser, viewport=LAPTOP) as page:
        value = _open(page, report)
        page.mouse.move(*_on(page, 500, 40))
        under = value("d.time(500)")
        page.keyboard.down("Control")
        page.mouse.wheel(0, -300)
        page.keyboard.up("Control")
        page.wait_for_function("penstockTimeline.views[0].zoomed > 2")
        assert value("d.time(500)") == pytest.approx(under, rel=1e-6)
        page.mouse.dblclick(*_on(page, 500, 40))
        page.wait_for_function("penstockTimeline.views[0].zoomed > 5")
        assert value("d.time(500)") == pytest.approx(under, rel=1e-6)
        page.mouse.down()
        page.mouse.move(*_on(page, 560, 40), steps=3)
        page.mouse.up()
        assert value("d.time(560)") == pytest.approx(under, rel=1e-6)
        left = value("v.from")
        page.keyboard.down("Shift")
        page.mouse.wheel(0, 500)
        page.wait_for_function(f"penstockTimeline.views[0].from > {left}")
        page.mouse.down()
        page.mouse.move(*_on(page, 700, 40), steps=3)
        page.mouse.up()
        page.keyboard.up("Shift")
        assert value("v.measure") == pytest.approx(value("[d.time(560), d.time(700)]"), rel=1e-6)
        page.mouse.move(*_on(page, LABEL_PX + 300, 20, "canvas.map"))
        page.mouse.down()
        page.mouse.up()
        middle = 300 / value("d.lanesWidth") * drawn.end_ns
        assert value("(v.from + v.to) / 2") == pytest.approx(middle, rel=0.01)
        page.click("button:text-is('All')")
        box = value("d.box({strip: v.data.lanes[1].strip, part: 'compute', index: 0}, 1)")
        page.mouse.click(*_on(page, (box[0] + box[1]) / 2, (box[2] + box[3]) / 2))
        assert value("[v.lane, v.selected.index]") == [1, 0]
        assert "node1/0: forward of micro-batch 0" in page.inner_text(".about")
        page.click("button:has-text('backward')")
        assert value("[v.shown[1], d.at(0, 0)]") == [0, None]
        page.click("button:has-text('By node')")
        assert value("v.rows.rows.filter((row) => row.node !== undefined).length") == 2


def test_the_address_keeps_the_view(browser: Browser, report: str) -> None:
    with Watched(browser, viewport=LAPTOP) as page:
        value = _open(page, report)
        value("v.zoom(0.25); v.lane = 1; v.step(1); v.layers.idle = true; v.search(2); v.show(v.end / 3, v.end / 4)")
        page.wait_for_function("location.hash.length > 5")
        kept = value("[v.hash, location.hash.slice(1)]")
        assert kept[0] == kept[1]
        with Watched(browser, viewport=LAPTOP) as other:
            again = _open(other, f"{report}#{kept[0]}")
            assert again("v.hash") == kept[0]
            assert again("[v.lane, v.only, v.layers.idle, v.selected.index]") == [1, 2, True, value("v.selected.index")]


def test_measured_blocks_stand_below_the_predicted_ones(browser: Browser, compared: str, drawn: Picture) -> None:
    with Watched(browser, viewport=LAPTOP) as page:
        value = _open(page, compared)
        blocks = drawn.strips[drawn.lanes[0].strip].compute
        assert value("v.end") == int(SLOWER * blocks.end_ns[blocks.number >= 0].max())
        above = value("d.box({strip: v.data.lanes[0].strip, part: 'compute', index: 1}, 0)")
        below = value("d.box({strip: v.data.lanes[0].measured, part: 'compute', index: 1}, 0)")
        assert below[2] >= above[3]
        assert below[0] - LABEL_PX == pytest.approx(SLOWER * (above[0] - LABEL_PX), abs=0.1)
        kind = value("d.theme.kinds[v.strips[v.data.lanes[0].measured].compute.kind[1]]")
        assert _colour(value, (below[0] + 3 * below[1]) / 4, below[3] - 2) == kind
        page.mouse.click(*_on(page, (below[0] + below[1]) / 2, (below[2] + below[3]) / 2))
        assert "(measured)" in page.inner_text(".about")
        assert "measured 25.0 % longer" in page.inner_text(".about")
        words = value("(v.data.comparable = false, v.words(v.selected).join(', '))")
        assert "%" not in words, "of other hardware nothing is compared"
        assert "predicted" in words
        page.click("button:has-text('Measured')")
        assert value("v.rows.bars(v.rows.rows[0], true).length") == 1


def test_memory_is_told_and_drawn_below(browser: Browser, report: str, drawn: Picture) -> None:
    """The chosen device's curve under the same axis, its peak as the judge has it, and its parts add up."""
    lane = drawn.lanes[1]
    with Watched(browser, viewport=LAPTOP) as page:
        value = _open(page, report)
        page.focus(".lanes-scroller")
        page.keyboard.press("ArrowDown")
        curve = value("[...v.curves.get(v.data.lanes[1].curve).total]")
        assert curve == lane.memory_bytes.tolist()
        assert value("v.data.lanes[1].peak_bytes") == lane.memory_bytes.max() == sum(lane.parts.values())
        assert page.inner_text(".memory-words").startswith("Memory of node1/0")
        assert page.locator(".peaks li").count() == len(drawn.lanes)
        page.mouse.move(*_on(page, 600, 60, "canvas.memory"))
        page.wait_for_function("document.querySelector('.memory-words').textContent.includes(' at ')")


@pytest.mark.tier("nightly")
def test_everybody_can_read_it(browser: Browser, compared: str) -> None:
    """No serious finding of axe in light and dark, nothing wider than a telephone, and a page that can be printed."""
    for scheme in ("light", "dark"):
        with Watched(browser, viewport=LAPTOP, color_scheme=scheme) as page:
            value = _open(page, compared)
            value("v.controls.toggle('idle')")
            assert barriers(page) == []
    with Watched(browser, viewport={"width": 375, "height": 700}, has_touch=True) as page:
        _open(page, compared)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 375
    with Watched(
        browser, viewport=LAPTOP, color_scheme="dark", forced_colors="active", reduced_motion="reduce"
    ) as page:
        value = _open(page, compared)
        page.emulate_media(forced_colors="none", media="print")
        assert not page.is_visible(".timeline-bar")
        page.wait_for_function("getComputedStyle(document.documentElement).colorScheme === 'light'")
        value("d.restyle()")
        assert min(value("d.theme.ground")) > 200
        page.emulate_media(media="screen", forced_colors="active")
        value("d.restyle()")


def test_a_choice_of_colours_is_kept(browser: Browser, report: str) -> None:
    with Watched(browser, viewport=LAPTOP, color_scheme="light") as page:
        value = _open(page, report)
        assert min(value("d.theme.ground")) > 200
        beside = page.context.new_page()
        _open(beside, report)
        page.click("[data-theme-choice=dark]")
        assert max(value("d.theme.ground")) < 60
        # A page hands what it keeps to the browser and does not wait: the next one may be opened before it is there.
        beside.wait_for_function("localStorage.getItem('penstock-theme') === 'dark'")
        again = _open(page, report)
        assert max(again("d.theme.ground")) < 60
        assert page.get_attribute("[data-theme-choice=dark]", "aria-pressed") == "true"


WALK = """(() => {
  for (const layer of ["idle", "links"]) v.controls.toggle(layer);
  for (const lane of v.data.lanes.keys()) {
    v.lane = lane;
    v.select(null);
    for (let i = 0; i < 8; i++) {
      for (const act of [() => v.step(1), () => v.follow(-1), () => v.follow(1)]) { act(); v.controls.describe(); }
      d.draw();
    }
  }
  v.search(1);
  v.restore(v.hash);
  return v.selected.index;
})()"""


@pytest.mark.cases(2)
@pytest.mark.parametrize("kind", ["periodic", "several", "averaging"])
def test_plans_of_every_kind_are_walked_through(
    browser: Browser, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """No flush, several pipelines, pipelines that share devices: every block has its words and its reasons."""
    path = tmp_path / "report.html"
    path.write_text(page(request.getfixturevalue(kind)), encoding="utf-8")
    with Watched(browser, viewport=LAPTOP) as page_:
        value = _open(page_, path.as_uri())
        assert value(WALK) >= 0
        assert "stage" in page_.inner_text(".about")
        window = value("v.data.window_ns")
        assert (window is not None) == (kind == "periodic")
        if window:
            pale, full = (_colour(value, value(f"d.x({time})"), 24) for time in (window[0] / 2, sum(window) / 2))
            accent = [int(part) for part in value("d.theme.accent")[4:-1].split()]
            assert pale != full == accent, "a line marks the window"


NORMAL = np.eye(3)
BLIND = {
    "normal": NORMAL,
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB."""
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def _linear(colour: Any) -> np.ndarray:
    share = np.asarray(colour, dtype=float) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def _contrast(a: Any, b: Any) -> float:
    low, high = sorted(float(XYZ[1] @ _linear(colour)) for colour in (a, b))
    return (high + 0.05) / (low + 0.05)


def _lab(colour: Any, seen: Any) -> np.ndarray:
    white = np.array([0.9505, 1.0, 1.089])
    f = np.cbrt(XYZ @ np.clip(np.asarray(seen) @ _linear(colour), 0, 1) / white)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.cases(1)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_told_apart(browser: Browser, report: str, scheme: str) -> None:
    """WCAG 1.4.11 and 1.4.3 for blocks and words; blocks of one row differ by 20 (CIE 1976) for every kind of eye."""
    with Watched(browser, viewport=LAPTOP, color_scheme=scheme) as page:
        value = _open(page, report)
        kinds, ground = value("d.theme.kinds"), value("d.theme.ground")
        words = [
            [int(v) for v in value(f"d.theme.{name}")[4:-1].split()] for name in ("text", "faint", "accent", "limit")
        ]
        back = [int(v) for v in value("d.theme.back")[4:-1].split()]
    assert min(_contrast(colour, ground) for colour in kinds) >= 3
    assert min(_contrast(colour, on) for colour in words for on in (ground, back)) >= 4.5
    for group in (kinds[:6], kinds[6:9]):
        for seen in BLIND.values():
            apart = [np.linalg.norm(_lab(a, seen) - _lab(b, seen)) for a, b in combinations(group, 2)]
            assert min(apart) >= 20


class _Pages(BaseHTTPRequestHandler):
    """One large timeline: a page, its data, and finer parts of it."""

    def __init__(self, drawn: Picture, requested: list[dict[str, int]], *rest: Any) -> None:
        self.drawn, self.requested = drawn, requested
        super().__init__(*rest)

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        kind, body = "application/json", ""
        if address.path == "/timeline":
            part = {name: int(values[0]) for name, values in parse_qs(address.query).items()}
            self.requested.append(part)
            data = (
                finer(self.drawn, part["from"], part["to"], part["columns"]) if part else payload(self.drawn, "large")
            )
            body = json.dumps(data)
        elif address.path == "/":
            kind = "text/html"
            body = (
                '<!doctype html><html lang="en"><meta charset="utf-8"><title>x</title><link rel="icon" href="data:,">'
                f"<style>{style()}</style><main>{fetched_figure('/timeline')}</main><script>{script()}</script>"
            )
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_words: object) -> None:
        """Log nothing."""


@pytest.fixture
def large() -> Iterator[tuple[str, list[dict[str, int]]]]:
    """1,024 devices in 128 nodes; a node's devices do the same, and have more blocks than are sent."""
    count = 2 * MAX_BLOCKS // 128
    start = np.arange(count, dtype=np.int64) * 100
    nothing, lanes, strips = Blocks.none("fba"), [], []
    curve = np.array([0, 500]), np.array([10, 20])
    for node in range(128):
        rows = np.column_stack((np.arange(count) % 2, np.full(count, node), np.arange(count), start, start + 90))
        strips.append(Strip(Blocks.from_rows(LETTERS, rows), nothing))
        lanes += [Lane(f"n{node}/{i}", node, (node,), *curve, 99, node=f"n{node}") for i in range(8)]
    drawn = Picture(100 * count, count, tuple(strips), tuple(lanes), firsts=(0, 128))
    requested: list[dict[str, int]] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Pages, drawn, requested))
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/", requested
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_large_cluster_is_folded_and_refined(browser: Browser, large: tuple[str, list[dict[str, int]]]) -> None:
    address, requested = large
    with Watched(browser, viewport=LAPTOP, allowed=(address, "data:")) as page:
        value = _open(page, address)
        assert value("[v.data.merged, v.rows.rows.filter((row) => row.lane !== undefined).length]") == [True, 128]
        assert value("v.rows.rows.map((row) => row.alike)") == [8] * 128, (
            "equal devices share a row, whatever their node"
        )
        assert "blocks are merged" in page.inner_text("figure")
        page.focus(".lanes-scroller")
        page.keyboard.press("o")
        assert value("v.rows.rows.filter((row) => row.lane !== undefined).length") == 135
        assert value("[v.rows.rows[0].node !== undefined, v.rows.rows[0].members.length]") == [True, 8]
        assert "the group of n0/0 is open" in page.inner_text("figure")
        page.keyboard.press("o")
        assert value("v.rows.rows.length") == 128
        page.keyboard.press("g")
        assert value("[v.rows.rows.length, v.rows.rows[0].title, v.rows.rows[1].alike]") == [256, "n0", 8]
        page.keyboard.press("g")
        value("(v.fine = null, v.show(10000, 600))")
        page.wait_for_function("penstockTimeline.views[0].fine?.from === 9400")
        assert requested[-1] == {"from": 9400, "to": 11200, "columns": value("3 * d.codes.length")}
        strip = value("(({ compute: b }) => [b.count, [...b.start], [...b.number]])(v.strip(3))")
        assert strip[1] == [100.0 * k for k in range(94, 112)]
        assert strip[2] == list(range(94, 112))
        value("(v.rows.folded.clear(), v.rows.place(), v.controls.resize(), d.parts.scroller.scrollTop = 0)")
        top = value("d.box({strip: 0, part: 'compute', index: 9, blocks: v.strip(0).compute}, 0)")
        page.mouse.move(*_on(page, (top[0] + top[1]) / 2, (top[2] + top[3]) / 2))
        page.wait_for_selector(".tip:not([hidden])")
        assert "n0/0: backward of micro-batch 103, stage 0" in page.inner_text(".tip")
