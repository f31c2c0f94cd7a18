"""The cluster as a drawing: nodes as boxes, devices as squares coloured by stage, and the traffic between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from math import hypot
from typing import NamedTuple

from penstock.report.blocks import Block, Cell, Column, Folded, Table, Text, of_amount, of_share
from penstock.report.rack_map import rack_map
from penstock.report.traffic import SORTS, Flow
from penstock.schemas.amounts import amount, percent
from penstock.schemas.plan import Plan
from penstock.schemas.topology import ClusterTopology, Node
from penstock.schemas.transformers.degrees import Degrees
from penstock.solvers.model.degrees import SHARDED

STAGE_COLOURS = 8
"""The number of stage colours (classes s0, s1, …); neighbours differ for every common kind of colour blindness."""
MOST_BOXES = 128
"""The largest number of devices whose nodes are boxes with their traffic; larger clusters are drawn as racks."""
MAX_DRAWN_FLOWS = 300
MAX_FLOW_ROWS = 60
BUSY = 0.5
"""The share of time in use from which a link is drawn as busy."""
_GAP, _HEAD, _WIDTH, _SIDE = 6, 22, 1000, 44


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
            *(half / abs(way) for half, way in ((self.width / 2, u - x), (self.height / 2, v - y)) if way),
        )
        return x + share * (u - x), y + share * (v - y)


def cluster_map(plan: Plan, topology: ClusterTopology, flows: Sequence[Flow] = ()) -> str:
    """Return an SVG element. ``flows`` number devices in order; of a large cluster they are in the table only."""
    whole = topology.expanded()
    stages: dict[str, list[int]] = defaultdict(list)
    for number, stage in enumerate(stage for pipeline in plan.pipelines for stage in pipeline.stages):
        for name in stage.devices:
            stages[name].append(number)
    if whole.num_devices > MOST_BOXES:
        return rack_map(whole, stages, STAGE_COLOURS)
    return _boxes_map(whole.nodes, stages, flows)


def _boxes_map(nodes: Sequence[Node], stages: Mapping[str, list[int]], flows: Sequence[Flow]) -> str:
    """Draw lines between nodes first and labels last, so that no line covers a label."""
    boxes, squares, home, parts, labels = [], [], [], [], []
    x, y, row_height = 0.0, 0.0, 0.0
    gap = _GAP + (24 if flows else 0)
    for number, node in enumerate(nodes):
        across = min(max(1, len(node.devices)), 8)
        width = max(across * (_SIDE + _GAP) + _GAP, 8 * min(len(node.name), 24) + 2 * _GAP)
        height = _HEAD + -(-len(node.devices) // across) * (_SIDE + _GAP) + _GAP
        if x and x + width > _WIDTH:
            x, y, row_height = 0, y + row_height + gap, 0
        boxes.append(_Place(x, y, width, height))
        parts.append(_box(boxes[-1]))
        labels.append(_name(boxes[-1], node.name))
        for i, device in enumerate(node.devices):
            at = (x + _GAP + i % across * (_SIDE + _GAP), y + _HEAD + i // across * (_SIDE + _GAP))
            squares.append(_Place(*at, _SIDE, _SIDE))
            home.append(number)
            parts.append(_device(squares[-1], device.id, device.kind, stages.get(device.id, [])))
            labels.append(_number(squares[-1], stages.get(device.id, [])))
        x, row_height = x + width + gap, max(row_height, height)
    names = [device.id for node in nodes for device in node.devices]
    between, inside = _arrows(flows, names, squares, home, boxes, [node.name for node in nodes])
    return (
        '<div class="scroll map" tabindex="0" role="region" aria-label="Cluster map">'
        f'<svg class="map-svg" viewBox="-2 -2 {_WIDTH + 4} {y + row_height + 4:.0f}" role="img" '
        f'aria-label="cluster map: {len(names)} devices in {len(nodes)} nodes">'
        f"{''.join([*between, *parts, *inside, *labels])}</svg></div>"
    )


def traffic_blocks(plan: Plan, flows: Sequence[Flow], names: Sequence[str]) -> tuple[Block, ...]:
    """Return the largest flows, as the map draws them, in a table. ``names`` of all devices in order."""
    within = _exchanged_within(plan)
    hint = Text(f"What the GPUs of a stage exchange ({within}) is part of its computing, not drawn.", "hint")
    remarks = (hint,) if within else ()
    if not flows:
        return (Text("No stage sends data to another." if within else "No data is sent between devices."), *remarks)
    heads = (Column("from"), Column("to"), *(Column(sort, True) for sort in SORTS), Column("per global batch", True))
    rows = (
        (
            Cell(names[flow.source]),
            Cell(names[flow.target]),
            *(of_amount(size) for size in (*flow.sizes, flow.bytes)),
            of_share(flow.utilisation),
        )
        for flow in flows
    )
    table = Table.of((*heads, Column("its busiest link is used", True)), rows, most=MAX_FLOW_ROWS)
    return (*remarks, Folded("Traffic as a table", (table,)))


def _exchanged_within(plan: Plan) -> str:
    """Return what moves among the GPUs of a stage and is part of its times: ``TP 4, parameters sharded``."""
    degrees = plan.degrees or Degrees()
    parts = [degrees.initials] if degrees.gpus > 1 else []
    if plan.sharding not in (None, "none", "optimizer"):
        parts.append(SHARDED[plan.sharding])
    return ", ".join(parts)


def _box(place: _Place) -> str:
    return (
        f'<rect class="node" x="{place.x:g}" y="{place.y:g}" width="{place.width:g}" height="{place.height:g}" rx="5"/>'
    )


def _name(place: _Place, name: str) -> str:
    room = max(4, int(place.width // 7.5))
    shown = name if len(name) <= room else name[: room - 1] + "…"
    return f'<text class="name" x="{place.x + _GAP:g}" y="{place.y + 15:g}">{escape(shown)}</text>'


def _shown(stages: list[int]) -> str:
    return ",".join(str(stage) for stage in stages) if len(stages) < 4 else f"{stages[0]}…{stages[-1]}"


def _device(place: _Place, name: str, kind: str, stages: list[int]) -> str:
    what = f"stage {_shown(stages)}" if stages else "not used"
    look = f"device s{stages[0] % STAGE_COLOURS}" if stages else "device unused"
    return (
        f"<g><title>{escape(name)} ({escape(kind)}): {what}</title>"
        f'<rect class="{look}" x="{place.x:g}" y="{place.y:g}" width="{place.width:g}" height="{place.height:g}" '
        f'rx="3"/></g>'
    )


def _number(place: _Place, stages: list[int]) -> str:
    """Return the stages as a label with a halo in the square's colour."""
    label, (x, y) = _shown(stages) or "idle", place.middle
    if place.width <= 7 * len(label) + 4:
        return ""
    look = f"on h{stages[0] % STAGE_COLOURS}" if stages else "off"
    return f'<text class="{look}" x="{x:g}" y="{y + 4:g}">{label}</text>'


def _arrows(
    flows: Sequence[Flow],
    names: Sequence[str],
    squares: Sequence[_Place],
    home: Sequence[int],
    boxes: Sequence[_Place],
    nodes: Sequence[str],
) -> tuple[list[str], list[str]]:
    """Draw the sums of flows between nodes, and flows within a node between its squares; the largest ones only."""
    inside: dict[tuple[int, int], list[Flow]] = defaultdict(list)
    between: dict[tuple[int, int], list[Flow]] = defaultdict(list)
    for flow in flows:
        a, b = home[flow.source], home[flow.target]
        if a == b:
            inside[flow.source, flow.target].append(flow)
        else:
            between[a, b].append(flow)
    drawn = [(nodes[a], nodes[b], boxes[a], boxes[b], kinds) for (a, b), kinds in between.items()]
    drawn += [(names[u], names[v], squares[u], squares[v], kinds) for (u, v), kinds in inside.items()]
    largest = sorted(range(len(drawn)), key=lambda i: -sum(flow.bytes for flow in drawn[i][4]))[:MAX_DRAWN_FLOWS]
    most = max((sum(flow.bytes for flow in each[4]) for each in drawn), default=1)
    arrows = [(i < len(between), _arrow(*drawn[i], most)) for i in largest]
    return [arrow for outside, arrow in arrows if outside], [arrow for outside, arrow in arrows if not outside]


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
