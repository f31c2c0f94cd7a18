"""Whole numbers as zigzag varints: seven bits a byte, the lowest first; small numbers of either sign take one byte."""

from __future__ import annotations

import numpy as np

SEVEN = np.uint64(7)


def varints(values: np.ndarray) -> bytes:
    """Return the bytes of an int64 array."""
    whole = values.astype(np.int64)
    left = (whole.astype(np.uint64) << np.uint64(1)) ^ (whole >> 63).astype(np.uint64)
    lengths = np.ones(len(left), dtype=np.int64)
    rest = left >> SEVEN
    while rest.any():
        lengths += rest > 0
        rest >>= SEVEN
    ends = np.cumsum(lengths)
    encoded = np.zeros(int(ends[-1]) if len(ends) else 0, dtype=np.uint8)
    for place in range(int(lengths.max(initial=0))):
        has = lengths > place
        more = (lengths[has] > place + 1).astype(np.uint8) << np.uint8(7)
        encoded[ends[has] - lengths[has] + place] = (left[has] & np.uint64(127)).astype(np.uint8) | more
        left = left >> SEVEN
    return encoded.tobytes()
