"""A bound from the load of all stages on the cables around nodes, and around groups of nodes (BOUNDS section 3).

For a time T, it is the least that these cables carry in any plan whose stages, and runs of stages in a group, may each
be part of a plan below T. If the cables cannot carry as much, no plan takes less than T. The largest such T is found in
a counted number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from penstock.solvers.bounds.contiguous.border_kernel import (
    MANY,
    NONE,
    Around,
    Room,
    Shares,
    find_stages,
    least_load,
)
from penstock.solvers.bounds.contiguous.borders import Border
from penstock.solvers.bounds.contiguous.label_steps import Pieces
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.costs.ties import bytes_of_spans
from penstock.solvers.model.micro_batches import Batch, largest_slice, row_classes
from penstock.solvers.model.problem import Problem

FINEST = 1024
"""Reciprocal of the first step above the known bound; later steps are longer, and the final precision is the same."""
LONGEST = 64
"""Greatest multiple of the known bound up to which a larger bound is tried."""
ROUNDING = 1e-12


def carried_bound_ns(problem: Problem, batch: Batch, links: Links, pieces: Pieces, known_ns: int, below_ns: int) -> int:
    """Return a time in ns that no plan of a number of micro-batches is below.

    It is at least ``known_ns``, which is such a time, and at most ``below_ns``, which suffices.
    """
    for border in links.borders:
        question = _Question(problem, batch, links, pieces, border)
        if known_ns < below_ns and question.may_prove(known_ns):
            known_ns = question.proven_ns(known_ns, below_ns)
    return known_ns


class _Question:
    """The question whether the cables around groups of devices can carry the transfers of every plan."""

    def __init__(self, problem: Problem, batch: Batch, links: Links, pieces: Pieces, border: Border) -> None:
        self.problem, self.pieces, self.border = problem, pieces, border
        layers, most = problem.num_layers, pieces.limit.shape[1] - 1
        size = max(border.sizes)
        classes = row_classes(problem.global_batch_size, batch.num_micro_batches)
        samples = [sum(rows * count for rows, count in classes), *far_samples(classes, size, most)]
        out, back = (_carried_ns(samples, each, border.widest) for each in pieces.sent)
        groups = np.maximum(2, -(-np.arange(most + 1) // size))
        cuttable = np.flatnonzero(problem.cuttable)
        self.around = Around(
            out=out,
            back=back,
            reduced=_reduced(problem, links, border, groups),
            groups=groups,
            size=size,
            nodes=border.nodes,
            full=border.full,
            first=int(cuttable[0]) + 1 if len(cuttable) else layers,
        )
        self.shares = list(_shares(border, most))
        widest = max(shares.room for shares in self.shares)
        alone, run, across, load = np.zeros((4, layers + 1, layers + 1), dtype=np.int64)
        self.room = Room(alone, run, across, load, np.zeros((layers + 1, widest + 1, 4), dtype=np.int64))
        # The load that all cables carry in a ns, as a fraction of the widest group's; each direction apart if it has a
        # separate one.
        self.capacity = Fraction(sum(border.widths) * (1 + border.full), border.widest)

    def may_prove(self, known_ns: int) -> bool:
        """Return whether the cables could be too narrow for any plan that is longer than the known bound."""
        around, pieces = self.around, self.pieces
        both = around.out[0] + around.back[0]
        idle = int(pieces.least_forward[pieces.devices, -1] + pieces.least_backward[pieces.devices, -1])
        reduced = len(self.border.sizes) * (1 + around.full) * int(around.reduced[:, 0, -1].max())
        carried = 2 * int(both.sum()) + reduced
        return 2 * int(both.max()) >= known_ns - idle or carried >= self.capacity * (known_ns - idle)

    def proven_ns(self, known_ns: int, below_ns: int) -> int:
        """Return the longest time found that no plan is below, at most ``below_ns``."""
        proven, step = known_ns, known_ns // FINEST + 1
        longest = min(below_ns, LONGEST * known_ns)
        open_ns = min(longest, proven + step)
        while proven < open_ns and self._refuted(open_ns):
            proven, step = open_ns, 2 * step
            open_ns = min(longest, proven + step)
        if proven == open_ns:
            # Other bounds report that no plan exists.
            return known_ns if proven < below_ns and self._refuted(FAR_NS) else proven
        while open_ns - proven > proven // FINEST + 1:
            middle = (proven + open_ns) // 2
            if self._refuted(middle):
                proven = middle
            else:
                open_ns = middle
        return proven

    def _refuted(self, time_ns: int) -> bool:
        """Return whether no plan takes less than a time."""
        pieces, around, room = self.pieces, self.around, self.room
        across = find_stages(pieces, around, time_ns, room)
        window = time_ns - 1 - int(pieces.least_forward[pieces.devices, around.first])
        if not across:
            window -= int(pieces.least_backward[pieces.devices, around.first])
        most = max(0, window) * self.capacity
        for shares in self.shares:
            load = int(least_load(pieces, around, shares, time_ns, room))
            if load == NONE or load > most:
                return True
        return False


def far_samples(classes: tuple[tuple[int, int], ...], size: int, most: int) -> list[int]:
    """Return for runs of 1, 2, … devices of a group the least samples that leave it for a stage across groups."""
    return [
        min(
            (
                sum(
                    count * max(0, rows - min(size - devices, r - 1) * largest_slice(rows, r))
                    for rows, count in classes
                )
                for r in range(2, most + 1)
            ),
            default=0,
        )
        for devices in range(1, size + 1)
    ]


def _carried_ns(samples: list[int], sent: np.ndarray, bytes_per_s: int) -> np.ndarray:
    """Return (numbers of samples, L + 1) ns, rounded down, to carry each of these numbers over each cut."""
    each = [[number * size * 1_000_000_000 // bytes_per_s for size in sent.tolist()] for number in samples]
    return np.asarray(np.minimum(np.asarray(each, dtype=object), FAR_NS), dtype=np.int64)


def _reduced(problem: Problem, links: Links, border: Border, groups: np.ndarray) -> np.ndarray:
    """Return (replicas + 1, L + 1, L + 1) ns of a stage's all-reduces on the cables around each of its groups."""
    size = np.zeros((problem.num_layers + 1, problem.num_layers + 1), dtype=np.int64)
    for spans, sums in bytes_of_spans(problem):
        size = np.where(spans, np.maximum(0, sums[None, :] - sums[:, None]), size)
    table = np.zeros((len(groups), *size.shape), dtype=np.int64)
    for replicas in range(2, len(groups)):
        devices = replicas
        if problem.rules.all_reduce == "hierarchical":
            devices = max(int(groups[replicas]), -(-replicas // links.node_size))
        moved = 2 * (devices - 1) / devices * float(problem.memory.exchange) * size
        # A measured all-reduce is known by its time, during which it keeps a channel busy.
        lane_ns = np.floor(moved * (1e9 / border.narrowest * (1 - ROUNDING))).astype(np.int64)
        measured = links.or_measured(lane_ns, size, replicas, True)
        moved = np.minimum(moved, np.where(measured < lane_ns, measured * (border.narrowest / 1e9), moved))
        table[replicas] = np.minimum(FAR_NS, np.floor(moved * (1e9 / border.widest * (1 - ROUNDING))))
    return table


def _shares(border: Border, most: int) -> Iterator[Shares]:
    """Yield ways to count devices: each as one; if groups are of one size, also ways in which large runs take a whole
    group.

    A run of more devices than a group less a part takes one whole group, and a run smaller than the part takes nothing.
    """
    size, number = max(border.sizes), len(border.sizes)
    plain = np.arange(size + 1)
    for part in [0, size / 2, size / 3, size / 4] if min(border.sizes) == size > 1 else [0]:
        run = np.where(plain > size - part, size, np.where(plain >= part, plain, 0))
        yield Shares(run.astype(np.int64), _across(run, number, most), sum(border.sizes))


def _across(run: np.ndarray, number: int, most: int) -> np.ndarray:
    """Return (most + 1,) the least room of each number of devices in two groups or more."""
    least = np.full((number + 1, most + 1), MANY, dtype=np.int64)
    least[0, 0] = 0
    for used in range(1, number + 1):
        for devices in range(1, min(most, len(run) - 1) + 1):
            least[used, devices:] = np.minimum(
                least[used, devices:], least[used - 1, : most + 1 - devices] + run[devices]
            )
    return np.asarray(least[2:].min(axis=0))
