"""A network that a source lists cable by cable: reached hosts, equal spines as one switch, dead ends dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.importers.cluster.hardware import SWITCH_LATENCY_NS
from penstock.importers.cluster.merging.cards import lanes_of
from penstock.importers.cluster.merging.joining import Wiring
from penstock.importers.cluster.merging.notes import Notes, shown
from penstock.importers.cluster.structured import several
from penstock.schemas.topology import Link

Ends = tuple[str, str]


@dataclass
class Cable:
    """All cables of two ends; ``bytes_per_s`` is None where one of them is unknown, else ``each`` has its own."""

    bytes_per_s: int | None
    latency_ns: int | None = None
    each: tuple[int, ...] = ()

    def add(self, bytes_per_s: int | None, each: tuple[int, ...]) -> None:
        """Count further cables in."""
        are_known = self.bytes_per_s is not None and bytes_per_s is not None
        self.bytes_per_s = (self.bytes_per_s or 0) + (bytes_per_s or 0) if are_known else None
        self.each += each


@dataclass
class CableMap:
    """Cables by their ends, of which one or both are switches, or none (a ring)."""

    source: str
    hosts: dict[str, None] = field(default_factory=dict)
    cables: dict[Ends, Cable] = field(default_factory=dict)

    def known_hosts(self) -> set[str]:
        """Return the hosts whose cables all have a bandwidth."""
        unknown = {end for ends, cable in self.cables.items() if cable.bytes_per_s is None for end in ends}
        return set(self.hosts) - unknown

    def links(
        self, cards: Mapping[str, int], devices: Mapping[str, int], latency_ns: Mapping[str, int], notes: Notes
    ) -> tuple[list[str], list[Link]]:
        """Return switches and links; a cable of unknown bandwidth gets a share of its node's cards."""
        degree: dict[str, int] = {}
        for end in (end for ends in self.cables for end in ends):
            degree[end] = degree.get(end, 0) + 1
        bandwidths = [cable.bytes_per_s for cable in self.cables.values() if cable.bytes_per_s is not None]
        links, guessed = [], 0
        for ends, cable in self.cables.items():
            width = cable.bytes_per_s
            of_host = [end for end in ends if end in self.hosts] if width is not None else []
            if width is None:
                of_nodes = [cards[end] // degree[end] for end in ends if end in self.hosts]
                width = min(of_nodes) if of_nodes else min(bandwidths, default=min(cards.values()))
                guessed += 1
            late = cable.latency_ns
            if late is None:
                late = max((latency_ns[end] for end in ends if end in self.hosts), default=SWITCH_LATENCY_NS)
            lanes = min((lanes_of(cable.each, devices[end]) or 1 for end in of_host), default=1)
            links.append(
                Link(
                    a=ends[0],
                    b=ends[1],
                    bandwidth_bytes_per_s=max(1, width),
                    latency_ns=late,
                    lanes=lanes if lanes > 1 else None,
                )
            )
        if guessed:
            notes.assume(
                f"{self.source} gives no bandwidth of {guessed} of {len(links)} links; a node's cards are shared "
                "evenly between its links, and a link between switches carries as much as the narrowest that is known"
            )
        return [end for end in degree if end not in self.hosts], links


def cable_map(wiring: Wiring, hosts: Sequence[str], notes: Notes) -> tuple[CableMap, set[str]]:
    """Return the cables among these hosts, and the hosts that are reached; the others are left out.

    Hosts are reached that the largest connected part holds.
    """
    wanted, switches = dict.fromkeys(hosts), {switch.name for switch in wiring.switches}
    cables: dict[Ends, Cable] = {}
    for link in wiring.links:
        if link.a == link.b or any(end not in switches and end not in wanted for end in (link.a, link.b)):
            continue
        ends = _ends(link.a, link.b, wanted)
        before = cables.setdefault(ends, Cable(0, link.latency_ns))
        width = link.bandwidth_bytes_per_s
        before.add(width, () if width is None else (width,))
    parts = _parts(cables)
    main = max(parts, key=lambda part: sum(end in wanted for end in part), default=set(hosts[:1]))
    for host in hosts:
        if host not in main:
            notes.leave_out(host, f"no cable of {wiring.source} leads from it to the others")
    cables = {ends: cable for ends, cable in cables.items() if ends[0] in main}
    reached = {host: None for host in hosts if host in main}
    cables = _without_duplicates(_without_dead_ends(cables, reached), reached, wiring.source, notes)
    return CableMap(wiring.source, reached, cables), set(reached)


def _ends(a: str, b: str, hosts: Mapping[str, None]) -> Ends:
    """Return two ends in one order: the host first."""
    return (a, b) if (a not in hosts, a) < (b not in hosts, b) else (b, a)


def _near(cables: Iterable[Ends]) -> dict[str, set[str]]:
    near: dict[str, set[str]] = {}
    for a, b in cables:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    return near


def _parts(cables: Iterable[Ends]) -> list[set[str]]:
    """Return the connected parts, in the order in which they are first met."""
    near, seen, parts = _near(cables), set[str](), []
    for start in near:
        if start in seen:
            continue
        part, left = {start}, [start]
        while left:
            fresh = near[left.pop()] - part
            part |= fresh
            left += fresh
        seen |= part
        parts.append(part)
    return parts


def _without_dead_ends(cables: dict[Ends, Cable], hosts: Mapping[str, None]) -> dict[Ends, Cable]:
    """Return the cables without switches that lead nowhere."""
    near = _near(cables)
    left = [name for name, others in near.items() if name not in hosts and len(others) == 1]
    while left:
        name = left.pop()
        for other in near.pop(name, ()):
            near[other].discard(name)
            if other not in hosts and len(near[other]) == 1:
                left.append(other)
    return {ends: cable for ends, cable in cables.items() if ends[0] in near and ends[1] in near}


def _without_duplicates(
    cables: dict[Ends, Cable], hosts: Mapping[str, None], source: str, notes: Notes
) -> dict[Ends, Cable]:
    """Merge switches with the very same neighbours: one carries what all of them do, as traffic spreads over them."""
    assumed: list[str] = []
    while True:
        alike: dict[frozenset[str], list[str]] = {}
        for name, others in _near(cables).items():
            if name not in hosts:
                alike.setdefault(frozenset(others), []).append(name)
        duplicates = {name: group[0] for group in alike.values() for name in group[1:]}
        if not duplicates:
            if assumed:
                notes.assume(f"switches of {source} that join the same places are counted as one: {several(assumed)}")
            return cables
        assumed += [f"{shown(group)} as {group[0]}" for group in alike.values() if len(group) > 1]
        merged: dict[Ends, Cable] = {}
        for (a, b), cable in cables.items():
            ends = _ends(duplicates.get(a, a), duplicates.get(b, b), hosts)
            before = merged.get(ends)
            if before is None:
                merged[ends] = Cable(cable.bytes_per_s, cable.latency_ns, cable.each)
            else:
                before.add(cable.bytes_per_s, cable.each)
        cables = merged
