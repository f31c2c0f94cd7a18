"""A large cluster as a drawing: a small block of squares for each node, in a box for each switch that nodes share.

Squares of one colour are one path, so that ten thousand devices are a small picture; a number stands where the stage
changes. Traffic is in the table: lines between hundreds of nodes would cover what they connect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from penstock.report.device_names import named
from penstock.schemas.topology import ClusterTopology, Node

WIDTH = 1000
_MARGIN, _HEAD, _GAP = 8, 22, 4
_CELLS = ((160, 11), (640, 7))
_SMALLEST = 5
"""The side of a device's square, by the largest number of nodes for which it is taken; the smallest for more, where a
node whose devices are alike is a single rectangle."""
_ACROSS = 4
_LETTER = 8.4
"""The width of a letter of a name; a digit of a stage's number has 6."""

Held = Mapping[str, Sequence[int]]


class Rack(NamedTuple):
    """Nodes that hang on one switch; ``name`` is empty where the cluster has only one."""

    name: str
    nodes: list[Node]


def racks(topology: ClusterTopology) -> list[Rack]:
    """Return the nodes of an expanded topology by the switch that they hang on, in the order of their first nodes."""
    switches = set(topology.switches)
    above: dict[str, str] = {}
    for link in topology.links:
        for place, switch in ((link.a, link.b), (link.b, link.a)):
            if switch in switches and place not in switches:
                above.setdefault(place, switch)
    found: dict[str, list[Node]] = defaultdict(list)
    for node in topology.nodes:
        found[above.get(node.name, "")].append(node)
    if len(found) < 2:
        return [Rack("", list(topology.nodes))]
    return [Rack(name or "on no switch", nodes) for name, nodes in found.items()]


def rack_map(topology: ClusterTopology, held: Held, colours: int) -> str:
    """Return an SVG element of an expanded topology; ``held``: the stages of each device by its name.

    Stage s has the colour class s modulo ``colours``.
    """
    side = next((size for most, size in _CELLS if len(topology.nodes) <= most), _SMALLEST)
    drawing = _Drawing(side, held, colours)
    for rack in racks(topology):
        drawing.add(rack)
    count = sum(len(node.devices) for node in topology.nodes)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="Cluster map"><svg class="map-svg large" '
        f'viewBox="-2 -2 {WIDTH + 4} {drawing.y + 4:.0f}" role="img" aria-label="cluster map: {count:,} devices in '
        f'{len(topology.nodes):,} nodes">{"".join([*drawing.boxes, *drawing.squares(), *drawing.texts])}</svg></div>'
    )


class _Drawing:
    """Racks one below the other; squares are collected by stage."""

    def __init__(self, side: int, held: Held, colours: int) -> None:
        self.side, self.held, self.colours = side, held, colours
        self.y = 0.0
        self.boxes: list[str] = []
        self.texts: list[str] = []
        self._paths: dict[int, list[str]] = defaultdict(list)
        self._devices: dict[int, list[str]] = defaultdict(list)
        self._nodes: list[Node] = []

    def add(self, rack: Rack) -> None:
        """Draw the nodes of a rack below what is there."""
        self._nodes += rack.nodes
        across = min(_ACROSS, max(len(node.devices) for node in rack.nodes))
        down = max(-(-len(node.devices) // across) for node in rack.nodes)
        wide, high = across * self.side + _GAP, down * self.side + _GAP
        room = 0 if rack.name else _LETTER * max(len(node.name) for node in rack.nodes)
        left = _MARGIN + room
        columns = max(1, int((WIDTH - left - _MARGIN) // wide))
        top = self.y + (_HEAD if rack.name else _MARGIN)
        rows = -(-len(rack.nodes) // columns)
        height = top - self.y + rows * high + _MARGIN - _GAP
        self.boxes.append(f'<rect class="node" x="0" y="{self.y:g}" width="{WIDTH}" height="{height:g}" rx="5"/>')
        if rack.name:
            first, last = rack.nodes[0].name, rack.nodes[-1].name
            own = first if len(rack.nodes) == 1 else f"{first} … {last} ({len(rack.nodes)} nodes)"
            self._text(_MARGIN, self.y + 15, f"{rack.name}: {own}")
        before: int | None = None
        for number, node in enumerate(rack.nodes):
            row, column = divmod(number, columns)
            x, y = left + column * wide, top + row * high
            if column == 0:
                before = None
                if not rack.name:
                    self._text(_MARGIN, y + high / 2 + 2, node.name)
            before = self._node(node, x, y, across, before)
        self.y += height + _GAP

    def _node(self, node: Node, x: float, y: float, across: int, before: int | None) -> int | None:
        """Draw a node's squares; return its stage where all of its devices hold the same one."""
        firsts = [next(iter(self.held.get(device.id, ())), -1) for device in node.devices]
        for device, stage in zip(node.devices, firsts, strict=True):
            self._devices[stage].append(device.id)
        alike = len(set(firsts)) == 1
        if alike and self.side == _SMALLEST:
            self._square(firsts[0], x, y, min(across, len(firsts)), -(-len(firsts) // across))
        else:
            for i, stage in enumerate(firsts):
                self._square(stage, x + i % across * self.side, y + i // across * self.side)
        if not alike:
            return None
        stage, down = firsts[0], -(-len(firsts) // across)
        label = str(stage) if stage >= 0 else "idle"
        if stage != before and len(label) * 6 <= across * self.side and down * self.side >= 10:
            x += (min(across, len(firsts)) * self.side - 1) / 2
            look = f"on h{stage % self.colours}" if stage >= 0 else "off"
            self._text(x, y + down * self.side / 2 + 3, label, look)
        return stage

    def _square(self, stage: int, x: float, y: float, across: int = 1, down: int = 1) -> None:
        wide, high = across * self.side - 1, down * self.side - 1
        self._paths[stage].append(f"M{x:g} {y:g}h{wide}v{high}h-{wide}z")

    def _text(self, x: float, y: float, words: str, look: str = "") -> None:
        shown = f' class="{look}"' if look else ""
        self.texts.append(f'<text{shown} x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def squares(self) -> list[str]:
        """Return a path for each stage, and one for the devices without any, with their names as its title."""
        made = []
        for stage, parts in sorted(self._paths.items()):
            look = f"s{stage % self.colours}" if stage >= 0 else "unused"
            what = f"stage {stage}" if stage >= 0 else "not used"
            devices = self._devices[stage]
            words = f"{what}: {named(devices, self._nodes)} ({len(devices):,} device{'s' if len(devices) > 1 else ''})"
            made.append(
                f'<g><title>{escape(words)}</title><path class="device {look}" data-devices="{len(devices)}" '
                f'd="{"".join(parts)}"/></g>'
            )
        return made
