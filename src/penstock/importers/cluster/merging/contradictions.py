"""What two sources may not both say of one node, and how it is reported."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.importers.cluster.facts import DeviceFacts, Place
from penstock.importers.cluster.hardware import Recognised, recognise
from penstock.importers.cluster.merging.notes import shown
from penstock.importers.lines import Faults

MEMORY_ERROR = 0.1
"""How far two sources may differ in a device's memory (MiB or MB, with or without ECC); the smaller one counts."""


class Contradictions:
    """What two sources say differently of nodes; said of many alike, with the places of the first."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str, str], tuple[list[str], Place, Place]] = {}

    def add(self, node: str, one: str, place: Place, other: str, other_place: Place) -> None:
        """``one`` is at ``place``, ``other`` at ``other_place``."""
        key = (one, place.source, other, other_place.source)
        self._found.setdefault(key, ([], place, other_place))[0].append(node)

    def report(self, faults: Faults) -> None:
        """A fault for each."""
        for (one, _, other, _), (nodes, place, other_place) in self._found.items():
            faults.add(None, f"{one} ({place}), but {other} ({other_place})", at=shown(nodes), code="contradiction")


def against(pair: tuple[DeviceFacts, DeviceFacts]) -> tuple[str, str] | None:
    """What two sources say of one device, where it cannot be true of both."""
    a, b = pair
    if not agree(a.product, b.product):
        return f"device {a.index} is {a.product!r}", f"{b.product!r}"
    one, other = a.memory_bytes, b.memory_bytes
    if one is not None and other is not None and max(one, other) > min(one, other) * (1 + MEMORY_ERROR):
        return f"device {a.index} has {one} bytes of memory", f"{other}"
    return None


def agree(a: str | None, b: str | None) -> bool:
    """Whether two names may be of one product. A name that the table does not know, a site's own, may be anything's."""
    known = [each for each in map(_recognised, (a, b)) if each is not None]
    if len(known) < 2:
        return True
    one, other = known
    if one.hardware.kind != other.hardware.kind:
        return False
    if not one.is_bare and not other.is_bare and one.hardware != other.hardware:
        return False
    sizes = [each.memory.value for each in known if each.is_sized and each.memory is not None]
    return len(sizes) < 2 or max(sizes) <= min(sizes) * (1 + MEMORY_ERROR)


def told_by(product: str | None) -> int:
    """How much a product's name tells: nothing, a site's own word, the chip, and its form or memory or both."""
    if product is None:
        return 0
    known = recognise(product)
    return 1 if known is None else 2 + (not known.is_bare) + known.is_sized


def _recognised(product: str | None) -> Recognised | None:
    return None if product is None else recognise(product)


def count_of(devices: Sequence[DeviceFacts]) -> str:
    """``8 devices``."""
    return f"{len(devices)} device{'' if len(devices) == 1 else 's'}"
