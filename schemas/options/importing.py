"""Options of an import of topologies."""

from __future__ import annotations

from functools import partial

from penstock.schemas.options.option import Option, described

SOURCES = "Sources"
FACTS = "What the sources do not say"
KEPT = "Nodes"

IMPORT_OPTIONS = {
    "formats": Option(
        panel=SOURCES,
        help="format of each file, or one for all, such as slurm-nodes",
        default="recognised by its content",
        pointer="/sources/0/format",
        flag="--from",
        metavar="FORMAT",
        is_repeatable=True,
    ),
    "agents": Option(
        panel=SOURCES,
        help="service whose living agents are a source, too, such as http://planner:8642",
        default="none",
        flag="--agents",
        metavar="URL",
    ),
    "node": Option(
        panel=SOURCES,
        help="nodes (a hostlist) that a text without node names describes, such as one of nvidia-smi or NCCL",
        default="all nodes with the same devices",
        pointer="/sources/0/nodes",
        flag="--node",
        metavar="NODES",
    ),
    "topology_name": Option(
        panel=SOURCES,
        help="topology to read of a topology.yaml that has several",
        default="the one that it marks as default",
        pointer="/options/topology",
        flag="--topology-name",
        metavar="NAME",
    ),
    "device_kind": Option(
        panel=FACTS,
        help="kind of the devices: H100, or PRODUCT=H100 for devices that a source calls PRODUCT",
        default="by the table of products",
        pointer="/options/devices",
        flag="--device-kind",
        metavar="KIND",
        is_repeatable=True,
    ),
    "kind": Option(
        panel=FACTS,
        help="kind that profiles lack, costed from one that they have: GB200=2.5xH100",
        default="none",
        pointer="/options/kinds",
        flag="--kind",
        metavar="NAME=SPEEDxKIND",
        is_repeatable=True,
    ),
    "devices_per_node": Option(
        panel=FACTS,
        help="devices of each node, such as 8, where no source counts them",
        default="asked for",
        pointer="/options/devices_per_node",
        flag="--devices-per-node",
        metavar="N",
        kind="whole",
    ),
    "memory": Option(
        panel=FACTS,
        help="memory of each device, such as 80GiB",
        default="by the table of devices",
        pointer="/options/memory_bytes",
        flag="--memory",
        metavar="SIZE",
        kind="bytes",
    ),
    "fabric": Option(
        panel=FACTS,
        help="what joins the devices of a node: ports (NVSwitch), pairs or a bus",
        default="by the table of devices",
        pointer="/options/fabric",
        flag="--fabric",
        values={"ports": "NVSwitch", "pairs": "links between pairs", "bus": "a bus such as PCIe"},
        kind="choice",
    ),
    "fabric_bandwidth": Option(
        panel=FACTS,
        help="bandwidth of a device into that fabric, in one direction, such as 450GB/s",
        default="by the table of devices",
        pointer="/options/fabric_bytes_per_s",
        flag="--fabric-bandwidth",
        metavar="BANDWIDTH",
    ),
    "nic": Option(
        panel=FACTS,
        help="bandwidth of all network cards of a node together, in one direction: 3200Gbit/s",
        default="by the table of devices, or asked for",
        pointer="/options/nic_bytes_per_s",
        flag="--nic",
        metavar="BANDWIDTH",
    ),
    "latency": Option(
        panel=FACTS,
        help="latency of the link from a node to its switch, such as 10us",
        default="by the table of devices",
        pointer="/options/latency_ns",
        flag="--latency",
        metavar="TIME",
    ),
    "oversubscription": Option(
        panel=FACTS,
        help="bandwidth below a switch divided by that of its link upwards, such as 2 for 2:1",
        default="1",
        pointer="/options/oversubscription",
        flag="--oversubscription",
        metavar="RATIO",
        kind="number",
    ),
    "nvlink_blocks": Option(
        panel=FACTS,
        help="take each block of Slurm's block topology for an NVLink domain, as of GB200 NVL72",
        default="a block is a switch",
        pointer="/options/nvlink_blocks",
        flag="--nvlink-blocks",
    ),
    "only": Option(
        panel=KEPT,
        help="nodes to keep, as a hostlist such as gpu[001-064]",
        default="all",
        pointer="/options/only",
        flag="--only",
        metavar="NODES",
    ),
    "only_free": Option(
        panel=KEPT,
        help="keep only nodes on which nothing runs",
        default="busy ones are kept, too",
        pointer="/options/only_free",
        flag="--only-free",
    ),
}
"""Options of an import, by the names of the command's parameters; a pointer is into a ``TopologyImport``."""
about = partial(described, IMPORT_OPTIONS)
