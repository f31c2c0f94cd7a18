"""The load of a stage in a step on its devices' links: both of its transfers and its all-reduces (BOUNDS 3).

If each node has one device and one cable, all that a device sends or receives passes that cable: forwards from the
stage before, gradients from the stage after, its all-reduce. A transfer keeps the cables of all its devices busy for
its whole duration, whatever stages they are in.
"""

from __future__ import annotations

import numpy as np

from penstock.solvers.bounds.contiguous.label_steps import AMONG_SPANNING, FROM_SPANNING, TO_OTHER_NODE, TO_SPANNING
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.costs.stage import least_update_ns

FAR_WAYS = (TO_OTHER_NODE, TO_SPANNING, FROM_SPANNING, AMONG_SPANNING)


def carried_ns(links: Links, sent: np.ndarray, rate: np.ndarray, forward: np.ndarray, batches: int) -> np.ndarray:
    """Return (replicas + 1, L + 1, L + 1) ns, the busiest direction of a device's cable; see ``Pieces.carried``.

    ``sent``, ``rate``: as in ``Pieces``; ``forward`` [replicas, first, after]: the least time of a forward.
    """
    table = np.zeros_like(forward)
    if not links.own_cables:
        return table
    problem = links.problem
    full = any(cable.full_duplex for cable in problem.network.cables)
    update = np.triu(np.subtract.outer(-least_update_ns(problem), -least_update_ns(problem)))
    size = np.asarray(problem.owned_bytes)
    for r in range(1, table.shape[0]):
        latency = links.between[1]
        received = np.min([rate[way, 1:, r] for way in FAR_WAYS])
        sent_rate = np.min([rate[way, r, 1:] for way in FAR_WAYS])
        # Forwards in and out, gradients in and out, of each cut.
        ways = [
            _moved(sent[d], each, latency) for d, each in ((0, received), (0, sent_rate), (1, received), (1, sent_rate))
        ]
        forwards_in, forwards_out, gradients_in, gradients_out = ways
        reduced = _reduced(links, np.maximum(0, size[None, :] - size[:, None]), r)
        into = (batches - 1) * forwards_in[:, None] + batches * gradients_in[None, :]
        out = batches * (gradients_out[:, None] + forwards_out[None, :])
        # The update follows everything received, but a gradient may still be sent while it runs.
        busy = np.maximum(into + update, forward[r] + out) if full else into + out
        table[r] = np.triu(np.minimum(FAR_NS, busy + reduced), 1)
    return table


def _moved(sent: np.ndarray, rate: float, latency_ns: int) -> np.ndarray:
    """Return (L + 1,) ns of one micro-batch's transfer over each cut, at the best rate."""
    if rate == np.inf:
        return np.where(sent > 0, FAR_NS, 0)
    return np.where(sent > 0, np.ceil(sent * rate).astype(np.int64) + latency_ns, 0)


def _reduced(links: Links, size: np.ndarray, replicas: int) -> np.ndarray:
    """Return the least ns of a stage's all-reduces, in one bucket."""
    if replicas == 1:
        return np.zeros_like(size)
    rate, latency_ns = links.ring(replicas, True)
    if rate == np.inf:
        return np.where(size > 0, FAR_NS, 0)
    ring_ns = np.where(size > 0, np.floor(size * (rate * (1 - 1e-12))).astype(np.int64) + latency_ns, 0)
    return links.or_measured(ring_ns, size, replicas, True)
