"""The nodes of a plan, the number of devices used on each, and the stages there: computed once for every target."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from penstock.schemas.topology import ClusterTopology

if TYPE_CHECKING:
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.ranks.bundle import JobBundle
    from penstock.schemas.topology import Node


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The part of a plan on one node. ``ranks`` are in the order of local ranks, ``stages`` in the order of stages.

    ``num_gpus``: physical accelerators that the used devices represent, 0 for CPUs. ``is_whole``: all devices are used.
    ``switch``: the switch at the other end of the node's own link, None where the topology does not state it.
    """

    name: str
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    num_gpus: int
    is_whole: bool
    switch: str | None


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes with the same number of ranks and accelerators."""

    num_ranks: int
    num_gpus: int
    nodes: tuple[NodeUse, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of a plan in the order of their first ranks."""

    nodes: tuple[NodeUse, ...]

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks of the whole plan."""
        return sum(len(node.ranks) for node in self.nodes)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the nodes."""
        return tuple(node.name for node in self.nodes)

    @property
    def fills_nodes(self) -> bool:
        """Return whether the plan uses every device of its nodes."""
        return all(node.is_whole for node in self.nodes)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return nodes with equal counts together, in the order of their first nodes; one group where all are equal."""
        by_counts: dict[tuple[int, int], list[NodeUse]] = {}
        for node in self.nodes:
            by_counts.setdefault((len(node.ranks), node.num_gpus), []).append(node)
        return tuple(Group(ranks, gpus, tuple(nodes)) for (ranks, gpus), nodes in by_counts.items())

    @property
    def slice_size(self) -> int | None:
        """Return how many consecutive nodes share a switch, where that number is the same throughout; else None."""
        if any(node.switch is None for node in self.nodes):
            return None
        runs = [len(list(nodes)) for _, nodes in groupby(self.nodes, key=lambda node: node.switch)]
        return runs[0] if len(set(runs)) == 1 else None

    def hosts_by_rank(self) -> list[str]:
        """Return the node of each rank."""
        node_of = {rank: node.name for node in self.nodes for rank in node.ranks}
        return [node_of[rank] for rank in range(self.num_ranks)]


def layout_of(file: PlanFile, bundle: JobBundle) -> Layout:
    """Return the layout of a plan that was lowered into ``bundle``."""
    topology = file.request.topology
    assert isinstance(topology, ClusterTopology)
    topology = topology.expanded()
    by_name = {node.name: node for node in topology.nodes}
    switch_of = _switches(topology)
    stages_of: dict[str, set[int]] = {}
    for pipeline in file.plan.pipelines:
        for number, stage in enumerate(pipeline.stages):
            for device in stage.devices:
                stages_of.setdefault(device, set()).add(number)
    used = []
    for name, ranks in bundle.nodes().items():
        devices = [bundle.ranks[rank].device for rank in ranks]
        node = by_name[name]
        used.append(
            NodeUse(
                name=name,
                ranks=ranks,
                stages=tuple(sorted(set().union(*(stages_of[device] for device in devices)))),
                num_gpus=_gpus(node, set(devices)),
                is_whole=set(devices) == {device.id for device in node.devices},
                switch=switch_of.get(name),
            )
        )
    return Layout(tuple(used))


def spans(numbers: Iterable[int]) -> str:
    """Format ascending numbers as ranges: 0-3, 6."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _gpus(node: Node, used: set[str]) -> int:
    return sum(device.gpus for device in node.devices if device.id in used and device.kind != "cpu")


def _switches(topology: ClusterTopology) -> dict[str, str]:
    """Return the switch at the other end of each node's first link to one."""
    switches = set(topology.switches)
    switch_of: dict[str, str] = {}
    for link in topology.links:
        for node, other in ((link.a, link.b), (link.b, link.a)):
            if other in switches and node not in switches:
                switch_of.setdefault(node, other)
    return switch_of
