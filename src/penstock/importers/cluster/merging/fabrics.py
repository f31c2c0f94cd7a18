"""What joins the devices of a node: as sources say, as the user says, or as such nodes are usually sold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from penstock.importers.cluster.facts import DeviceFacts, DeviceLinkFacts
from penstock.importers.cluster.hardware import Hardware, NvLink
from penstock.importers.cluster.merging.joining import Host
from penstock.importers.cluster.merging.reading import Known, Reading, gb, only
from penstock.schemas.topology import Fabric

Form = Literal["pairs", "ports", "bus"]


def fabric_of(host: Host, facts: Sequence[DeviceFacts], devices: Sequence[Known], reading: Reading) -> Fabric | None:
    if host.measured is not None and host.measured.fabric is not None:
        return host.measured.fabric
    hardware, given = only(devices), reading.options.given
    late = hardware.fabric_latency_ns.value if hardware else 0
    form, bandwidth = _said_fabric(host, facts, hardware, reading)
    bandwidth = given.fabric_bytes_per_s if bandwidth is None else bandwidth
    form = form or given.fabric or (hardware.fabric if hardware else None)
    if bandwidth is None and hardware is not None and form == hardware.fabric:
        bandwidth = hardware.fabric_bytes_per_s.value
        words = f"{hardware.kind} {hardware.form} nodes have {_WORDS[form]} of {gb(bandwidth)} a direction"
        reading.said.append(f"{words}: {hardware.fabric_bytes_per_s.source}")
    if form is None:
        reading.missing.append(("how the devices of a node are joined", "--fabric ports (options.fabric)"))
    if bandwidth is None:
        option = "--fabric-bandwidth 450GB/s (options.fabric_bytes_per_s)"
        reading.missing.append((f"the bandwidth between the devices of a node{_doubt(form, hardware)}", option))
    if form is None or bandwidth is None:
        return None
    if late:
        reading.said.append(f"a transfer between devices of a node begins {late / 1000:g} µs late: assumed")
    return Fabric(form=form, bandwidth_bytes_per_s=bandwidth, latency_ns=late)


def _doubt(form: Form | None, hardware: Hardware | None) -> str:
    """A hint where sources tell of PCIe only, of devices that are sold with NVLink between them."""
    if form != "bus" or hardware is None or hardware.nvlink is None or hardware.fabric == "bus":
        return ""
    return f" (PCIe; {hardware.kind} {hardware.form} have NVLink, which `nvidia-smi topo -mp` does not show, but -m)"


_WORDS: dict[Form, str] = {
    "ports": "ports into an NVLink switch",
    "pairs": "a link between any two devices",
    "bus": "a bus that all devices share",
}


def _said_fabric(
    host: Host, facts: Sequence[DeviceFacts], hardware: Hardware | None, reading: Reading
) -> tuple[Form | None, int | None]:
    """What the sources say: the form, and the bandwidth where they or the table tell it."""
    nvlink = hardware.nvlink if hardware else None
    wired = {(min(x.a, x.b), max(x.a, x.b)): x for x in host.device_links if x.path == "nvlink"}
    if host.has_nvswitch or (nvlink is not None and _is_switched(wired.values(), nvlink)):
        links = min((link.links for link in wired.values()), default=nvlink.links if nvlink else 0)
        return "ports", _carried(wired.values(), links, nvlink, reading)
    if not host.device_links:
        return None, None
    pairs = len(facts) * (len(facts) - 1) // 2
    if wired and (len(wired) == pairs or _joins_all(wired, [device.index for device in facts])):
        return "pairs", _of_mesh(list(wired.values()), pairs, nvlink, reading)
    if wired:
        reading.said.append(f"NVLink joins {len(wired)} of {pairs} pairs of devices, not all; only PCIe is counted")
    others = [link.bandwidth_bytes_per_s for link in host.device_links if link.path != "nvlink"]
    slowest = min((each for each in others if each is not None), default=None)
    cards = [device.pcie_bandwidth_bytes_per_s for device in facts]
    known = [each for each in (slowest, *cards) if each is not None]
    reading.said.append("devices without NVLink between them share the host's bus")
    return "bus", min(known, default=None)


def _is_switched(wired: Iterable[DeviceLinkFacts], nvlink: NvLink) -> bool:
    """Whether a device's links, counted for each peer, are more than it has: they end in a switch."""
    ends: dict[int, int] = {}
    for link in wired:
        for end in (link.a, link.b):
            ends[end] = ends.get(end, 0) + link.links
    return any(count > nvlink.links for count in ends.values())


def _of_mesh(links: Sequence[DeviceLinkFacts], pairs: int, nvlink: NvLink | None, reading: Reading) -> int | None:
    narrowest = min(link.links for link in links)
    if len(links) < pairs:
        reading.said.append(f"{pairs - len(links)} of {pairs} pairs have no NVLink of their own; others pass it on")
    if any(link.links > narrowest for link in links):
        reading.said.append(f"every pair is counted with {narrowest} NVLinks, as many as the narrowest has")
    return _carried(links, narrowest, nvlink, reading)


def _carried(links: Iterable[DeviceLinkFacts], count: int, nvlink: NvLink | None, reading: Reading) -> int | None:
    """The bandwidth of ``count`` links: as the source says, else as the table has it for each."""
    bandwidths = [link.bandwidth_bytes_per_s for link in links]
    known = [each for each in bandwidths if each is not None]
    if known and len(known) == len(bandwidths):
        return min(known)
    if nvlink is None or not count or reading.options.given.fabric_bytes_per_s is not None:
        return None
    each = nvlink.bytes_per_s
    reading.said.append(
        f"an NVLink carries {gb(each.value)} a direction, {count} of them {gb(count * each.value)}: {each.source}"
    )
    return count * each.value


def _joins_all(wired: Iterable[tuple[int, int]], devices: Sequence[int]) -> bool:
    """Whether NVLink alone leads from each device to all others."""
    near: dict[int, set[int]] = {}
    for a, b in wired:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    seen, left = {devices[0]}, [devices[0]]
    while left:
        fresh = near.get(left.pop(), set()) - seen
        seen |= fresh
        left += fresh
    return seen >= set(devices)
