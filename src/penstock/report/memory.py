"""The memory of all devices: a small curve for each, below the line of the device's capacity."""

from __future__ import annotations

from html import escape

import numpy as np

from penstock.report.drawing.payload import thinned
from penstock.report.drawing.picture import Lane, Picture
from penstock.report.words import amount, percent

MAX_PEAKS = 128
_POINTS, _WIDTH, _HEIGHT = 60, 120, 30


def peaks(picture: Picture) -> str:
    """Return a list with an entry for each group of devices with the same stages and the same curve."""
    alike: dict[tuple[int, bytes, int | None], list[Lane]] = {}
    for lane in picture.lanes:
        if len(lane.times_ns):
            alike.setdefault((lane.strip, lane.memory_bytes.tobytes(), lane.capacity_bytes), []).append(lane)
    entries = "".join(_entry(lanes, picture.end_ns) for lanes in list(alike.values())[:MAX_PEAKS])
    more = f'<p class="hint">{MAX_PEAKS} of {len(alike)} are shown.</p>' if len(alike) > MAX_PEAKS else ""
    return f'<ul class="peaks">{entries}</ul>{more}'


def _entry(lanes: list[Lane], end_ns: int) -> str:
    lane = lanes[0]
    peak = int(lane.memory_bytes.max())
    others = f" and {len(lanes) - 1} like it" if len(lanes) > 1 else ""
    stages = f"stage{'s' if len(lane.stages) > 1 else ''} {', '.join(map(str, lane.stages[:6]))}"
    words = amount(peak)
    if lane.capacity_bytes:
        words += f" of {amount(lane.capacity_bytes)} ({percent(peak / lane.capacity_bytes)})"
    largest = max(lane.parts.items(), key=lambda item: item[1], default=("", 0))
    most = f", most of it {largest[0]}" if largest[1] else ""
    return f"<li><strong>{escape(lane.device)}{others}</strong>{stages}: {words}{most}{_curve(lane, peak, end_ns)}</li>"


def _curve(lane: Lane, peak: int, end_ns: int) -> str:
    times, total, _activations = thinned(lane, _POINTS)
    capacity = lane.capacity_bytes or 0
    highest = 1.05 * max(peak, capacity if capacity < 3 * peak else 0, 1)
    x = np.append(times, end_ns) / end_ns * _WIDTH
    y = _HEIGHT * (1 - total / highest)
    steps = "".join(f"V{high:.1f}H{right:.1f}" for high, right in zip(y, x[1:], strict=True))
    line = ""
    if 0 < capacity < 3 * peak:
        at = _HEIGHT * (1 - capacity / highest)
        line = f'<path class="capacity" d="M0 {at:.1f}H{_WIDTH}"/>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="curve" d="M0 {_HEIGHT}{steps}V{_HEIGHT}Z"/>{line}</svg>'
    )
