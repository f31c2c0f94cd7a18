"""Slurm's topology.conf: switches that make a tree, blocks with their sizes, or rings.

.. [1] Slurm, topology.conf(5): the keys of each form; LinkSpeed has arbitrary units and is not used.
.. [2] Slurm, Topology Guide: how block sizes group neighbouring blocks into larger ones.
"""

from __future__ import annotations

from itertools import pairwise

from penstock.importers.cluster.facts import LinkFacts, Place, SourceFacts
from penstock.importers.cluster.hostlist import fold
from penstock.importers.cluster.slurm.slurm_lines import (
    At,
    Hostlists,
    Value,
    logical_lines,
    refuse_other_than_text,
    values,
)
from penstock.importers.cluster.switch_tree import Group, Switch, nested, node_facts, switch_facts
from penstock.importers.lines import Faults

_KEYS = ("SwitchName", "Switches", "Nodes", "LinkSpeed", "BlockName", "BlockSizes", "RingName")
_SPELLINGS = {key.lower(): key for key in _KEYS}
_ALLOWED = {
    "SwitchName": {"Switches", "Nodes", "LinkSpeed"},
    "BlockName": {"Nodes"},
    "BlockSizes": set[str](),
    "RingName": {"Nodes"},
}

NOTHING_NAMED = "it names no switch, block or ring: lines begin with SwitchName=, BlockName= or RingName="
LINK_SPEED = "LinkSpeed has arbitrary units in Slurm and is not read as a bandwidth"
BLOCKS = "Slurm does not say whether a block is one NVLink domain; it is a switch, or with --nvlink-blocks a domain"
RINGS = "a ring has no switch: each node is linked to the next one, and the last one to the first"


def read_slurm_conf(text: str, source: str = "topology.conf") -> SourceFacts:
    """Read the switches, blocks or rings of a topology.conf.

    Raises InvalidDocument with all faults by line and column: what is no Key=Value, unknown keys, names that are not
    there or there twice, nodes below two leaf switches, cycles of switches, two forms in one text.
    """
    faults = Faults(f"the topology.conf {source!r}")
    refuse_other_than_text(text, faults)
    lines = _Lines(faults)
    for line in logical_lines(text, faults):
        if line.text.strip():
            lines.read(values(line, _SPELLINGS, faults))
    lines.check_form()
    faults.stop()
    if lines.rings:
        return ring_facts("slurm-conf", source, lines.rings, faults)
    blocks = lines.switches and lines.switches[0].layer == "block"
    switches = nested(lines.switches, lines.groups(), faults) if blocks else lines.switches
    facts, duplicates = switch_facts(switches, faults, source)
    assumptions = [f"{source}: {LINK_SPEED}"] if lines.has_link_speed else []
    assumptions += [f"{source}: {BLOCKS}"] if blocks else []
    return SourceFacts(
        format="slurm-conf",
        source=source,
        nodes=node_facts(switches, source),
        switches=facts,
        assumptions=(*assumptions, *duplicates),
    )


def ring_facts(form: str, source: str, rings: list[Switch], faults: Faults) -> SourceFacts:
    """Return each ring's nodes, in its order, as links without a bandwidth; doubles of rings and nodes are faults."""
    switch_facts(rings, faults, source)
    links = []
    for ring in rings:
        place = Place(source, *ring.below_at)
        ends = zip(ring.nodes, (*ring.nodes[1:], ring.nodes[0]), strict=True) if len(ring.nodes) > 2 else [ring.nodes]
        links += [LinkFacts(a, b, place) for a, b in ends] if len(ring.nodes) > 1 else []
    return SourceFacts(
        format=form,
        source=source,
        nodes=node_facts(rings, source),
        links=tuple(links),
        assumptions=(f"{source}: {RINGS}",),
    )


def block_groups(sizes: list[int], blocks: list[str], at: At) -> list[Group]:
    """Return the larger blocks that block sizes make of neighbouring ones: 30, 120 puts four blocks into one each.

    Blocks left over at the end make one more of them, unless a smaller size holds them.
    """
    groups = []
    for smaller, size in pairwise(sizes):
        step = size // sizes[0]
        for start in range(0, len(blocks), step):
            members = tuple(blocks[start : start + step])
            if len(members) > smaller // sizes[0]:
                groups.append(Group(fold(members), at, members))
    return groups


def check_block_sizes(sizes: list[tuple[int, At]], faults: Faults) -> None:
    """Block sizes are faults where they are not the first one times growing powers of two."""
    for (smaller, _), (size, (line, column)) in pairwise(sizes):
        times = size // sizes[0][0]
        if size <= smaller or size % sizes[0][0] or times & (times - 1):
            detail = f"the block size {size} is not {sizes[0][0]} times a larger power of two than {smaller} is"
            faults.add(line, detail, column=column)


class _Lines:
    """The facts of the lines so far."""

    def __init__(self, faults: Faults) -> None:
        self.switches: list[Switch] = []
        self.rings: list[Switch] = []
        self.has_link_speed = False
        self._sizes: list[tuple[int, At]] = []
        self._forms: dict[str, At] = {}
        self._hostlists = Hostlists(faults)
        self._faults = faults

    def read(self, line: dict[str, Value]) -> None:
        """Take one line in."""
        subject = next((key for key in _ALLOWED if key in line), None)
        if subject is None:
            for value in list(line.values())[:1]:
                self._fault(value, f"{value.key} is of no switch, block or ring: its line names none")
            return
        for key in line.keys() - _ALLOWED[subject] - {subject}:
            self._fault(line[key], f"{key} does not go with {subject}")
        value = line[subject]
        self._forms.setdefault({"BlockSizes": "BlockName"}.get(subject, subject), value.at)
        if subject == "BlockSizes":
            self._read_sizes(value)
        elif self._is_name(value):
            self._read_names(line, value)

    def check_form(self) -> None:
        """Check that the text is of switches, of blocks or of rings alone, and names at least one."""
        forms = sorted(self._forms.items(), key=lambda form: form[1])
        if len(forms) > 1:
            (first, at), (second, (number, column)) = forms[:2]
            detail = f"{second} in a text that has {first} on line {at[0]}; Slurm reads one of them"
            self._faults.add(number, detail, column=column, code="contradiction")
        elif not self.switches and not self.rings and not self._faults.entries:
            self._faults.add(None, NOTHING_NAMED, code="missing")

    def groups(self) -> list[Group]:
        """Return the groups of blocks that BlockSizes defines."""
        if not self._sizes:
            return []
        return block_groups([size for size, _ in self._sizes], [s.name for s in self.switches], self._sizes[0][1])

    def _read_names(self, line: dict[str, Value], name: Value) -> None:
        nodes, switches = line.get("Nodes"), line.get("Switches")
        below = nodes or switches
        if name.key != "SwitchName" and (nodes is None or not nodes.text):
            self._fault(name, f"{name.text!r} has no Nodes=", "missing")
        if nodes and switches:
            self._fault(switches, f"{name.text!r} has Nodes and Switches; a switch has one of them", "contradiction")
        if "LinkSpeed" in line:
            self.has_link_speed = True
            if not line["LinkSpeed"].text.isascii() or not line["LinkSpeed"].text.isdigit():
                self._fault(line["LinkSpeed"], f"LinkSpeed={line['LinkSpeed'].text} is no whole number")
        read = Switch(
            name=name.text,
            at=name.at,
            below_at=below.at if below else name.at,
            nodes=self._hostlists.read(nodes.text, nodes.place) if nodes else (),
            switches=self._hostlists.read(switches.text, switches.place) if switches else (),
            layer=name.key.removesuffix("Name").lower(),
        )
        (self.rings if name.key == "RingName" else self.switches).append(read)

    def _read_sizes(self, value: Value) -> None:
        if self._sizes:
            self._fault(value, "BlockSizes is there twice", "double")
            return
        at = 0
        for entry in value.text.split(","):
            size = entry.strip()
            if size.isascii() and size.isdigit() and 0 < len(size) < 10 and int(size):
                self._sizes.append((int(size), value.place(at)))
            else:
                number, column = value.place(at)
                self._faults.add(number, f"the block size {size[:40]!r} is not a number of nodes", column=column)
            at += len(entry) + 1
        check_block_sizes(self._sizes, self._faults)

    def _is_name(self, value: Value) -> bool:
        if not value.text:
            self._fault(value, f"{value.key} is empty", "missing")
        elif value.text.split() != [value.text] or set(value.text) & set("[],"):
            self._fault(value, f"{value.text[:60]!r} is no single name")
        else:
            return True
        return False

    def _fault(self, value: Value, detail: str, code: str = "invalid") -> None:
        number, column = value.at
        self._faults.add(number, detail, column=column, code=code)
