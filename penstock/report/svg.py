"""A timeline as a small SVG file, for documents."""

from __future__ import annotations

from html import escape

from penstock.report.picture import NAMES, Blocks, Picture, Window
from penstock.report.words import duration

COLOURS = {
    "F": "#0072b2", "B": "#e69f00", "I": "#f0e442", "W": "#009e73", "R": "#cc79a7", "U": "#4d4d4d",
    "f": "#56b4e9", "b": "#d55e00", "a": "#8c8c8c",
}  # fmt: skip
"""Okabe and Ito's palette, which people with any common colour blindness can tell apart."""
_LABEL, _LANE, _THIN, _FOOT = 110, 30, 5, 46


def svg_timeline(picture: Picture, *, width: int = 960) -> str:
    """The picture on a white ground; blocks narrower than a tenth of a pixel are left out."""
    scale = (width - _LABEL - 8) / picture.end_ns
    height = len(picture.lanes) * _LANE + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="DejaVu Sans, Verdana, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for row, lane in enumerate(picture.lanes):
        y = row * _LANE + 4
        strip = picture.strips[lane.strip]
        stages = ",".join(str(stage) for stage in lane.stages)
        parts.append(f'<text x="6" y="{y + 15}" fill="#1c2128">{escape(lane.device)} [{stages}]</text>')
        parts.append(_blocks(strip.compute, scale, y, _LANE - _THIN - 5, labelled=True))
        parts.append(_blocks(strip.communication, scale, y + _LANE - _THIN - 4, _THIN, labelled=False))
    if picture.window is not None:
        parts.append(_window(picture.window, scale, len(picture.lanes) * _LANE))
    parts.append(_foot(picture, width, height))
    return "\n".join(parts) + "\n</svg>\n"


def _window(window: Window, scale: float, height: int) -> str:
    """What lies outside the steady window is pale; lines mark its edges."""
    left, right = (_LABEL + t * scale for t in window[:2])
    return (
        f"<g><title>{window}</title>"
        f'<rect x="{_LABEL}" y="0" width="{left - _LABEL:.1f}" height="{height}" fill="#ffffff" opacity="0.55"/>'
        f'<rect x="{right:.1f}" y="0" width="10000" height="{height}" fill="#ffffff" opacity="0.55"/>'
        f'<path d="M{left:.1f} 0V{height}M{right:.1f} 0V{height}" stroke="#1c2128" stroke-dasharray="4 3"/></g>'
    )


def _blocks(blocks: Blocks, scale: float, y: float, height: float, *, labelled: bool) -> str:
    parts = []
    for i in range(len(blocks)):
        x = _LABEL + blocks.start_ns[i] * scale
        wide = (blocks.end_ns[i] - blocks.start_ns[i]) * scale
        if wide < 0.1:
            continue
        letter = blocks.letters[blocks.kind[i]]
        gap = 0.8 if wide > 3 else 0.0
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{wide - gap:.1f}" height="{height}" fill="{COLOURS[letter]}"/>')
        if labelled and wide > 16 and blocks.number[i] >= 0:
            ink = "#000000" if letter in "BI" else "#ffffff"
            parts.append(f'<text x="{x + 3:.1f}" y="{y + height - 6}" fill="{ink}">{blocks.number[i]}</text>')
    return "".join(parts)


def _foot(picture: Picture, width: int, height: int) -> str:
    used = {
        s.letters[k]
        for strip in picture.strips
        for s in (strip.compute, strip.communication)
        for k in set(s.kind.tolist())
    }
    x, parts = _LABEL, []
    for letter in (letter for letter in NAMES if letter in used):
        parts.append(f'<rect x="{x}" y="{height - 18}" width="10" height="10" fill="{COLOURS[letter]}"/>')
        parts.append(f'<text x="{x + 14}" y="{height - 9}" fill="#1c2128">{NAMES[letter]}</text>')
        x += 24 + 7 * len(NAMES[letter])
    parts.append(f'<text x="{_LABEL}" y="{height - 28}" fill="#5b6572">0</text>')
    end = duration(picture.end_ns)
    if picture.window is not None:
        middle = (picture.window.start_ns + picture.window.end_ns) / (2 * picture.end_ns)
        place = _LABEL + (width - _LABEL - 8) * middle
        parts.append(f'<text x="{place:.1f}" y="{height - 28}" fill="#1c2128" text-anchor="middle">steady state</text>')
    parts.append(f'<text x="{width - 8}" y="{height - 28}" fill="#5b6572" text-anchor="end">{end}</text>')
    return "".join(parts)
