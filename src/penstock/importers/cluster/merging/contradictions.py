"""Contradictions between two sources about one node, and how they are reported."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.importers.cluster.facts import DeviceFacts, Place
from penstock.importers.cluster.hardware import Recognised, recognise
from penstock.importers.cluster.merging.notes import shown
from penstock.importers.lines import Faults

MEMORY_ERROR = 0.1
"""Largest relative difference of a device's memory in two sources (MiB or MB, ECC or not); the smaller one counts."""


class Contradictions:
    """Contradictions about nodes; equal ones of many nodes are one, with the places of the first."""

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str, str, str], tuple[list[str], Place, Place]] = {}

    def add(self, node: str, one: str, place: Place, other: str, other_place: Place) -> None:
        """Add a contradiction: ``one`` is at ``place``, ``other`` at ``other_place``."""
        key = (one, place.source, other, other_place.source)
        self._entries.setdefault(key, ([], place, other_place))[0].append(node)

    def report(self, faults: Faults) -> None:
        """Add a fault for each contradiction."""
        for (one, _, other, _), (nodes, place, other_place) in self._entries.items():
            faults.add(None, f"{one} ({place}), but {other} ({other_place})", at=shown(nodes), code="contradiction")


def against(pair: tuple[DeviceFacts, DeviceFacts]) -> tuple[str, str] | None:
    """Return two statements about one device that cannot both be true, or None."""
    a, b = pair
    if not agree(a.product, b.product):
        return f"device {a.index} is {a.product!r}", f"{b.product!r}"
    one, other = a.memory_bytes, b.memory_bytes
    if one is not None and other is not None and max(one, other) > min(one, other) * (1 + MEMORY_ERROR):
        return f"device {a.index} has {one} bytes of memory", f"{other}"
    return None


def agree(a: str | None, b: str | None) -> bool:
    """Return whether two names may be of one product; a name that the table does not know may be of any product."""
    matches = [each for each in map(_recognised, (a, b)) if each is not None]
    if len(matches) < 2:
        return True
    one, other = matches
    if one.hardware.kind != other.hardware.kind:
        return False
    if not one.is_bare and not other.is_bare and one.hardware != other.hardware:
        return False
    sizes = [each.memory.value for each in matches if each.is_sized and each.memory is not None]
    return len(sizes) < 2 or max(sizes) <= min(sizes) * (1 + MEMORY_ERROR)


def precision_of(product: str | None) -> int:
    """Score how precise a product's name is.

    No name scores 0, an unknown word 1 and a chip 2; its form and its memory add 1 each.
    """
    if product is None:
        return 0
    match = recognise(product)
    return 1 if match is None else 2 + (not match.is_bare) + match.is_sized


def _recognised(product: str | None) -> Recognised | None:
    return None if product is None else recognise(product)


def count_of(devices: Sequence[DeviceFacts]) -> str:
    """Return the number of devices in words: ``8 devices``."""
    return f"{len(devices)} device{'' if len(devices) == 1 else 's'}"
