"""Bulk simulation: the judge's times of many plans at once, from rows of numbers instead of objects (SOLVERS D).

For plans of one pipeline whose stages lie on devices of their own, replicas by rows, in early-backward order. Each
stage and each hop between two stages is costed once for a number of micro-batches and numbered (*pieces*, *hops*); a
plan is then a row of numbers, and its time is the judge's to the nanosecond (in a shared network without what sums of
tied parameters wait for links: ``bulk_ties``). So are the proven bound (BOUNDS section 2)
and how many micro-batches each stage can hold at most; whether a plan fits is for the judge to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.stage_windows import channel_kind
from penstock.solvers.bounds.windows_kernel import APART, SERIAL, Chains, window_bounds
from penstock.solvers.bounds.windows_kernel import FREE as NO_CHANNEL
from penstock.solvers.costs.durations import (
    UNREACHABLE_NS,
    Bucket,
    StageCosts,
    boundary_bytes,
    buckets,
    stage_costs,
    stage_rows,
    transfer,
    update_ns,
)
from penstock.solvers.costs.memory import micro_batches_that_fit, static_bytes
from penstock.solvers.improve.neighbourhood.batch_ties import BulkTies
from penstock.solvers.judge.clocks.batch import Plans, private_makespans
from penstock.solvers.judge.clocks.batch_shared import Wants, shared_makespans
from penstock.solvers.judge.clocks.channels import FREE, FULL, HALF
from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.slices import row_classes
from penstock.solvers.schedules.early_backward import early_backward

FAR_NS = 2**45
"""Stands in bounds for whatever takes longer: ten hours, so that sums stay below 2^63."""
CHANNELS = {"none": FREE, "full": FULL, "half": HALF}
KINDS = {"serial": SERIAL, "apart": APART, "free": NO_CHANNEL}

(EXPOSED, WORK, SPARE, KEPT, INPUT, GRADIENT, ROOM, TIMELESS, CUT_OFF) = range(6, 15)
"""Further columns of a piece: what all-reduces add at least to the last backward; all that it computes; bytes that
are left beside everything but micro-batches in flight; what each of these keeps, and its received input; a received
gradient; micro-batches that surely fit; whether an operation takes no time; whether nothing connects its replicas."""
(OUT, BACK, KIND, UNLINKED) = range(4, 8)
"""Further columns of a hop: its least times, how its two ways exclude each other, whether nothing connects it."""
MANY = 64
"""Plans from which threads are worth their start."""


class Rows(NamedTuple):
    """N plans by number: stages (N,), pieces (N, S) and the hops behind them; what is behind a plan's last is 0."""

    stages: np.ndarray
    pieces: np.ndarray
    hops: np.ndarray

    def of(self, chosen: np.ndarray) -> Rows:
        """Some of them, in the order asked for."""
        return Rows(*(column[chosen] for column in self))


class Catalogue:
    """Pieces and hops of one number of micro-batches, by number; ``stage_of`` gives a piece's stage.

    ``pairs``: devices of a piece times themselves, of a hop times each other, of all that were costed: what that took.
    """

    def __init__(self, problem: Problem, num_micro_batches: int) -> None:
        self.problem = problem
        self.num_micro_batches = num_micro_batches
        self.stage_of: list[Stage] = []
        self.pairs = 0
        self._classes = row_classes(problem.global_batch_size, num_micro_batches)
        self._pieces = Table(15)
        self._hops = Table(8)
        self._hops.add([-1, -1, -1, -1, 0, 0, NO_CHANNEL, 0])
        self._piece_ids: dict[Stage, int] = {}
        self._hop_ids: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}
        self._ties = BulkTies(problem)
        self._wants = Lists(problem)
        self._wants.add_hop([()] * 4)

    def piece(self, stage: Stage) -> int:
        """The number of a stage."""
        known = self._piece_ids.get(stage)
        if known is None:
            known = self._piece_ids[stage] = len(self.stage_of)
            self.stage_of.append(stage)
            self.pairs += stage.replicas**2
            self._cost_stage(stage)
        return known

    def hop(self, source: Stage, target: Stage) -> int:
        """The number of what is between two stages."""
        key = (target.first, source.devices, target.devices)
        known = self._hop_ids.get(key)
        if known is None:
            known = self._hop_ids[key] = self._hops.count
            self.pairs += source.replicas * target.replicas
            self._cost_hop(source, target)
        return known

    def rows(self, plans: Sequence[tuple[Stage, ...]]) -> Rows:
        """Plans by number."""
        most = max((len(stages) for stages in plans), default=1)
        made = Rows(
            *(np.zeros(shape, dtype=np.int32) for shape in (len(plans), (len(plans), most), (len(plans), most)))
        )
        for n, stages in enumerate(plans):
            made.stages[n] = len(stages)
            made.pieces[n, : len(stages)] = [self.piece(stage) for stage in stages]
            made.hops[n, : len(stages) - 1] = [self.hop(a, b) for a, b in pairwise(stages)]
        return made

    def stages(self, rows: Rows, n: int) -> tuple[Stage, ...]:
        """The stages of a plan."""
        return tuple(self.stage_of[p] for p in rows.pieces[n, : rows.stages[n]].tolist())

    def makespans_ns(self, rows: Rows, warmups: np.ndarray, threads: int = 1) -> np.ndarray:
        """(N,) the time of each plan under its warm-ups (N, S), as the judge would have it.

        UNREACHABLE_NS where nothing connects its devices, or where it waits for ever.
        """
        found = np.empty(len(rows.stages), dtype=np.int64)
        ready = np.zeros(rows.pieces.shape, dtype=np.int64)
        plans = Plans(*(np.ascontiguousarray(each, dtype=np.int32) for each in (*rows, warmups)))
        slices = np.linspace(0, len(found), (threads if len(found) >= MANY else 1) + 1).astype(int)
        parts = [slice(low, high) for low, high in pairwise(slices.tolist())]
        if len(parts) == 1:
            self._run(plans, found, ready)
        else:
            with ThreadPoolExecutor(len(parts)) as pool:
                done = [pool.submit(self._run, Plans(*(each[p] for each in plans)), found[p], ready[p]) for p in parts]
            for each in done:
                each.result()
        self._finish_ties(rows, ready, found)
        self._judge_timeless(rows, warmups, found)
        found[self._unreachable(rows)] = UNREACHABLE_NS
        return found

    def _run(self, plans: Plans, found: np.ndarray, ready: np.ndarray) -> None:
        cut, rules = self._classes[0][1], self.problem.rules
        if rules.shared:
            wants = self._wants.arrays()
            sizes = self.num_micro_batches, cut
            shared_makespans(self._pieces.rows, self._hops.rows, wants, plans, *sizes, found, ready)
            return
        channel = CHANNELS[rules.channel]
        sizes = self.num_micro_batches, cut
        private_makespans(self._pieces.rows, self._hops.rows, plans, *sizes, channel, found, ready)

    def _finish_ties(self, rows: Rows, ready: np.ndarray, found: np.ndarray) -> None:
        """Steps follow the sums of ties, which follow everything else."""
        for n in np.flatnonzero(found < UNREACHABLE_NS).tolist() if self._ties else ():
            pieces = rows.pieces[n, : rows.stages[n]].tolist()
            stages = [self.stage_of[p] for p in pieces]
            found[n] = self._ties.finish_ns((pieces, stages), ready[n, : len(pieces)], self._pieces.rows[pieces, 4])

    def _judge_timeless(self, rows: Rows, warmups: np.ndarray, found: np.ndarray) -> None:
        """The half-duplex kernel needs operations that take time; the judge does not."""
        if self.problem.rules.shared or self.problem.rules.channel != "half":
            return
        for n in np.flatnonzero(self._any(rows, self._pieces.rows[rows.pieces, TIMELESS])).tolist():
            plan = single_pipeline(self.stages(rows, n), self.num_micro_batches)
            own = [int(k) for k in warmups[n, : len(plan.stages)]]
            growing = any(min(b, self.num_micro_batches) > a for a, b in pairwise(own))
            orders = None if growing else early_backward(self.problem, plan, warmup=own)
            found[n] = UNREACHABLE_NS if orders is None else makespan_ns(self.problem, plan, orders)

    def _unreachable(self, rows: Rows) -> np.ndarray:
        pieces = self._any(rows, self._pieces.rows[rows.pieces, CUT_OFF])
        return np.asarray(pieces | self._any(rows, self._hops.rows[rows.hops, UNLINKED]))

    def _any(self, rows: Rows, flags: np.ndarray) -> np.ndarray:
        inside = np.arange(flags.shape[1]) < rows.stages[:, None]
        return np.asarray(((flags > 0) & inside).any(axis=1))

    def limits(self, rows: Rows) -> np.ndarray:
        """(N, S) micro-batches that each stage can have in flight at most; 0 where not one fits, M where all do."""
        table, hops = self._pieces.rows, self._hops.rows
        piece, inside = table[rows.pieces], np.arange(rows.pieces.shape[1]) < rows.stages[:, None]
        after, before = hops[rows.hops], np.roll(hops[rows.hops], 1, axis=1)
        each = piece[..., KEPT] + np.where(before[..., 0] >= 0, piece[..., INPUT], 0)
        spare = piece[..., SPARE] - np.where(after[..., 2] >= 0, piece[..., GRADIENT], 0)
        count = np.where(each > 0, spare // np.maximum(each, 1), self.num_micro_batches)
        count = np.where(spare >= 0, np.minimum(count, self.num_micro_batches), 0)
        return np.where(inside, count, self.num_micro_batches)

    def room(self, rows: Rows) -> np.ndarray:
        """(N, S) micro-batches in flight that surely fit, with all buffers; at least 1 (ALGORITHMS 1.7)."""
        inside = np.arange(rows.pieces.shape[1]) < rows.stages[:, None]
        return np.where(inside, self._pieces.rows[rows.pieces, ROOM], self.num_micro_batches)

    def bounds_ns(self, rows: Rows) -> np.ndarray:
        """(N,) a proven bound of each plan under any order of whole backwards."""
        found = np.empty(len(rows.stages), dtype=np.int64)
        limits = np.ascontiguousarray(self.limits(rows))
        for count in np.unique(rows.stages).tolist():
            which = np.flatnonzero(rows.stages == count)
            found[which] = self._bounds(rows.of(which), limits[which], count)
        return found

    def _bounds(self, rows: Rows, limits: np.ndarray, count: int) -> np.ndarray:
        piece = self._pieces.rows[rows.pieces[:, :count]]
        hop = self._hops.rows[rows.hops[:, :count]]
        back = np.concatenate((np.zeros_like(hop[:, :1, BACK]), hop[:, :-1, BACK]), axis=1)
        forward, backward = piece[..., 0:2].min(axis=-1), piece[..., 2:4].min(axis=-1)
        columns = (forward, backward, hop[..., OUT], back, hop[..., KIND], piece[..., EXPOSED], piece[..., 4])
        chains = Chains(*(np.ascontiguousarray(each) for each in (*columns, limits[:, :count], piece[..., WORK])))
        found, scratch = np.empty(len(rows.stages), dtype=np.int64), np.zeros((2, count), dtype=np.int64)
        window_bounds(chains, self.num_micro_batches, found, scratch[0], scratch[1])
        return found

    def _cost_stage(self, stage: Stage) -> None:
        problem, sizes = self.problem, [rows for rows, _count in self._classes]
        costs = [stage_costs(problem, stage, rows) for rows in sizes]
        made = buckets(problem, stage, 1)
        cut_off = any(bucket.duration_ns >= UNREACHABLE_NS for bucket in made)
        leads = [self._leads(stage, made, rows) for rows in sizes]
        exposed = [max(0, _behind(made, lead)) for lead in leads]
        step = update_ns(problem, stage)
        work = sum(count * _whole(cost) for cost, (_rows, count) in zip(costs, self._classes, strict=True))
        forward, backward = ([each[c] for c in (0, -1)] for each in _times(costs))
        timeless = 0 in forward or 0 in backward
        behind = min(exposed[-1], FAR_NS) + step
        memory = self._memory(stage, costs)
        self._pieces.add([*forward, *backward, step, behind, min(FAR_NS, *exposed), work, *memory, timeless, cut_off])
        self._wants.add_piece(made, leads)

    def _leads(self, stage: Stage, made: Sequence[Bucket], rows: int) -> list[int]:
        """How long before the end of a last backward of ``rows`` each bucket is ready."""
        if not self.problem.rules.overlap_all_reduce:
            return [0] * len(made)
        costs = self.problem.costs(self.problem.devices[stage.devices[0]].kind, stage_rows(stage, rows))
        return [int(costs.backward_ns[bucket.first] - costs.backward_ns[stage.first]) for bucket in made]

    def _memory(self, stage: Stage, costs: Sequence[StageCosts]) -> list[int]:
        """SPARE, KEPT, INPUT, GRADIENT and ROOM: as ``StageTimes.in_flight``, and as the clamp D of warm-ups."""
        problem, least = self.problem, self._classes[-1][0]
        free = min(problem.capacity_bytes(d) - problem.devices[d].context_bytes for d in stage.devices)
        free -= static_bytes(problem, stage).total
        workspace = 0 if min(cost.backward_ns + cost.recompute_ns for cost in costs) == 0 else None
        free -= min(cost.workspace_bytes for cost in costs) if workspace is None else workspace
        share = stage_rows(stage, least) if problem.memory.count_buffers else 0
        received = boundary_bytes(problem, stage.first - 1, share, 0) if stage.first > 0 else 0
        gradient = boundary_bytes(problem, stage.last, share, 1) if stage.last < problem.num_layers - 1 else 0
        room = max(1, min(micro_batches_that_fit(problem, stage, self._classes[0][0]), self.num_micro_batches))
        return [free, min(cost.kept_bytes for cost in costs), received, gradient, room]

    def _cost_hop(self, source: Stage, target: Stage) -> None:
        plan = single_pipeline((source, target), self.num_micro_batches)
        sizes = [rows for rows, _count in self._classes]
        moves = [[transfer(self.problem, plan, s, rows, s) for rows in sizes] for s in (0, 1)]
        times = [-1 if each[c] is None else each[c].duration_ns for each in moves for c in (0, -1)]  # type: ignore[union-attr]
        least = [min(FAR_NS, *(move.duration_ns if move else 0 for move in each)) for each in moves]
        kind = KINDS[channel_kind(self.problem.rules, *moves)]
        self._hops.add([*times, *least, kind, max(times) >= UNREACHABLE_NS])
        self._wants.add_hop([() if (move := each[c]) is None else move.resources for each in moves for c in (0, -1)])


def makespans_ns(problem: Problem, allocation: Allocation, warmups: np.ndarray, threads: int = 1) -> np.ndarray:
    """(N,) the times of one allocation under each of the warm-ups (N, S); see ``Catalogue.makespans_ns``."""
    catalogue = Catalogue(problem, allocation.num_micro_batches)
    rows = catalogue.rows([allocation.stages])
    return catalogue.makespans_ns(rows.of(np.zeros(len(warmups), dtype=np.int64)), warmups, threads)


class Table:
    """Rows of int64 that grow; ``rows`` are those that are there."""

    def __init__(self, columns: int) -> None:
        self._held = np.zeros((64, columns), dtype=np.int64)
        self.count = 0

    def add(self, row: Sequence[int]) -> None:
        """Behind the others."""
        if self.count == len(self._held):
            self._held = np.concatenate((self._held, np.zeros_like(self._held)))
        self._held[self.count] = row
        self.count += 1

    @property
    def rows(self) -> np.ndarray:
        """(count, columns)."""
        return self._held[: self.count]


class Lists:
    """What pieces and hops want of a shared network, as ``Wants`` has it; nothing is kept for a private one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._starts = {name: Table(1) for name in ("hop", "ring", "bucket")}
        self._values = {name: Table(1) for name in ("hop", "ring", "bucket", "lead")}
        for table in self._starts.values():
            table.add([0])

    def add_hop(self, links: Sequence[tuple[int, ...]]) -> None:
        """The next hop's links, by direction and row class."""
        for each in links if self._problem.rules.shared else ():
            self._add("hop", each)

    def add_piece(self, made: Sequence[Bucket], leads: Sequence[Sequence[int]]) -> None:
        """The next piece's buckets and ring."""
        if self._problem.rules.shared:
            self._add("ring", made[0].resources if made else ())
            self._add("bucket", [bucket.duration_ns for bucket in made])
            for first, last in zip(leads[0], leads[-1], strict=True):
                self._values["lead"].add([first])
                self._values["lead"].add([last])

    def _add(self, name: str, values: Sequence[int]) -> None:
        for value in values:
            self._values[name].add([value])
        self._starts[name].add([self._values[name].count])

    def arrays(self) -> Wants:
        """For the kernel."""
        hop, ring, bucket = (table.rows[:, 0] for table in self._starts.values())
        hop_links, ring_links, bucket_ns, lead_ns = (table.rows[:, 0] for table in self._values.values())
        count = len(self._problem.network.resources)
        return Wants(count, hop, hop_links, ring, ring_links, bucket, bucket_ns, lead_ns)


def _times(costs: Sequence[StageCosts]) -> tuple[list[int], list[int]]:
    """Forwards, and backwards with what they recompute, by row class."""
    return [cost.forward_ns for cost in costs], [cost.backward_ns + cost.recompute_ns for cost in costs]


def _whole(cost: StageCosts) -> int:
    return cost.forward_ns + cost.backward_ns + cost.recompute_ns


def _behind(made: Sequence[Bucket], leads: Sequence[int]) -> int:
    """What remains of the buckets, one after the other, after the last backward."""
    longest, behind = 0, 0
    for bucket, lead in zip(reversed(made), reversed(leads), strict=True):
        behind += bucket.duration_ns
        longest = max(longest, behind - lead)
    return longest
