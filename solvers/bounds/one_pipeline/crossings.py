"""The transfers over the cut before a layer, between the devices that hold the layers on both sides.

Where a device has its lowest layer, its pipeline has a stage boundary, and the stage before is on other devices: a
transfer for every micro-batch of the pipeline. There is a transfer also where the numbers of devices differ. In modes
that count links (``nic``) it takes at least the time of the bytes that the new device itself receives, or of the bytes
that must move to another device, shared by all senders or receivers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.one_pipeline.layer_costs import DeviceRange, Holding, Numbers, floored, overlap
from penstock.solvers.costs.infinity import FAR_NS


class Crossings(NamedTuple):
    """Arrays [option before, option, L] in ns, 0 before layer 0.

    ``out`` and ``back``: one transfer to a new device and back; ``out_same`` and ``back_same``: the same if no device
    is new. ``busy`` and ``busy_same``: how long one channel or link carries a step's transfers.
    """

    out: np.ndarray
    back: np.ndarray
    out_same: np.ndarray
    back_same: np.ndarray
    busy: np.ndarray
    busy_same: np.ndarray


def crossings(holding: Holding, numbers: Numbers) -> Crossings:
    """Return the crossings for a range of numbers of micro-batches."""
    cut = _Cut(holding, numbers)
    forward, backward = holding.problem.forward_bytes, holding.problem.backward_bytes
    one, same, step, step_same = (cut.rows(new, whole) for whole in (False, True) for new in (True, False))
    tables = (
        cut.transfers(forward, one, delayed=True),
        cut.transfers(backward, one, delayed=True),
        cut.transfers(forward, same, delayed=True),
        cut.transfers(backward, same, delayed=True),
        cut.transfers(cut.carried, step, delayed=False),
        cut.transfers(cut.carried, step_same, delayed=False),
    )
    return Crossings(*np.pad(np.stack(tables), [(0, 0)] * 3 + [(1, 0)]))


class _Cut:
    """All cuts, for micro-batches of a range of sizes; arrays [option before, option, L - 1]."""

    def __init__(self, holding: Holding, numbers: Numbers) -> None:
        self.problem, self.links, self.holding = holding.problem, holding.links, holding
        self.numbers = numbers
        self.least, self.most = numbers.rows(self.problem.global_batch_size)
        self.pairs = [[(before, after) for after in holding.options] for before in holding.options]

    @property
    def carried(self) -> np.ndarray:
        """Return the bytes of a sample that keep the cut's channel, or a device's link, busy; 0 if unknown."""
        rules, problem = self.problem.rules, self.problem
        alone = self.links.leaf_nodes and self.links.node_size == 1
        if not alone if rules.shared else rules.channel == "none":
            return np.zeros_like(problem.forward_bytes)
        full = self.holding.full_duplex if rules.shared else rules.channel == "full"
        both = np.maximum if full else np.add
        return np.asarray(both(problem.forward_bytes, problem.backward_bytes))

    def rows(self, new: bool, whole_step: bool) -> np.ndarray:
        """Return [option before, option] the least rows that one device or channel carries, per micro-batch or step."""
        return np.asarray([[self._rows(*pair, new, whole_step) for pair in row] for row in self.pairs])

    def _rows(self, before: DeviceRange, after: DeviceRange, new: bool, whole_step: bool) -> int:
        if not self.links.nic:
            every = self.problem.global_batch_size if whole_step else self.least
            return every if new or not overlap(before, after) else 0
        shared = self._displaced(before, after, whole_step) // min(before.most, after.most)
        return max(self._own_rows(after, whole_step), shared) if new else shared

    def _own_rows(self, after: DeviceRange, whole_step: bool) -> int:
        """Return the least rows that a new device receives."""
        if after.most == 1 and whole_step:
            return self.problem.global_batch_size
        return self.least // after.most * (self.numbers.least if whole_step else 1)

    def _displaced(self, before: DeviceRange, after: DeviceRange, whole_step: bool) -> int:
        """Return the rows that must move to another device: a device keeps at most its smaller slice."""
        kept = min(before.most, after.most) * -(-self.most // max(before.least, after.least))
        if whole_step:
            return max(0, self.problem.global_batch_size - self.numbers.most * kept)
        return max(0, self.least - kept)

    def transfers(self, sent: np.ndarray, rows: np.ndarray, *, delayed: bool) -> np.ndarray:
        """Return the time of ``rows`` of ``sent`` bytes each, within a node or between two, whichever is quicker."""
        least_ns = np.full((*rows.shape, len(sent)), FAR_NS, dtype=np.int64)
        for near, (fastest, delay) in ((True, self.links.inside), (False, self.links.between)):
            if fastest:
                speed = np.asarray([[self._speed(fastest, *pair, near) for pair in row] for row in self.pairs])
                sent_ns = floored(sent * (rows * 1e9 / speed)[:, :, None])
                least_ns = np.minimum(least_ns, sent_ns + (delay if delayed and self.links.nic else 0))
        return np.where((sent > 0) & (rows > 0)[:, :, None], least_ns, 0)

    def _speed(self, fastest: int, before: DeviceRange, after: DeviceRange, near: bool) -> float:
        """Return the most bytes per second that one device, or one transfer, gets."""
        if self.links.nic:
            each = fastest * max(before.most, after.most)
            return float(min(self.holding.widest_cable, each) if not near and self.links.leaf_nodes else each)
        mode = self.problem.rules.transfer
        spread = {"spp": before.most * after.most, "dapple": 1 if near else max(before.most, after.most)}
        return float(fastest * spread.get(mode, 1))
