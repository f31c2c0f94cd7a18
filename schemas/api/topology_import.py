"""Sources of a topology, as schedulers, drivers and fabric tools print them; and the result of their import."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.schemas.document import Document, Part
from penstock.schemas.quantities import Bytes, BytesPerSecond, ContentHash, Count, Flag, Name, Nanoseconds, Number
from penstock.schemas.topology import ClusterTopology, DeviceKind

MAX_SOURCES = 64
MAX_DEVICES_PER_NODE = 1024

Format = Literal[
    "slurm-conf",
    "slurm-yaml",
    "scontrol-topology",
    "scontrol-nodes",
    "ibnetdiscover",
    "k8s-nodes",
    "hypernodes",
    "topograph",
    "nvidia-topo",
    "nvidia-query",
    "nccl-xml",
    "rocm-topo",
    "agents",
]


class ImportSource(Part):
    """One text, and its kind."""

    text: str = Field(description="what the tool printed, or the file's content")
    format: Format | None = Field(default=None, description="left out: recognised by its content")
    name: Name | None = Field(default=None, description="its name in messages, such as a file's name")
    nodes: str | None = Field(
        default=None,
        min_length=1,
        description="hostlist of the nodes that a text without names (nvidia-smi, NCCL) describes; left out: all nodes "
        "with the same devices",
    )


class ImportOptions(Part):
    """Values for what sources leave open. Sources win over options, options over the table of devices."""

    name: Name = "imported"
    devices: tuple[Name, ...] = Field(
        default=(),
        max_length=MAX_SOURCES,
        description="what the devices are: `H100`, or `PRODUCT=H100` for those that a source calls PRODUCT",
    )
    devices_per_node: Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES_PER_NODE)] | None = None
    kinds: tuple[DeviceKind, ...] = Field(
        default=(), max_length=MAX_SOURCES, description="kinds that profiles lack, costed from ones that they have"
    )
    memory_bytes: Annotated[Bytes, Field(ge=1)] | None = Field(default=None, description="of each device")
    fabric: Literal["pairs", "ports", "bus"] | None = Field(
        default=None, description="how devices of a node are joined"
    )
    fabric_bytes_per_s: BytesPerSecond | None = Field(default=None, description="of it, in one direction")
    nic_bytes_per_s: BytesPerSecond | None = Field(
        default=None, description="all network cards of a node together, one direction"
    )
    latency_ns: Nanoseconds | None = Field(default=None, description="of a node's link to its switch")
    oversubscription: Number = Field(
        default=1,
        ge=1,
        le=1000,
        description="bandwidth below a switch divided by that of its uplink, where no source gives it",
    )
    topology: Name | None = Field(
        default=None, description="which of the topologies of a topology.yaml is meant; left out: its default"
    )
    nvlink_blocks: Flag = Field(default=False, description="each block of Slurm's block topology is an NVLink domain")
    only: str | None = Field(default=None, min_length=1, description="hostlist: these nodes, and no others")
    only_free: Flag = Field(default=False, description="nodes on which nothing runs, and no others")


class TopologyImport(Document):
    """Sources that describe one cluster."""

    kind: ClassVar[str] = "topology import"

    sources: tuple[ImportSource, ...] = Field(default=(), max_length=MAX_SOURCES)
    options: ImportOptions = ImportOptions()
    agents: Flag = Field(default=False, description="use the service's living agents as a source, too")
    store: Flag = Field(default=True, description="store the topology, so that requests may refer to it by its hash")


class SourceFound(Part):
    """A source's format, and how much of the topology it covers."""

    source: str
    format: Format
    nodes: Count
    switches: Count
    links: Count


class LeftOut(Part):
    """Nodes (a hostlist) that are no part of the topology."""

    nodes: str
    count: Count
    why: str


class TopologyImported(Part):
    """The topology; ``assumptions`` are also in it."""

    topology: ClusterTopology
    found: tuple[SourceFound, ...]
    assumptions: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    free: str | None = Field(
        default=None, description="hostlist of the nodes on which nothing runs; null: no source says what runs"
    )
    hash: ContentHash | None = Field(default=None, description="null if it was not stored")
