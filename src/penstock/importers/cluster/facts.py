"""Facts of one source about a cluster, before sources are merged. None: the source does not state it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from penstock.schemas.topology import ClusterTopology, Communicators


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a statement; line and column count from 1. ``pointer``: the place in a document (``items/3``)."""

    source: str
    line: int | None = None
    column: int | None = None
    pointer: str | None = None

    def __str__(self) -> str:
        parts = [self.source] + ([self.pointer] if self.pointer else [])
        parts += [f"{word} {number}" for word, number in (("line", self.line), ("column", self.column)) if number]
        return ", ".join(parts)


class StatedDevice(NamedTuple):
    """The facts of a device that only a topology document states; ``name``: its id without the node's name."""

    name: str
    context_bytes: int
    price: float | None
    gpus: int
    communicators: Communicators | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One accelerator. ``index``: as the driver counts. ``product``: as the source spells it.

    ``pcie_bandwidth_bytes_per_s``: one direction of the device's link, by its generation and width.
    """

    index: int
    product: str | None = None
    memory_bytes: int | None = None
    bus_id: str | None = None
    pcie_bandwidth_bytes_per_s: int | None = None
    is_partition: bool = False
    """A MIG instance or another part of a device."""
    is_kind: bool = False
    """Whether ``product`` is a device kind as profiles call it, not a maker's name."""
    stated: StatedDevice | None = None


@dataclass(frozen=True, slots=True)
class DeviceLinkFacts:
    """The path between two devices of a node (by index); ``bandwidth_bytes_per_s`` is one direction."""

    a: int
    b: int
    path: Literal["nvlink", "pcie-switch", "pcie", "host-bridge", "socket"]
    links: int = 1
    bandwidth_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class NicFacts:
    """A network card of a node, and the devices (by index) that are nearest to it."""

    name: str
    bandwidth_bytes_per_s: int | None = None
    near: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A host. ``name`` is empty where a source describes one node without naming it (nvidia-smi, an NCCL file).

    ``free``: whether nothing runs there; ``busy_devices``: how many devices are taken. ``has_nvswitch``: its devices
    have ports into a switch instead of links from one to another.
    """

    name: str
    place: Place
    devices: tuple[DeviceFacts, ...] | None = None
    device_links: tuple[DeviceLinkFacts, ...] = ()
    has_nvswitch: bool | None = None
    nics: tuple[NicFacts, ...] | None = None
    usable: bool | None = None
    why_not_usable: str = ""
    busy_devices: int | None = None


@dataclass(frozen=True, slots=True)
class SwitchFacts:
    """A switch, block, rack or domain, and everything below it.

    ``tier`` counts from 0 at the nodes; ``layer`` is the source's word for it. ``is_nvlink``: its nodes share one
    NVLink domain. ``bandwidth_bytes_per_s``: of the link to each child, one direction.
    """

    name: str
    place: Place
    nodes: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    tier: int | None = None
    layer: str = "switch"
    is_nvlink: bool = False
    bandwidth_bytes_per_s: int | None = None


@dataclass(frozen=True, slots=True)
class LinkFacts:
    """A cable between two nodes or switches; several of the same ends add up."""

    a: str
    b: str
    place: Place
    bandwidth_bytes_per_s: int | None = None
    latency_ns: int | None = None


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """All facts of one source. ``assumptions``: what had to be read into it, in sentences."""

    format: str
    source: str
    nodes: dict[str, NodeFacts] = field(default_factory=dict)
    switches: tuple[SwitchFacts, ...] = ()
    links: tuple[LinkFacts, ...] = ()
    assumptions: tuple[str, ...] = ()
    measured: ClusterTopology | None = None
    """The topology that a probe has written, from which the nodes' fabrics and links are taken."""
