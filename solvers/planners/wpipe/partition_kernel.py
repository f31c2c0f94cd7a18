"""The pairs of parts that devices can share (``partition.py``), as a compiled loop."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import loop


@loop
def pair_parts(
    first_ns: np.ndarray,
    second_ns: np.ndarray,
    first_bytes: np.ndarray,
    second_bytes: np.ndarray,
    room_bytes: np.ndarray,
    middle: int,
    most_first_ns: int,
    most_second_ns: int,
    width: int,
    came_from: np.ndarray,
) -> bool:
    """Return whether N devices can share places [0, middle) and [middle, P - 1].

    Device i takes the i-th part of each. ``first_ns``, ``second_ns`` (N, P): prefix sums of the time of the layers
    before each place on each device. ``first_bytes``, ``second_bytes`` (C, N, P) and ``room_bytes`` (C, N): C kinds of
    bytes that both parts of a device share. State (a, b) after i devices: where their last parts end. ``came_from`` (N
    + 1, P, P), int32, gets the state a P + b before each reached one, -1 elsewhere. ``width``: the number of ends of
    the second part, the furthest, that are followed for each end of the first; P makes the search exact.
    """
    count, places = first_ns.shape
    kinds = room_bytes.shape[0]
    came_from[:] = -1
    came_from[0, 0, middle] = 0
    for i in range(count):
        left = count - i - 1
        for a in range(i, middle - left):
            followed = 0
            for b in range(places - left - 2, middle + i - 1, -1):
                if came_from[i, a, b] < 0:
                    continue
                followed += 1
                if followed > width:
                    break
                end = places - left - 1
                for c in range(a + 1, middle - left + 1):
                    if first_ns[i, c] - first_ns[i, a] > most_first_ns:
                        break
                    while end > b and second_ns[i, end] - second_ns[i, b] > most_second_ns:
                        end -= 1
                    for k in range(kinds):
                        room = room_bytes[k, i] - first_bytes[k, i, c] + first_bytes[k, i, a]
                        while end > b and second_bytes[k, i, end] - second_bytes[k, i, b] > room:
                            end -= 1
                    if end == b:
                        break
                    for d in range(end, max(b, end - width), -1):
                        if came_from[i + 1, c, d] < 0:
                            came_from[i + 1, c, d] = a * places + b
    return bool(came_from[count, middle, places - 1] >= 0)
