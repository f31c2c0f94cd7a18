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
"""The side of a device's square in pixels, by the largest number of nodes.

Above these numbers the smallest side is used, and a node whose devices are alike is a single rectangle.
"""
_ACROSS = 4
_LETTER, _NARROW, _DIGIT = 8.4, 6.8, 6
"""The width of a letter of a node's name, of one of a title, which has narrow ones, and of a stage's digit."""
_MOST_ABREAST = 4

StagesOf = Mapping[str, Sequence[int]]


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
    nodes_of: dict[str, list[Node]] = defaultdict(list)
    for node in topology.nodes:
        nodes_of[above.get(node.name, "")].append(node)
    if len(nodes_of) < 2:
        return [Rack("", list(topology.nodes))]
    return [Rack(name or "on no switch", nodes) for name, nodes in nodes_of.items()]


def rack_map(topology: ClusterTopology, stages_of: StagesOf, colours: int) -> str:
    """Return an SVG element of an expanded topology; ``stages_of``: the stages of each device by its name.

    Stage s has the colour class s modulo ``colours``.
    """
    side = next((size for most, size in _CELLS if len(topology.nodes) <= most), _SMALLEST)
    drawing = _Drawing(side, stages_of, colours)
    shown = racks(topology)
    abreast = _abreast(shown, side)
    for start in range(0, len(shown), abreast):
        drawing.add(shown[start : start + abreast], abreast)
    count = sum(len(node.devices) for node in topology.nodes)
    return (
        f'<div class="scroll map" tabindex="0" role="region" aria-label="Cluster map"><svg class="map-svg large" '
        f'viewBox="-2 -2 {WIDTH + 4} {drawing.y + 4:.0f}" role="img" aria-label="cluster map: {count:,} devices in '
        f'{len(topology.nodes):,} nodes">{"".join([*drawing.boxes, *drawing.squares(), *drawing.texts])}</svg></div>'
    )


class _Form(NamedTuple):
    """The form of a rack in a box of a certain width: squares of a node, nodes of a row, and all sizes."""

    across: int
    down: int
    columns: int
    left: float
    height: float

    @classmethod
    def of(cls, rack: Rack, side: int, width: float) -> _Form:
        """Return the form of a rack; names of nodes are on the left where the rack has no name."""
        across = min(_ACROSS, max(len(node.devices) for node in rack.nodes))
        down = max(-(-len(node.devices) // across) for node in rack.nodes)
        left = _MARGIN + (0 if rack.name else _LETTER * max(len(node.name) for node in rack.nodes))
        columns = max(1, int((width - left - _MARGIN) // (across * side + _GAP)))
        rows = -(-len(rack.nodes) // columns)
        head = _HEAD if rack.name else _MARGIN
        return cls(across, down, columns, left, head + rows * (down * side + _GAP) + _MARGIN - _GAP)


def _title(rack: Rack) -> str:
    """Return the name of a rack with the names of its first and last node."""
    first, last = rack.nodes[0].name, rack.nodes[-1].name
    return f"{rack.name}: {first if len(rack.nodes) == 1 else f'{first} … {last} ({len(rack.nodes)} nodes)'}"


def _width(abreast: int) -> float:
    return (WIDTH - (abreast - 1) * _GAP) / abreast


def _abreast(shown: Sequence[Rack], side: int) -> int:
    """Return how many racks side by side make the drawing least high, of those numbers at which titles have room."""
    longest = max(len(_title(rack)) for rack in shown) * _NARROW + 2 * _MARGIN

    def height(abreast: int) -> float:
        heights = [_Form.of(rack, side, _width(abreast)).height for rack in shown]
        return sum(max(heights[start : start + abreast]) + _GAP for start in range(0, len(shown), abreast))

    possible = [n for n in range(1, min(_MOST_ABREAST, len(shown)) + 1) if n == 1 or longest <= _width(n)]
    return min(possible, key=height)


class _Drawing:
    """Racks side by side, in lines one below the other; squares are collected by stage."""

    def __init__(self, side: int, stages_of: StagesOf, colours: int) -> None:
        self.side, self.stages_of, self.colours = side, stages_of, colours
        self.y = 0.0
        self.boxes: list[str] = []
        self.texts: list[str] = []
        self._paths: dict[int, list[str]] = defaultdict(list)
        self._devices: dict[int, list[str]] = defaultdict(list)
        self._places: dict[int, list[int]] = defaultdict(list)
        self._nodes: list[Node] = []

    def add(self, line: Sequence[Rack], abreast: int) -> None:
        """Draw racks side by side, below what is there."""
        width = _width(abreast)
        forms = [_Form.of(rack, self.side, width) for rack in line]
        height = max(form.height for form in forms)
        for number, (rack, form) in enumerate(zip(line, forms, strict=True)):
            x = number * (width + _GAP)
            self.boxes.append(
                f'<rect class="node" x="{x:g}" y="{self.y:g}" width="{width:g}" height="{height:g}" rx="5"/>'
            )
            self._rack(rack, form, x)
        self.y += height + _GAP

    def _rack(self, rack: Rack, form: _Form, x: float) -> None:
        if rack.name:
            self._text(x + _MARGIN, self.y + 15, _title(rack))
        top = self.y + (_HEAD if rack.name else _MARGIN)
        wide, high = form.across * self.side + _GAP, form.down * self.side + _GAP
        before: int | None = None
        for number, node in enumerate(rack.nodes):
            row, column = divmod(number, form.columns)
            y = top + row * high
            if column == 0:
                before = None
                if not rack.name:
                    self._text(x + _MARGIN, y + high / 2 + 2, node.name)
            before = self._node(node, x + form.left + column * wide, y, form.across, before)

    def _node(self, node: Node, x: float, y: float, across: int, before: int | None) -> int | None:
        """Draw a node's squares; return its stage where all of its devices hold the same one."""
        firsts = [next(iter(self.stages_of.get(device.id, ())), -1) for device in node.devices]
        for device, stage in zip(node.devices, firsts, strict=True):
            self._devices[stage].append(device.id)
            self._places[stage].append(len(self._nodes))
        self._nodes.append(node)
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
        if stage != before and len(label) * _DIGIT <= across * self.side and down * self.side >= 10:
            self._label(label, stage, x + (min(across, len(firsts)) * self.side - 1) / 2, y + down * self.side / 2)
        return stage

    def _label(self, label: str, stage: int, x: float, y: float) -> None:
        """Write a node's stage, on a plate of its colour where it is made of squares, whose gaps would cross it."""
        if self.side > _SMALLEST:
            wide, colour = len(label) * _DIGIT + 4, f"s{stage % self.colours}" if stage >= 0 else "unused"
            self.texts.append(f'<rect class="{colour}" x="{x - wide / 2:g}" y="{y - 6:g}" width="{wide}" height="11"/>')
        self._text(x, y + 3, label, f"on h{stage % self.colours}" if stage >= 0 else "off")

    def _square(self, stage: int, x: float, y: float, across: int = 1, down: int = 1) -> None:
        wide, high = across * self.side - 1, down * self.side - 1
        self._paths[stage].append(f"M{x:g} {y:g}h{wide}v{high}h-{wide}z")

    def _text(self, x: float, y: float, words: str, look: str = "") -> None:
        shown = f' class="{look}"' if look else ""
        self.texts.append(f'<text{shown} x="{x:g}" y="{y:g}">{escape(words)}</text>')

    def squares(self) -> list[str]:
        """Return a path for each stage, and one for the devices without any, with their names as its title."""
        shapes = []
        for stage, parts in sorted(self._paths.items()):
            look = f"s{stage % self.colours}" if stage >= 0 else "unused"
            what = f"stage {stage}" if stage >= 0 else "not used"
            devices, places = self._devices[stage], self._places[stage]
            names = named(devices, self._nodes[places[0] : places[-1] + 1])
            words = f"{what}: {names} ({len(devices):,} device{'s' if len(devices) > 1 else ''})"
            shapes.append(
                f'<g><title>{escape(words)}</title><path class="device {look}" data-devices="{len(devices)}" '
                f'd="{"".join(parts)}"/></g>'
            )
        return shapes
