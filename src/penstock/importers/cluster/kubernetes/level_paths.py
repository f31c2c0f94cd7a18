"""Switches from the places of nodes: each node's path through named levels, from the outermost inwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.importers.cluster.facts import Place, SwitchFacts

MOST_LEVELS = 16
"""The most levels that Kueue takes in a node's path."""


class Step(NamedTuple):
    """One level of a node's path: its name, its distance from the nodes (0: next to them), and the node's value."""

    layer: str
    tier: int
    value: str


Path = tuple[Step, ...]


@dataclass(slots=True)
class _Switch:
    place: Place
    nodes: list[str] = field(default_factory=list)
    below: dict[Path, None] = field(default_factory=dict)


def make_switches(
    paths: Mapping[str, Path], places: Mapping[str, Place], *, is_nvlink: bool = False, names_in_use: Iterable[str] = ()
) -> tuple[SwitchFacts, ...]:
    """Return the switches on the nodes' paths, outermost first, otherwise in the order of the paths.

    Equal values under different parents are different switches (racks count from 0 in each block). A value of one
    switch alone is its name; others get the names of their parents, ``block-1/rack-7``. ``names_in_use`` are avoided.
    """
    switches: dict[Path, _Switch] = {}
    for node, path in paths.items():
        for depth in range(1, len(path) + 1):
            here = switches.setdefault(path[:depth], _Switch(places[node]))
            if depth == len(path):
                here.nodes.append(node)
            else:
                here.below[path[: depth + 1]] = None
    names = _names(switches, {*names_in_use, *places})
    ordered = sorted(switches, key=lambda path: -path[-1].tier)
    return tuple(
        SwitchFacts(
            name=names[path],
            place=switches[path].place,
            nodes=tuple(switches[path].nodes),
            switches=tuple(names[below] for below in switches[path].below),
            tier=path[-1].tier,
            layer=path[-1].layer,
            is_nvlink=is_nvlink,
        )
        for path in ordered
    )


def shared_values(paths: Iterable[Path]) -> dict[Step, set[Path]]:
    """Return the steps that stand under more than one parent, with these parents."""
    parents: dict[Step, set[Path]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            parents.setdefault(step, set()).add(path[:depth])
    return {step: above for step, above in parents.items() if len(above) > 1}


def _names(paths: Iterable[Path], names_in_use: set[str]) -> dict[Path, str]:
    """Return a name for each switch: its value with the fewest outer values before it that make it unique."""
    names: dict[Path, str] = {}
    waiting, length = list(paths), 0
    while waiting and length < max(map(len, waiting)):
        length += 1
        wanted: dict[str, list[Path]] = {}
        for path in waiting:
            wanted.setdefault("/".join(step.value for step in path[-length:]), []).append(path)
        waiting = []
        for name, several in wanted.items():
            if len(several) == 1 and name not in names_in_use:
                names[several[0]] = name
                names_in_use.add(name)
            else:
                waiting += several
    for number, path in enumerate(waiting):
        name = "/".join(f"{step.layer}={step.value}" for step in path)
        names[path] = f"{name}#{number}" if name in names_in_use else name
        names_in_use.add(names[path])
    return names
