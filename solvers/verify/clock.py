"""A timeline indexed for the checks of ``verify``: each stage's operations, and when all lanes have computed them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import micro_batch_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.timeline import Interval, Timeline, Track


@dataclass(frozen=True)
class Clock:
    """A timeline, and the plan that its times are checked against.

    ``early``: buckets may overlap the backward. ``every``: how many micro-batches make a round of each stage of a
    run with optimizer steps in its rows; empty for a flushed step, which is one round followed by its updates.
    ``sums_ties``: whether ranks add up the gradients of parameters tied across stages.
    """

    problem: Problem
    allocation: Allocation
    timeline: Timeline
    early: bool
    every: tuple[int, ...] = ()
    sums_ties: bool = True

    def round_size(self, s: int) -> int:
        """Return the number of micro-batches of a stage's round."""
        return self.every[s] if self.every else self.allocation.num_micro_batches

    def num_rounds(self, s: int) -> int:
        """Return the number of complete rounds of a stage."""
        return self.allocation.num_micro_batches // self.round_size(s)

    @cached_property
    def rows(self) -> np.ndarray:
        """Return the samples of each micro-batch, (M,)."""
        count = self.allocation.num_micro_batches
        return np.asarray([micro_batch_rows(self.problem.global_batch_size, count, m) for m in range(count)])

    @cached_property
    def completed(self) -> np.ndarray:
        """Return (2, S, M): when all lanes have run the forward, or the input gradient, of a micro-batch."""
        latest = np.full((2, len(self.allocation.stages), self.allocation.num_micro_batches), -1, dtype=np.int64)
        for track in self.timeline.tracks:
            kinds, stages, batches = track.operations.T
            for way, mask in ((0, kinds == FORWARD), (1, (kinds == BACKWARD) | (kinds == INPUT))):
                np.maximum.at(latest[way], (stages[mask], batches[mask]), track.end_ns[mask])
        return latest

    def other(self, s: int, way: int) -> int | None:
        """Return the stage that a stage sends to in a direction."""
        return self.allocation.next(s) if way == 0 else self.allocation.previous(s)

    def sizes(self) -> list[int]:
        """Return the distinct row counts of micro-batches."""
        return [int(size) for size in np.unique(self.rows)]

    @cached_property
    def updates_of(self) -> dict[int, list[Interval]]:
        """Return the optimizer steps of each stage, in the order of its tracks."""
        by_stage: dict[int, list[Interval]] = {}
        for each in self.timeline.updates:
            by_stage.setdefault(each.stage, []).append(each)
        return by_stage

    @cached_property
    def of_stage(self) -> list[list[tuple[Track, np.ndarray]]]:
        """Return each stage's tracks, with the indices of its operations in them."""
        parts: list[list[tuple[Track, np.ndarray]]] = [[] for _ in self.allocation.stages]
        for track in self.timeline.tracks:
            for s in self.stages_on(track):
                parts[s].append((track, np.flatnonzero(track.operations[:, 1] == s)))
        return parts

    def parts(self) -> Iterator[tuple[Track, int, np.ndarray]]:
        """Return every (track, stage, indices of the stage's operations in the track)."""
        for s, tracks in enumerate(self.of_stage):
            for track, at in tracks:
                yield track, s, at

    @cached_property
    def _stages_of(self) -> dict[int, list[int]]:
        by_device: dict[int, list[int]] = {}
        for s, stage in enumerate(self.allocation.stages):
            for device in stage.devices:
                by_device.setdefault(device, []).append(s)
        return by_device

    def stages_on(self, track: Track) -> list[int]:
        """Return the stages of a track's devices."""
        return self._stages_of[track.devices[0]]

    @cached_property
    def _transfers_of(self) -> dict[tuple[int, int], np.ndarray]:
        sent = self.timeline.transfers
        if not sent.stage.size:
            return {}
        order = np.lexsort((sent.direction, sent.stage))
        keys = np.stack([sent.stage[order], sent.direction[order]], axis=1)
        new = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
        groups = np.split(order, new)
        return {(int(sent.stage[group[0]]), int(sent.direction[group[0]])): group for group in groups}

    def sent_by(self, s: int, way: int) -> np.ndarray:
        """Return the indices of the transfers that a stage sends in a direction."""
        return self._transfers_of.get((s, way), np.empty(0, dtype=np.int64))

    def name(self, track: Track) -> str:
        """Return the name of the track's first device."""
        return self.problem.devices[track.devices[0]].name
