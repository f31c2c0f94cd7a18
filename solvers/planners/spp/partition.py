"""PRM: the partition, replication and mapping with the smallest slowest part, for every number of stages at once.

SPP section IV-B2, Algorithm 4: W(xi) is the least, over partitions of the layers into xi stages on consecutive devices
of the order, of the time that the slowest stage (its all-reduce included) or channel works in a step. The paper's
recursion minimises it for each xi and r. Here one sweep of ``prm_kernel`` decides for a threshold which xi are
possible, and thresholds are searched. Every plan read from a sweep lowers W(xi) to the integer that the plan takes;
every sweep without xi raises its floor. The smallest W is always exact. The others are exact too, unless the allowed
sweeps (``SWEEP_WORK``) run out: then each is within 1/1024 of its floor, or as close as those sweeps brought it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.spp.prm_kernel import LONGEST_NS, WORD, ChainArrays, Masks, possible, trace

SWEEP_WORK = 2 * 10**9
"""Limit on the steps of all sweeps of one search; a sweep counts V R L for each word of its table."""
EXACT_WORK = SWEEP_WORK // 4
"""The steps after which gaps of less than 1/``FINE`` are left as they are."""
FINE = 1024
MAX_TABLE_BYTES = 2**29


class ReplicatedPart(NamedTuple):
    """One stage: layers [first, end), the number of devices of the order, its way to run (1: recomputing)."""

    first: int
    end: int
    replicas: int
    way: int


Parts = tuple[ReplicatedPart, ...]


@dataclass
class Partition:
    """The best plans so far for one number of stages; no partition takes ``floor_ns`` or less."""

    value_ns: int
    floor_ns: int
    plans: tuple[np.ndarray, ...] = field(compare=False)

    @property
    def parts(self) -> tuple[Parts, ...]:
        """The plans, each once; the first has the smallest W."""
        return tuple(dict.fromkeys(tuple(ReplicatedPart(*row) for row in plan.tolist()) for plan in self.plans))

    @property
    def exact(self) -> bool:
        """True if nothing can be better."""
        return self.floor_ns >= self.value_ns - 1


def pruned_replicas(problem: Problem) -> tuple[int, ...]:
    """Return replica counts to try: 1 to 8, multiples of 8 up to 64 and multiples of 64 beyond.

    The sizes of nodes and of the whole cluster are among them (SOLVERS E).
    """
    devices = problem.num_devices
    sizes = {len(node) for node in problem.nodes()}
    chosen = {*range(1, 9), *range(8, 65, 8), *range(64, devices + 1, 64), *sizes, devices}
    return tuple(sorted(r for r in chosen if 0 < r <= devices))


def stages_that_fit(layers: int, devices: int, replica_counts: int) -> int:
    """Return the number of stages whose table stays within ``MAX_TABLE_BYTES``; at least one word of them."""
    words = max(1, MAX_TABLE_BYTES // (8 * devices * replica_counts * (layers + 1)))
    return min(layers, devices, WORD * words)


@dataclass
class ThresholdSearch:
    """The search over thresholds on one chain."""

    chain: ChainArrays
    most_stages: int
    partitions: dict[int, Partition] = field(default_factory=dict)
    work: int = 0

    def __post_init__(self) -> None:
        devices, counts = self.chain.stage_of.shape
        places = self.chain.least_ns.size
        words = self.chain.depth_bits.shape[1]
        depths, classes = self.chain.fits.shape[1:3]
        self._masks = Masks(
            table=np.zeros((words, devices, counts, places), dtype=np.uint64),
            carry=np.zeros((devices, counts, places), dtype=np.uint64),
            joined=np.zeros((devices, places), dtype=np.uint64),
            spread=np.zeros((places.bit_length(), places), dtype=np.uint64),
            reach=np.zeros((depths, classes, places), dtype=np.int64),
            widest=np.zeros(classes, dtype=np.int64),
            power=np.asarray([max(1, size).bit_length() - 1 for size in range(places + 1)], dtype=np.int64),
            begin=np.zeros((devices, 2), dtype=np.int64),
            band=np.zeros((words, devices, 2), dtype=np.int64),
        )
        self._step = devices * counts * places
        self._floor = np.full(self.most_stages + 1, -1, dtype=np.int64)

    def run(self, limit_ns: int, worth: Callable[[Parts], int]) -> dict[int, Partition]:
        """Return W for each number of stages.

        Numbers whose W exceeds ``limit_ns`` or the ``worth`` of the best plan are omitted.
        """
        limit_ns = min(limit_ns, self._last_ns())
        if not self._first(limit_ns):
            return {}
        self._smallest()
        self._probe(min(limit_ns, *(worth(p.parts[0]) for p in self.partitions.values())))
        self._settle(FINE, SWEEP_WORK)
        self._settle(1, EXACT_WORK)
        return dict(sorted(self.partitions.items()))

    def _first(self, limit_ns: int) -> bool:
        """Search for any plan: thresholds from the evenly shared work upwards, each a quarter above the one before."""
        devices = self.chain.stage_of.shape[0]
        threshold = max(1, int(self.chain.least_ns[-1]) // devices)
        while threshold < limit_ns:
            if self._probe(threshold):
                return True
            threshold += threshold // 4 + 1
        return self._probe(limit_ns)

    def _last_ns(self) -> int:
        """Return a threshold that excludes nothing that connected devices can run."""
        chain = self.chain
        stage = int(chain.spent_ns[..., -1].max() + chain.lag_ns.max())
        rates = chain.rate[np.isfinite(chain.rate)]
        channel = float(chain.moved.max()) * float(rates.max(initial=0.0)) + int(chain.hop_ns.max(initial=0))
        return min(LONGEST_NS, max(stage, int(min(channel, LONGEST_NS)) + 1))

    def _probe(self, threshold: int) -> bool:
        """Run one sweep: read the plans that it shows, raise the floors of the other numbers of stages."""
        words = possible(self.chain, self._masks, threshold)
        self.work += self._step * words
        shown = self._shown(words)
        for xi in range(1, self.most_stages + 1):
            if xi not in shown:
                self._floor[xi] = max(self._floor[xi], threshold)
            elif xi not in self.partitions or threshold < self.partitions[xi].value_ns:
                self._read(xi, threshold)
        for xi, partition in self.partitions.items():
            partition.floor_ns = int(self._floor[xi])
        return bool(shown)

    def _shown(self, words: int) -> set[int]:
        masks = np.bitwise_or.reduce(self._masks.table[:words, 0, :, 0], axis=1)
        return {WORD * w + k + 1 for w in range(words) for k in range(WORD) if int(masks[w]) >> k & 1}

    def _read(self, xi: int, threshold: int) -> None:
        """Read both plans of ``trace`` and store them, the plan with the smaller W first."""
        plans = [np.empty((xi, 4), dtype=np.int64) for _ in range(2)]
        values = [int(trace(self.chain, self._masks, threshold, xi, late == 1, plans[late])) for late in range(2)]
        if values[1] < values[0]:
            plans.reverse()
        self.partitions[xi] = Partition(min(values), int(self._floor[xi]), tuple(plans))

    def _smallest(self) -> None:
        """Search the smallest W of all, exactly: halve the gap, and every other time try one below the best plan."""
        downwards = False
        while True:
            value = min(p.value_ns for p in self.partitions.values())
            floor = min(int(f) for f in self._floor[1:])
            if floor >= value - 1:
                return
            self._probe(value - 1 if downwards else (value + floor) // 2)
            downwards = not downwards

    def _settle(self, fine: int, work: int) -> None:
        """Narrow the widest gap until all are below 1/``fine`` of their values (1: closed), or the work runs out."""
        downwards = False
        while self.work < work:
            _, xi = max((self._gap(p) / p.value_ns, -xi) for xi, p in self.partitions.items())
            partition = self.partitions[-xi]
            gap = self._gap(partition)
            if gap == 0 or (fine > 1 and gap * fine <= partition.value_ns):
                return
            downwards = not downwards and fine == 1
            self._probe(partition.value_ns - 1 if downwards else partition.value_ns - 1 - gap // 2)

    def _gap(self, partition: Partition) -> int:
        """Return how much the value may still fall."""
        return partition.value_ns - 1 - partition.floor_ns


def search(
    chain: ChainArrays,
    most_stages: int,
    limit_ns: int = LONGEST_NS,
    worth: Callable[[Parts], int] = lambda _parts: LONGEST_NS,
) -> dict[int, Partition]:
    """Run PRM for all xi: return W and its plans for every number of stages, in their order.

    Numbers are omitted if W is above ``limit_ns``, or above the ``worth`` of the plans with the smallest W. Since no
    step is shorter than its slowest stage or channel, they cannot win.
    """
    return ThresholdSearch(chain, most_stages).run(limit_ns, worth)
