"""The operations of one flushed step, their dependencies, lags and memory: the input of list scheduling.

Transfers are delays between operations. A micro-batch's stash and received input are kept from F to the end of its
B, or W where the backward is split; what R rebuilds is kept from R on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, RECOMPUTE, WEIGHT
from penstock.solvers.costs.memory import activation_bytes
from penstock.solvers.costs.stage import stage_costs
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.chunks import Ranks, ranks_of
from penstock.solvers.schedules.support.list_kernel import Jobs, run_list

SHAKE = 0.15
"""The share of its time that an operation may gain or lose when orders are shaken."""
Ranking = Sequence[tuple[int, int]]
"""Pairs (kind, chunk of the rank), the preferred first."""


class Chained:
    """One pipeline's operations, numbered (stage × kinds + kind) × M + micro-batch.

    Raises ``UnsupportedRequest`` where replicas do not share rows, or devices hold different sets of stages in part.
    """

    def __init__(self, problem: Problem, allocation: Allocation) -> None:
        self.problem, self.allocation = problem, allocation
        self.ranks: Ranks = ranks_of(allocation)
        self._number = allocation.num_micro_batches
        self._graph = StepGraph(problem, allocation)
        self._counts = [count for _rows, count in self._graph.classes]
        self._arrays = cache(self._operation_arrays)

    def times(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the times of larger micro-batches: F, I and W of each stage, (3, S).

        Also returns the transfers to its forward and its gradient, (2, S).
        """
        times = np.asarray([costs[0].durations_ns() for costs in self._graph.costs], dtype=np.int64)
        ways = np.zeros((2, len(times)), dtype=np.int64)
        for s in range(len(times)):
            for direction, other in enumerate((self.allocation.next(s), self.allocation.previous(s))):
                if other is not None:
                    ways[direction, other] = self._graph.lags_ns(s, direction)[0]
        return times.T[[FORWARD, INPUT, WEIGHT]], ways

    def taken_bytes(self, s: int) -> int:
        """Return the bytes that a stage keeps of one of the larger micro-batches from its forward on."""
        return activation_bytes(self.problem, self.allocation.stages[s], self._graph.classes[0][0])

    def peak_bytes(self, orders: Orders) -> list[int]:
        """Return the peak bytes of each rank when it runs its row."""
        lists, _codes = self.lists(orders, (), [0] * len(orders.rows))
        peaks = []
        for low, high in zip(lists.lane_start[:-1].tolist(), lists.lane_start[1:].tolist(), strict=True):
            steps = np.stack((lists.need[low:high], -lists.freed[low:high]), axis=1).ravel()
            peaks.append(int(np.cumsum(steps).max(initial=0)))
        return peaks

    def fits(self, orders: Orders, room: Sequence[int]) -> bool:
        """Return whether every rank's row fits its memory budget."""
        return all(peak <= free for peak, free in zip(self.peak_bytes(orders), room, strict=True))

    def overtaken(
        self, orders: Orders, room: Sequence[int], movers: tuple[int, ...], patience: int
    ) -> tuple[int, Orders]:
        """Return the step time and the orders when operations of the kinds ``movers`` overtake."""
        lists, codes = self.lists(orders, movers, room)
        start = run_list(lists, patience)
        return self._as_orders(codes, lists.lane, lists.duration_ns, start)

    def shaken(
        self, orders: Orders, room: Sequence[int], movers: tuple[int, ...], patience: int, rng: np.random.Generator
    ) -> Orders:
        """Return the orders for durations and lags perturbed by up to ``SHAKE``: another list that can run."""
        lists, codes = self.lists(orders, movers, room)
        longer = 1 + SHAKE * (2 * rng.random(len(codes)) - 1), 1 + SHAKE * (2 * rng.random(lists.lag_ns.shape) - 1)
        duration = (lists.duration_ns * longer[0]).astype(np.int64)
        drawn = lists._replace(duration_ns=duration, lag_ns=(lists.lag_ns * longer[1]).astype(np.int64))
        return self._as_orders(codes, lists.lane, duration, run_list(drawn, patience))[1]

    def constructed(
        self, ranking: Ranking, room: Sequence[int], patience: int, *, even: bool = False, ways: bool = True
    ) -> tuple[int, Orders] | None:
        """Return split-backward orders that prefer (kind, chunk) pairs in this order; None where memory is short.

        ``even``: as if all operations took the same time; ``ways``: whether transfers take time.
        """
        count, number = len(self.allocation.stages), self._number
        lines = [s * len(KINDS) + FORWARD for s in range(count)]  # where times are 0, as operations need each other
        lines += [s * len(KINDS) + kind for kind in (INPUT, WEIGHT) for s in reversed(range(count))]
        present = frozenset((kind, s) for s in range(count) for kind in (FORWARD, INPUT, WEIGHT))
        duration, need, freed, following, lag = self._arrays(present)
        if even:
            duration = np.where(duration > 0, duration.sum() // max(1, np.count_nonzero(duration)), 0)
        lane = np.full(count * len(KINDS), -1, dtype=np.int64)
        kept = np.zeros(count * len(KINDS), dtype=np.int64)
        preferred = []
        for r, chunks in enumerate(self.ranks.stages):
            for place, s in enumerate(chunks):
                lane[s * len(KINDS) : (s + 1) * len(KINDS)] = r
                kept[s * len(KINDS) + FORWARD] = sum(self.taken_bytes(later) for later in chunks[place + 1 :])
            preferred.append([chunks[chunk] * len(KINDS) + kind for kind, chunk in ranking])
        waits = np.bincount(following[following >= 0], minlength=len(duration)).astype(np.int64)
        jobs = Jobs(
            duration_ns=duration,
            need=need,
            freed=freed,
            following=following,
            lag_ns=lag if ways else np.zeros_like(lag),
            waits_for=waits,
            lane=np.repeat(lane, number),
            number=number,
            kept=kept,
            ranking=np.asarray(preferred, dtype=np.int64),
            room=np.asarray(room, dtype=np.int64),
        )
        start = run_list(jobs, patience)
        codes = np.concatenate([np.arange(line * number, (line + 1) * number) for line in lines])
        if (start[codes] < 0).any():
            return None
        return self._as_orders(codes, lane[codes // number], duration[codes], start[codes])

    def _as_orders(
        self, codes: np.ndarray, lane: np.ndarray, duration: np.ndarray, start: np.ndarray
    ) -> tuple[int, Orders]:
        """Return the end of the last operation, and the operations of each lane as they start."""
        order = np.lexsort((duration, start, lane))
        stage_kind, m = np.divmod(codes[order], self._number)
        s, kind = np.divmod(stage_kind, len(KINDS))
        operations, ends = np.stack((kind, s, m), axis=1), np.cumsum(np.bincount(lane)).tolist()
        rows = [operations[low:high] for low, high in pairwise([0, *ends])]
        return int((start + duration).max()), self.ranks.orders("overtaking", rows)

    def lists(self, orders: Orders, movers: tuple[int, ...], room: Sequence[int]) -> tuple[Jobs, np.ndarray]:
        """Return the rows as the kernel's lists, and each entry's number."""
        parts = [row.operations.astype(np.int64) for row in orders.rows]
        operations = np.concatenate(parts)
        kinds = operations[:, 0]
        codes = (operations[:, 1] * len(KINDS) + kinds) * self._number + operations[:, 2]
        lines = np.flatnonzero(np.bincount(codes // self._number)).tolist()
        present = frozenset((line % len(KINDS), line // len(KINDS)) for line in lines)
        duration, need, freed, following, lag = self._arrays(present)
        place = np.full(len(duration), -1, dtype=np.int64)
        place[codes] = np.arange(len(codes))
        after = following[codes]
        after = np.where(after >= 0, place[after], -1)
        waits = np.bincount(after[after >= 0], minlength=len(codes)).astype(np.int64)
        moves = np.zeros(len(KINDS), dtype=np.bool_)
        moves[list(movers)] = True
        jobs = Jobs(
            lane_start=prefix_sums([len(part) for part in parts]),
            lane=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
            duration_ns=duration[codes],
            need=need[codes],
            freed=freed[codes],
            following=after,
            lag_ns=lag[codes],
            waits_for=waits,
            movable=moves[kinds],
            room=np.asarray(room, dtype=np.int64),
        )
        return jobs, codes

    def _operation_arrays(self, present: frozenset[tuple[int, int]]) -> tuple[np.ndarray, ...]:
        """Return durations, needed and freed bytes, successors and their lags, by number; ``present``: (kind, s)."""
        size = len(self.allocation.stages) * len(KINDS)
        waiting = {(kind, s): self._after(kind, s, present) for kind, s in present}
        most = max(map(len, waiting.values()))
        duration, need, freed = (np.zeros((size, self._number), dtype=np.int64) for _ in range(3))
        following = np.full((size, self._number, most), -1, dtype=np.int64)
        lag = np.zeros((size, self._number, most), dtype=np.int64)
        for kind, s in present:
            line = s * len(KINDS) + kind
            apart = (RECOMPUTE, s) in present
            spent = [self._spent(kind, s, c, apart) for c in range(len(self._counts))]
            for array, column in zip((duration, need, freed), zip(*spent, strict=True), strict=True):
                array[line] = np.repeat(column, self._counts)
            for k, (after, direction) in enumerate(waiting[kind, s]):
                following[line, :, k] = after * self._number + np.arange(self._number)
                if direction is not None:
                    lag[line, :, k] = np.repeat(self._graph.lags_ns(s, direction), self._counts)
        flat = size * self._number
        return duration.ravel(), need.ravel(), freed.ravel(), following.reshape(flat, -1), lag.reshape(flat, -1)

    def _spent(self, kind: int, s: int, c: int, apart: bool) -> tuple[int, int, int]:
        """Return the duration, the bytes needed from the start and the bytes freed at the end of an operation."""
        stage, cost, rows = self.allocation.stages[s], self._graph.costs[s][c], self._graph.classes[c][0]
        kept = activation_bytes(self.problem, stage, rows)
        again = stage_costs(self.problem, stage.plain, rows).kept_bytes - cost.kept_bytes if apart else 0
        starts, ends = {FORWARD: kept, RECOMPUTE: again}, {BACKWARD: kept + again, WEIGHT: kept + again}
        return cost.durations_ns(apart=apart)[kind], starts.get(kind, 0), ends.get(kind, 0)

    def _after(self, kind: int, s: int, present: frozenset[tuple[int, int]]) -> list[tuple[int, int | None]]:
        """Return the (stage, kind) lines that wait for an operation, and the direction of the transfer between, if any.

        Where a stage has whole and split backwards, both lines wait: a micro-batch has an operation on one of them.
        """
        size, other = len(KINDS), None
        if kind == FORWARD and (other := self.allocation.next(s)) is not None:
            lines: list[tuple[int, int | None]] = [(other * size + FORWARD, 0)]
        elif kind in (FORWARD, RECOMPUTE):
            lines = [(s * size + each, None) for each in (INPUT, BACKWARD) if (each, s) in present]
        elif kind in (BACKWARD, INPUT) and (other := self.allocation.previous(s)) is not None:
            lines = [(other * size + each, 1) for each in (INPUT, BACKWARD) if (each, other) in present]
        else:
            lines = []
        follower = {FORWARD: RECOMPUTE, INPUT: WEIGHT}.get(kind)
        return [*lines, (s * size + follower, None)] if (follower, s) in present and follower is not None else lines
