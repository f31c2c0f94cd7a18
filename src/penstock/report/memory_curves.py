"""The memory of all devices: a small curve for each kind of device, all on one scale, below its capacity."""

from __future__ import annotations

from html import escape

import numpy as np

from penstock.report.drawing.payload import thinned
from penstock.report.drawing.picture import Lane, Picture
from penstock.schemas.amounts import amount, percent

MAX_PEAKS = 48
_POINTS, _WIDTH, _HEIGHT = 60, 120, 30


def peaks(picture: Picture) -> str:
    """Return a list with an entry for each group of devices with the same stages and the same curve, on one scale."""
    alike: dict[tuple[int, bytes, int | None], list[Lane]] = {}
    curves = {id(lane.memory_bytes): lane.memory_bytes for lane in picture.lanes}
    contents = {number: curve.tobytes() for number, curve in curves.items()}
    for lane in picture.lanes:
        if len(lane.times_ns):
            alike.setdefault((lane.strip, contents[id(lane.memory_bytes)], lane.capacity_bytes), []).append(lane)
    groups = list(alike.values())
    if not groups:
        return ""
    if len(groups) > MAX_PEAKS:
        fullest = sorted(range(len(groups)), key=lambda i: (-_fullness(groups[i][0]), i))[:MAX_PEAKS]
        groups = [groups[i] for i in sorted(fullest)]
    highest = _highest([lanes[0] for lanes in groups])
    entries = "".join(_entry(lanes, picture.end_ns, highest, len(lanes) * picture.together) for lanes in groups)
    more = f"The {MAX_PEAKS} fullest of {len(alike)} kinds of devices. " if len(alike) > MAX_PEAKS else ""
    note = f"{more}All have the same scale, from 0 to {amount(highest)}; the dashed line is what the device has."
    return f'<p class="hint">{note}</p><ul class="peaks">{entries}</ul>'


def fullest(picture: Picture) -> str:
    """Return the fullest device in words: ``at most 78.1 of 80 GiB (97.6 %), on node0/0``."""
    lanes = [lane for lane in picture.lanes if len(lane.times_ns)]
    if not lanes:
        return "not simulated"
    lane = max(lanes, key=_fullness)
    return f"at most {_peak(lane)}, on {lane.device}"


def _peak(lane: Lane) -> str:
    peak = int(lane.memory_bytes.max())
    if not lane.capacity_bytes:
        return amount(peak)
    return f"{amount(peak)} of {amount(lane.capacity_bytes)} ({percent(peak / lane.capacity_bytes)})"


def _fullness(lane: Lane) -> float:
    """Return the share of a device's memory that its peak takes; where it is not known, the peak in bytes."""
    return float(lane.memory_bytes.max()) / (lane.capacity_bytes or 1)


def _highest(lanes: list[Lane]) -> float:
    """Return the upper end of the scale of all curves: every peak, and every capacity that is within range."""
    peak = max(int(lane.memory_bytes.max()) for lane in lanes)
    capacities = [lane.capacity_bytes for lane in lanes if lane.capacity_bytes and lane.capacity_bytes < 3 * peak]
    return 1.05 * max(peak, *capacities, 1)


def _entry(lanes: list[Lane], end_ns: int, highest: float, count: int) -> str:
    lane = lanes[0]
    others = f" and {count - 1:,} like it" if count > 1 else ""
    stages = f"stage{'s' if len(lane.stages) > 1 else ''} {', '.join(map(str, lane.stages[:6]))}"
    largest = max(lane.parts.items(), key=lambda item: item[1], default=("", 0))
    most = f", most of it {largest[0]}" if largest[1] else ""
    return (
        f"<li><strong>{escape(lane.device)}{others}</strong>{stages}: {_peak(lane)}{most}"
        f"{_curve(lane, end_ns, highest)}</li>"
    )


def _curve(lane: Lane, end_ns: int, highest: float) -> str:
    times, total, _activations = thinned(lane, _POINTS)
    capacity = lane.capacity_bytes or 0
    x = np.append(times, end_ns) / end_ns * _WIDTH
    y = _HEIGHT * (1 - total / highest)
    steps = "".join(f"V{high:.1f}H{right:.1f}" for high, right in zip(y, x[1:], strict=True))
    line = ""
    if 0 < capacity <= highest:
        at = _HEIGHT * (1 - capacity / highest)
        line = f'<path class="capacity" d="M0 {at:.1f}H{_WIDTH}"/>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="curve" d="M0 {_HEIGHT}{steps}V{_HEIGHT}Z"/>{line}</svg>'
    )
