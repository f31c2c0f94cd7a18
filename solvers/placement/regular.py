"""Plans of equally replicated stages, drawn without a search: quick enough to judge hundreds of sets of hosts.

Every shape (stages × replicas) that leaves few devices idle, with layers cut so that the slowest stage is fastest among
the cuts that fit memory. An estimate orders them; the judge looks at the first few, with stages side by side in a host
and with replicas side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.solvers.allocation import Stage, single_pipeline
from penstock.solvers.batches import Batch, batch_of
from penstock.solvers.costs import all_reduce_ns
from penstock.solvers.planners.deadline import Deadline
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.session import Session
from penstock.solvers.problem import Problem
from penstock.solvers.result import Result

NAME = "regular"
JUDGED = 6
"""Shapes that are judged, by default."""
IDLE = 8
"""At most one in so many devices is left idle."""
MOST_DEPTHS = 48
"""Numbers of stages that are tried."""
SLICES = (1, 2, 4, 8, 16)
"""Rows of a micro-batch for each replica."""


class Shape(NamedTuple):
    """Stages, each on so many replicas; ``bounds`` of their layers; ``estimate_ns`` of a step."""

    estimate_ns: int
    depth: int
    replicas: int
    batch: Batch
    bounds: tuple[int, ...]


def plan(problem: Problem, judged: int = JUDGED) -> Result:
    """The best of the regular plans that are judged, with its bound; or the shortage of the nearest one."""
    session = Session(problem, Deadline(None), schedule="early-backward")
    session.judge_all(NAME, _proposals(problem, judged))
    return session.result(NAME, "")


def _proposals(problem: Problem, judged: int) -> Iterator[Proposal]:
    best: dict[tuple[int, Batch], Shape] = {}
    for shape in sorted(_shapes(problem)):
        best.setdefault((shape.replicas, shape.batch), shape)
    for shape in list(best.values())[:judged] or [_deepest(problem)]:
        for devices in _layouts(problem, shape):
            stages = tuple(
                Stage(first, stop - 1, tuple(devices[s])) for s, (first, stop) in enumerate(pairwise(shape.bounds))
            )
            allocation = single_pipeline(stages, shape.batch.num_micro_batches)
            yield Proposal(allocation, ("early-backward",), "A", (problem.rules.overlap_all_reduce,))


def _layouts(problem: Problem, shape: Shape) -> list[list[list[int]]]:
    """Devices of each stage: replicas side by side, and stages side by side."""
    used = np.arange(shape.depth * shape.replicas)
    together = used.reshape(shape.depth, shape.replicas).tolist()
    apart = used.reshape(shape.replicas, shape.depth).T.tolist()
    return [together] if together == apart else [together, apart]


def _depths(problem: Problem) -> list[int]:
    """Numbers of stages whose replicas use nearly all devices."""
    devices, most = problem.num_devices, int(problem.cuttable.sum()) + 1
    near = [s for s in range(1, min(most, devices) + 1) if (devices % s) * IDLE <= devices]
    if len(near) <= MOST_DEPTHS:
        return near
    return [near[round(i * (len(near) - 1) / (MOST_DEPTHS - 1))] for i in range(MOST_DEPTHS)]


def _shapes(problem: Problem) -> Iterator[Shape]:
    """Those that may fit."""
    for depth in _depths(problem):
        replicas = problem.num_devices // depth
        seen = set()
        for rows in problem.micro_batch_sizes or [rows * replicas for rows in SLICES]:
            if rows > problem.global_batch_size and rows > replicas:
                continue
            batch = batch_of(problem, min(rows, problem.global_batch_size))
            if batch.replicas_fed(problem.min_slice) < replicas or batch in seen:
                continue
            seen.add(batch)
            yield from _shapes_of(problem, depth, replicas, batch)


def _shapes_of(problem: Problem, depth: int, replicas: int, batch: Batch) -> Iterator[Shape]:
    """Without recomputation and with it, as the request allows and as fits."""
    chain = _Chain(problem, depth, replicas, batch)
    for again in {"never": (False,), "always": (True,), "auto": (False, True)}[problem.recompute]:
        bounds = chain.cuts(again)
        if bounds is not None:
            yield Shape(chain.estimate_ns(bounds, again), depth, replicas, batch, tuple(bounds))


def _deepest(problem: Problem) -> Shape:
    """Where nothing fits: the shape that comes nearest, so that it can be said what is missing."""
    depth = min(int(problem.cuttable.sum()) + 1, problem.num_devices)
    batch = batch_of(problem, max(problem.min_slice, min(problem.micro_batch_sizes, default=problem.min_slice)))
    chain = _Chain(problem, depth, 1, batch)
    return Shape(0, depth, 1, batch, tuple(chain.by_memory()))


class _Chain:
    """The layers as a slice of a micro-batch costs on the slowest kind, and as they fill the smallest device."""

    def __init__(self, problem: Problem, depth: int, replicas: int, batch: Batch) -> None:
        self.problem, self.depth, self.replicas, self.batch = problem, depth, replicas, batch
        share = -(-batch.most_rows // replicas)
        used = problem.devices[: depth * replicas]
        costs = [problem.costs(kind, share) for kind in sorted({device.kind for device in used})]
        self.forward = np.max([cost.forward_ns for cost in costs], axis=0)
        self.backward = np.max([cost.backward_ns for cost in costs], axis=0)
        self.stash = np.max([cost.stash_bytes for cost in costs], axis=0)
        rules = problem.memory
        states = problem.trainable_bytes * rules.state_factor
        if rules.shard_states:
            states = -(-states // replicas)
        self.static = problem.parameter_bytes + problem.trainable_bytes * rules.gradient_factor + states
        workspace = max(int(cost.workspace_bytes.max()) for cost in costs)
        room = min(problem.capacity_bytes(d) - device.context_bytes for d, device in enumerate(used))
        crossing = int(problem.forward_bytes.max(initial=0)) * share if rules.count_buffers else 0
        self.room, self.crossing = room - workspace, crossing
        self.places = np.concatenate(([0], np.flatnonzero(problem.cuttable) + 1, [problem.num_layers]))

    def time(self, again: bool) -> np.ndarray:
        """Prefix sums of a micro-batch's time, (L + 1,)."""
        return np.asarray(self.forward * (2 if again else 1) + self.backward)

    def cuts(self, again: bool) -> list[int] | None:
        """The cuts whose slowest stage is fastest among those that fit; None where none fit."""
        time = self.time(again)
        low, high = -(-int(time[-1]) // self.depth), int(time[-1])
        best = self._greedy(time, high, again)
        while best is not None and low < high:
            middle = (low + high) // 2
            found = self._greedy(time, middle, again)
            if found is None:
                low = middle + 1
            else:
                best, high = found, middle
        return best

    def _greedy(self, time: np.ndarray, most_ns: int, again: bool) -> list[int] | None:
        """As much as fits on each stage in turn, leaving a block for each that follows; None where layers are left."""
        bounds, at, last = [0], 0, len(self.places) - 1
        for stage in range(self.depth):
            i = self.places[at]
            flying = 1 if again else min(self.depth - stage, self.batch.num_micro_batches)
            held = self.static + flying * self.stash
            spare = self.room - self.crossing * (min(self.depth - stage, self.batch.num_micro_batches) + 2)
            reach = min(
                np.searchsorted(time[self.places], time[i] + most_ns, side="right"),
                np.searchsorted(held[self.places], held[i] + spare, side="right"),
            )
            stop = min(int(reach) - 1, last - (self.depth - stage - 1))
            if stop <= at:
                return None
            bounds.append(int(self.places[stop]))
            at = stop
        return bounds if at == last else None

    def by_memory(self) -> list[int]:
        """Cuts whose fullest stage holds least."""
        held = self.static + self.stash
        low, high = 0, int(held[-1])
        self.room, self.crossing = high, 0
        while low < high:
            self.room = (low + high) // 2
            low, high = (low, self.room) if self._greedy(held, int(held[-1]), again=True) else (self.room + 1, high)
        self.room = high
        bounds = self._greedy(held, int(held[-1]), again=True)
        assert bounds is not None
        return bounds

    def estimate_ns(self, bounds: list[int], again: bool) -> int:
        """Of a step: the slowest stage for each micro-batch, the way through all, the largest all-reduce and update."""
        time = self.time(again)
        steps = np.diff(time[bounds])
        weights = np.diff(self.problem.trainable_bytes[bounds])
        update = int(np.diff(self.problem.update_ns[bounds]).max())
        heaviest = int(weights.max())
        reduced = all_reduce_ns(self.problem, heaviest, range(self.replicas)) if self.replicas > 1 else 0
        return int(steps.max()) * (self.batch.num_micro_batches - 1) + int(steps.sum()) + reduced + update
