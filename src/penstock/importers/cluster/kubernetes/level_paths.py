"""Switches from what nodes say of their place: each node's path through named levels, from the outermost inwards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.importers.cluster.facts import Place, SwitchFacts

MOST_LEVELS = 16
"""The most levels that Kueue takes in a node's path."""


class Step(NamedTuple):
    """One level of a node's path: what the level is called, how far from the nodes it is (0: next to them), whose."""

    layer: str
    tier: int
    value: str


Path = tuple[Step, ...]


@dataclass(slots=True)
class _Found:
    place: Place
    nodes: list[str] = field(default_factory=list)
    below: dict[Path, None] = field(default_factory=dict)


def make_switches(
    paths: Mapping[str, Path], places: Mapping[str, Place], *, is_nvlink: bool = False, taken: Iterable[str] = ()
) -> tuple[SwitchFacts, ...]:
    """The switches that the nodes' paths go through, outermost first, in the order in which they are met.

    Equal values under different parents are different switches (racks are numbered from 0 in each block): a value that
    names one switch is its name, others are called by where they are, ``block-1/rack-7``. ``taken``: names in use.
    """
    found: dict[Path, _Found] = {}
    for node, path in paths.items():
        for depth in range(1, len(path) + 1):
            here = found.setdefault(path[:depth], _Found(places[node]))
            if depth == len(path):
                here.nodes.append(node)
            else:
                here.below[path[: depth + 1]] = None
    names = _names(found, {*taken, *places})
    ordered = sorted(found, key=lambda path: -path[-1].tier)
    return tuple(
        SwitchFacts(
            name=names[path],
            place=found[path].place,
            nodes=tuple(found[path].nodes),
            switches=tuple(names[below] for below in found[path].below),
            tier=path[-1].tier,
            layer=path[-1].layer,
            is_nvlink=is_nvlink,
        )
        for path in ordered
    )


def shared_values(paths: Iterable[Path]) -> dict[Step, set[Path]]:
    """Steps that stand under more than one parent, with these parents."""
    parents: dict[Step, set[Path]] = {}
    for path in paths:
        for depth, step in enumerate(path):
            parents.setdefault(step, set()).add(path[:depth])
    return {step: above for step, above in parents.items() if len(above) > 1}


def _names(paths: Iterable[Path], taken: set[str]) -> dict[Path, str]:
    """A name for each switch: its value with as many of the values around it as it takes to be one of its kind."""
    names: dict[Path, str] = {}
    waiting, length = list(paths), 0
    while waiting and length < max(map(len, waiting)):
        length += 1
        wanted: dict[str, list[Path]] = {}
        for path in waiting:
            wanted.setdefault("/".join(step.value for step in path[-length:]), []).append(path)
        waiting = []
        for name, several in wanted.items():
            if len(several) == 1 and name not in taken:
                names[several[0]] = name
                taken.add(name)
            else:
                waiting += several
    for number, path in enumerate(waiting):
        name = "/".join(f"{step.layer}={step.value}" for step in path)
        names[path] = f"{name}#{number}" if name in taken else name
        taken.add(names[path])
    return names
