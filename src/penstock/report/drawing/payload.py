"""What the page's script draws, as plain data: columns of blocks packed as differences, curves thinned.

Times are whole nanoseconds. A strip's block i starts ``gap[i]`` after block i-1 ended (transfers may overlap, so a
gap can be negative) and lasts ``length[i]``. A column is one number where all of its values are equal; else the base64
of zigzag varints, of ``stage`` and ``number`` and of curves the differences between neighbours. Above ``MAX_BLOCKS``
blocks a strip is merged to pixel columns, and ``finer`` gives a part of it in as many columns as are wanted.
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
"""Of all different curves together."""


class Mark(NamedTuple):
    """A part of the critical path: the lane, 1 where it is communication, and from when to when."""

    lane: int
    communication: int
    start_ns: int
    end_ns: int


def payload(
    picture: Picture, title: str, path: Sequence[Mark] = (), *, measured: Picture | None = None
) -> dict[str, Any]:
    """The picture as JSON data, with the critical path as marks on its lanes; ``measured``: what a run took instead."""
    is_merged = picture.num_blocks > MAX_BLOCKS
    strips, lanes = list(picture.strips), list(picture.lanes)
    if is_merged:
        columns = max(32, min(MOST_COLUMNS, MAX_BLOCKS // (2 * len(lanes))))
        strips = [_coarse(strip, columns, 0, picture.end_ns) for strip in strips]
    twins = _twins(picture, measured, strips, lanes) if measured is not None else [None] * len(lanes)
    curves = _Curves(lanes)
    return {
        "title": title,
        "end_ns": picture.end_ns,
        "measured_end_ns": measured.end_ns if measured else None,
        "window_ns": list(picture.window[:2]) if picture.window else None,
        "num_micro_batches": picture.num_micro_batches,
        "merged": is_merged,
        "num_blocks": picture.num_blocks,
        "names": NAMES,
        "kinds": _kinds(strips),
        "firsts": list(picture.firsts),
        "path": [list(mark) for mark in path],
        "strips": [_strip(strip) for strip in strips],
        "lanes": [_lane(lane, curves, twin) for lane, twin in zip(lanes, twins, strict=True)],
        "curves": curves.packed,
    }


def finer(picture: Picture, from_ns: int, to_ns: int, columns: int) -> dict[str, Any]:
    """The strips between two times, in at most so many columns; each block as it is where there are few enough."""
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


def _twins(picture: Picture, measured: Picture, strips: list[Strip], lanes: list[Lane]) -> list[int | None]:
    """The strip that was measured on each lane; ranks that have no lane get one with nothing predicted on it."""
    first, twins = len(strips), [None] * len(lanes)
    strips.extend(measured.strips)
    found: list[int | None] = list(twins)
    free = {(lane.device, lane.stages): number for number, lane in reversed(list(enumerate(lanes)))}
    for lane in measured.lanes:
        number = free.pop((lane.device, lane.stages), None)
        if number is None:
            lanes.append(Lane(lane.device, len(strips), lane.stages, lane.times_ns, lane.memory_bytes, None))
            strips.append(Strip.nothing())
            found.append(first + lane.strip)
        else:
            found[number] = first + lane.strip
    return found


def _kinds(strips: Sequence[Strip]) -> str:
    """The letters that there are."""
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
    """One number where all are equal."""
    if len(values) and np.all(values == values[0]):
        return int(values[0])
    return b64encode(varints(np.diff(values, prepend=0) if differences else values)).decode()


def _lane(lane: Lane, curves: _Curves, twin: int | None) -> dict[str, Any]:
    curve = curves.number(lane)
    return {
        "device": lane.device,
        "node": lane.node,
        "strip": lane.strip,
        "measured": twin,
        "stages": list(lane.stages),
        "curve": curve,
        "capacity_bytes": lane.capacity_bytes,
        "peak_bytes": int(lane.memory_bytes.max(initial=0)),
        "constant_bytes": sum(lane.parts.get(part, 0) for part in CONSTANT_PARTS),
        "parts": lane.parts,
    }


class _Curves:
    """The different memory curves of all lanes, each once."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._known: dict[tuple[bytes, bytes], int] = {}
        self.packed: list[dict[str, Any]] = []
        different = len({(lane.strip, lane.memory_bytes.tobytes()) for lane in lanes})
        self._points = max(32, min(MAX_CURVE_POINTS, MAX_CURVES_POINTS // max(1, different)))

    def number(self, lane: Lane) -> int | None:
        """The lane's curve; None where it has none."""
        if not len(lane.times_ns):
            return None
        key = (lane.times_ns.tobytes(), lane.memory_bytes.tobytes())
        if key not in self._known:
            self._known[key] = len(self.packed)
            self.packed.append(self._pack(lane))
        return self._known[key]

    def _pack(self, lane: Lane) -> dict[str, Any]:
        times, total, activations = thinned(lane, self._points)
        columns = {"times": times, "total": total, "activations": activations}
        packed = {name: b64encode(varints(np.diff(each, prepend=0))).decode() for name, each in columns.items()}
        return {"count": len(times), **packed}


def thinned(lane: Lane, points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Times, bytes and bytes of activations in at most so many points.

    Each stands for the highest of those it replaces, so peaks stay.
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
