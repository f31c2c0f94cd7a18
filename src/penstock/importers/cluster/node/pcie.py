"""PCI Express: the bandwidth of a link in one direction, and addresses in one spelling."""

from __future__ import annotations

import re

_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*GT/s(?:\s+PCIe)?")
_ADDRESS = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})\.([0-9a-f])")
_GENERATION_GT_PER_S = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_FRACTION_OF_BITS = {2.5: (8, 10), 5.0: (8, 10), 8.0: (128, 130), 16.0: (128, 130), 32.0: (128, 130), 64.0: (242, 256)}
"""Bits that carry data: 8b/10b, 128b/130b, and 242 of a flit's 256 bytes (PCI Express base specification 6.0)."""
MOST_LANES = 32


def link_bandwidth(rate: str, lanes: int) -> int | None:
    """Return bytes per second of a link; ``rate`` is such as ``16.0 GT/s PCIe``. None: rate or lanes are unknown.

    Raises ValueError for a rate that no PCI Express has, or more than MOST_LANES lanes.
    """
    if not rate.strip() or rate.strip() in ("Unknown", "Unknown speed") or lanes == 0:
        return None
    match = _RATE.fullmatch(rate.strip())
    if match is None or float(match[1]) not in _FRACTION_OF_BITS:
        rates = ", ".join(f"{each:g} GT/s" for each in _FRACTION_OF_BITS)
        raise ValueError(f"{rate!r} is not a PCI Express rate; the rates are {rates}")
    return _bandwidth(float(match[1]), lanes)


def generation_bandwidth(generation: int, lanes: int) -> int:
    """Return bytes per second of a link of a generation (1 to 6). Raises ValueError for others."""
    if generation not in _GENERATION_GT_PER_S:
        raise ValueError(f"PCI Express has no generation {generation}, only 1 to {max(_GENERATION_GT_PER_S)}")
    return _bandwidth(_GENERATION_GT_PER_S[generation], lanes)


def _bandwidth(gt_per_s: float, lanes: int) -> int:
    if not 0 < lanes <= MOST_LANES:
        raise ValueError(f"a link has 1 to {MOST_LANES} lanes, not {lanes}")
    data, bits = _FRACTION_OF_BITS[gt_per_s]
    return int(gt_per_s * 10**9) * lanes * data // (bits * 8)


def one_address(address: str) -> str:
    """Return a PCI address as ``domain:bus:device.function`` in small letters, the domain with four digits or more.

    Drivers write domains with eight digits and NCCL with four; what is no address comes back as it is.
    """
    match = _ADDRESS.fullmatch(address.strip().lower())
    if match is None:
        return address.strip()
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function}"
