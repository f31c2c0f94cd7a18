"""The table of devices and of the nodes that they are sold in: ``hardware.yaml``, each figure with where it is from.

Clusters by name (``penstock.examples.catalogue``) and imported topologies read the same table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from penstock.importers.cluster.yaml_loader import YAML_LOADER
from penstock.schemas import topology
from penstock.schemas.quantities import parse_bytes, parse_bytes_per_s, parse_time_ns
from penstock.schemas.transformers.degrees import Operation

ASSUMED = "assumed"
SWITCH_LATENCY_NS = 1_000
"""Latency of a link from one switch to the next; assumed."""

_TABLE = Path(__file__).with_name("hardware.yaml")
_TELLS_NOTHING = frozenset({"nvidia", "amd", "tesla", "geforce", "instinct", "gpu", "hbm3", "hbm3e", "shared"})
_SIZE = re.compile(r"([0-9]{1,3})(?:g|gb|gib)?")
_PARTITION = re.compile(r"(?:mig|[0-9]+[cg]\.[0-9]+gb.*|[0-9]{1,3}[abcq][0-9]?)")
"""A word of a MIG profile (``3g.20gb``), or the size and series of a vGPU (``H100-40C``, ``A40-48Q``)."""
_SIZE_ERROR = 0.1
"""Largest relative difference between a memory of the table and the size in a product's name or from a driver."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number of the table, and where it is from."""

    value: int
    source: str


@dataclass(frozen=True, slots=True)
class NvLink:
    """A device's links, and what each carries in one direction."""

    links: int
    bytes_per_s: Figure

    @property
    def total_bytes_per_s(self) -> int:
        """All links of a device together, one direction."""
        return self.links * self.bytes_per_s.value


@dataclass(frozen=True, slots=True)
class Reach:
    """Figures of a collective: its share of the fabric's bandwidth, ns per step between members, and ns in all."""

    share: float
    step_ns: int
    each_ns: int


@dataclass(frozen=True, slots=True)
class Collectives:
    """Collectives of a node's devices, by operation; ``most_members``: the largest number of members measured."""

    source: str
    most_members: int
    reach: Mapping[Operation, Reach] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Communicators:
    """The memory that NCCL takes of a device for each directed edge, and for each group."""

    stated: topology.Communicators
    source: str


@dataclass(frozen=True, slots=True)
class Hardware:
    """A form in which a kind of device is sold. ``memory``: the sizes; ``nic``: None where the user has to state it."""

    kind: str
    form: str
    words: frozenset[str]
    memory: tuple[Figure, ...]
    context: Figure
    nvlink: NvLink | None
    fabric: Literal["pairs", "ports", "bus"]
    fabric_bytes_per_s: Figure
    fabric_latency_ns: Figure
    nic_bytes_per_s: Figure | None
    nic_per_device: bool
    nic_latency_ns: Figure
    collectives: Collectives | None
    communicators: Communicators | None

    def size_near(self, size_bytes: float) -> Figure | None:
        """Return the memory of the table that a number in a name, or of another source, means; None for none."""
        near = [size for size in self.memory if abs(size.value - size_bytes) <= _SIZE_ERROR * size_bytes]
        return near[0] if near else None

    def node_nic_bytes_per_s(self, devices: int) -> int | None:
        """Return the one-way bandwidth of a node's network cards, by its devices; None if it is not in the table."""
        if self.nic_bytes_per_s is None:
            return None
        return self.nic_bytes_per_s.value * (devices if self.nic_per_device else 1)

    def node_lanes(self, devices: int) -> int | None:
        """Return how many equal cards a node has; None for one."""
        return devices if self.nic_per_device and devices > 1 else None


@dataclass(frozen=True, slots=True)
class Recognised:
    """A product's name, read. ``memory`` is None where neither name nor table tells which size it is."""

    hardware: Hardware
    memory: Figure | None
    is_bare: bool
    """The name says which chip alone; the form is the usual one."""
    is_sized: bool = False
    """The name says how large the memory is."""


@cache
def table() -> Mapping[str, tuple[Hardware, ...]]:
    """Return the forms of each kind, the usual one first."""
    data = yaml.load(_TABLE.read_text(encoding="utf-8"), Loader=YAML_LOADER)
    return {
        kind: tuple(_hardware(kind, entry["context"], form) for form in entry["forms"]) for kind, entry in data.items()
    }


def usual(kind: str) -> Hardware:
    """Return the usual form of a kind. Raises KeyError."""
    return table()[kind][0]


def communicators_of(kind: str) -> topology.Communicators | None:
    """Return the memory that communicators take of a device kind in its usual form; None where it was not measured."""
    communicators = table()[kind][0].communicators if kind in table() else None
    return None if communicators is None else communicators.stated


@cache
def is_partition(product: str) -> bool:
    """Return whether a product's name is of a part of a device (MIG, vGPU)."""
    return any(_PARTITION.fullmatch(word) for word in _words(product))


@cache
def recognise(product: str) -> Recognised | None:
    """Return the device that a source calls ``product``; None for a name with a word that the table does not have."""
    words = _words(product)
    kinds = [kind for kind in table() if kind.lower() in words]
    if len(kinds) != 1:
        return None
    forms = table()[kinds[0]]
    named = [form for form in forms if not form.words.isdisjoint(words)]
    if len(named) > 1:
        return None
    hardware = named[0] if named else forms[0]
    rest = set(words) - hardware.words - _TELLS_NOTHING - {hardware.kind.lower()}
    sizes = [size for word in rest if (size := _size(word, hardware)) is not None]
    if len(sizes) != len(rest) or len(sizes) > 1:
        return None
    memory = sizes[0] if sizes else hardware.memory[0] if len(hardware.memory) == 1 else None
    return Recognised(hardware, memory, is_bare=not named and len(forms) > 1, is_sized=bool(sizes))


def _words(product: str) -> list[str]:
    text = re.sub(r"gtx[\s_-]*1080[\s_-]*ti\b", "gtx1080ti", product.lower())
    return [word for word in re.split(r"[\s_/,-]+", text) if word]


def _size(word: str, hardware: Hardware) -> Figure | None:
    """Return the memory that a word of a name means, if the form is sold with it."""
    match = _SIZE.fullmatch(word)
    if match is None:
        return None
    return hardware.size_near(int(match[1]) * 10**9)


def _hardware(kind: str, context: dict[str, str], form: dict[str, Any]) -> Hardware:
    nvlink, nic = form.get("nvlink"), form.get("nic")
    context = form.get("context", context)
    return Hardware(
        kind=kind,
        form=form["name"],
        words=frozenset(form["words"]),
        memory=tuple(Figure(parse_bytes(size["is"]), size["from"]) for size in form["memory"]),
        context=Figure(parse_bytes(context["is"]), context["from"]),
        nvlink=NvLink(nvlink["links"], _rate(nvlink)) if nvlink else None,
        fabric=form["fabric"]["form"],
        fabric_bytes_per_s=_rate(form["fabric"]),
        fabric_latency_ns=_time(form["fabric_latency"]),
        nic_bytes_per_s=_rate(nic) if nic else None,
        nic_per_device=nic is not None and nic["per"] == "device",
        nic_latency_ns=_time(form.get("nic_latency", _LATENCY_OF_OTHERS)),
        collectives=_collectives(form["collectives"]) if "collectives" in form else None,
        communicators=_communicators(form["communicators"]) if "communicators" in form else None,
    )


def _communicators(fields: dict[str, str]) -> Communicators:
    edge, group = parse_bytes(fields["edge"]), parse_bytes(fields["group"])
    return Communicators(topology.Communicators(edge_bytes=edge, group_bytes=group), fields["from"])


def _collectives(fields: dict[str, Any]) -> Collectives:
    reach = {
        operation: Reach(
            fields[operation]["share"], *(parse_time_ns(fields[operation][name]) for name in ("step", "each"))
        )
        for operation in get_args(Operation)
        if operation in fields
    }
    return Collectives(fields["from"], fields["most_members"], reach)


_LATENCY_OF_OTHERS = {"is": "30 us", "from": ASSUMED}


def _rate(figure: dict[str, str]) -> Figure:
    return Figure(parse_bytes_per_s(figure["is"]), figure["from"])


def _time(figure: dict[str, str]) -> Figure:
    return Figure(parse_time_ns(figure["is"]), figure["from"])
