"""Layers that pins confine to some of the devices, for bounds: no other device may do their work.

A *block* is the layers between two neighbouring cuttable positions. One stage holds all of it, so a device may hold a
layer only if the pins let it hold the layer's whole block.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.solvers.model.pins import allowed_devices
from penstock.solvers.model.problem import Problem, per_problem

MOST_SETS = 64
"""The most sets of devices that are examined; any choice of them gives a bound."""

Devices = frozenset[int]


class Confined(NamedTuple):
    """Devices, and the layers (ascending) that only these may hold."""

    devices: Devices
    layers: tuple[int, ...]


@per_problem
def holders(problem: Problem) -> tuple[Devices, ...]:
    """Return for each layer the devices that may hold it; all devices if a block has no such device."""
    everywhere = frozenset(range(problem.num_devices))
    if not problem.pins:
        return (everywhere,) * problem.num_layers
    edges = [0, *(int(at) + 1 for at in np.flatnonzero(problem.cuttable)), problem.num_layers]
    allowed: list[Devices] = []
    for first, stop in pairwise(edges):
        allowed += [allowed_devices(problem, first, stop - 1)] * (stop - first)
    return tuple(allowed) if all(allowed) else (everywhere,) * problem.num_layers


@per_problem
def confined(problem: Problem) -> tuple[Confined, ...]:
    """Return all devices with all layers first, then unions of the pins' sets, with the layers confined to each."""
    holders_of_layer = holders(problem)
    unions: dict[Devices, None] = {}
    for devices in sorted(set(holders_of_layer), key=lambda each: (len(each), sorted(each))):
        for union in (devices, *(devices | other for other in unions)):
            if len(unions) < MOST_SETS:
                unions.setdefault(union)
    everywhere = frozenset(range(problem.num_devices))
    sets = (everywhere, *(union for union in unions if union != everywhere))
    return tuple(
        Confined(each, tuple(at for at, layer_holders in enumerate(holders_of_layer) if layer_holders <= each))
        for each in sets
    )
