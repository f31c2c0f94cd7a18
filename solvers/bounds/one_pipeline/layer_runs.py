"""Limits on runs of layers on the same devices: their work has to fit into the time.

Within a time T a device computes for at most T, so k devices hold neighbouring layers of at most k T device-ns; then
other devices follow. A device holds a layer as part of such a *run*, from one cut that is not closed to another.
"""

from __future__ import annotations

import numpy as np

from penstock.solvers.bounds.one_pipeline.layer_costs import DeviceRange
from penstock.solvers.costs.infinity import NEVER_NS

LOST_NS = NEVER_NS // 2**11
"""The work of a layer in an impossible option: more than any time times devices; 2^11 layers of it can be added up."""


def possible_work(
    work: np.ndarray, options: list[DeviceRange], closed: np.ndarray, cuts: np.ndarray, time_ns: int
) -> np.ndarray:
    """Return ``work`` [option, L], with ``LOST_NS`` where no run of the layer is short enough.

    ``closed`` [option before, option, L] and ``cuts`` [L]: where stages cannot begin, and where they may.
    """
    possible = work.copy()
    layers = work.shape[1]
    for o, option in enumerate(options):
        begins = cuts & ~closed[:, o].all(axis=0)
        ends = np.append(cuts & ~closed[o].all(axis=0), True)
        begins[0] = True
        before = np.maximum.accumulate(np.where(begins, np.arange(layers), 0))
        after = np.minimum.accumulate(np.where(ends, np.arange(layers + 1), layers)[::-1])[::-1][1:]
        total = np.concatenate(([0], np.cumsum(work[o])))
        possible[o, total[after] - total[before] > option.most * time_ns] = LOST_NS
    return possible
