"""The cluster as a drawing: nodes as boxes, devices as squares coloured by stage, and the traffic between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from html import escape
from math import hypot
from typing import NamedTuple

from penstock.report.tables import table
from penstock.report.traffic import SORTS, Flow
from penstock.report.words import amount, percent
from penstock.schemas.plan import Plan
from penstock.schemas.topology import ClusterTopology

STAGE_COLOURS = 8
"""The number of stage colours (classes s0, s1, …); neighbours differ for every common kind of colour blindness."""
MAX_DRAWN_DEVICES = 4096
MAX_DRAWN_FLOWS = 300
MAX_FLOW_ROWS = 60
BUSY = 0.5
"""The share of time in use from which a link is drawn as busy."""
_GAP, _HEAD, _WIDTH = 6, 22, 1000


class _Place(NamedTuple):
    """A box: its corner, width and height."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2

    def towards(self, other: _Place) -> tuple[float, float]:
        """Return the point where the line from this box's centre to another one's crosses the edge."""
        (x, y), (u, v) = self.middle, other.middle
        share = min(
            1.0,
            1.0,
            *(half / abs(way) for half, way in ((self.width / 2, u - x), (self.height / 2, v - y)) if way),
        )
        return x + share * (u - x), y + share * (v - y)


def cluster_map(plan: Plan, topology: ClusterTopology, flows: Sequence[Flow] = ()) -> str:
    """Return an SVG element; a sentence where the cluster is too large to draw. ``flows`` number devices in order."""
    nodes = topology.expanded().nodes
    count = sum(len(node.devices) for node in nodes)
    if count > MAX_DRAWN_DEVICES:
        return f"<p>{count} devices in {len(nodes)} nodes: too many to draw; the table of stages names them.</p>"
    held: dict[str, list[int]] = defaultdict(list)
    for number, stage in enumerate(stage for pipeline in plan.pipelines for stage in pipeline.stages):
        for name in stage.devices:
            held[name].append(number)
    side = 44 if count <= 128 else 24 if count <= 512 else 13
    gap = _GAP + (24 if flows and count <= 512 else 8 if flows else 0)
    boxes, squares, home, parts = [], [], [], []
    x, y, row_height = 0.0, 0.0, 0.0
    for number, node in enumerate(nodes):
        across = min(max(1, len(node.devices)), 8)
        width = max(across * (side + _GAP) + _GAP, 8 * min(len(node.name), 24) + 2 * _GAP)
        height = _HEAD + -(-len(node.devices) // across) * (side + _GAP) + _GAP
        if x and x + width > _WIDTH:
            x, y, row_height = 0, y + row_height + gap, 0
        boxes.append(_Place(x, y, width, height))
        parts.append(_node(boxes[-1], node.name))
        for i, device in enumerate(node.devices):
            square = _Place(x + _GAP + i % across * (side + _GAP), y + _HEAD + i // across * (side + _GAP), side, side)
            squares.append(square)
            home.append(number)
            parts.append(_device(square, device.id, device.kind, held.get(device.id, [])))
        x, row_height = x + width + gap, max(row_height, height)
    names = [device.id for node in nodes for device in node.devices]
    parts += _arrows(flows, names, squares, home, boxes, [node.name for node in nodes])
    return (
        f'<svg class="map-svg" viewBox="-2 -2 {_WIDTH + 4} {y + row_height + 4:.0f}" role="img" '
        f'aria-label="cluster map: {count} devices in {len(nodes)} nodes">{"".join(parts)}</svg>'
    )


def traffic_table(flows: Sequence[Flow], names: Sequence[str]) -> str:
    """Return a table of the largest flows, as the map draws them. ``names`` of all devices in order."""
    if not flows:
        return "<p>No data is sent between devices.</p>"
    rows = [
        [names[f.source], names[f.target], *(amount(size) for size in (*f.sizes, f.bytes)), percent(f.utilisation)]
        for f in flows[:MAX_FLOW_ROWS]
    ]
    more = (
        f'<p class="hint">The largest {MAX_FLOW_ROWS} of {len(flows):,} are shown.</p>'
        if len(flows) > len(rows)
        else ""
    )
    heads = ["from", "to", *SORTS, "per global batch", "its busiest link is used"]
    shown = table(heads, rows, numeric=range(2, len(heads)))
    return f"<details><summary>Traffic as a table</summary>{shown}{more}</details>"


def _node(place: _Place, name: str) -> str:
    room = max(4, int(place.width // 7.5))
    shown = name if len(name) <= room else name[: room - 1] + "…"
    return (
        f'<rect class="node" x="{place.x:g}" y="{place.y:g}" width="{place.width:g}" height="{place.height:g}" rx="5"/>'
        f'<text x="{place.x + _GAP:g}" y="{place.y + 15:g}">{escape(shown)}</text>'
    )


def _device(place: _Place, name: str, kind: str, stages: list[int]) -> str:
    label = ",".join(str(stage) for stage in stages) if len(stages) < 4 else f"{stages[0]}…{stages[-1]}"
    what = f"stage {label}" if stages else "not used"
    look = f"device s{stages[0] % STAGE_COLOURS}" if stages else "device unused"
    middle, base = place.middle
    text = (
        f'<text class="{"on" if stages else "off"}" x="{middle:g}" y="{base + 4:g}">{label or "–"}</text>'
        if place.width > 7 * len(label) + 4
        else ""
    )
    return (
        f"<g><title>{escape(name)} ({escape(kind)}): {what}</title>"
        f'<rect class="{look}" x="{place.x:g}" y="{place.y:g}" width="{place.width:g}" height="{place.height:g}" '
        f'rx="3"/>{text}</g>'
    )


def _arrows(
    flows: Sequence[Flow],
    names: Sequence[str],
    squares: Sequence[_Place],
    home: Sequence[int],
    boxes: Sequence[_Place],
    nodes: Sequence[str],
) -> list[str]:
    """Draw flows within a node between its squares, and the sums of the others between nodes; the largest ones only."""
    inside: dict[tuple[int, int], list[Flow]] = defaultdict(list)
    between: dict[tuple[int, int], list[Flow]] = defaultdict(list)
    for flow in flows:
        a, b = home[flow.source], home[flow.target]
        if a == b:
            inside[flow.source, flow.target].append(flow)
        else:
            between[a, b].append(flow)
    drawn = [(names[u], names[v], squares[u], squares[v], own) for (u, v), own in inside.items()]
    drawn += [(nodes[a], nodes[b], boxes[a], boxes[b], own) for (a, b), own in between.items()]
    drawn.sort(key=lambda each: -sum(flow.bytes for flow in each[4]))
    most = max((sum(flow.bytes for flow in each[4]) for each in drawn), default=1)
    return [_arrow(*each, most) for each in drawn[:MAX_DRAWN_FLOWS]]


def _arrow(source: str, target: str, a: _Place, b: _Place, flows: Sequence[Flow], most: int) -> str:
    size, used = sum(flow.bytes for flow in flows), max(flow.utilisation for flow in flows)
    far = hypot(b.middle[0] - a.middle[0], b.middle[1] - a.middle[1]) or 1.0
    across, along = (a.middle[1] - b.middle[1]) / far, (b.middle[0] - a.middle[0]) / far
    bend = min(26.0, far / 4)
    (x1, y1), (x2, y2) = a.towards(b), b.towards(a)
    shift = min(6.0, a.width / 8, b.width / 8)
    x1, y1, x2, y2 = (v + shift * d for v, d in zip((x1, y1, x2, y2), (across, along, across, along), strict=True))
    path = (
        f"M{x1:.0f} {y1:.0f}Q{(x1 + x2) / 2 + bend * across:.0f} {(y1 + y2) / 2 + bend * along:.0f} {x2:.0f} {y2:.0f}"
    )
    parts = ", ".join(
        f"{name} {amount(total)}" for k, name in enumerate(SORTS) if (total := sum(flow.sizes[k] for flow in flows))
    )
    words = f"{source} to {target}: {amount(size)} per global batch ({parts}); the busiest link is used {percent(used)}"
    return (
        f'<g><title>{escape(words)}</title><path class="flow{" busy" if used >= BUSY else ""}" '
        f'stroke-width="{1 + 4 * size / most:.1f}" d="{path}"/></g>'
    )
