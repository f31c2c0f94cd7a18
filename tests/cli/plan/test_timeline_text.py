"""The timeline in the terminal."""

from __future__ import annotations

import re

import numpy as np
import pytest

from penstock.report.drawing.picture import LETTERS, Blocks, Lane, Picture, Strip
from penstock.report.drawing.timeline_text import MAX_LINES, MAX_SINGLE, render_picture

pytestmark = pytest.mark.tier("quick")

NOTHING = np.zeros(0, np.int64)


def _picture(
    compute: list[tuple[int, int, int, int, int]], moved: list[tuple[int, int, int, int, int]], lanes: int = 1
) -> Picture:
    strip = Strip(
        Blocks.from_rows(LETTERS, np.array(compute, dtype=np.int64)),
        Blocks.from_rows("fba", np.array(moved, dtype=np.int64)),
    )
    return Picture(40, 2, (strip,), tuple(Lane(f"n/{i}", 0, (0,), NOTHING, NOTHING, None) for i in range(lanes)))


@pytest.fixture
def picture() -> Picture:
    """F0 F1 of 10 ns, a transfer, B0 of 10 ns: 40 columns make one column a nanosecond."""
    return _picture([(0, 0, 0, 0, 10), (0, 0, 1, 10, 20), (1, 0, 0, 25, 35)], [(0, 0, 0, 20, 24)])


def test_each_column_shows_what_fills_it(picture: Picture) -> None:
    lines = render_picture(picture, width=40 + len("n/0 [0]") + 2).splitlines()
    assert lines[0] == "n/0 [0] |F0ffffffffF1ffffffff====.B0bbbbbbbb....."
    assert lines[1].split() == ["0", "20", "ns", "40", "ns"]
    assert lines[2].strip() == "F forward  B backward  = communication  . idle"


def test_colours_keep_the_columns(picture: Picture) -> None:
    plain = render_picture(picture, width=60)
    coloured = render_picture(picture, width=60, colour=True)
    assert "\x1b[48;5;" in coloured
    bare = re.sub(r"\x1b\[[0-9;]*m", "", coloured)
    assert [len(line) for line in bare.splitlines()] == [len(line) for line in plain.splitlines()]
    assert "F0" in bare


@pytest.mark.parametrize("width", [1, 20, 33, 79, 300])
def test_lines_fit_the_width(picture: Picture, width: int) -> None:
    lines = render_picture(picture, width=width).splitlines()
    assert all(len(line) <= max(width, 10 + len("n/0 [0]") + 2) for line in lines[:-1])


def test_fine_blocks_show_the_kind_that_fills_most() -> None:
    picture = _picture([(1 if t % 4 else 0, 0, t, t, t + 1) for t in range(40)], [])
    assert render_picture(picture, width=10 + 9).splitlines()[0].endswith("|" + "B" * 10)


def test_many_devices_with_one_order_share_a_line() -> None:
    lines = render_picture(_picture([(0, 0, 0, 0, 10)], [], lanes=MAX_SINGLE + 1), width=80).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("n/0 ×17 [0] |F0fff")


def test_too_many_lines_are_counted() -> None:
    one = _picture([(0, 0, 0, 0, 10)], [])
    strips = one.strips * (MAX_LINES + 7)
    lanes = tuple(Lane(f"n/{i}", i, (0,), NOTHING, NOTHING, None) for i in range(len(strips)))
    lines = render_picture(Picture(40, 2, strips, lanes), width=80).splitlines()
    assert len(lines) == MAX_LINES + 3
    assert "and 7 more devices" in lines[MAX_LINES]
