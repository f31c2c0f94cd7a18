"""Volcano's HyperNodes (``kubectl get hypernodes -o json`` or yaml): a tree of switches with tiers.

.. [1] ``topology.volcano.sh/v1alpha1``: members are nodes or HyperNodes, by exact name, by a regular expression that
   may match anywhere in the name, or (nodes) by labels; larger tiers are farther apart. Go's expressions are RE2's, and
   RE2 reads them here too: in linear time, whatever the expression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import re2

from penstock.importers.cluster.facts import Place, SourceFacts, SwitchFacts
from penstock.importers.cluster.kubernetes.kubernetes_objects import (
    HyperNode,
    Labels,
    LabelSelector,
    Member,
    Requirement,
    check_labels,
    read_objects,
)
from penstock.importers.lines import Faults

_EXPRESSION_BYTES = 32 << 20
"""Memory that RE2 may take for the automaton of all expressions of a text."""


def read_hypernodes(text: str, source: str = "hypernodes.yaml") -> SourceFacts:
    """Read the switches that HyperNodes describe. Expressions and labels choose among nodes of the same text.

    Raises InvalidDocument with all faults: members that are not there, cycles, a node or HyperNode in two places,
    tiers that do not grow outwards, expressions and labels without nodes to choose from.
    """
    faults = Faults(f"the HyperNodes {source!r}")
    objects = read_objects(text, faults)
    check_labels(objects, faults)
    if not objects.hypernodes and not faults.entries:
        faults.add(None, f"there is no HyperNode among them, but {objects.kinds_found}")
    labels = {node.metadata.name: node.labels for node in objects.nodes.values()}
    switches, assumptions = hypernode_switches(objects.hypernodes, labels, source, faults)
    faults.stop()
    return SourceFacts(format="hypernodes", source=source, switches=switches, assumptions=tuple(assumptions))


@dataclass(slots=True)
class _Tree:
    """HyperNodes by name; ``nodes`` and ``below`` are what they hold, with the pointer of the member that said so."""

    pointers: dict[str, str]
    tiers: dict[str, int]
    nodes: dict[str, dict[str, str]] = field(default_factory=dict)
    below: dict[str, dict[str, str]] = field(default_factory=dict)


def hypernode_switches(
    hypernodes: Mapping[str, HyperNode], labels: Mapping[str, Labels], source: str, faults: Faults
) -> tuple[tuple[SwitchFacts, ...], list[str]]:
    """Return the switches of HyperNodes (by pointer), and the assumptions. ``labels``: of the text's nodes, by name."""
    of_name = {one.metadata.name: one for one in hypernodes.values()}
    tree = _Tree(
        pointers={one.metadata.name: pointer for pointer, one in hypernodes.items()},
        tiers={name: one.spec.tier for name, one in of_name.items()},
    )
    assumptions = _choose_members(of_name, labels, tree, faults)
    _check_tree(tree, faults)
    if not labels:
        assumptions.append("HyperNodes name nodes only: what these have has to come from another source")
    ranks = {tier: rank for rank, tier in enumerate(sorted(set(tree.tiers.values())))}
    in_order = sorted(of_name, key=lambda name: -tree.tiers[name])
    switches = tuple(
        SwitchFacts(
            name=name,
            place=Place(source, pointer=tree.pointers[name] or None),
            nodes=tuple(tree.nodes[name]),
            switches=tuple(tree.below[name]),
            tier=ranks[tree.tiers[name]],
            layer=of_name[name].spec.tierName or f"tier {tree.tiers[name]}",
        )
        for name in in_order
    )
    return switches, assumptions


def _choose_members(
    of_name: Mapping[str, HyperNode], labels: Mapping[str, Labels], tree: _Tree, faults: Faults
) -> list[str]:
    assumptions = []
    matches = _match_expressions(of_name, labels, tree, faults)
    for name, one in of_name.items():
        members: dict[str, dict[str, str]] = {"Node": {}, "HyperNode": {}}
        for number, member in enumerate(one.spec.members or ()):
            at = _member_pointer(tree.pointers[name], number)
            chosen = _chosen(member, at, labels, matches, faults)
            if chosen == []:
                assumptions.append(f"the member {number} of HyperNode {name!r} chooses nothing that is there")
            for other in chosen or ():
                members[member.type].setdefault(other, at)
        tree.nodes[name], tree.below[name] = members["Node"], members["HyperNode"]
        if not one.spec.members:
            assumptions.append(f"HyperNode {name!r} has no members")
    return assumptions


def _member_pointer(pointer: str, number: int) -> str:
    return f"{pointer}/spec/members/{number}".lstrip("/")


def _chosen(
    member: Member, at: str, labels: Mapping[str, Labels], matches: Mapping[str, list[str]], faults: Faults
) -> list[str] | None:
    """Return the names that a member's selector chooses; None where it is at fault."""
    selector = member.selector
    selectors = [one for one in (selector.exactMatch, selector.regexMatch, selector.labelMatch) if one is not None]
    if len(selectors) != 1:
        faults.add(None, f"a member has one of exactMatch, regexMatch and labelMatch; this has {len(selectors)}", at=at)
        return None
    if selector.exactMatch is not None:
        return [selector.exactMatch.name]
    if member.type == "Node" and not labels:
        faults.add(
            None,
            "this chooses among nodes, and none is in this text; give both: `kubectl get nodes,hypernodes -o json`",
            at=at,
        )
        return None
    if selector.regexMatch is not None:
        return matches.get(at)
    if member.type == "HyperNode":
        faults.add(None, "labelMatch chooses nodes, not HyperNodes; use exactMatch or regexMatch", at=at)
        return None
    assert selector.labelMatch is not None, "one of the three is given"
    wanted = selector.labelMatch
    return [name for name, of_node in labels.items() if _selects(wanted, of_node)]


def _match_expressions(
    of_name: Mapping[str, HyperNode], labels: Mapping[str, Labels], tree: _Tree, faults: Faults
) -> dict[str, list[str]]:
    """Return the names that each regular expression matches, by its member's pointer."""
    matches: dict[str, list[str]] = {}
    for kind, names in (("Node", labels), ("HyperNode", of_name)):
        patterns: dict[str, str] = {}
        owners: dict[str, str] = {}
        for name, one in of_name.items():
            for number, member in enumerate(one.spec.members or ()):
                if member.type == kind and member.selector.regexMatch is not None:
                    at = _member_pointer(tree.pointers[name], number)
                    patterns[at], owners[at] = member.selector.regexMatch.pattern, name
        for at, matched in _search(patterns, list(names), faults).items():
            matches[at] = [name for name in matched if kind == "Node" or name != owners[at]]
    return matches


def _search(patterns: Mapping[str, str], names: list[str], faults: Faults) -> dict[str, list[str]]:
    """Return the names that each pattern matches somewhere; each name is compared with all patterns at once."""
    options = re2.Options()
    options.log_errors, options.max_mem = False, _EXPRESSION_BYTES
    together = re2.Set.SearchSet(options)
    together.Add("")
    read: list[str] = []
    for at, pattern in patterns.items():
        try:
            re2.compile(pattern, options=options)
            together.Add(pattern)
            read.append(at)
        except re2.error as error:
            detail = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else error.args[0]
            faults.add(None, f"the pattern {pattern[:40]!r} is no regular expression of RE2: {detail}", at=at)
    matched: dict[str, list[str]] = {at: [] for at in read}
    if not read:
        return matched
    try:
        together.Compile()
        for name in names:
            # The empty pattern matches every name: no match at all means that RE2 ran out of its memory.
            indices = together.Match(name)
            if indices is None:
                raise re2.error("out of memory")
            for index in indices:
                if index:
                    matched[read[index - 1]].append(name)
    except re2.error:
        megabytes = _EXPRESSION_BYTES >> 20
        detail = f"the patterns of this text together need more than {megabytes} MiB to match; use exactMatch or labels"
        faults.add(None, detail, at=read[0])
        return {at: [] for at in read}
    return matched


def _selects(selector: LabelSelector, labels: Labels) -> bool:
    wanted, expressions = selector.matchLabels or {}, selector.matchExpressions or ()
    return (
        bool(wanted or expressions)
        and all(labels.get(key) == value for key, value in wanted.items())
        and all(_holds(expression, labels) for expression in expressions)
    )


def _holds(expression: Requirement, labels: Labels) -> bool:
    match expression.operator:
        case "In":
            return labels.get(expression.key) in (expression.values or ())
        case "NotIn":
            return labels.get(expression.key) not in (expression.values or ())
        case "Exists":
            return expression.key in labels
        case "DoesNotExist":
            return expression.key not in labels


def _check_tree(tree: _Tree, faults: Faults) -> None:
    parents: dict[str, str] = {}
    all_read = not faults.entries
    for name, below in tree.below.items():
        for child, at in below.items():
            if child not in tree.tiers:
                if not all_read:
                    continue  # it may be one of those at fault
                faults.add(None, f"HyperNode {child!r} is not in this text", at=at)
            elif child in parents:
                both = f"{parents[child]!r} and {name!r}"
                faults.add(None, f"HyperNode {child!r} is part of two, {both}; it can be in one only", at=at)
            else:
                parents[child] = name
    in_cycles: set[str] = set()
    for cycle in _cycles(parents):
        in_cycles.update(cycle)
        where = tree.pointers[cycle[0]]
        faults.add(None, f"HyperNodes are part of each other: {' in '.join(map(repr, [*cycle, cycle[0]]))}", at=where)
    for child, name in parents.items():
        if tree.tiers[child] >= tree.tiers[name] and child not in in_cycles:
            tiers = f"its tier {tree.tiers[child]} has to be less than {tree.tiers[name]}"
            faults.add(None, f"HyperNode {child!r} is part of {name!r}, so {tiers}", at=tree.below[name][child])
    if not faults.entries:
        _settle_nodes(tree, parents, faults)


def _cycles(parents: Mapping[str, str]) -> Iterable[list[str]]:
    """Yield each cycle once, from the member that comes first."""
    done: set[str] = set()
    for start in parents:
        way: dict[str, None] = {}
        at: str | None = start
        while at is not None and at not in done and at not in way:
            way[at] = None
            at = parents.get(at)
        if at is not None and at in way:
            names = list(way)
            yield names[names.index(at) :]
        done |= set(way)


def _settle_nodes(tree: _Tree, parents: Mapping[str, str], faults: Faults) -> None:
    """Keep a node in the innermost HyperNode that names it; two of which neither is inside the other are a fault."""
    first: dict[str, str] = {}
    for name in sorted(tree.nodes, key=lambda name: tree.tiers[name]):
        for node, at in list(tree.nodes[name].items()):
            inner = first.setdefault(node, name)
            if inner == name:
                continue
            if name not in _around(inner, parents):
                faults.add(None, f"node {node!r} is in two HyperNodes, {inner!r} and {name!r}; choose one", at=at)
            del tree.nodes[name][node]


def _around(name: str, parents: Mapping[str, str]) -> set[str]:
    around: set[str] = set()
    at = parents.get(name)
    while at is not None and at not in around:
        around.add(at)
        at = parents.get(at)
    return around
