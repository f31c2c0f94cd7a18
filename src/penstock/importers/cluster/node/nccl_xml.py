"""NCCL's topology files: the PCI tree of one node, its devices, NVLinks and network cards.

Dumped files (``NCCL_TOPO_DUMP_FILE``) have ``<gpu>`` and ``<net>`` in their PCI devices; static files that clouds ship
for ``NCCL_TOPO_FILE`` have bare PCI devices, which are recognised by their class. ``<c2c>`` joins a device to its
processor, not to other devices, and is not read.

.. [1] NCCL, ``src/graph/xml.cc`` and ``topo.cc``: the elements and attributes. ``speed`` of a net is Mbit/s. The class
   of an NVLink's other end is 0x068000 for a switch. RCCL writes ``<xgmi>`` in the place of ``<nvlink>``.
.. [2] PCI code and ID assignment: classes 0x0300, 0x0302, 0x0380 (display), 0x1200 (accelerator), 0x0200 (Ethernet),
   0x0207 (InfiniBand).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile
from typing import Literal

from penstock.importers.cluster.facts import DeviceFacts, DeviceLinkFacts, NicFacts, NodeFacts, Place, SourceFacts
from penstock.importers.cluster.node.pcie import link_bandwidth, one_address
from penstock.importers.cluster.node.xml_tree import Element, read_xml
from penstock.importers.lines import Faults

_INSTEAD = {
    "nvidia_smi_log": "what `nvidia-smi -q -x` prints; give it as nvidia-query",
    "graphs": "what NCCL_GRAPH_DUMP_FILE writes; give what NCCL_TOPO_DUMP_FILE writes",
}
_DEVICE_CLASSES = frozenset({0x0300, 0x0302, 0x0380, 0x1200})
_CARD_CLASSES = frozenset({0x0200, 0x0207})
_SWITCH_CLASS = 0x0680
_CLASS = re.compile(r"0x([0-9a-fA-F]{4})[0-9a-fA-F]{2}")
_NUMBER = re.compile(r"[0-9]{1,9}")
_BYTES_PER_S_OF_MBIT = 10**6 // 8
_LINKS = ("nvlink", "xgmi")
MOST_DEVICES = 256
MOST_PARTS = 1024
"""PCI devices and cards."""
_MOST_LINKS = 512
_MOST_MBIT_PER_S = 10**7


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A device: its place in the tree, and the ``<gpu>`` element with its links, if there is one."""

    index: int
    at: Element
    element: Element | None

    @property
    def address(self) -> str | None:
        address = self.at.attributes.get("busid")
        return one_address(address) if address else None


@dataclass(slots=True)
class _NvLinks:
    """NVLinks by pair of devices and into a switch by device, each with its element."""

    pairs: dict[tuple[int, int], tuple[int, Element]]
    switched: dict[int, int]
    outside: int = 0
    to_itself: int = 0


def read_nccl_xml(text: str, source: str = "nccl-topo.xml") -> SourceFacts:
    """Read the devices of a node, how they reach each other, and its network cards; the node has no name here.

    Raises InvalidDocument with all faults by line and column.
    """
    faults = Faults(f"the NCCL topology {source!r}")
    root = read_xml(text, faults, root="system", is_instead=_INSTEAD)
    _check_host(root, faults)
    _check_addresses(root, faults)
    gpus = _gpus(root, faults)
    bandwidths = {id(pci): _bandwidth(pci, faults) for pci in root.below("pci")}
    _check_size(root, gpus, faults)
    nvlinks = _nvlinks(gpus, faults)
    nics = tuple(_nics(root, gpus, faults))
    faults.stop()
    node = NodeFacts(
        name="",
        place=Place(source, line=root.line),
        devices=tuple(
            DeviceFacts(
                index=gpu.index,
                bus_id=gpu.address,
                pcie_bandwidth_bytes_per_s=bandwidths.get(id(gpu.at)),
                is_partition=gpu.element is not None and "mlopart" in gpu.element.attributes,
            )
            for gpu in gpus
        ),
        device_links=tuple(_links(gpus, nvlinks, bandwidths)),
        has_nvswitch=bool(nvlinks.switched) if nvlinks.switched or nvlinks.pairs else None,
        nics=nics or None,
    )
    return SourceFacts(
        format="nccl-xml", source=source, nodes={"": node}, assumptions=tuple(_assumptions(root, gpus, nvlinks))
    )


def _check_host(root: Element, faults: Faults) -> None:
    first: Element | None = None
    for cpu in root.below("cpu"):
        if first is not None and cpu.attributes.get("host_hash") != first.attributes.get("host_hash"):
            detail = (
                f"this <cpu> is of another host than that in line {first.line}; dump one node (one rank each) alone"
            )
            faults.add(cpu.line, detail, column=cpu.column)
            faults.stop()
        first = first or cpu


def _check_size(root: Element, gpus: Sequence[_Gpu], faults: Faults) -> None:
    """Refuse more devices and cards than a node has: each device is compared with every other and every card."""
    parts = sum(1 for tag in ("pci", "net") for _ in root.below(tag))
    if len(gpus) > MOST_DEVICES or parts > MOST_PARTS:
        detail = f"{len(gpus)} devices among {parts} PCI devices and cards are more than a node has"
        faults.add(root.line, f"{detail}; there are {MOST_DEVICES} among {MOST_PARTS} at most", column=root.column)
        faults.stop()


def _check_addresses(root: Element, faults: Faults) -> None:
    first: dict[str, Element] = {}
    for pci in root.below("pci"):
        address = one_address(pci.attributes.get("busid", ""))
        if not address:
            faults.add(pci.line, "the <pci> has no busid", column=pci.column, code="missing")
        elif address in first:
            faults.add(pci.line, f"{address} stands already in line {first[address].line}", column=pci.column)
        first.setdefault(address, pci)


def _class(pci: Element) -> int | None:
    match = _CLASS.fullmatch(pci.attributes.get("class", ""))
    return int(match[1], 16) if match else None


def _gpus(root: Element, faults: Faults) -> list[_Gpu]:
    """Return the devices in the order of their indices in the file, else in the order of their addresses."""
    elements = list(root.below("gpu"))
    if not elements:
        bare = [pci for pci in root.below("pci") if _class(pci) in _DEVICE_CLASSES]
        if not bare:
            detail = "there is no device: neither a <gpu> nor a <pci> of a display or accelerator class (0x030200)"
            faults.add(root.line, detail, column=root.column)
        bare.sort(key=lambda pci: _address_order(pci.attributes.get("busid", "")))
        return [_Gpu(index, pci, None) for index, pci in enumerate(bare)]
    gpus: dict[int, _Gpu] = {}
    for gpu in elements:
        index = _number(gpu, "dev", faults)
        at = gpu.parent if gpu.parent is not None and gpu.parent.tag == "pci" else gpu
        if index is None:
            continue
        if index in gpus and gpus[index].at is not at:
            before = gpus[index].element or gpus[index].at
            faults.add(gpu.line, f"dev {index} stands already in line {before.line}", column=gpu.column)
        # Several ranks on one device, or parts of one, repeat it.
        gpus.setdefault(index, _Gpu(index, at, gpu))
    return [gpus[index] for index in sorted(gpus)]


def _address_order(address: str) -> tuple[int, str]:
    domain, _, rest = one_address(address).partition(":")
    return (int(domain, 16) if re.fullmatch("[0-9a-f]{1,8}", domain) else 0, rest)


def _number(element: Element, key: str, faults: Faults, most: int = 10**6) -> int | None:
    value = element.attributes.get(key)
    if value is not None and _NUMBER.fullmatch(value.strip()) and int(value) <= most:
        return int(value)
    problem = "is missing" if value is None else f"has to be a whole number up to {most:,}; it is {value[:40]!r}"
    faults.add(element.line, f"{key} of <{element.tag}> {problem}", column=element.column)
    return None


def _bandwidth(pci: Element, faults: Faults) -> int | None:
    """Return the bandwidth of the link from a PCI device towards the processor."""
    if not pci.attributes.get("link_speed", "").strip() or not pci.attributes.get("link_width"):
        return None
    width = _number(pci, "link_width", faults)
    try:
        return None if width is None else link_bandwidth(pci.attributes["link_speed"], width)
    except ValueError as error:
        faults.add(pci.line, f"<pci> {pci.attributes.get('busid', '')}: {error}", column=pci.column)
        return None


# ---- NVLink ----------------------------------------------------------------------------------------------------------


def _nvlinks(gpus: Sequence[_Gpu], faults: Faults) -> _NvLinks:
    by_target = {gpu.address: gpu.index for gpu in gpus if gpu.address} | {str(gpu.index): gpu.index for gpu in gpus}
    links = _NvLinks({}, {})
    for gpu in gpus:
        for link in gpu.element.children if gpu.element is not None else ():
            if link.tag not in _LINKS:
                continue
            count = _number(link, "count", faults, _MOST_LINKS)
            target = link.attributes.get("target", "")
            other = by_target.get(one_address(target))
            if count is None:
                continue
            if _end_class(link) == _SWITCH_CLASS:
                links.switched[gpu.index] = links.switched.get(gpu.index, 0) + count
            elif other is None:
                links.outside += 1
            elif other == gpu.index:
                links.to_itself += 1
            else:
                before, _ = links.pairs.get((gpu.index, other), (0, link))
                links.pairs[gpu.index, other] = (before + count, link)
    _check_both_ways(links, faults)
    _check_switched(gpus, links, faults)
    return links


def _end_class(link: Element) -> int | None:
    match = _CLASS.fullmatch(link.attributes.get("tclass", ""))
    return int(match[1], 16) if match else None


def _check_both_ways(links: _NvLinks, faults: Faults) -> None:
    for (a, b), (count, link) in links.pairs.items():
        back = links.pairs.get((b, a))
        if a < b and back is not None and back[0] != count:
            detail = f"dev {a} has {count} links to dev {b}, but {back[0]} are said back (line {back[1].line})"
            faults.add(link.line, detail, column=link.column)


def _check_switched(gpus: Sequence[_Gpu], links: _NvLinks, faults: Faults) -> None:
    """Report a device whose links into the switch are down: the file leaves them out, and NCCL does not report it."""
    for gpu in gpus:
        if links.switched and gpu.index not in links.switched and gpu.element is not None:
            many = max(links.switched.values())
            detail = (
                f"dev {gpu.index} has no link into the NVLink switch, where others have {many}; see "
                "`nvidia-smi nvlink -s`, and dump the topology again"
            )
            faults.add(gpu.element.line, detail, column=gpu.element.column)


def _links(gpus: Sequence[_Gpu], nvlinks: _NvLinks, bandwidths: Mapping[int, int | None]) -> Iterator[DeviceLinkFacts]:
    """Yield the links between devices; none where the file leaves NVLink to the driver: PCI may not be all there is."""
    for a, b in combinations([gpu for gpu in gpus if gpu.element is not None], 2):
        ends = (a.index, b.index)
        direct = nvlinks.pairs.get(ends) or nvlinks.pairs.get((b.index, a.index))
        if direct and direct[0]:
            yield DeviceLinkFacts(*ends, path="nvlink", links=direct[0])
        elif all(nvlinks.switched.get(end) for end in ends):
            yield DeviceLinkFacts(*ends, path="nvlink", links=min(nvlinks.switched[end] for end in ends))
        else:
            path, bandwidth = _over_pci(a.at, b.at, bandwidths)
            yield DeviceLinkFacts(*ends, path=path, bandwidth_bytes_per_s=bandwidth)


# ---- the PCI tree ----------------------------------------------------------------------------------------------------


def _over_pci(
    a: Element, b: Element, bandwidths: Mapping[int, int | None]
) -> tuple[Literal["pcie-switch", "pcie", "host-bridge", "socket"], int | None]:
    """Return where the paths of two devices meet, and the narrowest link on them, without links between processors."""
    top = _common_ancestor(a, b)
    if top.tag == "system":
        return "socket", None
    way = [one for end in (a, b) for one in (*end.ancestors(), end) if one.tag == "pci" and not _is_around(one, top)]
    rates = [bandwidth for one in way if (bandwidth := bandwidths.get(id(one))) is not None]
    narrowest = min(rates) if rates and len(rates) == len(way) else None
    if top.tag != "pci":
        return "host-bridge", narrowest
    return ("pcie-switch" if len(way) <= 2 else "pcie"), narrowest


def _common_ancestor(a: Element, b: Element) -> Element:
    both = zip((*a.ancestors(), a), (*b.ancestors(), b), strict=False)
    return list(takewhile(lambda pair: pair[0] is pair[1], both))[-1][0]


def _is_around(element: Element, top: Element) -> bool:
    return element is top or any(element is one for one in top.ancestors())


def _nics(root: Element, gpus: Sequence[_Gpu], faults: Faults) -> Iterator[NicFacts]:
    """Yield the cards of ``<net>`` elements; in a file without any, PCI devices of a network class."""
    nets = list(root.below("net"))
    seen: set[tuple[str, str]] = set()
    for net in nets:
        name, port = net.attributes.get("name", "") or f"net{len(seen)}", net.attributes.get("port", "")
        if (name, port) not in seen:
            seen.add((name, port))
            speed = _number(net, "speed", faults, _MOST_MBIT_PER_S) if "speed" in net.attributes else None
            yield NicFacts(name, speed * _BYTES_PER_S_OF_MBIT if speed else None, _near(net, gpus))
    if not nets:
        for pci in root.below("pci"):
            if _class(pci) in _CARD_CLASSES:
                yield NicFacts(one_address(pci.attributes.get("busid", "")), None, _near(pci, gpus))


def _near(card: Element, gpus: Sequence[_Gpu]) -> tuple[int, ...]:
    """Return the devices with the shortest path to the card; none where all paths cross to another processor."""
    depths = {gpu.index: len(_common_ancestor(card, gpu.at).ancestors()) for gpu in gpus}
    deepest = max(depths.values(), default=0)
    return tuple(index for index, depth in depths.items() if depth == deepest) if deepest else ()


def _assumptions(root: Element, gpus: Sequence[_Gpu], nvlinks: _NvLinks) -> Iterator[str]:
    if gpus and gpus[0].element is None:
        yield f"a file without <gpu>: {len(gpus)} PCI devices of a display class count in the order of their addresses"
        yield "a file without <gpu> says nothing of NVLink, so not how devices reach each other"
    if nvlinks.outside:
        yield f"{nvlinks.outside} NVLinks lead to devices that are not in the file"
    if nvlinks.to_itself:
        yield f"{nvlinks.to_itself} NVLinks lead from a device to itself, as in files of clouds; they do not count"
    silent = [pci for pci in root.below("pci") if _class(pci) in _DEVICE_CLASSES and pci.find("gpu") is None]
    if gpus and gpus[0].element is not None and silent:
        yield f"{len(silent)} devices without a <gpu> are left out: the run that wrote the file did not use them"
