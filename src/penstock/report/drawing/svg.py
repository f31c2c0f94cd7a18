"""A timeline as one SVG file, for documents: lanes, legend, axis, critical path, with a light and a dark theme."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import floor, log10

from penstock.report.drawing.folding import folded
from penstock.report.drawing.merging import merged
from penstock.report.drawing.payload import MAX_BLOCKS, Mark
from penstock.report.drawing.picture import NAMES, Blocks, Picture, Strip, Window
from penstock.schemas.amounts import duration

COLOURS = {
    "F": ("#2463de", "#4a80f5"), "B": ("#cd7705", "#c97420"), "I": ("#7a6c35", "#ffdb34"), "W": ("#1a4c38", "#3be39a"),
    "R": ("#bb64bc", "#9d6cb2"), "U": ("#2c103c", "#d9f4f8"), "f": ("#1b81e2", "#5bb4fc"), "b": ("#e46206", "#f98111"),
    "a": ("#633c42", "#c6b29e"),
}  # fmt: skip
"""The colours of both themes, as in the style sheet: distinct for any common colour blindness."""
_TONES = {
    "ground": ("#ffffff", "#14181d"), "text": ("#1c2128", "#e7eaee"), "faint": ("#56606c", "#a3adb8"),
    "line": ("#d5d9e0", "#37404a"), "limit": ("#b3261e", "#ff8a80"),
}  # fmt: skip
_WIDTH, _LABEL, _LANE, _THIN, _FOOT, _RIGHT = 960, 120, 30, 5, 54, 10
LEAST_PX = 0.1


def svg_timeline(picture: Picture, path: Sequence[Mark] = (), *, measured: Picture | None = None) -> str:
    """Draw the picture, without blocks narrower than a tenth of a pixel. ``measured``: lanes below the predicted ones.

    Where there are many devices, those with the same order share a lane.
    """
    num_devices = len(picture.lanes) * picture.together
    picture, lane_of = folded(picture)
    path = [mark._replace(lane=lane_of[mark.lane]) for mark in path]
    end_ns = max(picture.end_ns, measured.end_ns if measured else 0)
    scale = (_WIDTH - _LABEL - _RIGHT) / end_ns
    parts = list(_lanes(picture, 0, scale, _WIDTH, "predicted" if measured else ""))
    parts += _path(picture, path, scale)
    count = len(picture.lanes)
    if measured is not None:
        parts += _lanes(measured, count, scale, _WIDTH, "measured")
        count += len(measured.lanes)
    if picture.window is not None:
        parts.append(_window(picture.window, scale, len(picture.lanes) * _LANE))
    bottom = count * _LANE + 6
    parts += _axis(end_ns, scale, bottom)
    parts.append(_legend([picture, *([measured] if measured else [])], bottom + 34, bool(path)))
    height = bottom + _FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="DejaVu Sans, Verdana, sans-serif" font-size="11" role="img">\n'
        f"<title>Timeline of {num_devices:,} devices, {duration(picture.end_ns)}</title>\n"
        f'<style>{_style()}</style>\n<rect class="ground" width="{_WIDTH}" height="{height}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _style() -> str:
    """Return the classes for both themes; a media query selects the dark one."""

    def rules(which: int) -> str:
        fills = [f".k{letter}{{fill:{tones[which]}}}" for letter, tones in COLOURS.items()]
        fills += [f".{name}{{fill:{tones[which]}}}" for name, tones in _TONES.items()]
        ink = "".join(f".i{k}{{fill:{_ink(COLOURS[k][which])}}}" for k in COLOURS)
        return "".join(fills) + ink + f".edge{{fill:none;stroke:{_TONES['text'][which]};stroke-dasharray:4 3}}"

    return f"{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}"


def _ink(colour: str) -> str:
    """Return black or white, whichever has the higher contrast to a colour."""
    linear = [((v / 255 + 0.055) / 1.055) ** 2.4 for v in bytes.fromhex(colour[1:])]
    return "#000000" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.18 else "#ffffff"


def _lanes(picture: Picture, first: int, scale: float, width: int, what: str) -> Iterator[str]:
    for row, lane in enumerate(picture.lanes, start=first):
        y = row * _LANE + 4
        strip = _drawable(picture, picture.strips[lane.strip], width)
        stages = ",".join(str(stage) for stage in lane.stages)
        yield f'<text class="text" x="6" y="{y + (10 if what else 15)}">{escape(lane.device)} [{stages}]</text>'
        if what:
            yield f'<text class="faint" x="6" y="{y + 21}" font-size="9">{what}</text>'
        yield _blocks(strip.compute, scale, y, _LANE - _THIN - 5, labelled=True)
        yield _blocks(strip.communication, scale, y + _LANE - _THIN - 4, _THIN, labelled=False)


def _drawable(picture: Picture, strip: Strip, width: int) -> Strip:
    """Return the strip, merged to half pixels where it has too many blocks for a document."""
    if picture.num_blocks <= MAX_BLOCKS // 8:
        return strip
    return Strip(*(merged(blocks, 2 * width, picture.end_ns) for blocks in strip))


def _path(picture: Picture, path: Sequence[Mark], scale: float) -> Iterator[str]:
    """Draw a line over the blocks of the critical path."""
    for mark in path:
        y = mark.lane * _LANE + (_LANE - _THIN if mark.communication else 4)
        wide = max((mark.end_ns - mark.start_ns) * scale, 0.5)
        high = _THIN if mark.communication else 2.5
        left = _LABEL + mark.start_ns * scale
        yield f'<rect class="limit" x="{left:.1f}" y="{y}" width="{wide:.1f}" height="{high}"/>'


def _window(window: Window, scale: float, height: int) -> str:
    """Fade what is outside the steady-state window, and mark its edges by lines."""
    left, right = (_LABEL + t * scale for t in window[:2])
    return (
        f"<g><title>{window}</title>"
        f'<rect class="ground" x="{_LABEL}" y="0" width="{left - _LABEL:.1f}" height="{height}" opacity="0.55"/>'
        f'<rect class="ground" x="{right:.1f}" y="0" width="10000" height="{height}" opacity="0.55"/>'
        f'<path class="edge" d="M{left:.1f} 0V{height}M{right:.1f} 0V{height}"/>'
        f'<text class="text" x="{(left + right) / 2:.1f}" y="{height + 4}" text-anchor="middle">steady state</text></g>'
    )


def _blocks(blocks: Blocks, scale: float, y: float, height: float, *, labelled: bool) -> str:
    parts = []
    for i in range(len(blocks)):
        x = _LABEL + blocks.start_ns[i] * scale
        wide = (blocks.end_ns[i] - blocks.start_ns[i]) * scale
        if wide < LEAST_PX:
            continue
        letter = blocks.letters[blocks.kind[i]]
        gap = 0.8 if wide > 3 else 0.0
        parts.append(f'<rect class="k{letter}" x="{x:.1f}" y="{y}" width="{wide - gap:.1f}" height="{height}"/>')
        if labelled and wide > 16 and blocks.number[i] >= 0:
            parts.append(f'<text class="i{letter}" x="{x + 3:.1f}" y="{y + height - 6}">{blocks.number[i]}</text>')
    return "".join(parts)


def _axis(end_ns: int, scale: float, y: float) -> Iterator[str]:
    """Draw the time axis with round numbers."""
    rough = end_ns / 8
    power = 10.0 ** floor(log10(max(rough, 1)))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough)
    yield f'<rect class="line" x="{_LABEL}" y="{y}" width="{end_ns * scale:.1f}" height="1"/>'
    tick = 0.0
    while tick <= end_ns:
        x = _LABEL + tick * scale
        anchor = ' text-anchor="middle"' if tick else ""
        yield f'<rect class="faint" x="{x:.1f}" y="{y}" width="1" height="4"/>'
        yield f'<text class="faint" x="{x:.1f}" y="{y + 16}"{anchor}>{duration(tick) if tick else "0"}</text>'
        tick += step


def _legend(pictures: Sequence[Picture], y: float, has_path: bool) -> str:
    used = {
        s.letters[k]
        for picture in pictures
        for strip in picture.strips
        for s in (strip.compute, strip.communication)
        for k in set(s.kind.tolist())
    }
    entries = [(f"k{letter}", NAMES[letter]) for letter in NAMES if letter in used]
    entries += [("limit", "critical path")] if has_path else []
    x, parts = _LABEL, []
    for look, words in entries:
        parts.append(f'<rect class="{look}" x="{x}" y="{y}" width="10" height="10"/>')
        parts.append(f'<text class="text" x="{x + 14}" y="{y + 9}">{words}</text>')
        x += 26 + round(6.6 * len(words))
    return "".join(parts)
