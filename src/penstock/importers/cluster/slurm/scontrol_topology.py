"""The output of ``scontrol show topology``: switches by level, blocks and the larger blocks above them, or rings.

Switches above others repeat all nodes below them. A torus is printed without the places of its nodes, so that its
links are in topology.yaml only.
"""

from __future__ import annotations

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.hostlist import fold_shortly
from penstock.importers.cluster.slurm.slurm_conf import BLOCKS, LINK_SPEED, NOTHING_NAMED, ring_facts
from penstock.importers.cluster.slurm.slurm_lines import Hostlists, Line, Value, refuse_other_than_text, values
from penstock.importers.cluster.switch_tree import Group, Switch, nested, node_facts, switch_facts, tiers_of
from penstock.importers.lines import Faults

_SUBJECTS = ("SwitchName", "BlockName", "AggregatedBlock", "RingName", "TorusName")
_KEYS = (*_SUBJECTS, "Level", "LinkSpeed", "Nodes", "Switches", "BlockIndex", "BlockSize", "RingSize")
_SPELLINGS = {key.lower(): key for key in (*_KEYS, "Dims", "PlacementDims", "Anchors")}
_REMEDY = "give the whole output of `scontrol show topology`, without names after it"


def read_scontrol_topology(text: str, source: str = "scontrol show topology") -> SourceFacts:
    """Read the switches, blocks or rings that Slurm prints.

    Raises InvalidDocument with all faults by line and column: lines that are none of the command's, switches that are
    not in the text (part of its output), nodes below two leaf switches, levels and nodes that contradict the tree.
    """
    faults = Faults(f"the topology {source!r}")
    refuse_other_than_text(text, faults)
    if "No topology information available" in text:
        faults.add(
            None, "Slurm says that it has no topology: all nodes are alike to it (topology/flat)", code="missing"
        )
        faults.stop()
    records = _Records(faults)
    for number, line in enumerate(text.lstrip("\ufeff").split("\n"), start=1):
        if line.strip():
            records.read(values(Line(line, (0,), number), _SPELLINGS, faults))
    if not faults.entries and not records.switches and not records.rings:
        faults.add(None, NOTHING_NAMED, code="missing")
    faults.stop()
    if records.rings:
        return ring_facts("scontrol-topology", source, records.rings, faults)
    switches = nested(records.switches, records.groups, faults) if records.groups else records.switches
    facts, duplicates = switch_facts(switches, faults, source, remedy=_REMEDY)
    records.check_against_tree()
    faults.stop()
    assumptions = [f"{source}: {LINK_SPEED}"] if records.has_link_speed else []
    assumptions += [f"{source}: {BLOCKS}"] if switches[0].layer == "block" else []
    return SourceFacts(
        format="scontrol-topology",
        source=source,
        nodes=node_facts(switches, source),
        switches=facts,
        assumptions=(*assumptions, *duplicates),
    )


class _Records:
    """The facts of the lines so far; ``repeated``: the nodes that a switch above others lists, for comparison."""

    def __init__(self, faults: Faults) -> None:
        self.switches: list[Switch] = []
        self.groups: list[Group] = []
        self.rings: list[Switch] = []
        self.has_link_speed = False
        self._levels: dict[str, Value] = {}
        self._repeated: dict[str, tuple[str, ...]] = {}
        self._hostlists = Hostlists(faults)
        self._faults = faults

    def read(self, record: dict[str, Value]) -> None:
        """Take one line in."""
        subject = next((record[key] for key in _SUBJECTS if key in record), None)
        if subject is None:
            for value in list(record.values())[:1]:
                self._fault(value, f"{value.key} is of no switch, block or ring: its line names none")
        elif not subject.text:
            self._fault(subject, f"{subject.key} is empty", "missing")
        elif subject.key == "TorusName":
            if "PlacementDims" not in record:
                self._fault(subject, "a torus is printed without the places of its nodes; import topology.yaml instead")
        elif subject.key == "SwitchName":
            self._read_switch(subject, record)
        else:
            self._read_block_or_ring(subject, record)

    def check_against_tree(self) -> None:
        """Check that levels and repeated nodes agree with the tree."""
        tiers = tiers_of(self.switches, self._faults)
        below: dict[str, set[str]] = {}
        for switch in sorted(self.switches, key=lambda switch: tiers[switch.name]):
            below[switch.name] = set(switch.nodes).union(*(below[name] for name in switch.switches))
            self._compare(switch, tiers[switch.name], below[switch.name])

    def _compare(self, switch: Switch, level: int, nodes: set[str]) -> None:
        printed = self._levels.get(switch.name)
        if printed is not None and printed.text != str(level):
            self._fault(
                printed, f"{switch.name!r} is on level {printed.text}, and level {level} by the switches below it"
            )
        repeated = set(self._repeated.get(switch.name, ()))
        if repeated and repeated != nodes:
            line, column = switch.at
            others = fold_shortly(sorted(repeated ^ nodes))
            detail = f"{switch.name!r} lists other nodes than the switches below it: {others}"
            self._faults.add(line, detail, column=column, code="contradiction")

    def _read_switch(self, name: Value, record: dict[str, Value]) -> None:
        if not self._is_name(name):
            return
        self.has_link_speed |= "LinkSpeed" in record and record["LinkSpeed"].text != "1"  # what Slurm says for none
        if "Level" in record:
            self._levels[name.text] = record["Level"]
        nodes, switches = self._names(record.get("Nodes")), self._names(record.get("Switches"))
        below = record.get("Switches") if switches else record.get("Nodes")
        if switches:
            self._repeated[name.text] = nodes
        read = Switch(
            name=name.text,
            at=name.at,
            below_at=below.at if below else name.at,
            nodes=() if switches else nodes,
            switches=switches,
        )
        self._of_one_form(self.switches, read)

    def _read_block_or_ring(self, name: Value, record: dict[str, Value]) -> None:
        nodes = record.get("Nodes")
        if name.key == "AggregatedBlock" or (name.key == "BlockName" and set(name.text) & set("[,")):
            self.groups.append(Group(name.text, name.at, self._hostlists.read(name.text, name.place)))
        elif self._is_name(name):
            layer = name.key.removesuffix("Name").lower()
            read = Switch(name.text, name.at, nodes.at if nodes else name.at, self._names(nodes), layer=layer)
            self._of_one_form(self.rings if layer == "ring" else self.switches, read)

    def _of_one_form(self, switches: list[Switch], read: Switch) -> None:
        other = next(iter([*self.switches[:1], *self.rings[:1]]), read)
        if other.layer != read.layer:
            detail = f"a {read.layer} in a text that has the {other.layer} {other.name!r} on line {other.at[0]}"
            self._faults.add(read.at[0], detail, column=read.at[1], code="contradiction")
        switches.append(read)

    def _is_name(self, value: Value) -> bool:
        if value.text.split() == [value.text] and not set(value.text) & set("[],"):
            return True
        self._fault(value, f"{value.text[:60]!r} is no single name")
        return False

    def _names(self, value: Value | None) -> tuple[str, ...]:
        return self._hostlists.read(value.text, value.place) if value else ()

    def _fault(self, value: Value, detail: str, code: str = "invalid") -> None:
        line, column = value.at
        self._faults.add(line, detail, column=column, code=code)
