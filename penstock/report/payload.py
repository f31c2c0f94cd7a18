"""What the page's script draws, as plain data: blocks in columns, differences instead of times, curves thinned.

Times are whole nanoseconds. A strip's block i starts ``gap[i]`` after block i-1 ended (transfers may overlap, so a
gap can be negative) and lasts ``length[i]``. Above ``MAX_BLOCKS`` blocks a strip is merged to pixel columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.report.picture import NAMES, Blocks, Lane, Picture, Strip, merged

MAX_BLOCKS = 200_000
MOST_COLUMNS = 4_000
MAX_CURVE_POINTS = 1_000


class Mark(NamedTuple):
    """A part of the critical path: the lane, 1 where it is communication, and from when to when."""

    lane: int
    communication: int
    start_ns: int
    end_ns: int


def payload(picture: Picture, title: str, path: Sequence[Mark] = ()) -> dict[str, Any]:
    """The picture as JSON data, with the critical path as marks on its lanes."""
    strips = picture.strips
    is_merged = picture.num_blocks > MAX_BLOCKS
    if is_merged:
        columns = max(32, min(MOST_COLUMNS, MAX_BLOCKS // (2 * len(picture.lanes))))
        strips = tuple(
            Strip(*(merged(blocks, columns, picture.end_ns) for blocks in (strip.compute, strip.communication)))
            for strip in strips
        )
    return {
        "title": title,
        "end_ns": picture.end_ns,
        "window_ns": list(picture.window[:2]) if picture.window else None,
        "num_micro_batches": picture.num_micro_batches,
        "merged": is_merged,
        "num_blocks": picture.num_blocks,
        "names": NAMES,
        "path": [list(mark) for mark in path],
        "strips": [{"compute": _blocks(s.compute), "communication": _blocks(s.communication)} for s in strips],
        "lanes": [_lane(lane) for lane in picture.lanes],
    }


def _blocks(blocks: Blocks) -> dict[str, Any]:
    before = np.concatenate(([0], blocks.end_ns[:-1]))
    return {
        "kind": "".join(blocks.letters[k] for k in blocks.kind.tolist()),
        "stage": _constant(blocks.stage),
        "number": _constant(blocks.number),
        "gap": (blocks.start_ns - before).tolist(),
        "length": (blocks.end_ns - blocks.start_ns).tolist(),
    }


def _constant(values: np.ndarray) -> int | list[int]:
    """One number where all are equal."""
    if len(values) and np.all(values == values[0]):
        return int(values[0])
    return values.tolist()  # type: ignore[no-any-return]


def _lane(lane: Lane) -> dict[str, Any]:
    times, memory = _thinned(lane.times_ns, lane.memory_bytes)
    return {
        "device": lane.device,
        "strip": lane.strip,
        "stages": list(lane.stages),
        "times_ns": times.tolist(),
        "memory_bytes": memory.tolist(),
        "capacity_bytes": lane.capacity_bytes,
    }


def _thinned(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most ``MAX_CURVE_POINTS`` points; each stands for the highest of those it replaces, so peaks stay."""
    if len(times) <= MAX_CURVE_POINTS:
        return times, values
    starts = np.linspace(0, len(times), MAX_CURVE_POINTS, endpoint=False).astype(np.int64)
    return times[starts], np.maximum.reduceat(values, starts)
