"""Rows of a topology's table of collectives, from what the table of devices says that a node's devices reach."""

from __future__ import annotations

from penstock.importers.cluster.hardware import Collectives, Hardware, Reach
from penstock.schemas.topology import MeasuredCollective
from penstock.schemas.transformers.degrees import Operation

SIZES = (2**16, 2**30)
"""Two sizes are enough for times that grow in a straight line; smaller ones take the time of the first."""
_ROUNDS = {"all_reduce": 2}
"""The number of times that a tensor goes around all members; operations not listed go around once."""


def rows_of(node: Hardware, devices: int) -> tuple[MeasuredCollective, ...]:
    """Return the collectives among 2, 4, 8 … and all devices of a node; no rows where the table has none for it.

    Beyond the members that were measured, their latency is taken.
    """
    collectives = node.collectives
    if collectives is None:
        return ()
    return tuple(
        MeasuredCollective(
            operation=operation,
            devices_per_node=members,
            size_bytes=size,
            time_ns=round(_time_ns(operation, collectives, reach, members, size, node.fabric_bytes_per_s.value)),
        )
        for operation, reach in collectives.reach.items()
        for members in members_of(devices)
        for size in SIZES
    )


def members_of(devices: int) -> list[int]:
    """Return the group sizes to measure: powers of two up to the devices of a node, and all of its devices."""
    powers = [2**power for power in range(1, devices.bit_length()) if 2**power <= devices]
    return sorted({*powers, devices} - {1})


def _time_ns(
    operation: Operation, collectives: Collectives, reach: Reach, members: int, size: int, bytes_per_s: int
) -> float:
    rounds = _ROUNDS.get(operation, 1)
    moved = rounds * (members - 1) / members * size
    steps = rounds * (min(members, collectives.most_members) - 1)
    return moved / (reach.share * bytes_per_s) * 1e9 + steps * reach.step_ns + reach.each_ns
