"""Cluster: its devices and the network between them, in one of three forms."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.document import Document, Part, refuse_doubles
from penstock.schemas.quantities import (
    Bytes,
    BytesPerSecond,
    Count,
    MemoryBytes,
    Name,
    Nanoseconds,
    Number,
    PositiveCount,
)
from penstock.schemas.transformers.degrees import Operation

MAX_DEVICES = 65_536
"""Devices of a cluster by name, and of one that a service takes unless its operator sets another number."""
MAX_MATRIX_DEVICES = 2048
MAX_COLLECTIVES = 4096
LINE_BY_LINE = ("nodes", "links", "collectives")
Duplex = Literal["full", "half"]


class Communicators(Part):
    """Memory of a device that its ranks' communicators take in addition to its context, as NCCL's do."""

    edge_bytes: Bytes = Field(description="for each direction in which it sends to, or receives from, another device")
    group_bytes: Bytes = Field(description="for each group of devices in whose collectives it takes part")


class Device(Part):
    """One accelerator, or a group of them that acts as one (``8xH100-tp8``)."""

    id: Name = Field(description="node/device")
    kind: Name
    memory_bytes: MemoryBytes
    context_bytes: Bytes = Field(default=0, description="taken by the driver and the library before the first tensor")
    price: Number | None = Field(default=None, ge=0, description="per hour, in any one currency")
    gpus: PositiveCount = Field(default=1, description="physical accelerators behind this device")
    communicators: Communicators | None = Field(default=None, description="left out: they take nothing")


class Fabric(Part):
    """The network inside a node, or the cards of a uniform cluster's nodes.

    ``pairs``: a separate channel between any two devices (NVLink mesh). ``ports``: each device has one port
    into a switch (NVSwitch). ``bus``: all devices share one medium (PCIe, a host's memory).
    """

    form: Literal["pairs", "ports", "bus"] = "pairs"
    bandwidth_bytes_per_s: BytesPerSecond
    latency_ns: Nanoseconds = 0
    duplex: Duplex = "full"
    lanes: PositiveCount | None = Field(
        default=None, description="of a nic only: the number of its equal cards, as in a link"
    )

    @model_validator(mode="after")
    def _whole_lanes(self) -> Self:
        _check_lanes(self)
        return self


def _refuse_lanes(fabric: Fabric | None) -> None:
    if fabric is not None and fabric.lanes is not None:
        raise ValueError("`lanes` is not allowed in a fabric; give it in `nic`, or in the link of a node")


def _check_lanes(link: Fabric | Link) -> None:
    if link.lanes is not None and link.bandwidth_bytes_per_s < link.lanes:
        raise ValueError(
            f"bandwidth_bytes_per_s {link.bandwidth_bytes_per_s} is less than 1 for each of {link.lanes} lanes; "
            "give the bandwidth of all lanes together"
        )


class Node(Part):
    """A host and its devices. Without a fabric its devices reach each other over the node's link, or one lane of it."""

    name: Name
    devices: Annotated[tuple[Device, ...], Field(min_length=1)]
    fabric: Fabric | None = None

    @model_validator(mode="after")
    def _fabric_is_whole(self) -> Self:
        _refuse_lanes(self.fabric)
        return self


class Link(Part):
    """A cable between two nodes, switches or devices; a node's NIC is one link that its devices share.

    ``lanes`` is the number of equal cards of a node that have the link's bandwidth together: what a device sends and
    receives passes one of them, device i of the node lane i modulo ``lanes``.
    """

    a: Name
    b: Name
    bandwidth_bytes_per_s: BytesPerSecond
    latency_ns: Nanoseconds = 0
    duplex: Duplex = "full"
    lanes: PositiveCount | None = Field(default=None, description="equal cards of a node that are this link; 1")

    @model_validator(mode="after")
    def _whole_lanes(self) -> Self:
        _check_lanes(self)
        return self


class UniformCluster(Part):
    """N equal nodes behind one switch."""

    nodes: PositiveCount
    devices_per_node: PositiveCount
    kind: Name
    memory_bytes: MemoryBytes
    context_bytes: Bytes = 0
    price: Number | None = Field(default=None, ge=0)
    gpus: PositiveCount = 1
    communicators: Communicators | None = Field(default=None, description="of each device")
    fabric: Fabric | None = None
    nic: Fabric | None = Field(default=None, description="each node's link to the switch; `form` is not used")
    node_names: str = Field(
        default="node{}",
        max_length=200,
        pattern=r"^[^{}]*\{(:0[1-9]d)?\}[^{}]*$",
        description="node i is called node_names.format(i): node{}, or gpu{:03d} with leading zeros",
    )

    @model_validator(mode="after")
    def _fabric_is_whole(self) -> Self:
        _refuse_lanes(self.fabric)
        return self


class DeviceKind(Part):
    """A kind that a profile may lack. Its costs follow from a kind that the profile has, or from this list."""

    name: Name
    scale_from: Name
    speed: Number = Field(gt=0, description="how many times faster than scale_from it is")


class MeasuredMatrix(Part):
    """Bandwidth and latency between all ordered pairs of devices, row sends to column; the diagonal is not read."""

    devices: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_MATRIX_DEVICES)]
    bandwidth_bytes_per_s: tuple[tuple[Count, ...], ...]
    latency_ns: tuple[tuple[Nanoseconds, ...], ...] | None = None

    @model_validator(mode="after")
    def _square(self) -> Self:
        size = len(self.devices)
        for name, rows in (("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s), ("latency_ns", self.latency_ns)):
            if rows is not None and (len(rows) != size or any(len(row) != size for row in rows)):
                raise ValueError(f"{name} has to be {size} rows of {size} numbers, as many as there are devices")
        return self

    def of(self, devices: Sequence[str]) -> MeasuredMatrix:
        """Return the matrix of some of its devices, in this order."""
        places = {device: number for number, device in enumerate(self.devices)}
        at = [places[device] for device in devices]

        def cut(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple(rows[a][b] for b in at) for a in at)

        late = None if self.latency_ns is None else cut(self.latency_ns)
        return MeasuredMatrix(
            devices=tuple(devices), bandwidth_bytes_per_s=cut(self.bandwidth_bytes_per_s), latency_ns=late
        )


class MeasuredCollective(Part):
    """The time of a collective of one size among ``devices_per_node`` devices in each of ``nodes`` nodes.

    ``size_bytes`` is the whole tensor of an all-reduce, an all-gather and a reduce-scatter. In an all-to-all, and to a
    neighbour (``send``), it is what one device sends.
    """

    operation: Operation
    devices_per_node: PositiveCount
    nodes: PositiveCount = 1
    size_bytes: Annotated[Bytes, Field(gt=0)]
    time_ns: Annotated[Nanoseconds, Field(gt=0)]

    @model_validator(mode="after")
    def _of_several(self) -> Self:
        if self.devices_per_node * self.nodes == 1:
            raise ValueError("a collective has at least two devices: devices_per_node × nodes is 1")
        return self


class ClusterTopology(Document):
    """Either ``nodes`` (with ``switches``, ``links`` or ``matrix``) or ``uniform``."""

    kind: ClassVar[str] = "topology"

    name: Name
    nodes: tuple[Node, ...] = ()
    switches: tuple[Name, ...] = ()
    links: tuple[Link, ...] = ()
    matrix: MeasuredMatrix | None = None
    uniform: UniformCluster | None = None
    kinds: tuple[DeviceKind, ...] = ()
    assumptions: tuple[str, ...] = ()
    links_from: Literal["measured"] | None = Field(default=None, description="measured: by a probe, not declared")
    collectives: Annotated[tuple[MeasuredCollective, ...], Field(min_length=1, max_length=MAX_COLLECTIVES)] | None = (
        Field(default=None, description="measured; others take the time of the formulas")
    )

    @model_validator(mode="after")
    def _measured_once(self) -> Self:
        refuse_doubles(
            "measured collective",
            [
                f"{row.operation} of {row.size_bytes} bytes, {row.devices_per_node} devices × {row.nodes} nodes"
                for row in self.collectives or ()
            ],
        )
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.uniform is None) == (not self.nodes):
            raise ValueError("give exactly one of `nodes` and `uniform`")
        if self.uniform is not None:
            if self.switches or self.links or self.matrix is not None:
                raise ValueError("`uniform` defines its own links; leave `switches`, `links` and `matrix` out")
            return self
        if self.links and self.matrix is not None:
            raise ValueError("give either `links` or a measured `matrix`, not both")
        refuse_doubles("node or switch", [node.name for node in self.nodes] + list(self.switches))
        every = [device.id for node in self.nodes for device in node.devices]
        refuse_doubles("device", every)
        ids = set(every)
        for node in self.nodes:
            for device in node.devices:
                if not device.id.startswith(node.name + "/"):
                    raise ValueError(f"device {device.id!r} is in node {node.name!r}; call it {node.name}/…")
        hosts = {node.name for node in self.nodes}
        places = hosts | set(self.switches) | ids
        for link in self.links:
            for end in (link.a, link.b):
                if end not in places:
                    raise ValueError(
                        f"link {link.a!r}–{link.b!r} ends at {end!r}, which is not a node, switch or device"
                    )
            if link.a == link.b:
                raise ValueError(f"link {link.a!r}–{link.b!r} has the same node, switch or device at both ends")
            if link.lanes is not None and (hosts.isdisjoint((link.a, link.b)) or not {link.a, link.b}.isdisjoint(ids)):
                raise ValueError(
                    f"link {link.a!r}–{link.b!r} has `lanes`, but does not join a node to a switch "
                    "or another node; leave `lanes` out"
                )
        if self.matrix is not None and sorted(self.matrix.devices) != sorted(ids):
            raise ValueError("the matrix has to name each device of `nodes` exactly once")
        return self

    def text(self) -> str:
        """Return JSON with a line for each node, link and measurement, so that even thousands compare well."""
        data = self.model_dump(mode="json", exclude_none=True)
        fields = []
        for name, value in data.items():
            lines = [json.dumps(each, ensure_ascii=False) for each in value] if name in LINE_BY_LINE else []
            text = "[\n  " + ",\n  ".join(lines) + "\n ]" if lines else json.dumps(value, ensure_ascii=False)
            fields.append(f" {json.dumps(name)}: {text}")
        return "{\n" + ",\n".join(fields) + "\n}"

    @property
    def num_devices(self) -> int:
        """The number of the cluster's devices."""
        if self.uniform is not None:
            return self.uniform.nodes * self.uniform.devices_per_node
        return sum(len(node.devices) for node in self.nodes)

    @property
    def group(self) -> tuple[str, int] | None:
        """The first device that is several GPUs, with their number; None where every device is one."""
        if self.uniform is not None:
            return (f"{self.uniform.node_names.format(0)}/0", self.uniform.gpus) if self.uniform.gpus > 1 else None
        return next(((each.id, each.gpus) for node in self.nodes for each in node.devices if each.gpus > 1), None)

    def costed_from(self, kind: str, costed: Collection[str]) -> tuple[str, float] | None:
        """Return the kind that a kind takes its costs from, and how many times faster it is; None without one."""
        scaled = {each.name: each for each in self.kinds}
        speed = 1.0
        for _ in range(len(scaled) + 1):
            if kind in costed:
                return kind, speed
            if kind not in scaled:
                return None
            kind, speed = scaled[kind].scale_from, speed * scaled[kind].speed
        return None

    def devices_in_words(self) -> str:
        """Return the number of devices of each kind: ``8 A100 and 8 V100``."""
        kinds = Counter(device.kind for node in self.nodes for device in node.devices)
        if self.uniform is not None:
            kinds[self.uniform.kind] = self.uniform.nodes * self.uniform.devices_per_node
        return " and ".join(f"{count:,} {kind}" for kind, count in kinds.items())

    def expanded(self) -> ClusterTopology:
        """Return the same cluster with ``uniform`` written out as nodes and links."""
        return self if self.uniform is None else _written_out(self)


@lru_cache(maxsize=4)
def _written_out(topology: ClusterTopology) -> ClusterTopology:
    """Return a uniform cluster as nodes and links; ten thousand devices take half a second, so the last are kept."""
    u = topology.uniform
    assert u is not None
    names = [u.node_names.format(i) for i in range(u.nodes)]
    nodes = tuple(
        Node(
            name=name,
            fabric=u.fabric,
            devices=tuple(
                Device(
                    id=f"{name}/{d}",
                    kind=u.kind,
                    memory_bytes=u.memory_bytes,
                    context_bytes=u.context_bytes,
                    price=u.price,
                    gpus=u.gpus,
                    communicators=u.communicators,
                )
                for d in range(u.devices_per_node)
            ),
        )
        for name in names
    )
    nic = u.nic.model_dump(exclude={"form"}) if u.nic else None
    links = tuple(Link(a=name, b="switch", **nic) for name in names) if nic else ()
    return ClusterTopology(
        name=topology.name,
        nodes=nodes,
        switches=("switch",) if nic else (),
        links=links,
        kinds=topology.kinds,
        assumptions=topology.assumptions,
        links_from=topology.links_from,
        collectives=topology.collectives,
    )
