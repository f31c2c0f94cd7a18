"""Proven bounds of all plans of a small space: every stage and every hop is costed once, then looked up.

The numbers are those of ``StageTimes``, the bound is that of ``windows`` (BOUNDS section 2) with each stage's work.
``bulk.Catalogue`` takes any plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import channel_kind
from penstock.solvers.bounds.windows_kernel import APART, FREE, SERIAL, Chains, window_bounds
from penstock.solvers.costs.durations import transfer
from penstock.solvers.costs.shortages import shortage_of
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.slices import row_classes
from penstock.solvers.planners.exact.enumeration import Placement, Space

WHOLE_BACKWARDS = Orders("any order", ())
"""Stands for every order of whole backwards where only the kinds of operations count."""

FAR_NS = 2**45
"""Stands for whatever takes longer, such as a way that does not exist: ten hours, and sums stay below 2^63."""

CHANNELS = {"serial": SERIAL, "apart": APART, "free": FREE}


class Piece(NamedTuple):
    """A stage by itself; times in ns, the most micro-batches that it can have in flight, its work in a step."""

    forward: int
    backward: int
    exposed: int
    update: int
    limit: int
    work: int


class Hop(NamedTuple):
    """The transfers between two stages, and how they exclude each other."""

    out: int
    back: int
    channel: int


def piece_of(problem: Problem, num_micro_batches: int, stage: Stage) -> Piece:
    """A stage, costed. Its room is that of a first stage, which holds no received inputs, so it is an upper bound."""
    plan = single_pipeline((stage,), num_micro_batches)
    times = StageTimes(problem, plan, WHOLE_BACKWARDS)
    holds = shortage_of(problem, plan, (1,)) is None
    return Piece(
        times.forward[0],
        times.backward[0],
        min(times.exposed[0], FAR_NS),
        times.update[0],
        min(times.in_flight(0), num_micro_batches) if holds else 0,
        times.work_ns(stage.devices[0], updates=False),
    )


def hop_of(problem: Problem, num_micro_batches: int, source: Stage, target: Stage) -> Hop:
    """The way from a stage to the next one and back."""
    plan = single_pipeline((source, target), num_micro_batches)
    sizes = [rows for rows, _count in row_classes(problem.global_batch_size, num_micro_batches)]
    out, back = ([transfer(problem, plan, s, rows, s) for rows in sizes] for s in (0, 1))
    there, home = (min(FAR_NS, *(move.duration_ns if move else 0 for move in moves)) for moves in (out, back))
    return Hop(there, home, CHANNELS[channel_kind(problem.rules, out, back)])


def chains_of(pieces: np.ndarray, hops: np.ndarray) -> Chains:
    """Arrays for the kernel from (N, S, fields of Piece) and, for the hop behind each stage, (N, S, fields of Hop)."""
    forward, backward, exposed, update, limit, work = np.ascontiguousarray(pieces.transpose(2, 0, 1))
    out, back, channel = np.ascontiguousarray(hops.transpose(2, 0, 1))
    back = np.concatenate((np.zeros_like(back[:, :1]), back[:, :-1]), axis=1)
    return Chains(forward, backward, out, back, channel, exposed, update, limit, work)


def bounds_of(chains: Chains, num_micro_batches: int) -> np.ndarray:
    """(N,) in ns."""
    count, stages = chains.forward.shape
    bounds = np.zeros(count, dtype=np.int64)
    scratch = np.zeros((2, stages), dtype=np.int64)
    window_bounds(chains, num_micro_batches, bounds, scratch[0], scratch[1])
    return bounds


class ChainTables:
    """Bounds of all plans of one number of micro-batches in a space.

    A stage's times depend on its layers and, up to symmetry, its devices; a hop on the cut and both stages' devices.
    In mode ``nic`` slices of unequal size make even symmetric pairs differ, so there each pair stands for itself.
    Where a stage may recompute or not, it takes the time of not doing so and has the room of whichever leaves more: the
    input that a recomputing stage keeps may be larger than its stash.
    """

    def __init__(self, space: Space, batch: Batch) -> None:
        self.space = space
        self.batch = batch
        self._pieces: dict[object, np.ndarray] = {}
        self._hops: dict[object, np.ndarray] = {}

    def bounds(self, partitions: np.ndarray, placements: Sequence[Placement]) -> np.ndarray:
        """(len(placements), len(partitions)): a proven bound of each plan, in ns."""
        rows = [bounds_of(self._chains(partitions, each), self.batch.num_micro_batches) for each in placements]
        return np.asarray(rows, dtype=np.int64).reshape(len(placements), len(partitions))

    def _chains(self, partitions: np.ndarray, placement: Placement) -> Chains:
        stages = len(placement)
        pieces = np.empty((len(partitions), stages, len(Piece._fields)), dtype=np.int64)
        hops = np.zeros((len(partitions), stages, len(Hop._fields)), dtype=np.int64)
        for s, devices in enumerate(placement):
            pieces[:, s] = self._piece_table(devices)[partitions[:, s], partitions[:, s + 1]]
            if s + 1 < stages:
                hops[:, s] = self._hop_table(devices, placement[s + 1])[partitions[:, s + 1]]
        return chains_of(pieces, hops)

    def _piece_table(self, devices: tuple[int, ...]) -> np.ndarray:
        """(L, L + 1, fields) of stages from one layer up to another on these devices."""
        key = self.space.orbit((devices,))
        if key not in self._pieces:
            self._pieces[key] = self._make_pieces(devices)
        return self._pieces[key]

    def _make_pieces(self, devices: tuple[int, ...]) -> np.ndarray:
        layers = self.space.problem.num_layers
        table = np.zeros((layers, layers + 1, len(Piece._fields)), dtype=np.int64)
        for i, first in enumerate(self._starts):
            for stop in (*self._starts[i + 1 :], layers):
                table[first, stop] = self._best_piece(Stage(first, stop - 1, devices))
        return table

    def _best_piece(self, stage: Stage) -> Piece:
        problem, number = self.space.problem, self.batch.num_micro_batches
        again = replace(stage, recompute=((stage.first, stage.last),))
        piece = piece_of(problem, number, again if problem.recompute == "always" else stage)
        if problem.recompute == "auto" and piece.limit < number:
            return piece._replace(limit=max(piece.limit, piece_of(problem, number, again).limit))
        return piece

    def _hop_table(self, source: tuple[int, ...], target: tuple[int, ...]) -> np.ndarray:
        """(L, fields) of the transfers between two stages by the second one's first layer."""
        rules = self.space.problem.rules
        slices = rules.shared or rules.transfer == "nic"
        key = (source, target) if slices else self.space.orbit((source, target))
        if key not in self._hops:
            table = np.zeros((self.space.problem.num_layers, len(Hop._fields)), dtype=np.int64)
            for first in self._starts[1:]:
                pair = Stage(first - 1, first - 1, source), Stage(first, first, target)
                table[first] = hop_of(self.space.problem, self.batch.num_micro_batches, *pair)
            self._hops[key] = table
        return self._hops[key]

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        """Layers that a stage may begin with."""
        return (0, *(cut + 1 for cut in self.space.cuts))
