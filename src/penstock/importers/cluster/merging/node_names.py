"""Names of several sources that mean the same node."""

from __future__ import annotations

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.lines import Faults


class Names:
    """The names of nodes: equal names mean one node, and so do first label (``gpu1``) and whole (``gpu1.site.org``)."""

    def __init__(self, faults: Faults) -> None:
        self.nodes: dict[str, None] = {}
        self.joined: dict[str, str] = {}
        self._by_label: dict[str, list[str]] = {}
        self._faults = faults

    def of(self, name: str) -> str:
        """Return the name of the node here."""
        return self.joined.get(name, name)

    def learn(self, facts: SourceFacts) -> None:
        """Take in a source's names. A name joins one node of earlier sources that no other name of it is or joins."""
        before = {label: tuple(names) for label, names in self._by_label.items()}
        here = _named(facts)
        joining_name: dict[str, str] = {}
        for name in here:
            if name in self.nodes or name in self.joined:
                continue
            label = _label(name)
            near = [other for other in before.get(label, ()) if label in (name, other) and other not in here]
            if len(near) > 1:
                self._faults.add(None, f"{name!r} of {facts.source} may be any of {', '.join(near)}", at=name)
            elif near and near[0] in joining_name:
                detail = f"{near[0]!r} may be {joining_name[near[0]]!r} or {name!r} of {facts.source}"
                self._faults.add(None, detail, at=near[0])
            elif near:
                self.joined[name] = near[0]
                joining_name[near[0]] = name
            else:
                self.nodes[name] = None
                if label:
                    self._by_label.setdefault(label, []).append(name)


def _label(name: str) -> str:
    """Return the first label of a host name; empty for an address."""
    label = name.partition(".")[0]
    return "" if label.isdigit() else label


def _named(facts: SourceFacts) -> dict[str, None]:
    switches = {switch.name for switch in facts.switches}
    names = dict.fromkeys(name for name in facts.nodes if name)
    for switch in facts.switches:
        names.update(dict.fromkeys(switch.nodes))
    for link in facts.links:
        names.update(dict.fromkeys(end for end in (link.a, link.b) if end not in switches))
    return names


def free_name(wanted: str, names_in_use: set[str]) -> str:
    """Return ``wanted``, or ``wanted`` with the first number that makes it a new name."""
    name, number = wanted, 2
    while name in names_in_use:
        name, number = f"{wanted}-{number}", number + 1
    return name
