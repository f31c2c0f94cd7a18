"""Runs of layers on the same devices have to fit into the time.

Within a time T a device computes for T at most, so k devices hold neighbouring layers of k T device-ns at most, then
others follow. Whoever holds a layer has taken it in such a *run*, from one cut that is not closed to another.
"""

from __future__ import annotations

import numpy as np

from penstock.solvers.bounds.one_pipeline.layer_costs import Option
from penstock.solvers.costs.infinity import NEVER_NS

LOST_NS = NEVER_NS // 2**11
"""Work of a layer that cannot be held so: more than any time times devices; of 2^11 layers it can be added up."""


def possible_work(
    work: np.ndarray, options: list[Option], closed: np.ndarray, cuts: np.ndarray, time_ns: int
) -> np.ndarray:
    """``work`` [option, L], ``LOST_NS`` where no run of the layer is short enough.

    ``closed`` [option before, option, L] and ``cuts`` [L] say where stages cannot begin, and where they may.
    """
    found = work.copy()
    layers = work.shape[1]
    for o, option in enumerate(options):
        begins = cuts & ~closed[:, o].all(axis=0)
        ends = np.append(cuts & ~closed[o].all(axis=0), True)
        begins[0] = True
        before = np.maximum.accumulate(np.where(begins, np.arange(layers), 0))
        behind = np.minimum.accumulate(np.where(ends, np.arange(layers + 1), layers)[::-1])[::-1][1:]
        total = np.concatenate(([0], np.cumsum(work[o])))
        found[o, total[behind] - total[before] > option.most * time_ns] = LOST_NS
    return found
