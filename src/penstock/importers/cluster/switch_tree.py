"""Switches and blocks of a source, checked to be a tree; every form of Slurm's topology is read into them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.importers.cluster.facts import NodeFacts, Place, SwitchFacts
from penstock.importers.cluster.hostlist import fold_shortly
from penstock.importers.cluster.slurm.slurm_lines import At
from penstock.importers.lines import Faults

MOST_TIERS = 20
"""The most tiers of a tree; Slurm's limit."""


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch, block or group of blocks; ``at`` and ``below_at``: line and column of its name and of its list."""

    name: str
    at: At
    below_at: At
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    layer: str = "switch"


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that are one larger block."""

    name: str
    at: At
    blocks: tuple[str, ...]


def switch_facts(
    switches: Sequence[Switch], faults: Faults, source: str, *, remedy: str | None = None
) -> tuple[tuple[SwitchFacts, ...], tuple[str, ...]]:
    """Return the facts of these switches, lowest tier first, and the assumptions.

    Switches above the very same switches, such as the spines of a fat tree, become one. Raises InvalidDocument with all
    faults: doubles, unknown switches, nodes and switches that are below two, cycles.
    """
    _check_names(switches, faults)
    _check_nodes(switches, faults)
    faults.stop(remedy)
    tiers = tiers_of(switches, faults)
    faults.stop(remedy)
    kept, duplicates = _without_duplicates(sorted(switches, key=lambda switch: tiers[switch.name]))
    _check_parents(kept, faults)
    faults.stop()
    facts = [
        SwitchFacts(
            name=switch.name,
            place=Place(source, *switch.at),
            nodes=switch.nodes,
            switches=switch.switches,
            tier=tiers[switch.name],
            layer=switch.layer,
        )
        for switch in kept
    ]
    assumptions = [
        f"{source}: {fold_shortly([first, *others])} are above the same switches and read as one, {first}"
        for first, others in duplicates.items()
    ]
    return tuple(facts), tuple(assumptions)


def node_facts(switches: Iterable[Switch], source: str) -> dict[str, NodeFacts]:
    """Return the nodes that switches name, with the places that name them."""
    nodes: dict[str, NodeFacts] = {}
    for switch in switches:
        place = Place(source, *switch.below_at)
        nodes.update({name: NodeFacts(name, place) for name in switch.nodes})
    return nodes


def nested(blocks: Sequence[Switch], groups: Iterable[Group], faults: Faults) -> list[Switch]:
    """Return the blocks and the groups above them, each above the largest smaller groups in it."""
    top = {block.name: block.name for block in blocks}
    blocks_of = {block.name: {block.name} for block in blocks}
    switches = list(blocks)
    for group in sorted(groups, key=lambda group: len(group.blocks)):
        unknown = [name for name in group.blocks if name not in top]
        if unknown:
            faults.add(group.at[0], f"{group.name!r} is of unknown blocks: {fold_shortly(unknown)}", column=group.at[1])
            continue
        members = set(group.blocks)
        tops = tuple(dict.fromkeys(top[name] for name in group.blocks))
        torn = [name for name in tops if not blocks_of[name] <= members]
        if torn:
            detail = f"{group.name!r} has some blocks of {torn[0]!r}, and not all of them"
            faults.add(group.at[0], detail, column=group.at[1])
        elif len(tops) > 1:
            switches.append(Switch(group.name, group.at, group.at, switches=tops, layer="aggregated-block"))
            blocks_of[group.name] = members
            top.update(dict.fromkeys(group.blocks, group.name))
    return switches


def _check_names(switches: Sequence[Switch], faults: Faults) -> None:
    first: dict[str, Switch] = {}
    for switch in switches:
        before = first.setdefault(switch.name, switch)
        if before is not switch:
            detail = f"the {switch.layer} {switch.name!r} is there twice, first on line {before.at[0]}"
            faults.add(switch.at[0], detail, column=switch.at[1], code="double")
    for switch in switches:
        line, column = switch.below_at
        unknown = [name for name in switch.switches if name not in first]
        if unknown:
            detail = f"{switch.name!r} is above {fold_shortly(unknown)}, which is not a switch of this text"
            faults.add(line, detail, column=column, code="unknown")
        if len(set(switch.switches)) < len(switch.switches):
            detail = f"{switch.name!r} is above {_doubles(switch.switches)} twice"
            faults.add(line, detail, column=column, code="double")


def _check_nodes(switches: Sequence[Switch], faults: Faults) -> None:
    leaf_of: dict[str, Switch] = {}
    for switch in switches:
        line, column = switch.below_at
        again: dict[str, list[str]] = {}
        for node in switch.nodes:
            leaf = leaf_of.setdefault(node, switch)
            if leaf is not switch:
                again.setdefault(leaf.name, []).append(node)
        for name, nodes in again.items():
            kind = "leaf switch" if switch.layer == "switch" else switch.layer
            detail = f"{fold_shortly(nodes)} of {switch.name!r} is of {name!r}, too; a node has one {kind}"
            faults.add(line, detail, column=column, code="contradiction")
        if len(set(switch.nodes)) < len(switch.nodes):
            faults.add(line, f"{switch.name!r} has {_doubles(switch.nodes)} twice", column=column, code="double")


def _doubles(names: Sequence[str]) -> str:
    return fold_shortly([name for name, count in Counter(names).items() if count > 1])


def tiers_of(switches: Sequence[Switch], faults: Faults) -> dict[str, int]:
    """Return how far each switch is above the nodes; a cycle and a tree of too many tiers are faults."""
    above: dict[str, list[str]] = {switch.name: [] for switch in switches}
    waits = {}
    for switch in switches:
        waits[switch.name] = len(switch.switches)
        for name in switch.switches:
            above[name].append(switch.name)
    tiers = {name: 0 for name, count in waits.items() if not count}
    ready = list(tiers)
    for name in ready:
        for parent in above[name]:
            tiers[parent] = max(tiers.get(parent, 0), tiers[name] + 1)
            waits[parent] -= 1
            if not waits[parent]:
                ready.append(parent)
    by_name = {switch.name: switch for switch in switches}
    highest = max(tiers, key=lambda name: tiers[name], default="")
    if highest and tiers[highest] > MOST_TIERS:
        line, column = by_name[highest].at
        detail = f"{highest!r} has {tiers[highest]} tiers of switches below it; at most {MOST_TIERS} are read"
        faults.add(line, detail, column=column)
    left = {name for name, count in waits.items() if count}
    for cycle in _cycles(left, by_name):
        switch = by_name[cycle[0]]
        detail = f"switches are above themselves: {' → '.join([*cycle, cycle[0]])}"
        faults.add(switch.below_at[0], detail, column=switch.below_at[1], code="cycle")
    return tiers


def _cycles(left: set[str], by_name: dict[str, Switch]) -> Iterable[list[str]]:
    """Yield the cycles below switches that wait for themselves, each from the switch that comes first in the text."""
    done: set[str] = set()
    for start in by_name:
        path: dict[str, None] = {}
        name = start
        while name in left and name not in done and name not in path:
            path[name] = None
            name = next(child for child in by_name[name].switches if child in left)
        if name in path:
            cycle = list(path)[list(path).index(name) :]
            first = min(cycle, key=lambda member: by_name[member].at)
            turn = cycle.index(first)
            yield cycle[turn:] + cycle[:turn]
        done.update(path)


def _without_duplicates(by_tier: Sequence[Switch]) -> tuple[list[Switch], dict[str, list[str]]]:
    """Return the switches without duplicates: an earlier switch above the same switches takes a duplicate's place."""
    kept: list[Switch] = []
    instead: dict[str, str] = {}
    first: dict[frozenset[str], str] = {}
    duplicates: dict[str, list[str]] = {}
    for switch in by_tier:
        below = tuple(dict.fromkeys(instead.get(name, name) for name in switch.switches))
        name = first.setdefault(frozenset(below), switch.name) if below else switch.name
        if name == switch.name:
            kept.append(replace(switch, switches=below))
        else:
            instead[switch.name] = name
            duplicates.setdefault(name, []).append(switch.name)
    return kept, duplicates


def _check_parents(switches: Sequence[Switch], faults: Faults) -> None:
    parent: dict[str, Switch] = {}
    for switch in switches:
        for name in switch.switches:
            other = parent.setdefault(name, switch)
            if other is not switch:
                detail = f"{name!r} is below {switch.name!r} and {other.name!r}, which are not above the same switches"
                faults.add(switch.below_at[0], detail, column=switch.below_at[1], code="contradiction")
