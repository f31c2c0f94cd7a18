"""Pictures: who does what when, and the merging of what is too fine to draw."""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.report.chrome_trace import MEASURED, PREDICTED, chrome_events, compared_events
from penstock.report.drawing.assets import style
from penstock.report.drawing.folding import MOST_LANES
from penstock.report.drawing.merging import coverage, merged
from penstock.report.drawing.payload import MAX_BLOCKS, MAX_CURVE_POINTS, Mark, finer, payload
from penstock.report.drawing.picture import LETTERS, Blocks, Lane, Picture, Strip, picture_of_trace
from penstock.report.drawing.svg import COLOURS, svg_timeline
from penstock.report.drawing.varints import varints
from penstock.schemas.amounts import amount, duration, percent
from penstock.schemas.plan import Plan
from penstock.schemas.trace import Trace


def _letters(blocks: Blocks) -> str:
    return "".join(blocks.letters[kind] for kind in blocks.kind.tolist())


def test_lanes_go_by_stage_and_hold_their_updates(picture: Picture) -> None:
    assert [lane.device for lane in picture.lanes] == ["node0/0", "node0/1", "node0/2"]
    assert [lane.stages for lane in picture.lanes] == [(0,), (1,), (1,)]
    assert [_letters(picture.strips[lane.strip].compute) for lane in picture.lanes] == ["FFBBU", "FBU", "FBU"]


def test_a_device_shows_only_transfers_of_its_own_micro_batches(picture: Picture) -> None:
    """The replicas of stage 1 take one micro-batch each; stage 0 sends and receives for both."""
    moved = [picture.strips[lane.strip].communication for lane in picture.lanes]
    assert [(_letters(blocks), blocks.number.tolist()) for blocks in moved] == [
        ("ffbb", [0, 1, 0, 1]),
        ("fba", [0, 0, 0]),
        ("fba", [1, 1, 0]),
    ]


def _blocks(*intervals: tuple[int, int, int]) -> Blocks:
    return Blocks.from_rows(LETTERS, np.array([(kind, 0, 0, start, end) for kind, start, end in intervals]))


def test_coverage_counts_overlaps_once() -> None:
    blocks = _blocks((0, 0, 10), (0, 5, 12), (1, 12, 20), (0, 30, 40))
    shares = coverage(blocks, np.array([0.0, 10.0, 20.0, 40.0]))
    assert shares[0].tolist() == [10.0, 2.0, 10.0]
    assert shares[1].tolist() == [0.0, 8.0, 0.0]
    assert not shares[2:].any()


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.integers(1, 30)), max_size=12),
    st.integers(1, 20),
)
def test_coverage_equals_counting_each_nanosecond(intervals: list[tuple[int, int, int]], columns: int) -> None:
    """By enumeration of every nanosecond; columns on whole numbers."""
    blocks = _blocks(*((kind, start, start + length) for kind, start, length in intervals))
    edges = np.linspace(0, 100 * columns, columns + 1)
    shares = coverage(blocks, edges)
    for kind in range(len(LETTERS)):
        busy = {t for k, start, length in intervals if k == kind for t in range(start, start + length)}
        counted = [sum(1 for t in busy if 100 * c <= t < 100 * (c + 1)) for c in range(columns)]
        assert shares[kind].tolist() == pytest.approx(counted)


def test_merging_keeps_what_fills_most_of_a_column() -> None:
    blocks = _blocks(*((i % 2, 10 * i, 10 * i + (10 if i % 2 else 1)) for i in range(100)))
    coarse = merged(blocks, 10, 1000)
    assert _letters(coarse) == "B"
    assert (coarse.start_ns.tolist(), coarse.end_ns.tolist()) == ([0], [1000])
    assert merged(_blocks((0, 0, 10)), 10, 1000).start_ns.size == 0


def test_a_large_picture_is_merged_and_a_small_one_is_not() -> None:
    count = MAX_BLOCKS // 2 + 1
    start = np.arange(count, dtype=np.int64) * 10
    rows = np.column_stack((start % 2, np.zeros(count), np.arange(count), start, start + 10)).astype(np.int64)
    nothing = Blocks.from_rows("fba", np.zeros((0, 5), np.int64))
    strip = Strip(Blocks.from_rows(LETTERS, rows), nothing)
    curve = np.arange(5000)
    lanes = tuple(Lane(f"n/{i}", i, (0,), curve, curve, 9000) for i in range(2))
    data = payload(Picture(10 * count, count, (strip, strip), lanes), "large")
    assert data["merged"]
    assert data["num_blocks"] == 2 * count
    assert len(data["strips"][0]["compute"]["kind"]) <= 4000
    assert data["curves"][0]["count"] == MAX_CURVE_POINTS
    assert max(_numbers(data["curves"][0]["total"], sums=True)) == 4999
    small = payload(Picture(10 * count, count, (strip,), lanes[:1]), "small")
    assert not small["merged"]
    assert len(small["strips"][0]["compute"]["kind"]) == count
    alike = tuple(Lane(f"n/{i}", 0, (0,), curve, curve, 9000) for i in range(100))
    many = payload(Picture(10 * count, count, (strip,), alike), "many lanes that share a strip")
    assert not many["merged"], "a strip is sent once"
    assert many["num_blocks"] == 100 * count
    assert many["lanes"][99] == {"device": "n/99", "node": "", "measured": None, "like": 0}
    part = finer(Picture(10 * count, count, (strip, strip), lanes), 5000, 6000, 50)
    assert part["strips"][0]["compute"]["kind"] == "F" * 100, "few enough to be themselves"


def _numbers(packed: int | str, count: int = 1, *, sums: bool = False) -> list[int]:
    """Decode zigzag varints, byte by byte."""
    if isinstance(packed, int):
        return [packed] * count
    values, value, shift = [], 0, 0
    for byte in b64decode(packed):
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value // 2 if value % 2 == 0 else -(value + 1) // 2)
            value, shift = 0, 0
    return list(accumulate(values)) if sums else values


@given(st.lists(st.integers(-(2**62), 2**62 - 1)))
def test_varints_give_back_every_number(numbers: list[int]) -> None:
    packed = varints(np.array(numbers, dtype=np.int64))
    assert _numbers(b64encode(packed).decode()) == numbers


def test_payload_gives_back_every_time(picture: Picture) -> None:
    data = payload(picture, "x")
    for strip, packed in zip(picture.strips, data["strips"], strict=True):
        for blocks, columns in zip(strip, packed.values(), strict=True):
            count = len(columns["kind"])
            end, starts, ends = 0, [], []
            lengths = _numbers(columns["length"], count)
            for gap, length in zip(_numbers(columns["gap"], count), lengths, strict=True):
                starts.append(end + gap)
                end = starts[-1] + length
                ends.append(end)
            assert (starts, ends) == (blocks.start_ns.tolist(), blocks.end_ns.tolist())
            assert _numbers(columns["number"], count, sums=True) == blocks.number.tolist()
            assert columns["kind"] == _letters(blocks)


def test_chrome_events_are_complete_and_in_microseconds(picture: Picture) -> None:
    events = list(chrome_events(picture))
    work = [e for e in events if e["ph"] == "X" and e["pid"] == 0 and e["tid"] == 0]
    assert [(e["name"], e["ts"], e["dur"]) for e in work][:2] == [("F0", 0.0, 0.01), ("F1", 0.01, 0.01)]
    assert len([e for e in events if e["ph"] == "C"]) == 9


def test_svg_draws_each_block(picture: Picture) -> None:
    text = svg_timeline(picture)
    assert text.count('<rect class="kF"') == 4 + 1, "four forwards and the legend"
    assert "node0/2 [1]" in text


def test_of_many_devices_those_with_the_same_order_share_a_row(picture: Picture) -> None:
    first, second, _ = picture.lanes
    fuller = replace(second, device="last", memory_bytes=second.memory_bytes + 1)
    many = replace(picture, lanes=(first, *(second,) * MOST_LANES, fuller))
    text = svg_timeline(many, [Mark(MOST_LANES, 0, 0, 5)])
    assert f"Timeline of {MOST_LANES + 2} devices" in text
    assert re.findall(r">(node[^<]*)</text>", text) == ["node0/0 [0]", f"node0/1 ×{MOST_LANES + 1} [1]"]
    marked = re.findall(r'<rect class="limit" x="[^"]*" y="(\d+)" width="[^"]*" height="2.5"', text)
    assert marked == [str(30 + 4)], "the path is marked on the row that its device shares"
    processes = [e for e in chrome_events(many) if e["name"] == "process_name"]
    assert [e["args"]["name"] for e in processes] == ["node0/0", f"node0/1 ×{MOST_LANES + 1}"]
    peaks = [e["args"]["bytes"] for e in chrome_events(many) if e["ph"] == "C" and e["pid"] == 1]
    assert max(peaks) == int(fuller.memory_bytes.max())


def test_a_lane_of_devices_that_work_together_says_how_many_there_are(picture: Picture) -> None:
    text = svg_timeline(replace(picture, together=1250))
    assert f"Timeline of {1250 * len(picture.lanes):,} devices" in text
    assert re.findall(r">(node[^<]*) \[", text) == [f"{lane.device} ×1,250" for lane in picture.lanes]
    assert payload(replace(picture, together=1250), "")["together"] == 1250


def test_svg_and_style_sheet_have_the_same_colours() -> None:
    sheet = dict(re.findall(r"--(\w): light-dark\((#\w+, #\w+)\)", style()))
    assert sheet == {letter: ", ".join(tones) for letter, tones in COLOURS.items()}


def test_a_trace_becomes_a_picture_of_its_last_step(plan: Plan) -> None:
    def rank(step: int, *events: tuple[str, int, int]) -> dict[str, object]:
        listed = [{"instruction": i, "start_ns": a, "end_ns": b} for i, a, b in events]
        return {"rank": 0, "device": "node0/0", "step": step, "events": listed}

    trace = Trace.parse(
        {
            "plan_hash": "sha256:" + "0" * 64,
            "predicted_time_per_global_batch_ns": 100,
            "measured_times_per_global_batch_ns": [120],
            "ranks": [
                rank(2, ("0F0", 0, 9), ("0SEND_F0@1", 9, 10), ("0B0", 20, 40), ("0REDUCE0", 40, 41), ("0STEP", 41, 50)),
                rank(1, ("0F0", 0, 999)),
            ],
        }
    )
    picture = picture_of_trace(trace, plan)
    assert picture.end_ns == 50
    assert _letters(picture.strips[0].compute) == "FBU"
    assert _letters(picture.strips[0].communication) == "fa"
    assert picture.lanes[0].stages == (0,)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1500, "1.50 µs"), (999_999, "1.00 ms"), (12_345_678, "12.3 ms"), (2.5e11, "250 s")],
)
def test_durations(value: float, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 B"), (1536, "1.50 KiB"), (1024**3 * 79.6, "79.6 GiB"), (2**50, "1,024 TiB")]
)
def test_amounts(value: float, text: str) -> None:
    assert amount(value) == text


def test_percent() -> None:
    assert (percent(0.1234), percent(1.0), percent(0.0)) == ("12.3 %", "100 %", "0.0 %")


def _measured(*ranks: tuple[str, int, list[tuple[str, int, int]]]) -> Trace:
    """Return a trace of ranks by device, step and events."""
    return Trace.parse(
        {
            "plan_hash": "sha256:" + "0" * 64,
            "predicted_time_per_global_batch_ns": 100,
            "measured_times_per_global_batch_ns": [120],
            "ranks": [
                {
                    "rank": number,
                    "device": device,
                    "step": step,
                    "events": [{"instruction": i, "start_ns": a, "end_ns": b} for i, a, b in events],
                }
                for number, (device, step, events) in enumerate(ranks)
            ],
        }
    )


def test_prediction_and_measurement_are_two_tracks(picture: Picture, plan: Plan) -> None:
    """Two ranks on one device and a message each way: two processes, a pair of threads per lane, an arrow a message."""
    trace = _measured(
        ("node0/0", 3, [("0F0", 0, 9), ("0SEND_F0", 9, 10), ("0B0", 60, 80), ("0STEP", 80, 90)]),
        ("node0/0", 3, [("1F0", 25, 40), ("1B0", 40, 55), ("1SEND_B0", 55, 56), ("0NORM", 56, 58)]),
    )
    events = list(compared_events(picture, trace, plan))
    json.dumps(events)
    names = {(e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    assert (names[PREDICTED, None], names[MEASURED, None]) == ("predicted", "measured")
    assert [names[MEASURED, k] for k in range(4)] == [
        "node0/0 [0] compute",
        "node0/0 [0] communication",
        "node0/0 [1] compute",
        "node0/0 [1] communication",
    ]
    blocks = [(e["pid"], e["tid"], e["name"], e["ts"]) for e in events if e["ph"] == "X"]
    assert len([b for b in blocks if b[0] == PREDICTED]) == sum(
        len(picture.strips[lane.strip].compute) + len(picture.strips[lane.strip].communication)
        for lane in picture.lanes
    )
    assert [b[1:] for b in blocks if b[0] == MEASURED] == [
        (0, "F0", 0.0),
        (0, "B0", 0.06),
        (0, "U", 0.08),
        (1, "f0", 0.009),
        (2, "F0", 0.025),
        (2, "B0", 0.04),
        (3, "b0", 0.055),
        (3, "a", 0.056),
    ]
    arrows = [(e["ph"], e["id"], e["name"], e["tid"], e["ts"]) for e in events if e.get("cat") == "message"]
    assert arrows == [
        ("s", 0, "F0", 1, 0.009),
        ("f", 0, "F0", 2, 0.025),
        ("s", 1, "B0", 3, 0.055),
        ("f", 1, "B0", 0, 0.06),
    ]
