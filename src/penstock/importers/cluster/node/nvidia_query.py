"""The output of ``nvidia-smi -q -x``: the devices of one node, their memory, PCIe links and partitions.

The drivers' files differ from release to release (``nvsmi_device_v4.dtd`` to ``v12``); what is read here has kept its
name, and what a driver does not know is ``N/A``.
"""

from __future__ import annotations

import re

from penstock.importers.cluster.facts import DeviceFacts, NodeFacts, Place, SourceFacts
from penstock.importers.cluster.node.pcie import generation_bandwidth, one_address
from penstock.importers.cluster.node.xml_tree import Element, read_xml
from penstock.importers.lines import Faults

ROOTS = {
    "system": "an NCCL topology; give it as nccl-xml",
    "graphs": "what NCCL_GRAPH_DUMP_FILE writes; give what NCCL_TOPO_DUMP_FILE writes, as nccl-xml",
}
_MEMORY = re.compile(r"([0-9]{1,9}) (MiB|MB)")
_NUMBER = re.compile(r"([0-9]{1,3})x?")
_MIB = 2**20
_NO_CLUSTER = re.compile(r"[0-]*|N/A")


def read_nvidia_query(text: str, source: str = "nvidia-smi -q -x") -> SourceFacts:
    """Read the devices of a node; it has no name here. Partitions take the place of a device in MIG mode.

    Raises InvalidDocument with all faults by line and column.
    """
    faults = Faults(f"the XML of nvidia-smi {source!r}")
    root = read_xml(text, faults, root="nvidia_smi_log", is_instead=ROOTS)
    gpus = list(root.below("gpu"))
    if not gpus:
        faults.add(root.line, "there is no <gpu> in it", column=root.column)
    _check_count(root, len(gpus), faults)
    devices: list[DeviceFacts] = []
    for gpu in gpus:
        devices += _devices(gpu, len(devices), faults)
    _check_addresses(gpus, faults)
    _check_fabric(gpus, faults)
    faults.stop()
    node = NodeFacts(
        name="", place=Place(source, line=root.line), devices=tuple(devices), has_nvswitch=_has_nvswitch(gpus)
    )
    domains = sorted({domain for gpu in gpus if (domain := _domain(gpu))})
    assumptions = [
        f"the node is in the NVLink domain {domain}; this does not say which others are" for domain in domains
    ]
    return SourceFacts(format="nvidia-query", source=source, nodes={"": node}, assumptions=tuple(assumptions))


def _devices(gpu: Element, index: int, faults: Faults) -> list[DeviceFacts]:
    product, memory = _text(gpu, "product_name"), _memory(gpu, faults)
    if product is None:
        faults.add(gpu.line, "the <gpu> has no product_name", column=gpu.column, code="missing")
    bus_id = _text(gpu, "pci/pci_bus_id") or gpu.attributes.get("id")
    whole = DeviceFacts(
        index=index,
        product=product,
        memory_bytes=memory,
        bus_id=one_address(bus_id) if bus_id else None,
        pcie_bandwidth_bytes_per_s=_pcie(gpu, faults),
    )
    if _text(gpu, "mig_mode/current_mig") != "Enabled":
        return [whole]
    inside = gpu.find("mig_devices")
    parts = [child for child in inside.children if child.tag == "mig_device"] if inside else []
    return [
        DeviceFacts(
            index=index + number,
            product=product,
            memory_bytes=_memory(part, faults) if part else None,
            bus_id=whole.bus_id,
            is_partition=True,
        )
        for number, part in enumerate(parts or [None])
    ]


def _text(element: Element, path: str) -> str | None:
    child = element.find(path)
    return child.text if child is not None and child.text and child.text != "N/A" else None


def _memory(element: Element, faults: Faults) -> int | None:
    """Return the whole memory, including the part that the driver keeps for itself."""
    total = element.find("fb_memory_usage/total")
    if total is None or total.text in ("N/A", ""):
        return None
    match = _MEMORY.fullmatch(total.text)
    if match is None or not int(match[1]):
        faults.add(
            total.line, f"the memory has to be such as 81559 MiB; it is {total.text[:40]!r}", column=total.column
        )
        return None
    return int(match[1]) * _MIB


def _pcie(gpu: Element, faults: Faults) -> int | None:
    """Return the bandwidth of the best link: an idle device lowers its link."""
    info = gpu.find("pci/pci_gpu_link_info")
    generation, width = (info.find(path) if info else None for path in _BEST)
    if generation is None or width is None or "N/A" in (generation.text, width.text):
        return None
    numbers = _NUMBER.fullmatch(generation.text), _NUMBER.fullmatch(width.text)
    try:
        if numbers[0] is None or numbers[1] is None:
            raise ValueError(f"PCIe generation {generation.text[:20]!r} or width {width.text[:20]!r} is not a number")
        return generation_bandwidth(int(numbers[0][1]), int(numbers[1][1]))
    except ValueError as error:
        faults.add(generation.line, str(error), column=generation.column)
        return None


_BEST = ("pcie_gen/max_link_gen", "link_widths/max_link_width")


def _has_nvswitch(gpus: list[Element]) -> bool | None:
    """Return True where a fabric manager joined the devices, so that there is a switch; None where that is open."""
    return True if gpus and all(_text(gpu, "fabric/state") == "Completed" for gpu in gpus) else None


def _check_fabric(gpus: list[Element], faults: Faults) -> None:
    """Refuse a node of which only some devices are in the NVLink fabric: the others reach them over PCIe."""
    joined = [_text(gpu, "fabric/state") == "Completed" for gpu in gpus]
    if not any(joined):
        return
    for number, (gpu, is_joined) in enumerate(zip(gpus, joined, strict=True)):
        if not is_joined:
            detail = (
                f"device {number} is not in the NVLink fabric (state {_text(gpu, 'fabric/state') or 'N/A'}), where "
                f"{sum(joined)} others are; see `nvidia-smi nvlink -s` and the fabric manager, and query again"
            )
            faults.add(gpu.line, detail, column=gpu.column)


def _domain(gpu: Element) -> str | None:
    """Return the NVLink domain beyond the node, ``<ClusterUUID>.<CliqueId>``, as GPU feature discovery writes it."""
    cluster, clique = _text(gpu, "fabric/clusterUuid"), _text(gpu, "fabric/cliqueId")
    return f"{cluster}.{clique}" if cluster and clique and not _NO_CLUSTER.fullmatch(cluster) else None


def _check_count(root: Element, count: int, faults: Faults) -> None:
    attached = root.find("attached_gpus")
    if attached is not None and attached.text.isdecimal() and int(attached.text[:6]) != count:
        detail = f"attached_gpus is {attached.text[:6]}, and there are {count} <gpu>"
        faults.add(attached.line, f"{detail}; give the output of `nvidia-smi -q -x` whole", column=attached.column)


def _check_addresses(gpus: list[Element], faults: Faults) -> None:
    first: dict[str, Element] = {}
    for gpu in gpus:
        address = one_address(_text(gpu, "pci/pci_bus_id") or gpu.attributes.get("id") or "")
        if address and address in first:
            detail = f"the device {address} stands already in line {first[address].line}"
            faults.add(gpu.line, detail, column=gpu.column)
        first.setdefault(address, gpu)
