"""Sources of a topology, as schedulers, drivers and fabric tools print them; and the result of their import."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from penstock.schemas.document import Document, Part
from penstock.schemas.options.importing import about
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
    format: Format | None = Field(default=None, description=about("formats"))
    name: Name | None = Field(default=None, description="its name in messages, such as a file's name")
    nodes: str | None = Field(default=None, min_length=1, description=about("node"))


class ImportOptions(Part):
    """Values for what sources leave open. Sources win over options, options over the table of devices."""

    name: Name = "imported"
    devices: tuple[Name, ...] = Field(default=(), max_length=MAX_SOURCES, description=about("device_kind"))
    devices_per_node: Annotated[int, Field(strict=True, ge=1, le=MAX_DEVICES_PER_NODE)] | None = Field(
        default=None, description=about("devices_per_node")
    )
    kinds: tuple[DeviceKind, ...] = Field(default=(), max_length=MAX_SOURCES, description=about("kind"))
    memory_bytes: Annotated[Bytes, Field(ge=1)] | None = Field(default=None, description=about("memory"))
    fabric: Literal["pairs", "ports", "bus"] | None = Field(default=None, description=about("fabric"))
    fabric_bytes_per_s: BytesPerSecond | None = Field(default=None, description=about("fabric_bandwidth"))
    nic_bytes_per_s: BytesPerSecond | None = Field(default=None, description=about("nic"))
    latency_ns: Nanoseconds | None = Field(default=None, description=about("latency"))
    oversubscription: Number = Field(default=1, ge=1, le=1000, description=about("oversubscription"))
    topology: Name | None = Field(default=None, description=about("topology_name"))
    nvlink_blocks: Flag = Field(default=False, description=about("nvlink_blocks"))
    only: str | None = Field(default=None, min_length=1, description=about("only"))
    only_free: Flag = Field(default=False, description=about("only_free"))


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
    sources: tuple[SourceFound, ...]
    assumptions: tuple[str, ...]
    left_out: tuple[LeftOut, ...]
    free: str | None = Field(
        default=None, description="hostlist of the nodes on which nothing runs; null: no source says what runs"
    )
    hash: ContentHash | None = Field(default=None, description="null if it was not stored")
