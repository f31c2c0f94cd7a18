"""The fabric between the devices of a node: as sources or the user state it, or as such nodes are usually sold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from penstock.importers.cluster.facts import DeviceFacts, DeviceLinkFacts
from penstock.importers.cluster.hardware import Hardware, NvLink
from penstock.importers.cluster.merging.joining import Host
from penstock.importers.cluster.merging.reading import NodeDevice, Reading, gb, only
from penstock.schemas.topology import Fabric

Form = Literal["pairs", "ports", "bus"]


def fabric_of(
    host: Host, facts: Sequence[DeviceFacts], devices: Sequence[NodeDevice], reading: Reading
) -> Fabric | None:
    if host.measured is not None and host.measured.fabric is not None:
        return host.measured.fabric
    hardware, options = only(devices), reading.options.import_options
    late = hardware.fabric_latency_ns.value if hardware else 0
    form, bandwidth = _fabric_of_sources(host, facts, hardware, reading)
    bandwidth = options.fabric_bytes_per_s if bandwidth is None else bandwidth
    form = form or options.fabric or (hardware.fabric if hardware else None)
    if bandwidth is None and hardware is not None and form == hardware.fabric:
        bandwidth = hardware.fabric_bytes_per_s.value
        words = f"{hardware.kind} {hardware.form} nodes have {_WORDS[form]} of {gb(bandwidth)} a direction"
        reading.sentences.append(f"{words}: {hardware.fabric_bytes_per_s.source}")
    if form is None:
        reading.missing.append(("how the devices of a node are joined", "--fabric ports (options.fabric)"))
    if bandwidth is None:
        option = f"--fabric-bandwidth {'50GB/s' if form == 'bus' else '450GB/s'} (options.fabric_bytes_per_s)"
        doubt = _doubt(host, facts, form, hardware)
        reading.missing.append((f"the bandwidth between the devices of a node{doubt}", option))
    if form is None or bandwidth is None:
        return None
    if late:
        reading.sentences.append(f"a transfer between devices of a node begins {late / 1000:g} µs late: assumed")
    return Fabric(form=form, bandwidth_bytes_per_s=bandwidth, latency_ns=late)


def _doubt(host: Host, facts: Sequence[DeviceFacts], form: Form | None, hardware: Hardware | None) -> str:
    """Return a hint where only PCIe counts, although the devices are sold with NVLink between them."""
    if form != "bus" or hardware is None or hardware.nvlink is None or hardware.fabric == "bus":
        return ""
    if apart := _without_nvlink(_wired(host), facts):
        return f" (PCIe, as {apart}; see `nvidia-smi nvlink -s`)"
    if _wired(host):
        return " (PCIe, as NVLink does not join all devices; see `nvidia-smi nvlink -s`)"
    return f" (PCIe; {hardware.kind} {hardware.form} have NVLink, which `nvidia-smi topo -mp` does not show, but -m)"


def _wired(host: Host) -> dict[tuple[int, int], DeviceLinkFacts]:
    """Return the NVLinks by pair of devices, the lower index first."""
    return {(min(x.a, x.b), max(x.a, x.b)): x for x in host.device_links if x.path == "nvlink"}


def _without_nvlink(wired: Iterable[tuple[int, int]], facts: Sequence[DeviceFacts]) -> str:
    """Name the devices without an NVLink in a node where others have some; otherwise return no text."""
    ends = {end for pair in wired for end in pair}
    names = [f"GPU{device.index}" for device in facts if device.index not in ends]
    if not ends or not names:
        return ""
    return f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no NVLink to the others"


_WORDS: dict[Form, str] = {
    "ports": "ports into an NVLink switch",
    "pairs": "a link between any two devices",
    "bus": "a bus that all devices share",
}


def _fabric_of_sources(
    host: Host, facts: Sequence[DeviceFacts], hardware: Hardware | None, reading: Reading
) -> tuple[Form | None, int | None]:
    """Return the fabric by the sources: its form, and its bandwidth where they or the table have it."""
    nvlink = hardware.nvlink if hardware else None
    wired = _wired(host)
    pairs = len(facts) * (len(facts) - 1) // 2
    is_switched = host.has_nvswitch or (nvlink is not None and _is_switched(wired.values(), nvlink))
    if is_switched and (len(wired) == pairs or not host.device_links):
        links = min((link.links for link in wired.values()), default=nvlink.links if nvlink else 0)
        _note_narrowest("device", list(wired.values()), links, reading)
        return "ports", _carried(wired.values(), links, nvlink, reading)
    if not host.device_links:
        return None, None
    # A switch joins all pairs: where one is missing, a device is cut off from it, and links are no mesh.
    if wired and not is_switched and (len(wired) == pairs or _joins_all(wired, [device.index for device in facts])):
        return "pairs", _of_mesh(list(wired.values()), pairs, nvlink, reading)
    if wired:
        apart = _without_nvlink(wired, facts) or f"NVLink joins {len(wired)} of {pairs} pairs of devices, not all"
        reading.sentences.append(f"{apart}; only PCIe is counted")
    others = [link.bandwidth_bytes_per_s for link in host.device_links if link.path != "nvlink"]
    slowest = min((each for each in others if each is not None), default=None)
    cards = [device.pcie_bandwidth_bytes_per_s for device in facts]
    bandwidths = [each for each in (slowest, *cards) if each is not None]
    reading.sentences.append("devices without NVLink between them share the host's bus")
    return "bus", min(bandwidths, default=None)


def _is_switched(wired: Iterable[DeviceLinkFacts], nvlink: NvLink) -> bool:
    """Return whether a device's links, counted for each peer, exceed the links that it has: they end in a switch."""
    ends: dict[int, int] = {}
    for link in wired:
        for end in (link.a, link.b):
            ends[end] = ends.get(end, 0) + link.links
    return any(count > nvlink.links for count in ends.values())


def _of_mesh(links: Sequence[DeviceLinkFacts], pairs: int, nvlink: NvLink | None, reading: Reading) -> int | None:
    narrowest = min(link.links for link in links)
    if len(links) < pairs:
        reading.sentences.append(f"{pairs - len(links)} of {pairs} pairs have no link between them; others pass it on")
    _note_narrowest("pair", links, narrowest, reading)
    return _carried(links, narrowest, nvlink, reading)


def _note_narrowest(what: str, links: Sequence[DeviceLinkFacts], narrowest: int, reading: Reading) -> None:
    if any(link.links > narrowest for link in links):
        reading.sentences.append(f"every {what} is counted with {narrowest} NVLinks, as many as the narrowest has")


def _carried(links: Iterable[DeviceLinkFacts], count: int, nvlink: NvLink | None, reading: Reading) -> int | None:
    """Return the bandwidth of ``count`` links: as the source states it, else by the table for each."""
    bandwidths = [link.bandwidth_bytes_per_s for link in links]
    rates = [each for each in bandwidths if each is not None]
    if rates and len(rates) == len(bandwidths):
        return min(rates)
    if nvlink is None or not count or reading.options.import_options.fabric_bytes_per_s is not None:
        return None
    each = nvlink.bytes_per_s
    reading.sentences.append(
        f"an NVLink carries {gb(each.value)} a direction, {count} of them {gb(count * each.value)}: {each.source}"
    )
    return count * each.value


def _joins_all(wired: Iterable[tuple[int, int]], devices: Sequence[int]) -> bool:
    """Return whether NVLink alone leads from each device to all others."""
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
