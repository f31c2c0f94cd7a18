"""The inside of a node: devices, what joins them, and network cards; from facts, options and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.importers.cluster.facts import DeviceFacts, StatedDevice
from penstock.importers.cluster.hardware import Figure, Hardware, recognise, table
from penstock.importers.cluster.merging.cards import Cards, cards_of
from penstock.importers.cluster.merging.fabrics import fabric_of
from penstock.importers.cluster.merging.joining import Host
from penstock.importers.cluster.merging.notes import Notes
from penstock.importers.cluster.merging.reading import NodeDevice, Options, Reading, gib, only
from penstock.schemas.amounts import amount
from penstock.schemas.topology import Communicators, Fabric, Link


@dataclass(frozen=True, slots=True)
class Inside:
    """A node. ``names``: of its devices within it. ``nvlink_bytes_per_s``: of all into a domain; 0 without NVLink."""

    devices: tuple[NodeDevice, ...]
    names: tuple[str, ...]
    fabric: Fabric | None
    cards: Cards
    nvlink_bytes_per_s: int = 0


def insides(hosts: Mapping[str, Host], options: Options, notes: Notes) -> dict[str, Inside]:
    """Return the inside of each host. Hosts with missing facts are noted, and left out of the result."""
    alike: dict[object, list[Host]] = {}
    for host in hosts.values():
        alike.setdefault(_signature(host), []).append(host)
    inside_of: dict[str, Inside] = {}
    for group in alike.values():
        names = [host.name for host in group]
        reading = Reading(options)
        inside = _inside(group[0], reading)
        for sentence in reading.sentences:
            notes.assume(sentence, names)
        for what, option in reading.missing:
            notes.miss(what, option, names)
        if inside is not None:
            inside_of |= dict.fromkeys(names, inside)
    return inside_of


def _signature(host: Host) -> tuple[object, ...]:
    """Return the facts that two hosts must share so that one reading serves both; a device's bus address is not one."""
    measured = host.measured and (host.measured.source, _key(host.measured.fabric), _link_key(host.measured.link))
    return host.devices, host.device_links, host.has_nvswitch, host.nics, measured


def _key(fabric: Fabric | None) -> str:
    return fabric.model_dump_json() if fabric else ""


def _link_key(link: Link | None) -> tuple[int, int, int | None] | None:
    return (link.bandwidth_bytes_per_s, link.latency_ns, link.lanes) if link else None


def _inside(host: Host, reading: Reading) -> Inside | None:
    facts = _devices(host, reading)
    devices = [_node_device(device, reading) for device in facts]
    node_devices = tuple(device for device in devices if device is not None)
    if not facts or len(node_devices) < len(devices):
        return None
    reading.sentences[:] = dict.fromkeys(reading.sentences)
    fabric = fabric_of(host, facts, node_devices, reading) if len(node_devices) > 1 else None
    hardware = only(node_devices)
    nvlink = hardware.nvlink if hardware and hardware.fabric == "ports" else None
    indices = _indices(facts)
    cards = cards_of(host, indices, hardware, reading.options.import_options)
    nvlink_bytes_per_s = nvlink.total_bytes_per_s * len(node_devices) if nvlink else 0
    return Inside(node_devices, _names(facts, indices), fabric, cards, nvlink_bytes_per_s)


def _indices(devices: Sequence[DeviceFacts]) -> tuple[int, ...]:
    """Return the driver's indices; the positions where a source has no index."""
    indices = tuple(device.index for device in devices)
    return indices if len(set(indices)) == len(indices) else tuple(range(len(indices)))


def _names(devices: Sequence[DeviceFacts], indices: Sequence[int]) -> tuple[str, ...]:
    """Return the devices' names as a topology document has them, else their indices."""
    names = tuple(device.stated.name for device in devices if device.stated is not None)
    return names if len(names) == len(devices) else tuple(map(str, indices))


def _devices(host: Host, reading: Reading) -> tuple[DeviceFacts, ...]:
    if host.devices is not None:
        return host.devices
    count = reading.options.import_options.devices_per_node
    if count is None:
        reading.missing.append(("the number of devices", "--devices-per-node 8 (options.devices_per_node)"))
        count = 1
    return tuple(DeviceFacts(index) for index in range(count))


def _node_device(device: DeviceFacts, reading: Reading) -> NodeDevice | None:
    product, options = device.product, reading.options
    if device.is_kind and product is not None:
        hardware = table().get(product, (None,))[0]
        return _with_memory(product, hardware, None, device, reading)
    meant = options.meant(product)
    read = recognise(meant or product) if meant or product else None
    if read is None and meant is None:
        option = f"--device-kind '{product}=H100'" if product else "--device-kind H100"
        what = f"what {product!r} is" if product else "what the devices are"
        reading.missing.append((what, f"{option} (options.devices)"))
        return None
    if read is None:
        assert meant is not None
        return _with_memory(meant, None, None, device, reading)
    if read.is_bare:
        hardware = read.hardware
        reading.sentences.append(f"{meant or product!r} is taken for {hardware.kind} {hardware.form}, its usual form")
    return _with_memory(read.hardware.kind, read.hardware, read.memory, device, reading)


def _with_memory(
    kind: str, hardware: Hardware | None, size: Figure | None, device: DeviceFacts, reading: Reading
) -> NodeDevice:
    memory = device.memory_bytes or reading.options.import_options.memory_bytes
    if device.memory_bytes and device.stated is None and not device.is_partition and hardware is not None:
        size = hardware.size_near(device.memory_bytes)
        memory = device.memory_bytes if size is None else None  # drivers count what torch cannot have
    if memory is None and size is not None:
        memory = size.value
        reading.sentences.append(f"{kind} has {gib(size.value)} of memory: {size.source}")
    if memory is None:
        sizes = f" ({' or '.join(gib(each.value) for each in hardware.memory)})" if hardware else ""
        reading.missing.append((f"the memory of {kind}{sizes}", "--memory 80GiB (options.memory_bytes)"))
    stated = device.stated
    context_bytes = stated.context_bytes if stated is not None else 0
    if not context_bytes and hardware is not None:
        context_bytes = hardware.context.value
        reading.sentences.append(
            f"driver and libraries take {gib(context_bytes)} of each {kind}: {hardware.context.source}"
        )
    price, gpus = (stated.price, stated.gpus) if stated is not None else (None, 1)
    return NodeDevice(
        kind, memory or 0, hardware, context_bytes, price, gpus, _communicators(kind, hardware, stated, reading)
    )


def _communicators(
    kind: str, hardware: Hardware | None, stated: StatedDevice | None, reading: Reading
) -> Communicators | None:
    """Return the communicators' memory by the device's document, else by the table; None where neither has it."""
    if stated is not None and stated.communicators is not None:
        return stated.communicators
    entry = None if hardware is None else hardware.communicators
    if entry is None:
        return None
    communicators = entry.stated
    each = f"{amount(communicators.edge_bytes)} for a directed edge and {amount(communicators.group_bytes)} for a group"
    reading.sentences.append(f"each communicator takes {each} of each {kind}: {entry.source}")
    return communicators
