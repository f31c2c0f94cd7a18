"""The devices of a problem in few classes: devices of one kind with about as much memory."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.model.problem import Problem

MOST = 4
"""The most classes: each one is a variant of every stage, and a price to find."""


class DeviceClass(NamedTuple):
    """A number of devices, each of one of ``kinds``, each with at most ``free_bytes`` for stages."""

    kinds: tuple[str, ...]
    free_bytes: int
    devices: int


def device_classes(problem: Problem) -> list[DeviceClass]:
    """Return the classes by kind and memory, the most memory of a kind first; with more than ``MOST``, some joined.

    Of two classes that are joined all devices count as having the larger memory, and as being of the quicker kind.
    """
    alike = Counter((device.kind, free_bytes(problem, (d,))) for d, device in enumerate(problem.devices))
    ordered = sorted(alike.items(), key=lambda each: (each[0][0], -each[0][1]))
    classes = [DeviceClass((kind,), free, devices) for (kind, free), devices in ordered]
    while len(classes) > MOST:
        at = min(range(len(classes) - 1), key=lambda place: _lost(*classes[place : place + 2]))
        classes[at : at + 2] = [_joined(*classes[at : at + 2])]
    return classes


def _lost(larger: DeviceClass, smaller: DeviceClass) -> tuple[bool, int]:
    """Return the loss where two neighbours are joined: whether their kinds differ, and the difference in bytes."""
    return larger.kinds != smaller.kinds, (larger.free_bytes - smaller.free_bytes) * smaller.devices


def _joined(one: DeviceClass, other: DeviceClass) -> DeviceClass:
    kinds = tuple(sorted({*one.kinds, *other.kinds}))
    return DeviceClass(kinds, max(one.free_bytes, other.free_bytes), one.devices + other.devices)
