"""What crosses the cut before a layer, between the devices that hold the layers on its sides.

Where a device has its lowest layer, its pipeline has a stage boundary, and the stage before is on other devices: a
transfer for every micro-batch of the pipeline. There is one as well where the numbers of devices differ. In modes that
count links (``nic``) it takes at least what the new device itself receives, or what must change its place, shared by
all who send or receive.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.all_plans.options import FAR_NS, Holding, Numbers, Option, floored, overlap


class Crossings(NamedTuple):
    """Arrays [option before, option, L] in ns, 0 before layer 0.

    ``out`` and ``back``: one transfer to a new device and back; ``out_same`` and ``back_same``: where no device is
    new. ``busy`` and ``busy_same``: how long one channel or link carries a step's transfers.
    """

    out: np.ndarray
    back: np.ndarray
    out_same: np.ndarray
    back_same: np.ndarray
    busy: np.ndarray
    busy_same: np.ndarray


def crossings(holding: Holding, numbers: Numbers, options: list[Option]) -> Crossings:
    """For a range of numbers of micro-batches."""
    cut = _Cut(holding, numbers)
    tables = [
        [[make(before, after, new) for after in options] for before in options]
        for new in (True, False)
        for make in (cut.out, cut.back, cut.busy)
    ]
    out, back, busy, out_same, back_same, busy_same = np.pad(np.asarray(tables), [(0, 0)] * 3 + [(1, 0)])
    return Crossings(out, back, out_same, back_same, busy, busy_same)


class _Cut:
    """The cuts of a problem for micro-batches of a range of sizes; what is returned is (L - 1,)."""

    def __init__(self, holding: Holding, numbers: Numbers) -> None:
        self.problem, self.links, self.holding = holding.problem, holding.links, holding
        self.numbers = numbers
        self.least, self.most = numbers.rows(self.problem.global_batch_size)
        self.sent = (self.problem.forward_bytes, self.problem.backward_bytes)

    def out(self, before: Option, after: Option, new: bool) -> np.ndarray:
        """One micro-batch over each cut, forward."""
        return self._fastest(self.sent[0], self._rows(before, after, new, False), before, after, latency=True)

    def back(self, before: Option, after: Option, new: bool) -> np.ndarray:
        """Its gradient."""
        return self._fastest(self.sent[1], self._rows(before, after, new, False), before, after, latency=True)

    def busy(self, before: Option, after: Option, new: bool) -> np.ndarray:
        """All micro-batches of a step, on the channel of the cut or a link of a device."""
        rules = self.problem.rules
        alone = self.links.leaf_nodes and self.links.node_size == 1
        if not alone if rules.shared else rules.channel == "none":
            return np.zeros_like(self.sent[0])
        full = self.holding.full_duplex if rules.shared else rules.channel == "full"
        sent = np.maximum(*self.sent) if full else self.sent[0] + self.sent[1]
        return self._fastest(sent, self._rows(before, after, new, True), before, after, latency=False)

    def _own_rows(self, after: Option, whole_step: bool) -> int:
        """What a new device receives at least."""
        if after.most == 1 and whole_step:
            return self.problem.global_batch_size
        return self.least // after.most * (self.numbers.least if whole_step else 1)

    def _rows(self, before: Option, after: Option, new: bool, whole_step: bool) -> int:
        """That one device or channel has to do with at least."""
        if not self.links.nic:
            every = self.problem.global_batch_size if whole_step else self.least
            return every if new or not overlap(before, after) else 0
        shared = self._displaced(before, after, whole_step) // min(before.most, after.most)
        return max(self._own_rows(after, whole_step), shared) if new else shared

    def _displaced(self, before: Option, after: Option, whole_step: bool) -> int:
        """Rows that cannot stay where they are: a device keeps at most its smaller slice."""
        kept = min(before.most, after.most) * -(-self.most // max(before.least, after.least))
        if whole_step:
            return max(0, self.problem.global_batch_size - self.numbers.most * kept)
        return max(0, self.least - kept)

    def _fastest(self, sent: np.ndarray, rows: int, before: Option, after: Option, *, latency: bool) -> np.ndarray:
        """Within a node or between two, whichever is quicker."""
        if rows == 0:
            return np.zeros_like(sent)
        found = [np.full(len(sent), FAR_NS, dtype=np.int64)]
        for near, (fastest, delay) in ((True, self.links.inside), (False, self.links.between)):
            if fastest:
                rate = rows * 1e9 / self._speed(fastest, before, after, near)
                found.append(floored(sent * rate) + (delay if latency and self.links.nic else 0))
        return np.where(sent > 0, np.min(found, axis=0), 0)

    def _speed(self, fastest: int, before: Option, after: Option, near: bool) -> int:
        """Bytes per second that one device, or one transfer, gets at most."""
        if self.links.nic:
            one_link = not near and self.links.leaf_nodes
            return self.holding.widest_cable if one_link else fastest * max(before.most, after.most)
        mode = self.problem.rules.transfer
        spread = {"spp": before.most * after.most, "dapple": 1 if near else max(before.most, after.most)}
        return fastest * spread.get(mode, 1)
