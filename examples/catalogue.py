"""Models and clusters by name: shipped analytic profiles, shapes, the topologies of the papers, and forms like
``8x8xH100``.

No torch: planning by name needs none. The tables of devices are loaded when a form asks for them, not before: the
service imports this module. A node of a kind is what that device is usually sold in, as
``penstock.importers.cluster.hardware`` has it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.examples.shapes import SHAPES
from penstock.schemas.errors import InvalidDocument, UnknownName, meant
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import MAX_DEVICES, ClusterTopology, DeviceKind, Fabric, UniformCluster
from penstock.schemas.transformers.shape import TransformerShape

if TYPE_CHECKING:
    from penstock.importers.cluster.hardware import Hardware

_HERE = Path(__file__).parent
_CLUSTER = re.compile(r"(?:(?P<nodes>[0-9]+)x)?(?P<devices>[0-9]+)x(?P<kind>[A-Za-z][A-Za-z0-9-]*)")
_LARGEST_NODE = 8
_ALIKE = 0.4


def model_names() -> tuple[str, ...]:
    """Return the models whose modules and profile are shipped."""
    return tuple(sorted(path.stem for path in (_HERE / "profiles").glob("*.json")))


def profile_names() -> tuple[str, ...]:
    """Return the models that have a profile by name: shipped, or computed from a shape."""
    return tuple(sorted({*model_names(), *SHAPES}))


def cluster_names() -> tuple[str, ...]:
    """Return the clusters that are written out; `cluster` also reads forms like ``8x8xH100`` and ``16xA100``."""
    return tuple(sorted(path.stem for path in (_HERE / "topologies").glob("*.yaml")))


@lru_cache(maxsize=16)
def profile(name: str) -> ModelProfile:
    """Return the profile of model ``name``, shipped or computed for all kinds. Raises UnknownName with near models."""
    if known_profile(name) in model_names():
        from penstock.shapes.profiles import at_degrees

        return at_degrees(read(name))
    from penstock.shapes.profiles import FRAMEWORK, every_kind, profile_of

    return profile_of(SHAPES[name], FRAMEWORK, every_kind())


def read(name: str) -> ModelProfile:
    """Return the shipped profile of model ``name`` as it is written: a transformer's without costs at degrees."""
    return ModelProfile.read(_HERE / "profiles" / f"{name}.json")


def known_profile(name: str) -> str:
    """Return the name of a model that has a profile. Raises UnknownName naming the nearest models."""
    if name not in profile_names():
        raise UnknownName(f"there is no model {name!r} among the examples", remedy=_remedy(name, profile_names()))
    return name


def shape(name: str) -> TransformerShape:
    """Return the shape of transformer ``name``, whose profile need not be shipped. Raises UnknownName."""
    if name not in SHAPES:
        raise UnknownName(f"there is no transformer {name!r} among the examples", remedy=_remedy(name, SHAPES))
    return SHAPES[name]


@lru_cache(maxsize=64)
def cluster(name: str) -> ClusterTopology:
    """Return the cluster ``name``: one that is written out, or ``NODESxDEVICESxKIND``, or ``DEVICESxKIND``.

    Without a number of nodes the devices are in nodes of eight. Raises UnknownName naming the nearest clusters or
    device kinds, InvalidDocument for a form with impossible numbers.
    """
    if name in cluster_names():
        return ClusterTopology.read(_HERE / "topologies" / f"{name}.yaml")
    from penstock.facts.device_table import DEVICES

    match = _CLUSTER.fullmatch(name)
    if match is None:
        names = [*cluster_names(), *(f"8x8x{kind}" for kind in DEVICES)]
        counts = re.fullmatch(r"[0-9]+x[0-9]+", name)
        remedy = f"say of which kind the devices are: {name}xA100" if counts else _joined(name) or _remedy(name, names)
        raise UnknownName(f"there is no cluster {name!r} among the examples", remedy=remedy)
    kinds = {kind.lower(): kind for kind in DEVICES}
    kind = kinds.get(match["kind"].lower(), match["kind"])
    if kind not in DEVICES and not difflib.get_close_matches(kind.upper(), DEVICES, 1, _ALIKE):
        raise UnknownName(
            f"no device kind {kind!r} in the table; it has {', '.join(DEVICES)}",
            remedy="describe the cluster in a topology file; `penstock probe -o here.json` writes one of this machine",
        )
    nodes, devices = _counts(name, match["nodes"], int(match["devices"]))
    if nodes * devices > MAX_DEVICES:
        raise InvalidDocument(
            f"the cluster {name!r} has {nodes * devices:,} devices; the limit is {MAX_DEVICES:,}",
            remedy="plan for a part of it",
        )
    return _uniform(name, nodes, devices, kind)


def _joined(name: str) -> str:
    """Return the remedy for a form that lacks the x before the kind, as in ``2x4V100``; empty for any other name."""
    from penstock.facts.device_table import DEVICES

    for kind in DEVICES:
        counts = name[: -len(kind)].rstrip("-_ x")
        if name.lower().endswith(kind.lower()) and re.fullmatch(r"(?:[0-9]+x)?[0-9]+", counts):
            return f"did you mean {counts}x{kind}?"
    return ""


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
    from penstock.facts.device_table import device_facts
    from penstock.importers.cluster import hardware
    from penstock.importers.cluster.collective_rows import rows_of

    node = hardware.usual(device_facts(kind).kind)
    fabric = Fabric(
        form=node.fabric,
        bandwidth_bytes_per_s=node.fabric_bytes_per_s.value,
        latency_ns=node.fabric_latency_ns.value,
    )
    nic = node.node_nic_bytes_per_s(devices)
    assert nic is not None
    cards = Fabric(bandwidth_bytes_per_s=nic, latency_ns=node.nic_latency_ns.value, lanes=node.node_lanes(devices))
    return ClusterTopology(
        name=name,
        uniform=UniformCluster(
            nodes=nodes,
            devices_per_node=devices,
            kind=kind,
            memory_bytes=node.memory[0].value,
            context_bytes=node.context.value,
            communicators=None if node.communicators is None else node.communicators.stated,
            fabric=fabric if devices > 1 else None,
            nic=cards if nodes > 1 else None,
        ),
        kinds=_scaled(kind),
        assumptions=(
            f"links of {kind} nodes at line rate, from the table in penstock.importers.cluster.hardware",
            *_assumed(node, devices),
        ),
        collectives=rows_of(node, devices) or None,
    )


def _scaled(kind: str) -> tuple[DeviceKind, ...]:
    """Return the kinds whose costs stand in for a kind: the kind that it is like, and H100's for B200."""
    from penstock.facts.device_table import SCALED_FROM, device_facts

    nearest = SCALED_FROM if kind == "B200" else device_facts(kind).like
    if nearest is None:
        return ()
    speed = device_facts(kind).flops_per_s("bf16") / device_facts(nearest).flops_per_s("bf16")
    return (DeviceKind(name=kind, scale_from=nearest, speed=round(speed, 3)), *_scaled(nearest))


def _assumed(node: Hardware, devices: int) -> Iterator[str]:
    """Yield what a cluster of kinds that shipped profiles lack takes over, and from where."""
    from penstock.facts.device_table import EXTRAPOLATED_EXPECTED_ERROR

    for each in _scaled(node.kind):
        yield (
            f"a profile without costs of {each.name} takes those of {each.scale_from} at {each.speed} times the speed, "
            f"the ratio of what both reach in bf16 products: expect {EXTRAPOLATED_EXPECTED_ERROR:.0%} of error, and "
            f"less of a profile computed for {each.name}"
        )
    if node.collectives is not None and devices > 1:
        beyond = (
            f"; among more than {node.collectives.most_members}, which were not measured, with the latency of these"
        )
        more = beyond if devices > node.collectives.most_members else ""
        yield f"collectives inside a node: {node.collectives.source}{more}"


def _remedy(name: str, available: Iterable[str]) -> str:
    names = list(available)
    return str(meant(name.lower(), names, f"one of {', '.join(names)}"))
