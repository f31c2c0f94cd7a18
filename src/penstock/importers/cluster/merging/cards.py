"""The network cards of a node: as sources say, as the user says, or as such nodes are usually sold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.importers.cluster.facts import NicFacts
from penstock.importers.cluster.hardware import Hardware
from penstock.importers.cluster.merging.joining import Host
from penstock.importers.cluster.merging.reading import Known, gbit, only
from penstock.schemas.api.topology_import import ImportOptions

UNKNOWN_LATENCY_NS = 30_000
"""Of the cards of nodes that the table does not know; as for Ethernet, assumed."""


class Cards(NamedTuple):
    """All cards of a node together, in one direction; None where nothing tells it.

    ``lanes``: into how many equal parts devices share them, None for one. ``own``: the bandwidth of each device's card,
    where a source says that each has one to itself.
    """

    bytes_per_s: int | None
    latency_ns: int
    is_latency_assumed: bool
    lanes: int | None = None
    own: tuple[int, ...] = ()


def cards_of(host: Host, indices: Sequence[int], hardware: Hardware | None, given: ImportOptions) -> Cards:
    """The cards as measured, said or given."""
    if host.measured is not None and host.measured.link is not None:
        link = host.measured.link
        return Cards(link.bandwidth_bytes_per_s, link.latency_ns, False, link.lanes)
    late = given.latency_ns
    if late is None:
        late = hardware.nic_latency_ns.value if hardware else UNKNOWN_LATENCY_NS
    is_assumed = given.latency_ns is None
    cards = host.nics or ()
    speeds = [card.bandwidth_bytes_per_s for card in cards]
    known = [speed for speed in speeds if speed is not None]
    if known and len(known) == len(speeds):
        return Cards(sum(known), late, is_assumed, lanes_of(known, len(indices)), _own(cards, indices))
    return Cards(given.nic_bytes_per_s, late, is_assumed)


def lanes_of(speeds: Sequence[int], devices: int) -> int | None:
    """The cards that share the traffic of a node's devices, each taking one; None for one card and unequal ones.

    Where there are several for each device, they count as one card of that device.
    """
    if len(speeds) < 2 or len(set(speeds)) > 1 or devices < 2:
        return None
    return len(speeds) if len(speeds) % devices else devices


def _own(cards: Sequence[NicFacts], indices: Sequence[int]) -> tuple[int, ...]:
    """The bandwidth of each device's card, where each has one that is near to it and to no other."""
    near = {card.near[0]: card.bandwidth_bytes_per_s for card in cards if len(card.near) == 1}
    known = tuple(speed for index in indices if (speed := near.get(index)) is not None)
    return known if len(known) == len(indices) == len(cards) else ()


def usual_cards(devices: Sequence[Known], said: list[str]) -> tuple[int, int | None] | None:
    """Bandwidth and lanes of all cards of a node, as the table has it for its devices, which is said; or None."""
    hardware = only(devices)
    if hardware is None or hardware.nic_bytes_per_s is None:
        return None
    one = hardware.nic_bytes_per_s
    words = f"one card of {gbit(one.value)}{' for each device' if hardware.nic_per_device else ''}"
    said.append(f"{hardware.kind} {hardware.form} nodes have {words}: {one.source}")
    width = hardware.node_nic_bytes_per_s(len(devices))
    assert width is not None
    return width, hardware.node_lanes(len(devices))
