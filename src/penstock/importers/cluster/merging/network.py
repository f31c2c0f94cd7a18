"""The network between nodes: which source counts, the place of each node, and links with bandwidths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.importers.cluster.facts import SwitchFacts
from penstock.importers.cluster.hardware import SWITCH_LATENCY_NS
from penstock.importers.cluster.merging.cables import CableMap, cable_map
from penstock.importers.cluster.merging.cards import usual_cards
from penstock.importers.cluster.merging.inside import Inside
from penstock.importers.cluster.merging.joining import Wiring
from penstock.importers.cluster.merging.node_names import free_name
from penstock.importers.cluster.merging.notes import Notes, shown
from penstock.importers.lines import Faults
from penstock.schemas.api.topology_import import ImportOptions
from penstock.schemas.topology import Link


@dataclass
class Tree:
    """Switches with everything below them; ``bandwidths``: of the links to a switch's children, if a source has it."""

    nodes: dict[str, list[str]] = field(default_factory=dict)
    switches: dict[str, list[str]] = field(default_factory=dict)
    bandwidths: dict[str, int] = field(default_factory=dict)
    root: str = ""


@dataclass(frozen=True)
class Network:
    """The connections of nodes, without bandwidths where no source has them. ``domains``: NVLink beyond a node."""

    tree: Tree | None = None
    cables: CableMap | None = None
    domains: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_unknown(self) -> bool:
        """Whether no source has switches or cables."""
        return self.tree is None and self.cables is None


def network(wirings: Sequence[Wiring], hosts: Iterable[str], notes: Notes) -> tuple[Network, set[str]]:
    """Return the network of these hosts, and the hosts in it; the others are left out.

    The first source with cables counts, or else the first one with switches. NVLink domains are from the first source
    that has some. Without any, nothing is left out and the network has neither tree nor cables. Raises InvalidDocument
    for switches that make no tree, and for a host in two domains.
    """
    here = list(dict.fromkeys(hosts))
    usable = [wiring for wiring in wirings if wiring.links or any(not each.is_nvlink for each in wiring.switches)]
    chosen = next((wiring for wiring in usable if wiring.links), usable[0] if usable else None)
    for other in usable:
        if other is not chosen and chosen is not None:
            notes.assume(f"the network is as {chosen.source} has it; the switches of {other.source} are not used")
    tree = cables = None
    reached = set(here)
    if chosen is not None and chosen.links:
        cables, reached = cable_map(chosen, here, notes)
    elif chosen is not None:
        tree, reached = _tree(chosen, here, notes)
    names_in_use = {*here, *(switch.name for wiring in usable for switch in wiring.switches if not switch.is_nvlink)}
    return Network(tree, cables, _domains(wirings, reached, names_in_use, notes)), reached


def _domains(wirings: Sequence[Wiring], hosts: set[str], names_in_use: set[str], notes: Notes) -> dict[str, list[str]]:
    """Return NVLink domains that join at least two hosts. Raises InvalidDocument for a host in two of them."""
    sources = [wiring for wiring in wirings if any(switch.is_nvlink for switch in wiring.switches)]
    for other in sources[1:]:
        notes.assume(f"NVLink domains are those of {sources[0].source}; those of {other.source} are not used")
    faults = Faults("the NVLink domains")
    of: dict[str, str] = {}
    members: dict[str, list[str]] = {}
    for switch in (each for wiring in sources[:1] for each in wiring.switches if each.is_nvlink):
        for node in switch.nodes:
            if of.setdefault(node, switch.name) != switch.name:
                faults.add(None, f"it is in {of[node]!r} and in {switch.name!r} of {switch.place}", at=node)
            elif node in hosts and node not in members.setdefault(switch.name, []):
                members[switch.name].append(node)
    faults.stop()
    joining = {name: nodes for name, nodes in members.items() if len(nodes) > 1}
    return {
        (free_name(f"{name}-nvlink", names_in_use) if name in names_in_use else name): nodes
        for name, nodes in joining.items()
    }


def _tree(wiring: Wiring, hosts: Sequence[str], notes: Notes) -> tuple[Tree, set[str]]:
    tree = Tree()
    switches = {switch.name: switch for switch in wiring.switches}
    faults = Faults(f"the switches of {wiring.source}")
    parent: dict[str, str] = {}
    wanted, reached = set(hosts), set[str]()
    for switch in sorted(wiring.switches, key=lambda each: bool(each.switches)):
        below, nodes = _children(switch, switches)
        for name in below:
            if name not in switches:
                faults.add(
                    switch.place.line, f"{switch.name!r} is above {name!r}, which is not a switch", at=switch.name
                )
            elif parent.setdefault(name, switch.name) != switch.name:
                detail = f"it is below {parent[name]!r} and below {switch.name!r}"
                faults.add(switch.place.line, detail, at=name)
        if switch.is_nvlink:
            continue
        tree.switches[switch.name] = [name for name in below if name in switches]
        tree.nodes[switch.name] = [node for node in nodes if node in wanted and node not in reached]
        reached.update(tree.nodes[switch.name])
        if switch.bandwidth_bytes_per_s is not None:
            tree.bandwidths[switch.name] = switch.bandwidth_bytes_per_s
    _refuse_cycles(parent, switches, faults)
    faults.stop()
    for host in hosts:
        if host not in reached:
            notes.leave_out(host, f"it hangs on no switch of {wiring.source}")
    _close(tree, [name for name in tree.nodes if name not in parent], wiring, hosts, notes)
    return tree, reached


def _children(switch: SwitchFacts, switches: Mapping[str, SwitchFacts]) -> tuple[list[str], list[str]]:
    """Return switches and nodes right below; the nodes of an NVLink domain hang on its parent with their cards."""
    below, nodes = [], list(switch.nodes)
    for name in switch.switches:
        if name in switches and switches[name].is_nvlink:
            nodes += switches[name].nodes
        else:
            below.append(name)
    return below, nodes


def _refuse_cycles(parent: Mapping[str, str], switches: Mapping[str, SwitchFacts], faults: Faults) -> None:
    done: set[str] = set()
    for start in parent:
        path: dict[str, None] = {}
        name: str | None = start
        while name is not None and name not in path and name not in done:
            path[name] = None
            name = parent.get(name)
        if name in path and name is not None:
            cycle = list(path)[list(path).index(name) :]
            line = switches[name].place.line if name in switches else None
            faults.add(line, f"switches are above themselves: {' → '.join([*cycle[::-1], cycle[-1]])}", code="cycle")
        done.update(path)


def _close(tree: Tree, roots: list[str], wiring: Wiring, hosts: Sequence[str], notes: Notes) -> None:
    """Drop switches above nothing, and those on top with one child; join what is left below one switch."""
    counts = _counts(tree, roots)
    for name in [name for name, count in counts.items() if not count]:
        del tree.nodes[name], tree.switches[name]
    for name in tree.switches:
        tree.switches[name] = [below for below in tree.switches[name] if below in tree.nodes]
    roots = [name for name in roots if name in tree.nodes]
    while len(roots) == 1 and not tree.nodes[roots[0]] and len(tree.switches[roots[0]]) == 1:
        (only,) = tree.switches.pop(roots[0])
        del tree.nodes[roots[0]]
        roots = [only]
    if len(roots) > 1:
        top = free_name("core", {*tree.nodes, *hosts})
        words = "blocks" if all(each.layer == "block" for each in wiring.switches) else "switches"
        notes.assume(f"{wiring.source} does not say what joins the {words} {shown(roots)}; one switch above them does")
        tree.nodes[top], tree.switches[top] = [], roots
        roots = [top]
    tree.root = roots[0] if roots else ""


def _counts(tree: Tree, roots: Sequence[str]) -> dict[str, int]:
    """Return the number of nodes below each switch."""
    counts: dict[str, int] = {}
    for name in reversed(_downwards(tree, roots)):
        counts[name] = len(tree.nodes[name]) + sum(counts[below] for below in tree.switches[name])
    return counts


def _downwards(tree: Tree, roots: Sequence[str]) -> list[str]:
    """Return all switches, each before those below it."""
    order = list(roots)
    for name in order:
        order += tree.switches[name]
    return order


# ---- links -----------------------------------------------------------------------------------------------------------


def links_of(net: Network, insides: Mapping[str, Inside], options: ImportOptions, notes: Notes) -> dict[str, Any]:
    """Return switches and links of a topology. Missing network cards are noted; then both lists are empty."""
    switches, links = _links_of(net, insides, options, notes) if len(insides) > 1 else ([], [])
    return {"switches": switches, "links": links}


def _links_of(
    net: Network, insides: Mapping[str, Inside], options: ImportOptions, notes: Notes
) -> tuple[list[str], list[Link]]:
    switches, links = _domain_links(net.domains, insides, notes)
    if net.is_unknown and any(insides.keys() <= {link.a for link in links if link.b == name} for name in switches):
        return switches, links
    found_cards = _all_cards(insides, net.cables.known_hosts() if net.cables else set(), notes)
    if found_cards is None:
        return [], []
    cards, lanes = found_cards
    tree = net.tree
    if tree is None and net.cables is None:
        top = free_name("switch", {*insides, *net.domains})
        tree = Tree(nodes={top: list(insides)}, switches={top: []}, root=top)
        notes.assume("no source says how nodes are joined; one switch with the bandwidth of their cards is assumed")
    if tree is not None:
        names, node_links = _downwards(tree, [tree.root]), _tree_links(tree, insides, cards, lanes, options, notes)
    else:
        assert net.cables is not None
        latency_ns = {name: inside.cards.latency_ns for name, inside in insides.items()}
        devices = {name: len(inside.devices) for name, inside in insides.items()}
        names, node_links = net.cables.links(cards, devices, latency_ns, notes)
    assumed = {name: inside.cards.latency_ns for name, inside in insides.items() if inside.cards.is_latency_assumed}
    for name, late in assumed.items() if node_links else ():
        notes.assume(f"a node's link adds {late / 1000:g} µs: assumed", [name])
    if any(link.latency_ns == SWITCH_LATENCY_NS and link.a not in insides for link in node_links):
        notes.assume(f"each link between switches adds {SWITCH_LATENCY_NS / 1000:g} µs: assumed")
    return switches + names, links + node_links


def _all_cards(
    insides: Mapping[str, Inside], not_needed: set[str], notes: Notes
) -> tuple[dict[str, int], dict[str, int | None]] | None:
    """Return the one-way bandwidth of all cards of each node together, in bytes per second, and their lanes.

    None where some are missing, which is noted.
    """
    alike: dict[int, list[str]] = {}
    for name, inside in insides.items():
        if inside.cards.bytes_per_s is None and name not in not_needed:
            alike.setdefault(id(inside), []).append(name)
    cards = {name: inside.cards.bytes_per_s or 0 for name, inside in insides.items()}
    lanes = {name: inside.cards.lanes for name, inside in insides.items()}
    complete = True
    for names in alike.values():
        sentences: list[str] = []
        usual = usual_cards(insides[names[0]].devices, sentences)
        if usual is None:
            notes.miss("the bandwidth of a node's network cards", "--nic 400Gbit/s (options.nic_bytes_per_s)", names)
            complete = False
        else:
            notes.assume(sentences[0], names)
            cards |= dict.fromkeys(names, usual[0])
            lanes |= dict.fromkeys(names, usual[1])
    return (cards, lanes) if complete else None


def _domain_links(
    domains: Mapping[str, Sequence[str]], insides: Mapping[str, Inside], notes: Notes
) -> tuple[list[str], list[Link]]:
    switches, links = [], []
    for name, nodes in domains.items():
        wired = [node for node in nodes if insides[node].nvlink_bytes_per_s]
        if len(wired) < 2:
            notes.assume(f"no source has the NVLink bandwidth of the domain {name}; it is not counted")
            continue
        switches.append(name)
        for node in wired:
            inside = insides[node]
            late = inside.fabric.latency_ns if inside.fabric else 0
            width, lanes = inside.nvlink_bytes_per_s, len(inside.devices) if len(inside.devices) > 1 else None
            links.append(Link(a=node, b=name, bandwidth_bytes_per_s=width, latency_ns=late, lanes=lanes))
        each = insides[wired[0]].nvlink_bytes_per_s / len(insides[wired[0]].devices) / 1e9
        notes.assume(f"each device brings its {each:.4g} GB/s of NVLink into its domain", wired)
    return switches, links


def _tree_links(
    tree: Tree,
    insides: Mapping[str, Inside],
    cards: Mapping[str, int],
    lanes: Mapping[str, int | None],
    options: ImportOptions,
    notes: Notes,
) -> list[Link]:
    order = _downwards(tree, [tree.root])
    below_of: dict[str, int] = {}
    for name in reversed(order):
        below_of[name] = sum(cards[node] for node in tree.nodes[name])
        below_of[name] += sum(below_of[below] for below in tree.switches[name])
    links: list[Link] = []
    for name in order:
        for node in tree.nodes[name]:
            together = (tree.bandwidths[name], None) if name in tree.bandwidths else (cards[node], lanes[node])
            links += _node_links(node, name, insides[node], *together)
    for name in order:
        for below in tree.switches[name]:
            width = tree.bandwidths.get(name, max(1, int(below_of[below] / options.oversubscription)))
            links.append(Link(a=below, b=name, bandwidth_bytes_per_s=width, latency_ns=SWITCH_LATENCY_NS))
    if any(below for name, below in tree.switches.items() if name not in tree.bandwidths):
        ratio = options.oversubscription
        share = "" if ratio == 1 else f", divided by {ratio:g} as --oversubscription says"
        notes.assume(f"a switch's link upwards carries what the cards of these nodes below it do{share}")
    return links


def _node_links(node: str, switch: str, inside: Inside, width: int, lanes: int | None) -> list[Link]:
    late = inside.cards.latency_ns
    if inside.cards.per_device:
        cards = zip(inside.names, inside.cards.per_device, strict=True)
        return [Link(a=f"{node}/{name}", b=switch, bandwidth_bytes_per_s=each, latency_ns=late) for name, each in cards]
    return [Link(a=node, b=switch, bandwidth_bytes_per_s=width, latency_ns=late, lanes=lanes)]
