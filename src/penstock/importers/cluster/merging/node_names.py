"""Which names of several sources mean the same node."""

from __future__ import annotations

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.lines import Faults


class Names:
    """Which names mean the same node: equal ones, and a first label (``gpu1``) and the whole (``gpu1.site.org``)."""

    def __init__(self, faults: Faults) -> None:
        self.known: dict[str, None] = {}
        self.joined: dict[str, str] = {}
        self._by_label: dict[str, list[str]] = {}
        self._faults = faults

    def of(self, name: str) -> str:
        """What the node is called here."""
        return self.joined.get(name, name)

    def learn(self, facts: SourceFacts) -> None:
        """The names of a source. A name joins one node of the sources before, which no other name of it is or joins."""
        before = {label: tuple(names) for label, names in self._by_label.items()}
        here = _named(facts)
        taken: dict[str, str] = {}
        for name in here:
            if name in self.known or name in self.joined:
                continue
            label = _label(name)
            near = [other for other in before.get(label, ()) if label in (name, other) and other not in here]
            if len(near) > 1:
                self._faults.add(None, f"{name!r} of {facts.source} may be any of {', '.join(near)}", at=name)
            elif near and near[0] in taken:
                detail = f"{near[0]!r} may be {taken[near[0]]!r} or {name!r} of {facts.source}"
                self._faults.add(None, detail, at=near[0])
            elif near:
                self.joined[name] = near[0]
                taken[near[0]] = name
            else:
                self.known[name] = None
                if label:
                    self._by_label.setdefault(label, []).append(name)


def _label(name: str) -> str:
    """The first label of a host name; empty for an address."""
    label = name.partition(".")[0]
    return "" if label.isdigit() else label


def _named(facts: SourceFacts) -> dict[str, None]:
    switches = {switch.name for switch in facts.switches}
    found = dict.fromkeys(name for name in facts.nodes if name)
    for switch in facts.switches:
        found.update(dict.fromkeys(switch.nodes))
    for link in facts.links:
        found.update(dict.fromkeys(end for end in (link.a, link.b) if end not in switches))
    return found


def free_name(wanted: str, taken: set[str]) -> str:
    """``wanted``, or with the first number that makes it a new name."""
    name, number = wanted, 2
    while name in taken:
        name, number = f"{wanted}-{number}", number + 1
    return name
