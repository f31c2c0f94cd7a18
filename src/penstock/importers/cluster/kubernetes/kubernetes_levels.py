"""Places of Kubernetes nodes by their labels: which label is which level of the network.

Kueue's ``Topology`` object names the labels of a site. Without one, these well-known labels are used:

.. [1] NVIDIA topograph: ``fabric.topograph.run/tier-N`` (0 is next to the node), ``accelerator.topograph.run/domain``
   and ``sub-domain``; before, ``network.topology.nvidia.com/leaf|spine|core|accelerator``.
.. [2] Amazon EKS: ``topology.k8s.aws/network-node-layer-N`` (the largest N is next to the node).
.. [3] Google GKE: ``cloud.google.com/gce-topology-block|subblock``.
.. [4] Oracle OKE: ``oci.oraclecloud.com/rdma.hpc_island_id|network_block_id|local_block_id``, or of the host,
   ``oci.oraclecloud.com/host.network_block_id|rack_id``.
.. [5] CoreWeave: ``backend.coreweave.cloud/fabric|superpod|leafgroup``, for InfiniBand ``ib.coreweave.cloud/…`` too;
   ``ds.coreweave.com/nvlink.domain``.
.. [6] The labels of Kueue's documentation, ``cloud.provider.com/topology-block|rack``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set

from penstock.importers.cluster.facts import Place, SwitchFacts
from penstock.importers.cluster.kubernetes.kubernetes_objects import Labels, Node, Topology
from penstock.importers.cluster.kubernetes.level_paths import MOST_LEVELS, Path, Step, make_switches, shared_values
from penstock.importers.cluster.structured import several
from penstock.importers.lines import Faults

_HOST = frozenset({"kubernetes.io/hostname", "cloud.google.com/gce-topology-host"})
_AREAS = ("topology.kubernetes.io/region", "topology.kubernetes.io/zone")
_TIER = re.compile(r"fabric\.topograph\.run/tier-([0-9]{1,3})")
_AWS_LAYER = re.compile(r"topology\.k8s\.aws/network-node-layer-([0-9]{1,3})")
_SCHEMES = (
    tuple(f"network.topology.nvidia.com/{level}" for level in ("datacenter", "core", "spine", "leaf")),
    ("cloud.google.com/gce-topology-block", "cloud.google.com/gce-topology-subblock"),
    tuple(f"oci.oraclecloud.com/rdma.{level}_id" for level in ("hpc_island", "network_block", "local_block")),
    ("oci.oraclecloud.com/host.network_block_id", "oci.oraclecloud.com/host.rack_id"),
    tuple(f"backend.coreweave.cloud/{level}" for level in ("fabric", "superpod", "leafgroup")),
    tuple(f"ib.coreweave.cloud/{level}" for level in ("fabric", "superpod", "leafgroup")),
    ("cloud.provider.com/topology-block", "cloud.provider.com/topology-rack"),
)
NVLINK_LABELS = (
    ("accelerator.topograph.run/domain", "accelerator.topograph.run/sub-domain"),
    ("network.topology.nvidia.com/accelerator",),
    ("ds.coreweave.com/nvlink.domain",),
    ("nvidia.com/gpu.clique",),
)
"""Labels of the NVLink domain, outermost first; the first line that a source has is used."""
_OF_NVLINK = frozenset(key for keys in NVLINK_LABELS for key in keys)
_NO_CLIQUE = re.compile(r"[0-]+\.[0-9]+")
"""A cluster of zeros: the devices of the node are in no fabric beyond it."""


def read_levels(
    nodes: Mapping[str, Node],
    with_devices: Set[str],
    topologies: Mapping[str, Topology],
    source: str,
    faults: Faults,
) -> tuple[tuple[SwitchFacts, ...], list[str]]:
    """Return the switches above nodes (by pointer), with NVLink domains, and the assumptions.

    ``with_devices``: names of the nodes that have devices; labels that other nodes lack are not reported.
    """
    places = {node.metadata.name: Place(source, pointer=pointer) for pointer, node in nodes.items()}
    labels = {node.metadata.name: node.labels for node in nodes.values()}
    keys, assumptions = _level_labels(labels.values(), topologies, faults)
    paths = {name: _path(of_node, keys) for name, of_node in labels.items()}
    chosen = {name: path for name, path in paths.items() if name in with_devices}
    assumptions += _assumptions(chosen or paths, keys, bool(topologies))
    switches = make_switches(paths, places)
    switches = _without_lone_areas(switches)
    switch_names = [switch.name for switch in switches]
    domains: tuple[SwitchFacts, ...] = ()
    for of_domain in NVLINK_LABELS:
        inside = {name: path for name, of_node in labels.items() if (path := _path(of_node, of_domain))}
        if inside:
            domains = make_switches(inside, places, is_nvlink=True, names_in_use=switch_names)
            break
    return switches + domains, assumptions


def _level_labels(
    of_nodes: Iterable[Labels], topologies: Mapping[str, Topology], faults: Faults
) -> tuple[tuple[str, ...], list[str]]:
    """Return the labels that name the levels, outermost first."""
    present = {key for labels in of_nodes for key, value in labels.items() if value}
    if len(topologies) > 1:
        names = ", ".join(repr(one.metadata.name) for one in topologies.values())
        faults.add(
            None,
            f"there are several Topology objects, {names}; give the one that the nodes belong to",
            at=next(iter(topologies)),
        )
    for topology in topologies.values():
        named = tuple(level.nodeLabel for level in topology.spec.levels)
        levels = tuple(key for key in named if key not in _HOST | _OF_NVLINK)
        unused = [key for key in levels if key not in present]
        assumptions = [f"no node carries the label {key} of the Topology {topology.metadata.name!r}" for key in unused]
        return tuple(key for key in levels if key in present), assumptions
    keys = tuple(key for key in _AREAS if key in present) + _known_scheme(present)
    if len(keys) > MOST_LEVELS:
        faults.add(None, f"nodes have labels of {len(keys)} levels; there are {MOST_LEVELS} at most", at="items")
    return keys[-MOST_LEVELS:], []


def _known_scheme(present: set[str]) -> tuple[str, ...]:
    tiers = {int(match[1]): key for key in present if (match := _TIER.fullmatch(key))}
    if tiers:
        return tuple(tiers[number] for number in sorted(tiers, reverse=True))
    for scheme in _SCHEMES:
        if used := tuple(key for key in scheme if key in present):
            return used
    layers = {int(match[1]): key for key in present if (match := _AWS_LAYER.fullmatch(key))}
    return tuple(layers[number] for number in sorted(layers))


def _path(labels: Labels, keys: tuple[str, ...]) -> Path:
    return tuple(
        Step(layer=key, tier=len(keys) - 1 - depth, value=labels[key])
        for depth, key in enumerate(keys)
        if labels.get(key) and not (key in _OF_NVLINK and _NO_CLIQUE.fullmatch(labels[key]))
    )


def _assumptions(paths: Mapping[str, Path], keys: tuple[str, ...], by_topology: bool) -> list[str]:
    if not keys:
        return ["no label says where nodes are in the network"]
    sentences = [] if by_topology else [f"nodes are joined by their labels {', '.join(keys)}, outermost first"]
    shared = shared_values(paths.values())
    for layer in dict.fromkeys(step.layer for step in shared):
        values = [step for step in shared if step.layer == layer]
        parents = sorted("/".join(one.value for one in path) or "the outside" for path in shared[values[0]])
        more = f", and {len(values) - 1} more such" if len(values) > 1 else ""
        example = f"{values[0].value} under {several(parents)}"
        sentences.append(f"{layer} is the same in several places ({example}{more}): each is a switch of its own")
    partly = [name for name, path in paths.items() if 0 < len(path) < len(keys)]
    if partly:
        sentences.append(
            f"some labels of {', '.join(keys)} are missing on {several(partly)}: joined where the labels end"
        )
    return sentences


def _without_lone_areas(switches: tuple[SwitchFacts, ...]) -> tuple[SwitchFacts, ...]:
    """Return the switches without top regions and zones that hold one place only: these join nothing."""
    kept = list(switches)
    while kept and kept[0].layer in _AREAS and len(kept[0].switches) == 1 and not kept[0].nodes:
        kept.pop(0)
    return tuple(kept)
