"""Stages and edges of plans of one pipeline, each costed once and numbered, and the proven bounds of such plans.

Stages share no devices, and a stage's replicas share the rows of a micro-batch. A plan is then a row of stage and edge
numbers. Its bound is the bound of ``stage_windows`` with the work of each stage (docs/theory/bounds.md, section 2). The
costs are the costs of ``StageTimes``: with micro-batches of two sizes, single steps count with the quicker one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD
from penstock.solvers.bounds.stage_windows import channel_kind
from penstock.solvers.bounds.windows_kernel import FREE, Chains, window_bounds
from penstock.solvers.costs.buckets import Bucket, exposed_ns, leads_ns, whole_buckets
from penstock.solvers.costs.infinity import FAR_NS, NEVER_NS
from penstock.solvers.costs.memory import free_bytes, static_bytes
from penstock.solvers.costs.stage import StageCosts, stage_costs, stage_rows, update_ns
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.costs.transfer import boundary_bytes
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem

(UPDATE, EXPOSED, WORK, SPARE, KEPT, INPUT, GRADIENT, TIMELESS, CUT_OFF) = (4, *range(6, 14))
"""Columns of a stage after its forwards (0, 1) and backwards (2, 3) of both row classes.

* Its update. Column 5: the update and the time that all-reduces add to the last backward.
* The least time that all-reduces add; all that it computes in a step.
* The bytes left for in-flight micro-batches; the bytes that each of these keeps, and its received input.
* The bytes of a received gradient.
* Whether an operation takes no time; whether nothing connects the replicas.
"""
(OUT, BACK, KIND, UNLINKED) = range(4, 8)
"""Columns of an edge after its forward transfers (0, 1) and backward transfers (2, 3; -1 where nothing travels).

The smallest transfer of each direction, how the two directions exclude each other, whether nothing connects its stages.
"""


class Rows(NamedTuple):
    """N plans as numbers: the number of stages (N,), the stages (N, S), and the edge after each; 0 after the last."""

    lengths: np.ndarray
    stages: np.ndarray
    edges: np.ndarray

    def of(self, chosen: np.ndarray) -> Rows:
        """Return the chosen plans, in the given order."""
        return Rows(*(column[chosen] for column in self))


class Reduced(NamedTuple):
    """The buckets of a stage and, by row class, how long before the end of the last backward each is ready."""

    buckets: tuple[Bucket, ...]
    leads: list[list[int]]


class ChainCosts:
    """Costed stages and edges for one number of micro-batches; ``stage_of`` gives the stage of a number.

    ``pairs`` counts the work of costing them: devices of a stage squared, devices of both sides of an edge multiplied.
    ``reduced`` and ``links`` are, by number, the buckets of a stage and the links that an edge's transfers pass, by
    direction and row class; edge 0 means no edge.
    """

    def __init__(self, problem: Problem, num_micro_batches: int) -> None:
        self.problem = problem
        self.num_micro_batches = num_micro_batches
        self.stage_of: list[Stage] = []
        self.reduced: list[Reduced] = []
        self.links: list[list[tuple[int, ...]]] = [[()] * 4]
        self.pairs = 0
        self.classes = row_classes(problem.global_batch_size, num_micro_batches)
        self._stages = Table(14)
        self._edges = Table(8)
        self._edges.add([-1, -1, -1, -1, 0, 0, FREE, 0])
        self._stage_numbers: dict[Stage, int] = {}
        self._edge_numbers: dict[tuple[int, tuple[int, ...], tuple[int, ...]], int] = {}

    def stage(self, stage: Stage) -> int:
        """Return the number of a stage; cost it at its first use."""
        number = self._stage_numbers.get(stage)
        if number is None:
            number = self._stage_numbers[stage] = len(self.stage_of)
            self.stage_of.append(stage)
            self.pairs += stage.replicas**2
            self._cost_stage(stage)
        return number

    def edge(self, source: Stage, target: Stage) -> int:
        """Return the number of the edge between two stages; cost it at its first use."""
        key = (target.first, source.devices, target.devices)
        number = self._edge_numbers.get(key)
        if number is None:
            number = self._edge_numbers[key] = self._edges.count
            self.pairs += source.replicas * target.replicas
            self._cost_edge(source, target)
        return number

    @property
    def stage_columns(self) -> np.ndarray:
        """All numbered stages: (stages, columns) int64."""
        return self._stages.rows

    @property
    def edge_columns(self) -> np.ndarray:
        """All numbered edges: (edges, columns) int64."""
        return self._edges.rows

    def rows(self, plans: Sequence[tuple[Stage, ...]]) -> Rows:
        """Return the plans as rows of numbers."""
        most = max((len(stages) for stages in plans), default=1)
        rows = Rows(
            *(np.zeros(shape, dtype=np.int32) for shape in (len(plans), (len(plans), most), (len(plans), most)))
        )
        for n, stages in enumerate(plans):
            rows.lengths[n] = len(stages)
            rows.stages[n, : len(stages)] = [self.stage(stage) for stage in stages]
            rows.edges[n, : len(stages) - 1] = [self.edge(a, b) for a, b in pairwise(stages)]
        return rows

    def stages(self, rows: Rows, n: int) -> tuple[Stage, ...]:
        """Return the stages of plan ``n``."""
        return tuple(self.stage_of[p] for p in rows.stages[n, : rows.lengths[n]].tolist())

    def limits(self, rows: Rows) -> np.ndarray:
        """Return (N, S) the most in-flight micro-batches of each stage; 0 where not one fits, M where all do."""
        edges = self.edge_columns
        stage, inside = self.stage_columns[rows.stages], np.arange(rows.stages.shape[1]) < rows.lengths[:, None]
        after, before = edges[rows.edges], np.roll(edges[rows.edges], 1, axis=1)
        each = stage[..., KEPT] + np.where(before[..., 0] >= 0, stage[..., INPUT], 0)
        spare = stage[..., SPARE] - np.where(after[..., 2] >= 0, stage[..., GRADIENT], 0)
        count = np.where(each > 0, spare // np.maximum(each, 1), self.num_micro_batches)
        count = np.where(spare >= 0, np.minimum(count, self.num_micro_batches), 0)
        return np.where(inside, count, self.num_micro_batches)

    def least_limit(self, number: int) -> int:
        """Return the limit of a stage as ``limits`` does, whatever its neighbours are."""
        stage = self.stage_columns[number]
        each, spare = int(stage[KEPT] + stage[INPUT]), int(stage[SPARE] - stage[GRADIENT])
        return self.num_micro_batches if each == 0 and spare >= 0 else max(0, spare // max(1, each))

    def bounds_ns(self, rows: Rows, limits: np.ndarray | None = None) -> np.ndarray:
        """Return (N,) a proven bound of each plan under any order of whole backwards.

        ``limits`` (N, S) replaces the plans' limits.
        """
        bounds = np.empty(len(rows.lengths), dtype=np.int64)
        limits = np.ascontiguousarray(self.limits(rows) if limits is None else limits)
        for count in np.unique(rows.lengths).tolist():
            which = np.flatnonzero(rows.lengths == count)
            bounds[which] = self._bounds(rows.of(which), limits[which], count)
        return bounds

    def _bounds(self, rows: Rows, limits: np.ndarray, count: int) -> np.ndarray:
        stage = self.stage_columns[rows.stages[:, :count]]
        edge = self.edge_columns[rows.edges[:, :count]]
        back = np.concatenate((np.zeros_like(edge[:, :1, BACK]), edge[:, :-1, BACK]), axis=1)
        forward, backward = stage[..., 0:2].min(axis=-1), stage[..., 2:4].min(axis=-1)
        columns = (forward, backward, edge[..., OUT], back, edge[..., KIND], stage[..., EXPOSED], stage[..., UPDATE])
        chains = Chains(*(np.ascontiguousarray(each) for each in (*columns, limits[:, :count], stage[..., WORK])))
        bounds, scratch = np.empty(len(rows.lengths), dtype=np.int64), np.zeros((2, count), dtype=np.int64)
        window_bounds(chains, self.num_micro_batches, bounds, scratch[0], scratch[1])
        return bounds

    def _cost_stage(self, stage: Stage) -> None:
        problem, sizes = self.problem, [rows for rows, _count in self.classes]
        costs = [stage_costs(problem, stage, rows) for rows in sizes]
        buckets = whole_buckets(problem, stage)
        cut_off = any(bucket.duration_ns >= NEVER_NS for bucket in buckets)
        leads = [[lead for lead, _weight in leads_ns(problem, stage, rows, buckets)] for rows in sizes]
        exposed = [exposed_ns(buckets, lead) for lead in leads]
        step = update_ns(problem, stage)
        work = sum(count * cost.passes_ns for cost, (_rows, count) in zip(costs, self.classes, strict=True))
        forward, backward, *_rest = zip(*(costs[c].durations_ns() for c in (0, -1)), strict=True)
        timeless = 0 in forward or 0 in backward
        after = min(exposed[-1], FAR_NS) + step
        memory = self._memory(stage, costs)
        self._stages.add([*forward, *backward, step, after, min(FAR_NS, *exposed), work, *memory, timeless, cut_off])
        self.reduced.append(Reduced(buckets, leads))

    def _memory(self, stage: Stage, costs: Sequence[StageCosts]) -> list[int]:
        """Return SPARE, KEPT, INPUT and GRADIENT, counted as in ``StageTimes.in_flight``."""
        problem, least = self.problem, self.classes[-1][0]
        free = free_bytes(problem, stage.devices) - static_bytes(problem, stage).total
        if all(cost.durations_ns()[BACKWARD] > 0 for cost in costs):
            free -= min(cost.workspace_bytes for cost in costs)
        share = stage_rows(stage, least) if problem.memory.count_buffers else 0
        received = boundary_bytes(problem, stage.first - 1, share, 0) if stage.first > 0 else 0
        gradient = boundary_bytes(problem, stage.last, share, 1) if stage.last < problem.num_layers - 1 else 0
        return [free, min(cost.kept_bytes for cost in costs), received, gradient]

    def _cost_edge(self, source: Stage, target: Stage) -> None:
        graph = StepGraph(self.problem, single_pipeline((source, target), self.num_micro_batches))
        moves = [graph.moves[s][s] for s in (0, 1)]
        ends = [each[c] for each in moves for c in (0, -1)]
        times = [-1 if move is None else move.duration_ns for move in ends]
        least = [min(FAR_NS, *graph.lags_ns(s, s)) for s in (0, 1)]
        kind = channel_kind(self.problem.rules, *moves)
        self._edges.add([*times, *least, kind, max(times) >= NEVER_NS])
        self.links.append([() if move is None else move.resources for move in ends])


class Table:
    """A growing array of int64 rows; ``rows`` has the rows added so far."""

    def __init__(self, columns: int) -> None:
        self._array = np.zeros((64, columns), dtype=np.int64)
        self.count = 0

    def add(self, row: Sequence[int]) -> None:
        """Append a row."""
        if self.count == len(self._array):
            self._array = np.concatenate((self._array, np.zeros_like(self._array)))
        self._array[self.count] = row
        self.count += 1

    @property
    def rows(self) -> np.ndarray:
        """The rows added so far: (count, columns)."""
        return self._array[: self.count]
