"""The network cards of a node: as sources or the user state them, or as such nodes are usually sold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.importers.cluster.facts import NicFacts
from penstock.importers.cluster.hardware import Hardware
from penstock.importers.cluster.merging.joining import Host
from penstock.importers.cluster.merging.reading import NodeDevice, gbit, only
from penstock.schemas.api.topology_import import ImportOptions

UNKNOWN_LATENCY_NS = 30_000
"""Latency of the cards of nodes that the table does not know; the value for Ethernet, assumed."""


class Cards(NamedTuple):
    """All cards of a node together, in one direction; None where no source has it.

    ``lanes``: how many equal parts devices share them in, None for one. ``per_device``: the bandwidth of each device's
    card, where a source gives each device a card to itself.
    """

    bytes_per_s: int | None
    latency_ns: int
    is_latency_assumed: bool
    lanes: int | None = None
    per_device: tuple[int, ...] = ()


def cards_of(host: Host, indices: Sequence[int], hardware: Hardware | None, options: ImportOptions) -> Cards:
    """Return the cards as measured, as a source states them, or as the options do."""
    if host.measured is not None and host.measured.link is not None:
        link = host.measured.link
        return Cards(link.bandwidth_bytes_per_s, link.latency_ns, False, link.lanes)
    late = options.latency_ns
    if late is None:
        late = hardware.nic_latency_ns.value if hardware else UNKNOWN_LATENCY_NS
    is_assumed = options.latency_ns is None
    cards = host.nics or ()
    speeds = [card.bandwidth_bytes_per_s for card in cards]
    bandwidths = [speed for speed in speeds if speed is not None]
    if bandwidths and len(bandwidths) == len(speeds):
        return Cards(
            sum(bandwidths), late, is_assumed, lanes_of(bandwidths, len(indices)), _card_of_each_device(cards, indices)
        )
    return Cards(options.nic_bytes_per_s, late, is_assumed)


def lanes_of(speeds: Sequence[int], devices: int) -> int | None:
    """Return how many cards share the traffic of a node's devices, each taking one; None for one card and unequal ones.

    Where there are several for each device, they count as one card of that device.
    """
    if len(speeds) < 2 or len(set(speeds)) > 1 or devices < 2:
        return None
    return len(speeds) if len(speeds) % devices else devices


def _card_of_each_device(cards: Sequence[NicFacts], indices: Sequence[int]) -> tuple[int, ...]:
    """Return the bandwidth of each device's card, where each has a card that is near to it and to no other."""
    near = {card.near[0]: card.bandwidth_bytes_per_s for card in cards if len(card.near) == 1}
    bandwidths = tuple(speed for index in indices if (speed := near.get(index)) is not None)
    return bandwidths if len(bandwidths) == len(indices) == len(cards) else ()


def usual_cards(devices: Sequence[NodeDevice], sentences: list[str]) -> tuple[int, int | None] | None:
    """Return bandwidth and lanes of a node's cards by the table, and add a sentence; None if the table has no entry."""
    hardware = only(devices)
    if hardware is None or hardware.nic_bytes_per_s is None:
        return None
    one = hardware.nic_bytes_per_s
    words = f"one card of {gbit(one.value)}{' for each device' if hardware.nic_per_device else ''}"
    sentences.append(f"{hardware.kind} {hardware.form} nodes have {words}: {one.source}")
    width = hardware.node_nic_bytes_per_s(len(devices))
    assert width is not None
    return width, hardware.node_lanes(len(devices))
