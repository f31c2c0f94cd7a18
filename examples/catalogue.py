"""Models and clusters by name: shipped analytic profiles, the topologies of the papers, and forms like ``8x8xH100``.

No torch: planning by name needs none. The table of devices is loaded when a form asks for it, not before: the service
imports this module. A node of a kind is what that device is usually sold in:

* GTX1080Ti: one PCIe 3.0 bus that all devices share (128 Gbit/s, as SPP's section V-A has it), 25 Gbit/s Ethernet.
* V100: NVLink pairs of 25 GB/s a direction, 25 Gbit/s Ethernet (a p3.16xlarge; DAPPLE's configuration A).
* A100: NVSwitch ports of 300 GB/s a direction, one 200 Gbit/s NIC per device (DGX A100).
* H100, H200: NVSwitch ports of 450 GB/s a direction, one 400 Gbit/s NIC per device (DGX H100, DGX H200).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.schemas.errors import InvalidDocument, NotFound
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster

_HERE = Path(__file__).parent
_CLUSTER = re.compile(r"(?:(?P<nodes>[0-9]+)x)?(?P<devices>[0-9]+)x(?P<kind>[A-Za-z][A-Za-z0-9-]*)")
_LARGEST_NODE = 8
_GBIT = 10**9 // 8


class _NodeKind(NamedTuple):
    form: Literal["pairs", "ports", "bus"]
    fabric_bytes_per_s: int
    fabric_latency_ns: int
    nic_bytes_per_s: int
    nic_per_device: bool
    nic_latency_ns: int


_NODES: dict[str, _NodeKind] = {
    "GTX1080Ti": _NodeKind("bus", 128 * _GBIT, 10_000, 25 * _GBIT, False, 30_000),
    "V100": _NodeKind("pairs", 25 * 10**9, 5_000, 25 * _GBIT, False, 30_000),
    "A100": _NodeKind("ports", 300 * 10**9, 5_000, 200 * _GBIT, True, 10_000),
    "H100": _NodeKind("ports", 450 * 10**9, 5_000, 400 * _GBIT, True, 10_000),
    "H200": _NodeKind("ports", 450 * 10**9, 5_000, 400 * _GBIT, True, 10_000),
}


def model_names() -> tuple[str, ...]:
    """The models with a shipped profile."""
    return tuple(sorted(path.stem for path in (_HERE / "profiles").glob("*.json")))


def cluster_names() -> tuple[str, ...]:
    """The clusters that are written out; forms like ``8x8xH100`` and ``16xA100`` are understood besides."""
    return tuple(sorted(path.stem for path in (_HERE / "topologies").glob("*.yaml")))


@lru_cache(maxsize=16)
def profile(name: str) -> ModelProfile:
    """The shipped profile of model ``name``. Raises NotFound naming the nearest models."""
    if name not in model_names():
        raise NotFound(f"there is no model {name!r} among the examples", remedy=_remedy(name, model_names()))
    return ModelProfile.read(_HERE / "profiles" / f"{name}.json")


@lru_cache(maxsize=64)
def cluster(name: str) -> ClusterTopology:
    """The cluster ``name``: one that is written out, or ``NODESxDEVICESxKIND``, or ``DEVICESxKIND``.

    Without a number of nodes the devices stand in nodes of eight. Raises NotFound naming the nearest clusters or
    device kinds, InvalidDocument for a form with impossible numbers.
    """
    if name in cluster_names():
        return ClusterTopology.read(_HERE / "topologies" / f"{name}.yaml")
    from penstock.executor.profiling.device_table import DEVICES

    match = _CLUSTER.fullmatch(name)
    if match is None:
        known = [*cluster_names(), *(f"8x8x{kind}" for kind in DEVICES)]
        raise NotFound(f"there is no cluster {name!r} among the examples", remedy=_remedy(name, known))
    kinds = {kind.lower(): kind for kind in DEVICES}
    kind = kinds.get(match["kind"].lower(), match["kind"])
    nodes, devices = _counts(name, match["nodes"], int(match["devices"]))
    return _uniform(name, nodes, devices, kind)


def _counts(name: str, nodes: str | None, devices: int) -> tuple[int, int]:
    if devices < 1 or (nodes is not None and int(nodes) < 1):
        raise InvalidDocument(f"the cluster {name!r} has no device; each number has to be at least 1")
    if nodes is not None:
        return int(nodes), devices
    if devices <= _LARGEST_NODE:
        return 1, devices
    if devices % _LARGEST_NODE:
        raise InvalidDocument(
            f"{devices} devices do not fill nodes of {_LARGEST_NODE}; write NODESxDEVICESxKIND instead of {name!r}"
        )
    return devices // _LARGEST_NODE, _LARGEST_NODE


def _uniform(name: str, nodes: int, devices: int, kind: str) -> ClusterTopology:
    from penstock.executor.profiling.device_table import device_facts

    facts, node = device_facts(kind), _NODES[kind]
    nic = node.nic_bytes_per_s * (devices if node.nic_per_device else 1)
    fabric = Fabric(form=node.form, bandwidth_bytes_per_s=node.fabric_bytes_per_s, latency_ns=node.fabric_latency_ns)
    return ClusterTopology(
        name=name,
        uniform=UniformCluster(
            nodes=nodes,
            devices_per_node=devices,
            kind=kind,
            memory_bytes=facts.memory_bytes,
            context_bytes=facts.context_bytes,
            fabric=fabric if devices > 1 else None,
            nic=Fabric(bandwidth_bytes_per_s=nic, latency_ns=node.nic_latency_ns) if nodes > 1 else None,
        ),
        assumptions=(f"links of {kind} nodes at line rate, from the table in penstock.examples.catalogue",),
    )


def _remedy(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4) or known
    return ", ".join(near)
