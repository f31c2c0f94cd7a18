"""Every plan of a small request: partitions × replications × placements up to symmetry × micro-batch numbers.

The plans have one contiguous pipeline, whose stages share no devices and split every micro-batch by rows; devices may
be left over. Devices of one node are alike when swapping them changes neither costs nor network, and so are nodes. Of
plans that differ only by such swaps one is listed (SOLVERS F calls its placements orbits). ``count`` computes the
number of plans without listing them.

Where transfers are counted slice by slice, the order of a stage's replicas decides which of them exchange rows, and a
swap of nodes changes that order. An ``ordered`` space lists these plans too, and swaps only neighbouring devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, combinations_with_replacement, pairwise, product
from math import comb, prod

import numpy as np

from penstock.solvers.costs.tables.device_line import likeness
from penstock.solvers.model.allocation import Allocation, single_pipeline, stages_on
from penstock.solvers.model.micro_batches import Batch, candidates, dapple_replicas
from penstock.solvers.model.problem import Problem

Placement = tuple[tuple[int, ...], ...]
"""The devices of each stage, ascending."""


@dataclass(frozen=True, eq=False)
class Space:
    """The plans of a request, by number of micro-batches, number of stages, placement and cuts."""

    problem: Problem
    batches: tuple[Batch, ...]
    ordered: bool = False

    @classmethod
    def of(cls, problem: Problem, most: int | None = None) -> Space:
        """Return the space of the numbers of micro-batches that the other planners try.

        It has every order of replicas that matters, unless that makes more than ``most`` plans.
        """
        space = cls(problem, candidates(problem, dapple_replicas(problem)))
        if space.is_complete:
            return space
        whole = replace(space, ordered=True)
        return space if most is not None and whole.count() > most else whole

    @cached_property
    def is_complete(self) -> bool:
        """Whether each plan with replicas in the order of the cluster takes the time of a plan that is listed."""
        rules = self.problem.rules
        if self.ordered or not (rules.shared or rules.transfer == "nic"):
            return True
        spans = sorted((min(ids), max(ids)) for ids in ([d for n in c for k in n for d in k] for c in self.nodes))
        are_blocks = all(one[1] < two[0] for one, two in pairwise(spans))
        are_runs = all(_is_run(devices) for alike in self.nodes for nest in alike for devices in nest)
        return are_blocks and are_runs and all(len(alike) == 1 or _is_single(alike[0]) for alike in self.nodes)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """Layers after which a stage may end."""
        return tuple(np.flatnonzero(self.problem.cuttable).tolist())

    @property
    def most_stages(self) -> int:
        """The number of devices, or of blocks of layers if that is smaller."""
        return min(self.problem.num_devices, len(self.cuts) + 1)

    @cached_property
    def nodes(self) -> tuple[tuple[Nest, ...], ...]:
        """Nodes that are alike, each as its devices that are alike."""
        return _alike_nodes(self.problem)

    def count(self) -> int:
        """Count the plans, including plans whose micro-batches do not feed all replicas."""
        each = (comb(len(self.cuts), s - 1) * self._count_placements(s) for s in range(1, self.most_stages + 1))
        return len(self.batches) * sum(each)

    def _count_placements(self, stages: int) -> int:
        """Count the orbits in which every stage has devices, by inclusion and exclusion over the empty stages."""
        return sum((-1) ** (stages - k) * comb(stages, k) * self._count_any(k) for k in range(stages + 1))

    @cached_property
    def _listed(self) -> tuple[tuple[Nest, ...], ...]:
        """Nodes whose swaps are left out: alike ones, or, where orders count, each by itself."""
        if not self.ordered:
            return self.nodes
        nests = (_alike_devices(self.problem, devices, in_runs=True) for devices in self.problem.nodes())
        return tuple((nest,) for nest in nests if nest)

    def _count_any(self, stages: int) -> int:
        """Count the orbits of devices over ``stages`` stages or none: multisets of nodes' contents for each class."""
        total = 1
        for alike in self._listed:
            contents = prod(comb(len(devices) + stages, stages) for devices in alike[0])
            total *= comb(contents + len(alike) - 1, len(alike))
        return total

    def placements(self, stages: int) -> Iterator[Placement]:
        """Yield one placement of each orbit, in a fixed order."""
        for chosen in product(*(self._class_contents(alike, stages) for alike in self._listed)):
            groups: list[list[int]] = [[] for _ in range(stages)]
            for alike, contents in zip(self._listed, chosen, strict=True):
                for nest, content in zip(alike, contents, strict=True):
                    _deal(groups, nest, content)
            if all(groups):
                yield tuple(tuple(sorted(group)) for group in groups)

    def _class_contents(self, alike: Sequence[Nest], stages: int) -> list[tuple[Content, ...]]:
        kinds = [_shares(len(devices), stages) for devices in alike[0]]
        return list(combinations_with_replacement(list(product(*kinds)), len(alike)))

    def partitions(self, stages: int) -> np.ndarray:
        """Return (n, stages + 1): layer 0, the first layer of each further stage, and L."""
        inner = [tuple(cut + 1 for cut in each) for each in combinations(self.cuts, stages - 1)]
        table = np.zeros((len(inner), stages + 1), dtype=np.int64)
        table[:, -1] = self.problem.num_layers
        if stages > 1:
            table[:, 1:-1] = inner
        return table

    def orbit(self, groups: Placement) -> tuple[object, ...]:
        """Return a key that two placements share if swaps of alike devices and nodes turn one into the other."""
        contents = []
        for alike in self.nodes:
            counts = [tuple(tuple(len(each.intersection(g)) for g in groups) for each in map(set, n)) for n in alike]
            contents.append(tuple(sorted(counts)))
        return tuple(contents)

    def allocation(self, batch: Batch, firsts: Sequence[int], placement: Placement) -> Allocation:
        """Return the plan of one partition and placement."""
        return single_pipeline(stages_on(placement, map(int, firsts)), batch.num_micro_batches)


Nest = tuple[tuple[int, ...], ...]
Content = tuple[tuple[int, ...], ...]


def _shares(devices: int, stages: int) -> list[tuple[int, ...]]:
    """Return every way to give ``stages`` stages some of the devices; the remaining devices are unused."""
    if stages == 0:
        return [()]
    return [(count, *rest) for count in range(devices, -1, -1) for rest in _shares(devices - count, stages - 1)]


def _deal(groups: list[list[int]], nest: Nest, content: Content) -> None:
    for devices, shares in zip(nest, content, strict=True):
        start = 0
        for stage, count in enumerate(shares):
            groups[stage] += devices[start : start + count]
            start += count


def _alike_nodes(problem: Problem) -> tuple[tuple[Nest, ...], ...]:
    """Return the classes of alike nodes; the relation is transitive, as swaps that change nothing can be combined."""
    classes: list[list[Nest]] = []
    for devices in problem.nodes():
        nest = _alike_devices(problem, devices)
        if not nest:
            continue
        for members in classes:
            if _same_shape(nest, members[0]) and _swaps(problem, members[0], nest):
                members.append(nest)
                break
        else:
            classes.append([nest])
    return tuple(tuple(each) for each in classes)


def _is_single(nest: Nest) -> bool:
    return sum(map(len, nest)) == 1


def _is_run(devices: Sequence[int]) -> bool:
    return devices[-1] - devices[0] == len(devices) - 1


def _alike_devices(problem: Problem, devices: Sequence[int], *, in_runs: bool = False) -> Nest:
    """Return classes of devices that are alike; ``in_runs``: of neighbouring ones alone."""
    classes: list[list[int]] = []
    for device in devices:
        for members in classes[-1:] if in_runs else classes:
            if in_runs and members[-1] + 1 != device:
                continue
            if _swaps(problem, ((members[0],),), ((device,),)):
                members.append(device)
                break
        else:
            classes.append([device])
    return tuple(tuple(each) for each in classes)


def _same_shape(a: Nest, b: Nest) -> bool:
    return [len(each) for each in a] == [len(each) for each in b]


def _swaps(problem: Problem, a: Nest, b: Nest) -> bool:
    """Return whether swapping the devices of ``a`` and ``b`` leaves kinds, memory, pins and the network unchanged."""
    first, second = [d for each in a for d in each], [d for each in b for d in each]
    for u, v in zip(first, second, strict=True):
        x, y = problem.devices[u], problem.devices[v]
        if likeness(x) != likeness(y):
            return False
        if any((u in pin.devices) != (v in pin.devices) for pin in problem.pins):
            return False
    network = problem.network
    if network.matrix_bytes_per_s is not None:
        order = np.arange(problem.num_devices)
        order[first], order[second] = second, first
        tables = [network.matrix_bytes_per_s, network.matrix_latency_ns]
        return all(bool((t[np.ix_(order, order)] == t).all()) for t in tables if t is not None)
    if network.has_cards and not network.keeps_lanes(dict(zip(first + second, second + first, strict=True))):
        return False
    names = network.device_names
    swap: dict[str, str] = {}
    for u, v in zip(first, second, strict=True):
        swap |= {names[u]: names[v], names[v]: names[u]}
    one, other = network.node_of[first[0]], network.node_of[second[0]]
    if one != other:
        if network.insides[one] != network.insides[other]:
            return False
        hosts = network.node_names
        swap |= {hosts[one]: hosts[other], hosts[other]: hosts[one]}
    wires = sorted((sorted((c.a, c.b)), c[2:]) for c in network.cables)
    moved = sorted((sorted((swap.get(c.a, c.a), swap.get(c.b, c.b))), c[2:]) for c in network.cables)
    return wires == moved
