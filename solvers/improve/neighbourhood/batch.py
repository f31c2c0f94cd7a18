"""Bulk simulation: the judge's times of many plans at once, from rows of numbers instead of objects (SOLVERS D).

The plans have one pipeline, whose stages share no devices, replicas by rows, and early-backward order. A plan is a row
of numbers of costed stages and edges (``ChainCosts``), and its time is the judge's to the nanosecond; only in a shared
network the time that sums of tied parameters wait for links is missing (``batch_ties``). The judge decides whether a
plan fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from penstock.solvers.bounds.chain_costs import CUT_OFF, TIMELESS, UNLINKED, UPDATE, ChainCosts, Rows, Table
from penstock.solvers.costs.buckets import pieces
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.improve.neighbourhood.batch_ties import BulkTies
from penstock.solvers.judge.clocks.batch import Plans, private_makespans
from penstock.solvers.judge.clocks.batch_shared import Wants, shared_makespans
from penstock.solvers.judge.clocks.channels import FREE, FULL, HALF
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.schedules.early_backward import early_backward

CHANNELS = {"none": FREE, "full": FULL, "half": HALF}
MANY = 64
"""Plans from which threads are worth their start."""


class Catalogue(ChainCosts):
    """Costed stages and edges of one number of micro-batches whose plans can also be simulated."""

    def __init__(self, problem: Problem, num_micro_batches: int) -> None:
        super().__init__(problem, num_micro_batches)
        self._ties = BulkTies(problem)
        self._wants = Lists()
        self._room: list[int] = []

    def room(self, rows: Rows) -> np.ndarray:
        """Return (N, S) micro-batches in flight that surely fit, with all buffers; at least 1 (ALGORITHMS 1.7)."""
        for stage in self.stage_of[len(self._room) :]:
            fits = micro_batches_that_fit(self.problem, stage, self.classes[0][0])
            self._room.append(max(1, min(fits, self.num_micro_batches)))
        inside = np.arange(rows.stages.shape[1]) < rows.lengths[:, None]
        return np.where(inside, np.asarray(self._room)[rows.stages], self.num_micro_batches)

    def makespans_ns(self, rows: Rows, warmups: np.ndarray, threads: int = 1) -> np.ndarray:
        """Return (N,) the judge's time of each plan under its warm-ups (N, S).

        NEVER_NS where no link connects its devices, or where it waits for ever.
        """
        times_ns = np.empty(len(rows.lengths), dtype=np.int64)
        ready = np.zeros(rows.stages.shape, dtype=np.int64)
        wants = self._wants.arrays(self) if self.problem.rules.shared else None
        plans = Plans(*(np.ascontiguousarray(each, dtype=np.int32) for each in (*rows, warmups)))
        slices = np.linspace(0, len(times_ns), (threads if len(times_ns) >= MANY else 1) + 1).astype(int)
        parts = [slice(low, high) for low, high in pairwise(slices.tolist())]
        if len(parts) == 1:
            self._run(plans, wants, times_ns, ready)
        else:
            with ThreadPoolExecutor(len(parts)) as pool:
                done = [
                    pool.submit(self._run, Plans(*(each[p] for each in plans)), wants, times_ns[p], ready[p])
                    for p in parts
                ]
            for each in done:
                each.result()
        self._finish_ties(rows, ready, times_ns)
        self._judge_timeless(rows, warmups, times_ns)
        times_ns[self._unreachable(rows)] = NEVER_NS
        return times_ns

    def _run(self, plans: Plans, wants: Wants | None, times_ns: np.ndarray, ready: np.ndarray) -> None:
        sizes = self.num_micro_batches, self.classes[0][1]
        if wants is not None:
            shared_makespans(self.stage_columns, self.edge_columns, wants, plans, *sizes, times_ns, ready)
            return
        channel = CHANNELS[self.problem.rules.channel]
        private_makespans(self.stage_columns, self.edge_columns, plans, *sizes, channel, times_ns, ready)

    def _finish_ties(self, rows: Rows, ready: np.ndarray, times_ns: np.ndarray) -> None:
        """Add the sums of ties, which follow all operations, and the steps after them."""
        for n in np.flatnonzero(times_ns < NEVER_NS).tolist() if self._ties else ():
            numbers = rows.stages[n, : rows.lengths[n]].tolist()
            plan = numbers, [self.stage_of[number] for number in numbers]
            times_ns[n] = self._ties.finish_ns(plan, ready[n, : len(numbers)], self.stage_columns[numbers, UPDATE])

    def _judge_timeless(self, rows: Rows, warmups: np.ndarray, times_ns: np.ndarray) -> None:
        """Simulate plans with operations of no duration by the judge, because the half-duplex kernel cannot."""
        if self.problem.rules.shared or self.problem.rules.channel != "half":
            return
        for n in np.flatnonzero(self._any(rows, self.stage_columns[rows.stages, TIMELESS])).tolist():
            plan = single_pipeline(self.stages(rows, n), self.num_micro_batches)
            depths = [int(k) for k in warmups[n, : len(plan.stages)]]
            growing = any(min(b, self.num_micro_batches) > a for a, b in pairwise(depths))
            orders = None if growing else early_backward(self.problem, plan, warmup=depths)
            times_ns[n] = NEVER_NS if orders is None else makespan_ns(self.problem, plan, orders)

    def _unreachable(self, rows: Rows) -> np.ndarray:
        cut_off = self._any(rows, self.stage_columns[rows.stages, CUT_OFF])
        return np.asarray(cut_off | self._any(rows, self.edge_columns[rows.edges, UNLINKED]))

    def _any(self, rows: Rows, flags: np.ndarray) -> np.ndarray:
        inside = np.arange(flags.shape[1]) < rows.lengths[:, None]
        return np.asarray(((flags > 0) & inside).any(axis=1))


class Lists:
    """The links that stages and edges use in a shared network, in the form of ``Wants``."""

    def __init__(self) -> None:
        self._starts = {name: Table(1) for name in ("edge", "ring", "bucket")}
        self._values = {name: Table(1) for name in ("edge", "ring", "bucket", "lead")}
        for table in self._starts.values():
            table.add([0])

    def arrays(self, costs: ChainCosts) -> Wants:
        """Return the kernel's lists of all stages and edges that have been costed so far."""
        for links in costs.links[self._starts["edge"].count // 4 :]:
            for each in links:
                self._add("edge", each)
        for buckets, leads in costs.reduced[self._starts["ring"].count - 1 :]:
            self._add("ring", buckets[0].resources if buckets else ())
            parts = [
                (piece.duration_ns, first, last)
                for bucket, first, last in zip(buckets, leads[0], leads[-1], strict=True)
                for piece in pieces(costs.problem, bucket)
            ]
            self._add("bucket", [duration_ns for duration_ns, _first, _last in parts])
            for _duration_ns, first, last in parts:
                self._values["lead"].add([first])
                self._values["lead"].add([last])
        edge, ring, bucket = (table.rows[:, 0] for table in self._starts.values())
        edge_links, ring_links, bucket_ns, lead_ns = (table.rows[:, 0] for table in self._values.values())
        count = len(costs.problem.network.resources)
        return Wants(count, edge, edge_links, ring, ring_links, bucket, bucket_ns, lead_ns)

    def _add(self, name: str, values: Sequence[int]) -> None:
        for value in values:
            self._values[name].add([value])
        self._starts[name].add([self._values[name].count])
