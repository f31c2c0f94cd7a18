"""A timeline in the terminal: one line per device, a letter or a colour per kind of work.

Where a block is wide enough it shows its micro-batch (``F3ff``: forward of micro-batch 3); where it is not, a
column shows the kind that fills most of it. ``.`` is idle, ``=`` waiting while a transfer or an all-reduce runs.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from penstock.report.drawing.merging import coverage
from penstock.report.drawing.picture import LETTERS, Lane, Picture, Strip, Window, picture_of_timeline
from penstock.schemas.amounts import duration
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.timeline import Timeline

IDLE = "."
COMMUNICATION = "="
MAX_SINGLE = 16
MAX_LINES = 64
_BACKGROUND = {"F": 25, "B": 172, "I": 178, "W": 30, "R": 133, "U": 240}
"""Xterm colours close to Okabe and Ito's palette: blue, orange, yellow, green, purple, grey."""


def render_timeline(
    problem: Problem,
    timeline: Timeline,
    allocation: Allocation | None = None,
    *,
    width: int = 100,
    colour: bool = False,
) -> str:
    """Render the simulated timeline in ``width`` columns."""
    return render_picture(picture_of_timeline(problem, timeline, allocation), width=width, colour=colour)


def render_picture(picture: Picture, *, width: int = 100, colour: bool = False) -> str:
    """Render a line per device, a time axis, and the meaning of the letters.

    Above ``MAX_SINGLE`` devices those with the same order share a line; above ``MAX_LINES`` lines the rest is counted.
    """
    lanes = _shown(picture)
    hidden = sum(len(group) for group in lanes[MAX_LINES:])
    shown = [group[0] for group in lanes[:MAX_LINES]]
    labels = [_label(group) for group in lanes[:MAX_LINES]]
    margin = max((len(label) for label in labels), default=0)
    columns = max(10, width - margin - 2)
    drawn: dict[int, str] = {}
    lines = []
    for lane, label in zip(shown, labels, strict=True):
        if lane.strip not in drawn:
            drawn[lane.strip] = _row(picture.strips[lane.strip], picture.end_ns, columns, colour)
        lines.append(f"{label:<{margin}} |{drawn[lane.strip]}")
    if hidden:
        lines.append(f"{'':<{margin}} |… and {hidden} more devices")
    if picture.window is not None:
        lines.append(f"{'':<{margin}} |{_marked(picture.window, picture.end_ns, columns)}")
    lines.append(_axis(picture.end_ns, margin, columns))
    if picture.window is not None:
        lines.append(f"{'':<{margin}}  {picture.window}")
    lines.append(f"{'':<{margin}}  {_legend(picture, colour)}")
    return "\n".join(lines)


def _shown(picture: Picture) -> list[list[Lane]]:
    if len(picture.lanes) <= MAX_SINGLE:
        return [[lane] for lane in picture.lanes]
    return [list(group) for _, group in groupby(picture.lanes, key=lambda lane: lane.strip)]


def _label(group: list[Lane]) -> str:
    stages = ",".join(str(stage) for stage in group[0].stages)
    times = f" ×{len(group)}" if len(group) > 1 else ""
    return f"{group[0].device}{times} [{stages}]"


def _row(strip: Strip, end_ns: int, columns: int, colour: bool) -> str:
    kinds, text = _columns(strip, end_ns, columns)
    if not colour:
        return "".join(text)
    parts = []
    open_kind = ""
    for kind, character in zip(kinds, text, strict=True):
        if kind != open_kind:
            parts.append("\x1b[0m" if kind not in _BACKGROUND else f"\x1b[48;5;{_BACKGROUND[kind]};97m")
            open_kind = kind
        parts.append(" " if character.islower() else character)
    return "".join(parts) + "\x1b[0m"


def _columns(strip: Strip, end_ns: int, columns: int) -> tuple[list[str], list[str]]:
    """Return the kind and the character of each column."""
    edges = np.linspace(0, end_ns, columns + 1)
    shares = coverage(strip.compute, edges)
    moving = coverage(strip.communication, edges).sum(axis=0)
    column_ns = end_ns / columns
    best = np.argmax(shares, axis=0)
    busy = shares.sum(axis=0) >= 0.5 * column_ns
    kinds = [
        LETTERS[k] if full else (COMMUNICATION if moved >= 0.5 * column_ns else IDLE)
        for k, full, moved in zip(best.tolist(), busy.tolist(), moving.tolist(), strict=True)
    ]
    text = list(kinds)
    blocks = strip.compute
    first = np.ceil(blocks.start_ns / column_ns - 0.5).astype(np.int64)
    last = np.ceil(blocks.end_ns / column_ns - 0.5).astype(np.int64)
    for i in np.flatnonzero(last - first >= 2).tolist():
        letter = LETTERS[blocks.kind[i]]
        label = f"{letter}{blocks.number[i]}" if blocks.number[i] >= 0 else letter
        span = int(last[i] - first[i])
        label = label if len(label) <= span else letter
        text[first[i] : last[i]] = label.ljust(span, letter.lower())
        kinds[first[i] : last[i]] = letter * span
    return kinds, text


def _marked(window: Window, end_ns: int, columns: int) -> str:
    """Return a line under the steady part."""
    first, last = (min(round(t * columns / end_ns), columns) for t in window[:2])
    name = "steady" if last - first >= 10 else ""
    return " " * first + f"[{name:-^{max(0, last - first - 2)}}]"


def _axis(end_ns: int, margin: int, columns: int) -> str:
    middle, end = duration(end_ns / 2), duration(end_ns)
    half = columns // 2
    return f"{'':<{margin}} 0{middle:>{half}}{end:>{columns - half}}"


def _legend(picture: Picture, colour: bool) -> str:
    names = {"F": "forward", "B": "backward", "I": "input grads", "W": "weight grads", "R": "recompute", "U": "update"}
    present = sorted({int(k) for strip in picture.strips for k in np.unique(strip.compute.kind)})
    entries = []
    for kind in present:
        letter = LETTERS[kind]
        mark = f"\x1b[48;5;{_BACKGROUND[letter]};97m{letter}\x1b[0m" if colour else letter
        entries.append(f"{mark} {names[letter]}")
    return "  ".join([*entries, f"{COMMUNICATION} communication", f"{IDLE} idle"])
