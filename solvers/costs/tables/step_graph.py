"""A step of an allocation as a graph: its operations, the transfers between them, their resources and their bytes.

The simulator, list scheduling, job shops, bounds and explanations read this graph; the orders of operations are theirs.
Lists are by stage number, then by *row class*: micro-batches have one size, or two, the larger ones first.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from penstock.solvers.costs.buckets import Bucket
from penstock.solvers.costs.memory import Static, static_bytes, step_bytes
from penstock.solvers.costs.reductions import ReductionGroup, group_buckets, reduction_groups
from penstock.solvers.costs.stage import StageCosts, input_bytes, recomputed_inputs, stage_costs, stage_rows, update_ns
from penstock.solvers.costs.transfer import Transfer, boundary_bytes, channels, message_bytes, transfer
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem


class StageMemory(NamedTuple):
    """Bytes of one micro-batch on the busiest replica of a stage."""

    stash: int
    workspace: int
    rebuilt_inside: int
    rebuilt_whole: int
    received_input: int
    received_gradient: int
    sent_output: int
    sent_gradient: int


class StepGraph:
    """The graph of one allocation; ``classes``: (rows, number of micro-batches) of each row class, one or two."""

    def __init__(self, problem: Problem, allocation: Allocation) -> None:
        self.problem, self.allocation = problem, allocation
        self.classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)

    @cached_property
    def costs(self) -> list[list[StageCosts]]:
        """The costs of each stage's operations."""
        stages = self.allocation.stages
        return [[stage_costs(self.problem, stage, rows) for rows, _count in self.classes] for stage in stages]

    @cached_property
    def moves(self) -> list[tuple[list[Transfer | None], list[Transfer | None]]]:
        """The transfers from each stage forward and backward; None where nothing is sent."""
        return [(self._moves(s, 0), self._moves(s, 1)) for s in range(len(self.allocation.stages))]

    def _moves(self, s: int, way: int) -> list[Transfer | None]:
        return [transfer(self.problem, self.allocation, s, rows, way) for rows, _count in self.classes]

    def lags_ns(self, s: int, way: int) -> list[int]:
        """Return the duration of each transfer that a stage sends forward (0) or backward (1); 0 without a transfer."""
        return [0 if move is None else move.duration_ns for move in self.moves[s][way]]

    def channels(self, s: int, way: int, c: int = 0) -> tuple[int, ...]:
        """Return the resources that a transfer from a stage takes; none where nothing is sent."""
        move = self.moves[s][way][c]
        return () if move is None else channels(self.problem.rules, move.resources, s - way, way)

    @cached_property
    def reductions(self) -> list[tuple[ReductionGroup, tuple[Bucket, ...]]]:
        """The groups of stages that reduce gradients together, with their buckets."""
        return [(group, group_buckets(self.problem, group)) for group in reduction_groups(self.allocation)]

    @cached_property
    def update_ns(self) -> list[int]:
        """The time of each stage's optimizer step."""
        return [update_ns(self.problem, stage) for stage in self.allocation.stages]

    @cached_property
    def static(self) -> list[Static]:
        """The bytes that each stage takes for the whole step."""
        return [static_bytes(self.problem, stage) for stage in self.allocation.stages]

    @cached_property
    def step_bytes(self) -> list[int]:
        """The bytes that each stage's optimizer step takes while it runs."""
        return [step_bytes(self.problem, stage) for stage in self.allocation.stages]

    def counts(self, s: int, device: int | None = None) -> list[int]:
        """Return how many micro-batches of each row class pass through a stage, or through one of its devices."""
        stage, batches, turn, turns = self.allocation.stages[s], self.allocation.micro_batches(s), 0, 1
        if device is not None and stage.dispatch == "round_robin":
            turn, turns = stage.devices.index(device), stage.replicas
        start, numbers = 0, []
        for _rows, count in self.classes:
            first, start = max(start, batches.start), start + count
            numbers.append(len(range(first + (turn - first) % turns, min(start, batches.stop), turns)))
        return numbers

    @cached_property
    def memory(self) -> list[list[StageMemory]]:
        """The bytes that one micro-batch takes on each stage."""
        classes = range(len(self.classes))
        return [[self._memory(s, c) for c in classes] for s in range(len(self.allocation.stages))]

    def _memory(self, s: int, c: int) -> StageMemory:
        stage, cost, rows = self.allocation.stages[s], self.costs[s][c], self.classes[c][0]
        plain = stage_costs(self.problem, stage.plain, rows) if stage.recomputes else cost
        received = self._buffer(s, self.allocation.previous(s), c, 0)
        rebuilt = recomputed_inputs(self.problem, stage, stage_rows(stage, rows))
        return StageMemory(
            stash=cost.kept_bytes + self._handed_input(s, rows, received),
            workspace=plain.workspace_bytes,
            rebuilt_inside=cost.workspace_bytes - plain.workspace_bytes,
            rebuilt_whole=plain.kept_bytes - cost.kept_bytes + rebuilt,
            received_input=received,
            received_gradient=self._buffer(s, self.allocation.next(s), c, 1),
            sent_output=self._buffer(s, s, c, 0),
            sent_gradient=self._buffer(s, s, c, 1),
        )

    def _handed_input(self, s: int, rows: int, received: int) -> int:
        """Return the input bytes that a stage recomputing its first layers keeps if one on its devices passes it on.

        A received input is a buffer; without buffers ``kept_bytes`` includes it.
        """
        stage = self.allocation.stages[s]
        begins = any(first == stage.first for first, _last in stage.recompute)
        if not begins or received or not self.problem.memory.count_buffers or self.allocation.previous(s) is None:
            return 0
        return input_bytes(self.problem, stage.first, stage_rows(stage, rows))

    def _buffer(self, holder: int, sender: int | None, c: int, way: int) -> int:
        """Return the bytes of a send or receive buffer on ``holder`` for the message of ``sender``; 0 without a
        message.

        A receiver of an encoded message has buffers for the message and for the decoded tensors.
        """
        if sender is None or not self.problem.memory.count_buffers or self.moves[sender][way][c] is None:
            return 0
        source, stage = self.allocation.stages[sender], self.allocation.stages[holder]
        cut = source.last if way == 0 else source.first - 1
        share = stage_rows(stage, self.classes[c][0])
        size = boundary_bytes(self.problem, cut, share, way)
        coded = source.coded[1 - way] and holder != sender
        return size + message_bytes(self.problem, cut, share, way, coded=True) if coded else size
