"""The drawing as JSON for the page's script: blocks in columns, packed as differences, and thinned memory curves.

Times are integers in nanoseconds. ``payload`` returns the whole picture and ``finer`` a part of it in more detail.

* A *strip* has one block for each operation or transfer of a device. Block i starts ``gap[i]`` ns after the end of
  block i - 1, negative where transfers overlap, and lasts ``length[i]`` ns.
* A *column* holds one value of every block. It is a plain number where all values are equal; otherwise base64 of zigzag
  varints, and for ``stage`` and ``number`` of the differences between neighbours. Memory curves are packed likewise.
* A lane that differs from an earlier one in no more than its name, node and measured strip is ``like`` that one.
* A picture with more than ``MAX_BLOCKS`` blocks in its strips is merged to pixel columns.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.report.drawing.merging import merged
from penstock.report.drawing.picture import CONSTANT_PARTS, NAMES, Blocks, Lane, Picture, Strip
from penstock.report.drawing.varints import varints

MAX_BLOCKS = 200_000
MOST_COLUMNS = 4_000
MAX_CURVE_POINTS = 1_000
MAX_CURVES_POINTS = 32_000
"""The limit for all distinct curves together."""


class Mark(NamedTuple):
    """A part of the critical path: its lane, 1 where it is communication, its start and end in ns."""

    lane: int
    communication: int
    start_ns: int
    end_ns: int


def payload(
    picture: Picture, title: str, path: Sequence[Mark] = (), *, measured: Picture | None = None
) -> dict[str, Any]:
    """Return the picture as JSON data, with the critical path as marks on its lanes; ``measured``: a run's picture."""
    is_merged = picture.num_sent > MAX_BLOCKS
    strips, lanes = list(picture.strips), list(picture.lanes)
    if is_merged:
        columns = max(32, min(MOST_COLUMNS, MAX_BLOCKS // (2 * len(strips))))
        strips = [_coarse(strip, columns, 0, picture.end_ns) for strip in strips]
    of_lane = _measured_strips(measured, strips, lanes) if measured is not None else [None] * len(lanes)
    curves = _Curves(lanes)
    return {
        "title": title,
        "end_ns": picture.end_ns,
        "measured_end_ns": measured.end_ns if measured else None,
        "comparable": measured is None or measured.is_comparable,
        "window_ns": list(picture.window[:2]) if picture.window else None,
        "num_micro_batches": picture.num_micro_batches,
        "merged": is_merged,
        "num_blocks": picture.num_blocks,
        "names": NAMES,
        "kinds": _kinds(strips),
        "firsts": list(picture.firsts),
        "together": picture.together,
        "path": [list(mark) for mark in path],
        "strips": [_strip(strip) for strip in strips],
        "lanes": _lanes(lanes, curves, of_lane),
        "curves": curves.packed,
    }


def finer(picture: Picture, from_ns: int, to_ns: int, columns: int) -> dict[str, Any]:
    """Return the strips between two times, merged to ``columns`` pixel columns where they have too many blocks."""
    columns = max(1, min(columns, 4 * MOST_COLUMNS))
    cut = [_cut(strip, from_ns, to_ns) for strip in picture.strips]
    count = sum(len(strip.compute) + len(strip.communication) for strip in cut)
    if count > MAX_BLOCKS:
        columns = max(32, min(columns, MAX_BLOCKS // (2 * len(picture.strips))))
        cut = [_coarse(strip, columns, from_ns, to_ns) for strip in cut]
    return {"from_ns": from_ns, "to_ns": to_ns, "strips": [_strip(strip) for strip in cut]}


def _coarse(strip: Strip, columns: int, from_ns: int, to_ns: int) -> Strip:
    return Strip(*(merged(blocks, columns, to_ns, from_ns) for blocks in strip))


def _cut(strip: Strip, from_ns: int, to_ns: int) -> Strip:
    return Strip(*(blocks.where((blocks.end_ns > from_ns) & (blocks.start_ns < to_ns)) for blocks in strip))


def _measured_strips(measured: Picture, strips: list[Strip], lanes: list[Lane]) -> list[int | None]:
    """Append the measured strips and return the one of each lane; a rank without a lane gets a new, empty one."""
    first = len(strips)
    strips.extend(measured.strips)
    strip_of: list[int | None] = [None] * len(lanes)
    free = {(lane.device, lane.stages): number for number, lane in reversed(list(enumerate(lanes)))}
    for lane in measured.lanes:
        number = free.pop((lane.device, lane.stages), None)
        if number is None:
            lanes.append(Lane(lane.device, len(strips), lane.stages, lane.times_ns, lane.memory_bytes, None))
            strips.append(Strip.nothing())
            strip_of.append(first + lane.strip)
        else:
            strip_of[number] = first + lane.strip
    return strip_of


def _kinds(strips: Sequence[Strip]) -> str:
    """Return the letters of the kinds that occur."""
    used = {part.letters[k] for strip in strips for part in strip for k in np.unique(part.kind).tolist()}
    return "".join(letter for letter in NAMES if letter in used)


def _strip(strip: Strip) -> dict[str, Any]:
    return {name: _blocks(blocks) for name, blocks in zip(Strip._fields, strip, strict=True)}


def _blocks(blocks: Blocks) -> dict[str, Any]:
    before = np.concatenate(([0], blocks.end_ns[:-1]))
    return {
        "kind": "".join(blocks.letters[k] for k in blocks.kind.tolist()),
        "stage": _column(blocks.stage, differences=True),
        "number": _column(blocks.number, differences=True),
        "gap": _column(blocks.start_ns - before),
        "length": _column(blocks.end_ns - blocks.start_ns),
    }


def _column(values: np.ndarray, *, differences: bool = False) -> int | str:
    """Return the packed values, or one number where all are equal."""
    if len(values) and np.all(values == values[0]):
        return int(values[0])
    return b64encode(varints(np.diff(values, prepend=0) if differences else values)).decode()


def _lanes(lanes: Sequence[Lane], curves: _Curves, measured_strips: Sequence[int | None]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    first: dict[tuple[Any, ...], int] = {}
    for number, (lane, measured_strip) in enumerate(zip(lanes, measured_strips, strict=True)):
        fields = {"device": lane.device, "node": lane.node, "measured": measured_strip}
        key = (lane.strip, lane.stages, curves.number(lane), lane.capacity_bytes, tuple(sorted(lane.parts.items())))
        like = first.setdefault(key, number)
        entries.append(fields | (_lane(lane, curves) if like == number else {"like": like}))
    return entries


def _lane(lane: Lane, curves: _Curves) -> dict[str, Any]:
    return {
        "strip": lane.strip,
        "stages": list(lane.stages),
        "curve": curves.number(lane),
        "capacity_bytes": lane.capacity_bytes,
        "peak_bytes": int(lane.memory_bytes.max(initial=0)),
        "constant_bytes": sum(lane.parts.get(part, 0) for part in CONSTANT_PARTS),
        "parts": lane.parts,
    }


class _Curves:
    """The distinct memory curves of all lanes."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._packed_at: dict[tuple[bytes, bytes], int] = {}
        self._numbers: dict[tuple[int, int], int] = {}
        self.packed: list[dict[str, Any]] = []
        curves = {(lane.strip, id(lane.memory_bytes)): lane.memory_bytes for lane in lanes}
        different = len({(strip, curve.tobytes()) for (strip, _), curve in curves.items()})
        self._points = max(32, min(MAX_CURVE_POINTS, MAX_CURVES_POINTS // max(1, different)))

    def number(self, lane: Lane) -> int | None:
        """Return the number of the lane's curve; None for a lane without a curve."""
        if not len(lane.times_ns):
            return None
        same = id(lane.times_ns), id(lane.memory_bytes)
        if same not in self._numbers:
            key = (lane.times_ns.tobytes(), lane.memory_bytes.tobytes())
            if key not in self._packed_at:
                self._packed_at[key] = len(self.packed)
                self.packed.append(self._pack(lane))
            self._numbers[same] = self._packed_at[key]
        return self._numbers[same]

    def _pack(self, lane: Lane) -> dict[str, Any]:
        times, total, activations = thinned(lane, self._points)
        columns = {"times": times, "total": total, "activations": activations}
        packed = {name: b64encode(varints(np.diff(each, prepend=0))).decode() for name, each in columns.items()}
        return {"count": len(times), **packed}


def thinned(lane: Lane, points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return times, bytes and bytes of activations in at most ``points`` points.

    Each point is the highest of the points that it replaces, so peaks are kept.
    """
    times, total = lane.times_ns, lane.memory_bytes
    activations = lane.activations_bytes if len(lane.activations_bytes) else np.zeros_like(total)
    if len(times) <= points:
        return times, total, activations
    starts = np.linspace(0, len(times), points, endpoint=False).astype(np.int64)
    highest = np.maximum.reduceat(total, starts)
    group = np.repeat(np.arange(points), np.diff(np.append(starts, len(times))))
    which = np.flatnonzero(total == highest[group])
    first = which[np.searchsorted(group[which], np.arange(points))]
    return times[starts], highest, activations[first]
