"""Even stages, for any batches: the times of passes and the bytes kept, of all stages at once, for any recomputation.

The numbers are the same as in ``costs.stage`` and ``costs.memory``, which cost one stage after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from penstock.solvers.costs.memory import static_bytes
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.degrees import Modules
from penstock.solvers.model.problem import Costs, Problem

Way = int | Modules
"""A way of recomputing: a number of a stage's first layers that are alike, or these modules of every layer."""


@dataclass(frozen=True, eq=False)
class Cut:
    """S stages on R ranks of equally many devices, which follow one another ``parts`` times.

    ``span``: the layers that stages share out, the last one excluded; most often they are alike.
    """

    problem: Problem
    stages: tuple[Stage, ...]
    parts: int
    span: tuple[int, int]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.stages) // self.parts

    @cached_property
    def typical(self) -> int:
        """The layer that stands for all of the span: the first of the layers that keep most."""
        kept = np.diff(self.problem.costs(self.problem.devices[0].kind, 1).stash_bytes)
        return self.span[0] + int(kept[slice(*self.span)].argmax())

    @cached_property
    def longest(self) -> int:
        """The most layers of a stage."""
        return int((self._stop - self._first).max())

    @cached_property
    def room_bytes(self) -> np.ndarray:
        """The bytes of the smallest device of each rank besides the rank's parameters and states, (R,)."""
        problem = self.problem
        free = [problem.capacity_bytes(d) - device.context_bytes for d, device in enumerate(problem.devices)]
        static = [static_bytes(problem, stage).total for stage in self.stages]
        smallest = np.asarray(free, dtype=np.int64).reshape(self.ranks, -1).min(axis=1)
        return np.asarray(smallest - np.asarray(static, dtype=np.int64).reshape(self.parts, -1).sum(axis=0))

    def pass_ns(self, share: int, way: Way) -> tuple[np.ndarray, np.ndarray]:
        """Return the times of a micro-batch of ``share`` rows for each device: forward and backward, and recomputation.

        Both (S,), in ns, on each stage's slowest device.
        """
        times = self._times(share, way)
        forward, backward, again = (self._most([each[which] for each in times]) for which in range(3))
        return forward + backward, again

    def kept_bytes(self, share: int, way: Way) -> np.ndarray:
        """Return the bytes that a micro-batch of ``share`` rows for each device keeps, its input included: (S,)."""
        problem, first = self.problem, self._first
        inputs = self._inputs * share
        low, stop = self._recomputed(way)
        kept = []
        for kind in self._kinds:
            costs = problem.costs(kind, share)
            stashed = _between(costs.stash_bytes, first, self._stop)
            if isinstance(way, int):
                stashed = stashed - _between(costs.stash_bytes, low, stop)
            else:
                stashed = stashed - _between(costs.again(way).freed_bytes, first, self._stop)
            kept.append(stashed)
        most = self._most(kept)
        if isinstance(way, int):  # each segment keeps its input, which may be the stage's input
            segments = stop if problem.recompute != "always" else np.minimum(stop, low + 1)
            most = most + _between(inputs, low, segments)
            if problem.memory.count_buffers:
                most = most - np.where((low == first) & (stop > low), _between(inputs, first, first + 1), 0)
        return most + _between(inputs, first, first + 1) if problem.memory.count_buffers else most

    def _times(self, share: int, way: Way) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return (S,) the times of forwards, backwards and recomputation on each kind of devices."""
        low, stop = self._recomputed(way)

        def of_kind(costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            whole = costs.forward_ns, costs.backward_ns
            forward, backward = (_between(each, self._first, self._stop) for each in whole)
            if isinstance(way, int):
                return forward, backward, _between(costs.forward_ns, low, stop)
            return forward, backward, _between(costs.again(way).recompute_ns, self._first, self._stop)

        return [of_kind(self.problem.costs(kind, share)) for kind in self._kinds]

    def _recomputed(self, way: Way) -> tuple[np.ndarray, np.ndarray]:
        """Return (S,) the first layer that each stage recomputes whole, and the one after the last."""
        if self.problem.recompute == "always":
            return self._first, self._stop
        low = np.maximum(self._first, self.span[0])
        number = way if isinstance(way, int) else 0
        return low, np.maximum(low, np.minimum(np.minimum(self._stop, self.span[1]), low + number))

    def _most(self, of_kinds: list[np.ndarray]) -> np.ndarray:
        """Return (S,) the largest of values for each kind, over the kinds on which a stage runs."""
        if len(of_kinds) == 1:
            return of_kinds[0]
        return np.asarray(np.where(self._runs_on, np.stack(of_kinds), np.iinfo(np.int64).min).max(axis=0))

    @cached_property
    def _kinds(self) -> list[str]:
        return sorted({device.kind for device in self.problem.devices})

    @cached_property
    def _runs_on(self) -> np.ndarray:
        """A mask (K, S): stages that have devices of a kind."""
        kinds = np.asarray([self._kinds.index(device.kind) for device in self.problem.devices])
        ranks = kinds.reshape(self.ranks, -1)
        return np.tile([(ranks == kind).any(axis=1) for kind in range(len(self._kinds))], self.parts)

    @cached_property
    def _first(self) -> np.ndarray:
        return np.asarray([stage.first for stage in self.stages])

    @cached_property
    def _stop(self) -> np.ndarray:
        return np.asarray([stage.last + 1 for stage in self.stages])

    @cached_property
    def _inputs(self) -> np.ndarray:
        """Prefix sums (L + 1,) of the bytes that a row carries over the cut before each layer."""
        crossing = self.problem.forward_bytes[: self.problem.num_layers - 1]
        return np.concatenate(([0, 0], np.cumsum(crossing)))


def _between(sums: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return prefix sums' differences, elementwise."""
    return np.asarray(sums[stop] - sums[first])
