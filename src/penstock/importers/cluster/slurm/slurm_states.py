"""Node states of Slurm: which of them let a node take a job, and what generic resources (gres) say of devices.

.. [1] Slurm, sinfo(1), NODE STATE CODES: the words, and the signs after them.
.. [2] Slurm, gres.conf(5) and slurm.conf(5), Gres: ``name[:type]:count``, with sockets or indices in parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from penstock.importers.cluster.facts import DeviceFacts

HAS_JOBS = {"ALLOCATED", "ALLOC", "MIXED", "MIX", "COMPLETING", "COMP"}
_TAKES_JOBS = {
    *HAS_JOBS,
    *("IDLE", "PLANNED", "BLOCKED", "UNDRAIN", "RESUME"),
    *("RESERVED", "RES", "CLOUD", "DYNAMIC_NORM", "EXTERNAL", "PERFCTRS", "NPC"),
    *("POWER", "POWER_UP", "POWER_DOWN", "POWERED_UP", "POWERED_DOWN", "POWERING_UP", "POWERING_DOWN"),
}
_TAKES_NONE = {
    "DOWN": "it is down",
    "DRAIN": "it is drained",
    "DRAINED": "it is drained",
    "DRAINING": "it drains",
    "ERROR": "it is in error",
    "FAIL": "it is about to fail",
    "FAILING": "it is about to fail",
    "FUTURE": "it does not exist yet",
    "DYNAMIC_FUTURE": "it does not exist yet",
    "INVAL": "it registered with less than its configuration says",
    "INVALID": "it registered with less than its configuration says",
    "INVALID_REG": "it registered with less than its configuration says",
    "MAINT": "it is in maintenance",
    "MAINTENANCE": "it is in maintenance",
    "NOT_RESPONDING": "it does not respond",
    "NO_RESPOND": "it does not respond",
    "REBOOT": "it reboots",
    "REBOOT_CANCELED": "its reboot was cancelled",
    "REBOOT_ISSUED": "it reboots",
    "REBOOT_REQUESTED": "it reboots when its jobs end",
    "UNKNOWN": "it is in a state that Slurm does not know yet",
}
_SIGNS = {"*": "NOT_RESPONDING", "$": "MAINT", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED"}
_SIGNS |= {"~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN", "-": "PLANNED"}
_MARKED = re.compile(rf"([^{re.escape(''.join(_SIGNS))}]*)(.*)", re.DOTALL)
_ENTRY = re.compile(r"[^,(]+(?:\([^)]{0,500}\))?")
_PARTITION = re.compile(r"(?<!\d)\d+g\.\d+gb|^mig\b|_mig\b", re.IGNORECASE)

Counts = tuple[tuple[str | None, int], ...]
"""Type and count of each entry; the texts of a cluster's nodes are mostly alike, hence the caches."""

MOST_DEVICES = 1024
"""The most devices of one node; more is a mistake, and would only cost memory."""


def state_words(states: Iterable[str]) -> list[str]:
    """Return the words of states such as ``IDLE*+DRAIN``, with the signs after them as words."""
    words = []
    for state in states:
        for part in state.upper().split("+"):
            marked = _MARKED.fullmatch(part.strip())
            assert marked is not None  # the pattern matches everything
            words += [marked[1]] if marked[1] else []
            words += [_SIGNS[sign] for sign in marked[2] if sign in _SIGNS]
    return words


def why_not_usable(words: Iterable[str]) -> str:
    """Return why a node in such a state takes no job; empty if it does."""
    reasons = [
        _TAKES_NONE.get(word, f"Penstock does not know the state {word}") for word in words if word not in _TAKES_JOBS
    ]
    return " and ".join(dict.fromkeys(reasons))


@lru_cache(maxsize=256)
def gres_counts(text: str) -> Counts | None:
    """Return type and count of each gpu entry of a gres text; None if an entry of gpu cannot be read.

    Other generic resources (``shard``, ``mps``) are parts of devices or none, and passed over.
    """
    counts: list[tuple[str | None, int]] = []
    for match in _ENTRY.finditer(text):
        entry = match[0].split("(")[0].strip().removeprefix("gres/")
        name, *rest = re.split(r"[:=]", entry)
        if name != "gpu":
            continue
        rest = [part for part in rest if part != "no_consume"]
        count = rest.pop() if rest and rest[-1].isascii() and rest[-1].isdigit() else "1"
        if len(rest) > 1 or len(count) > 9:
            return None
        counts.append((rest[0] if rest else None, int(count)))
    return tuple(counts)


@lru_cache(maxsize=256)
def devices(counts: Counts) -> tuple[DeviceFacts, ...]:
    """Return the devices in the order of their entries; types that name a slice of a device are partitions."""
    products = [product for product, count in counts for _ in range(count)]
    return tuple(
        DeviceFacts(index=index, product=product, is_partition=bool(product and _PARTITION.search(product)))
        for index, product in enumerate(products)
    )


@lru_cache(maxsize=256)
def tracked_devices(tres: str) -> int | None:
    """Count the devices of a text of trackable resources, ``cpu=64,gres/gpu=8,gres/gpu:h100=8``; None if it names none.

    ``gres/gpu`` means all types together.
    """
    counts = gres_counts(",".join(part for part in tres.split(",") if part.strip().startswith("gres/gpu")))
    if not counts:
        return None
    whole = [count for product, count in counts if product is None]
    return whole[0] if whole else sum(count for _, count in counts)
