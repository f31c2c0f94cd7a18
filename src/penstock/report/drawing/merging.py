"""Blocks too fine to draw: what share of each pixel column a kind fills, and columns in place of blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from penstock.report.drawing.picture import Blocks


def coverage(blocks: Blocks, edges_ns: np.ndarray) -> np.ndarray:
    """Return the time of each kind between neighbouring edges; float64 of shape (kinds, columns).

    Overlapping intervals of one kind count once.
    """
    shares = np.zeros((len(blocks.letters), len(edges_ns) - 1))
    for kind in range(len(blocks.letters)):
        of_kind = blocks.kind == kind
        start, end = blocks.start_ns[of_kind], blocks.end_ns[of_kind]
        if not len(start):
            continue
        latest = np.maximum.accumulate(end)
        first = np.flatnonzero(np.concatenate(([True], start[1:] > latest[:-1])))
        left, right = start[first], latest[np.concatenate((first[1:] - 1, [len(start) - 1]))]
        knots = np.stack((left, right), axis=1).ravel().astype(np.float64)
        done = np.stack((np.cumsum(right - left) - (right - left), np.cumsum(right - left)), axis=1).ravel()
        shares[kind] = np.diff(np.interp(edges_ns, knots, done.astype(np.float64)))
    return shares


def merged(blocks: Blocks, columns: int, end_ns: int, from_ns: int = 0) -> Blocks:
    """Return the strip in at most ``columns`` blocks: per pixel column the kind that fills most of it, or nothing."""
    edges = np.linspace(from_ns, end_ns, columns + 1)
    shares = coverage(blocks, edges)
    idle = np.maximum((edges[1:] - edges[:-1]) - shares.sum(axis=0), 0.0)
    kind = np.argmax(np.vstack((shares, idle)), axis=0)
    change = np.concatenate(([0], np.flatnonzero(np.diff(kind)) + 1, [columns]))
    whole = edges.astype(np.int64)
    rows = [(kind[a], -1, -1, whole[a], whole[b]) for a, b in pairwise(change.tolist())]
    kept = [row for row in rows if row[0] < len(blocks.letters)]
    return Blocks.from_rows(blocks.letters, np.array(kept, dtype=np.int64))
