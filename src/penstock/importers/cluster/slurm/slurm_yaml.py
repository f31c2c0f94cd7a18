"""Slurm's topology.yaml: a list of named topologies, each a tree, blocks, flat, rings or a three-dimensional torus.

.. [1] Slurm, topology.yaml(5): the names, ``cluster_default``, and the forms tree, block and flat.
.. [2] Slurm, topology.conf(5): rings and what block sizes mean. The places of a torus count along x first, then y, z.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from penstock.importers.cluster.facts import LinkFacts, Place, SourceFacts
from penstock.importers.cluster.positioned_yaml import Item, Mapping, Sequence, Word, read_yaml
from penstock.importers.cluster.slurm.slurm_conf import BLOCKS, block_groups, check_block_sizes, ring_facts
from penstock.importers.cluster.slurm.slurm_lines import At, Hostlists, refuse_other_than_text
from penstock.importers.cluster.switch_tree import Switch, nested, node_facts, switch_facts
from penstock.importers.lines import Faults

_FLAT = "flat: Slurm says nothing of the network between nodes"
_TORUS = "a torus has no switch: each node is linked to its two neighbours along each of three axes, around the ends"
_AXES = ("x", "y", "z")


def read_slurm_yaml(text: str, source: str = "topology.yaml", topology: str | None = None) -> SourceFacts:
    """Read the topology of this name; without a name the first with ``cluster_default: true``, or the only one.

    Raises InvalidDocument with all faults by line and column: YAML that does not parse, aliases, unknown keys, what
    is missing or not of its form, several topologies and none that is the default, and all that a tree can have wrong.
    """
    faults = Faults(f"the topology.yaml {source!r}")
    refuse_other_than_text(text, faults)
    form = _Form(faults, source)
    name, kind, item = _chosen(form, read_yaml(text, faults), topology)
    assumptions = () if topology or name == "" else (f"{source}: the topology {name!r} is read",)
    facts = _READERS[kind](form, item)
    return replace(facts, assumptions=(*assumptions, *facts.assumptions))


def _chosen(form: _Form, document: Item, wanted: str | None) -> tuple[str, str, Item]:
    """Name, form and content of the topology that is asked for."""
    topologies: dict[str, tuple[str, Item]] = {}
    defaults: list[str] = []
    for entry in form.mappings(document, "the document"):
        form.check_keys(entry, {"topology", "cluster_default", *_READERS})
        name = form.word(entry, "topology")
        kinds = [kind for kind in _READERS if kind in entry.items]
        if len(kinds) != 1:
            detail = f"it has {' and '.join(kinds) or 'no form'}; a topology has one of {', '.join(_READERS)}"
            form.fault(entry.at, detail, "contradiction" if kinds else "missing")
        elif name in topologies:
            form.fault(entry.at, f"the topology {name!r} is there twice", "double")
        else:
            topologies[name] = kinds[0], entry.items[kinds[0]]
            if form.is_true(entry, "cluster_default"):
                defaults.append(name)
    form.faults.stop()
    listed = ", ".join(topologies)
    if wanted is not None and wanted not in topologies:
        form.fault(None, f"there is no topology {wanted!r}; there are {listed}", "unknown")
    elif not topologies:
        form.fault(None, "it has no topology", "missing")
    elif wanted is None and not defaults and len(topologies) > 1:
        form.fault(None, f"none of its topologies is the default: say which of {listed} is meant", "missing")
    form.faults.stop("--topology NAME (options.topology)")
    name = wanted if wanted is not None else next(iter([*defaults, *topologies]))
    return name if len(topologies) > 1 else "", *topologies[name]


class _Form:
    """A reader of a document's parts; a part that is not of its form is a fault."""

    def __init__(self, faults: Faults, source: str) -> None:
        self.faults = faults
        self.source = source
        self._hostlists = Hostlists(faults)

    def fault(self, at: At | None, detail: str, code: str = "invalid") -> None:
        line, column = at or (None, None)
        self.faults.add(line, detail, column=column, code=code)

    def mapping(self, item: Item, what: str, keys: set[str]) -> Mapping:
        """Return the item as a mapping of these keys; an empty mapping for another item."""
        if not isinstance(item, Mapping):
            self.fault(item.at, f"{what} is no mapping")
            return Mapping({}, {}, item.at)
        self.check_keys(item, keys)
        return item

    def check_keys(self, item: Mapping, keys: set[str]) -> None:
        for key, at in item.keys.items():
            if key not in keys:
                self.fault(at, f"{key} is none of {', '.join(sorted(keys))}", "unknown")

    def mappings(self, item: Item | None, what: str) -> list[Mapping]:
        """Return the entries of a list of mappings."""
        if item is None:
            return []
        if not isinstance(item, Sequence):
            self.fault(item.at, f"{what} is no list")
            return []
        for entry in item.items:
            if not isinstance(entry, Mapping):
                self.fault(entry.at, f"an entry of {what} is no mapping")
        return [entry for entry in item.items if isinstance(entry, Mapping)]

    def entries(self, item: Mapping, key: str) -> list[Mapping]:
        """Return the list of mappings of a key, which has to be there with an entry at least."""
        if key not in item.items:
            self.fault(item.at, f"{key} is missing", "missing")
        mappings = self.mappings(item.items.get(key), key)
        if not mappings and key in item.items:
            self.fault(item.keys[key], f"{key} is empty", "missing")
        return mappings

    def word(self, item: Mapping, *keys: str) -> str:
        """Return the one name of the first of these keys that is there."""
        key = next((key for key in keys if key in item.items), keys[0])
        value = item.items.get(key)
        if value is None:
            self.fault(item.at, f"{key} is missing", "missing")
        elif not isinstance(value, Word) or value.text.split() != [value.text] or set(value.text) & set("[],"):
            self.fault(value.at, f"{key} is no single name")
        else:
            return value.text
        return ""

    def is_true(self, item: Mapping, key: str) -> bool:
        value = item.items.get(key)
        text = value.text.lower() if isinstance(value, Word) else ""
        if value is not None and text not in ("true", "false", "yes", "no", "on", "off"):
            self.fault(value.at, f"{key} is neither true nor false")
        return text in ("true", "yes", "on")

    def number(self, value: Item | None, what: str, at: At, least: int = 1) -> int:
        """Return a whole number of ``least`` or more; ``least`` for another value."""
        if value is None:
            self.fault(at, f"{what} is missing", "missing")
        elif isinstance(value, Word) and value.text.isascii() and value.text.isdigit() and len(value.text) < 10:
            if int(value.text) >= least:
                return int(value.text)
            self.fault(value.at, f"{what} is {value.text}; it is {least} at least")
        else:
            self.fault(value.at, f"{what} is no whole number")
        return least

    def names(self, item: Mapping, key: str) -> tuple[str, ...]:
        """Return the names of the hostlist, or list of hostlists, of a key; none if it is not there."""
        value = item.items.get(key)
        hosts: list[str] = []
        for word in value.items if isinstance(value, Sequence) else [value] if value else []:
            if isinstance(word, Word):
                hosts += self._hostlists.read(word.text, word.place)
            else:
                self.fault(word.at, f"{key} is no hostlist such as node[01-16]")
        return tuple(hosts)

    def below_at(self, item: Mapping, *keys: str) -> At:
        """Return the place of the value of the first of these keys."""
        return next((item.items[key].at for key in keys if key in item.items), item.at)


def _tree(form: _Form, item: Item) -> SourceFacts:
    switches = []
    for entry in form.entries(form.mapping(item, "tree", {"switches"}), "switches"):
        form.check_keys(entry, {"switch", "children", "nodes", "link_speed"})
        if "children" in entry.items and "nodes" in entry.items:
            form.fault(entry.keys["children"], "a switch has nodes or children, not both", "contradiction")
        read = Switch(
            name=form.word(entry, "switch"),
            at=form.below_at(entry, "switch"),
            below_at=form.below_at(entry, "children", "nodes"),
            nodes=form.names(entry, "nodes"),
            switches=form.names(entry, "children"),
        )
        switches.append(read)
    form.faults.stop()
    return _of_switches(form, switches)


def _block(form: _Form, item: Item) -> SourceFacts:
    read = form.mapping(item, "block", {"block_sizes", "blocks"})
    blocks = []
    for entry in form.entries(read, "blocks"):
        form.check_keys(entry, {"block", "nodes"})
        at, below_at = form.below_at(entry, "block"), form.below_at(entry, "nodes")
        nodes = form.names(entry, "nodes")
        blocks.append(Switch(form.word(entry, "block"), at, below_at, nodes, layer="block"))
    listed = read.items.get("block_sizes")
    entries = listed.items if isinstance(listed, Sequence) else (listed,) if listed else ()
    sizes = [(form.number(entry, "a block size", entry.at), entry.at) for entry in entries]
    if not form.faults.entries and sizes:
        check_block_sizes(sizes, form.faults)
    form.faults.stop()
    groups = block_groups([size for size, _ in sizes], [b.name for b in blocks], sizes[0][1]) if sizes else []
    return _of_switches(form, nested(blocks, groups, form.faults), f"{form.source}: {BLOCKS}")


def _of_switches(form: _Form, switches: list[Switch], *assumptions: str) -> SourceFacts:
    facts, duplicates = switch_facts(switches, form.faults, form.source)
    return SourceFacts(
        format="slurm-yaml",
        source=form.source,
        nodes=node_facts(switches, form.source),
        switches=facts,
        assumptions=(*assumptions, *duplicates),
    )


def _flat(form: _Form, item: Item) -> SourceFacts:
    if isinstance(item, Sequence):
        form.fault(item.at, "flat is true, or a mapping")
    elif isinstance(item, Word) and not form.is_true(Mapping({"flat": item}, {}, item.at), "flat"):
        form.fault(item.at, "flat is not true, and the topology has no other form", "missing")
    form.faults.stop()
    return SourceFacts(format="slurm-yaml", source=form.source, assumptions=(f"{form.source}: {_FLAT}",))


def _ring(form: _Form, item: Item) -> SourceFacts:
    rings = []
    for entry in form.entries(form.mapping(item, "ring", {"rings"}), "rings"):
        form.check_keys(entry, {"ring", "name", "nodes"})
        nodes = form.names(entry, "nodes")
        if not nodes:
            form.fault(entry.at, "the ring has no nodes", "missing")
        name, at = form.word(entry, "ring", "name"), form.below_at(entry, "ring", "name")
        rings.append(Switch(name, at, form.below_at(entry, "nodes"), nodes, layer="ring"))
    form.faults.stop()
    return ring_facts("slurm-yaml", form.source, rings, form.faults)


def _torus(form: _Form, item: Item) -> SourceFacts:
    toruses: list[Switch] = []
    links: list[LinkFacts] = []
    for entry in form.entries(form.mapping(item, "torus3d", {"toruses"}), "toruses"):
        form.check_keys(entry, {"name", "torus", "dims", "nodes", "regions", "placements"})
        dims = _three(form, entry, "dims")
        cells = _cells(form, entry, dims)
        at = form.below_at(entry, "nodes", "regions")
        name = form.word(entry, "name", "torus")
        toruses.append(Switch(name, form.below_at(entry, "name", "torus"), at, tuple(cells.values()), layer="torus"))
        place = Place(form.source, *at)
        links += [LinkFacts(a, b, place) for a, b in _neighbours(cells, dims)]
    form.faults.stop()
    switch_facts(toruses, form.faults, form.source)
    return SourceFacts(
        format="slurm-yaml",
        source=form.source,
        nodes=node_facts(toruses, form.source),
        links=tuple(links),
        assumptions=(f"{form.source}: {_TORUS}",),
    )


def _three(form: _Form, item: Mapping, key: str, least: int = 1) -> tuple[int, int, int]:
    if key not in item.items:
        form.fault(item.at, f"{key} is missing", "missing")
        return least, least, least
    read = form.mapping(item.items[key], key, set(_AXES))
    x, y, z = (form.number(read.items.get(axis), f"{axis} of {key}", read.at, least) for axis in _AXES)
    return x, y, z


def _cells(form: _Form, entry: Mapping, dims: tuple[int, int, int]) -> dict[tuple[int, int, int], str]:
    """Return the node at each place of a torus: all of them in order, or the ones that regions name."""
    if ("nodes" in entry.items) == ("regions" in entry.items):
        form.fault(entry.at, "a torus has nodes or regions, one of them", "contradiction")
        return {}
    if "nodes" in entry.items:
        return _filled(form, entry, (0, 0, 0), dims)
    cells: dict[tuple[int, int, int], str] = {}
    for region in form.entries(entry, "regions"):
        form.check_keys(region, {"name", "anchor", "dims", "nodes"})
        anchor = _three(form, region, "anchor", 0)
        size = _three(form, region, "dims")
        if any(start + length > most for start, length, most in zip(anchor, size, dims, strict=True)):
            form.fault(region.at, "the region does not fit into the torus")
            continue
        filled = _filled(form, region, anchor, size)
        if filled.keys() & cells.keys():
            form.fault(region.at, "the region overlaps one before it", "contradiction")
        cells.update(filled)
    return cells


def _filled(
    form: _Form, entry: Mapping, anchor: tuple[int, int, int], size: tuple[int, int, int]
) -> dict[tuple[int, int, int], str]:
    nodes = form.names(entry, "nodes")
    x, y, z = size
    if len(nodes) != x * y * z:
        form.fault(form.below_at(entry, "nodes"), f"there are {len(nodes)} nodes for {x} × {y} × {z} places")
        return {}
    return {(anchor[0] + i % x, anchor[1] + i // x % y, anchor[2] + i // (x * y)): node for i, node in enumerate(nodes)}


def _neighbours(cells: dict[tuple[int, int, int], str], dims: tuple[int, int, int]) -> list[tuple[str, str]]:
    """Return each two nodes side by side along an axis, around the ends; once, even where an axis has two places."""
    pairs = []
    for place, node in cells.items():
        for axis in range(3):
            onward = list(place)
            onward[axis] = (place[axis] + 1) % dims[axis]
            other = cells.get((onward[0], onward[1], onward[2]))
            if other is not None and other != node and not (dims[axis] == 2 and place[axis] == 1):
                pairs.append((node, other))
    return pairs


_READERS: dict[str, Callable[[_Form, Item], SourceFacts]] = {
    "tree": _tree,
    "block": _block,
    "flat": _flat,
    "ring": _ring,
    "torus3d": _torus,
}
