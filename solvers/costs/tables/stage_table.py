"""Costs of all layers or stages at once, for searches and bounds, for slices of micro-batches of one size.

``LayerSums`` and ``StaticSums`` are prefix sums over layers; ``StageTable`` has a value for each pair of places where a
stage may begin and end. Where devices are of several kinds, a *plan* rounds up (each layer is as slow, and as large, as
on its slowest kind) and a *bound* rounds down (each layer is as quick as on its quickest kind). The numbers are the
same as in ``stage`` and ``memory``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

from penstock.solvers.costs.memory import owned_of, training_bytes
from penstock.solvers.costs.stage import step_ns
from penstock.solvers.model.problem import Problem, prefix_sums

Rounding = Literal["up", "down"]


class LayerSums(NamedTuple):
    """Prefix sums (L + 1,) int64 of a slice's costs over layers: times in ns, and bytes that stay alive from F to B.

    ``workspace_bytes`` (L,) is per layer.
    """

    forward_ns: np.ndarray
    backward_ns: np.ndarray
    weight_ns: np.ndarray
    kept_bytes: np.ndarray
    workspace_bytes: np.ndarray


class StaticSums(NamedTuple):
    """Bytes of parameters, gradients and optimizer states: by layer (L + 1,), or (n, n) between two places."""

    parameters: np.ndarray
    trainable: np.ndarray
    owned: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """Return the bytes that a stage holds for the whole step; ``owned`` and ``trainable`` are in ``parameters``."""
        return np.asarray(self.parameters + self.gradients + self.optimizer)


def between(prefix: np.ndarray) -> np.ndarray:
    """Return (n, n): the difference between any two places of a prefix sum (n,); meaningless below the diagonal."""
    return np.asarray(prefix[None, :] - prefix[:, None])


def widest_between(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return (n, n) int64: the largest of the layers' values (L,) between two of n places; 0 below the diagonal."""
    widest = np.zeros((len(places),) * 2, dtype=np.int64)
    largest = np.maximum.reduceat(values, places[:-1])
    widest[:-1, 1:] = np.maximum.accumulate(np.triu(np.broadcast_to(largest, widest[:-1, 1:].shape)), axis=1)
    return widest


def cut_places(problem: Problem) -> np.ndarray:
    """Return (n,) int64: the number of layers before each place where a stage may begin or end, both ends included."""
    return np.asarray([0, *(np.flatnonzero(problem.cuttable) + 1), problem.num_layers], dtype=np.int64)


def crossing_bytes(problem: Problem, direction: int, rows: int = 1) -> np.ndarray:
    """Return (L + 1,) int64: the bytes that ``rows`` samples send over the cut before each layer; 0 at both ends."""
    return rows * np.pad(problem.forward_bytes if direction == 0 else problem.backward_bytes, 1)


def layer_sums(problem: Problem, kinds: Sequence[str], rows: int, rounding: Rounding = "up") -> LayerSums:
    """Return the costs of a slice of ``rows`` samples, each layer on the slowest or the quickest of the kinds."""
    costs = [problem.costs(kind, rows) for kind in kinds]
    join = np.maximum if rounding == "up" else np.minimum

    def joined(prefixes: list[np.ndarray]) -> np.ndarray:
        return prefixes[0] if len(prefixes) == 1 else prefix_sums(join.reduce([np.diff(each) for each in prefixes]))

    return LayerSums(
        joined([cost.forward_ns for cost in costs]),
        joined([cost.backward_ns for cost in costs]),
        joined([cost.weight_ns for cost in costs]),
        joined([cost.stash_bytes for cost in costs]),
        np.asarray(join.reduce([cost.workspace_bytes for cost in costs])),
    )


def static_sums(problem: Problem, replicas: int = 1) -> StaticSums:
    """Return prefix sums (L + 1,) of the layers' fixed bytes on each of ``replicas``, without copies of tied weights.

    With optimizer states sharded over replicas each sum is rounded up, so differences are within a byte.
    """
    return _static(problem, problem.parameter_bytes, problem.trainable_bytes, problem.owned_bytes, replicas)


@lru_cache(maxsize=4)
def _weights_between(problem: Problem, places: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    at = np.asarray(places, dtype=np.int64)
    sums = (problem.parameter_bytes, problem.trainable_bytes, problem.owned_bytes)
    parameters, trainable, owned = (between(each[at]) for each in sums)
    for _name, layers, size in problem.shared_parameters:
        used = np.searchsorted(np.sort(layers), at)
        holds, owns = used[None, :] > used[:, None], (at[:, None] <= layers[0]) & (layers[0] < at[None, :])
        copied = holds & ~owns
        parameters, trainable = parameters + copied * size, trainable + copied * size
        owned = owned + copied * owned_of(problem, size)
    return parameters, trainable, owned


def static_between(problem: Problem, places: np.ndarray, replicas: int = 1) -> StaticSums:
    """Return (n, n): ``memory.static_bytes`` of the stage between any two places, on ``replicas`` devices."""
    parameters, trainable, owned = _weights_between(problem, tuple(places.tolist()))
    return _static(problem, parameters, trainable, owned, replicas)


def _static(
    problem: Problem, parameters: np.ndarray, trainable: np.ndarray, owned: np.ndarray, replicas: int
) -> StaticSums:
    return StaticSums(parameters, trainable, owned, *training_bytes(problem, trainable, owned, replicas))


def _slowest(each: list[np.ndarray]) -> np.ndarray:
    """Return the elementwise maximum of the values on each kind."""
    return np.asarray(np.maximum.reduce(each))


class StageTable:
    """Stages between any two of n ``places`` on ``replicas`` devices of ``kinds``, for slices of ``rows`` samples.

    All tables are (n, n) int64 by the place before the first and the one after the last layer, and meaningless below
    the diagonal. Times in ns and sizes in bytes are of one micro-batch, on the slowest kind.
    """

    def __init__(
        self, problem: Problem, kinds: Sequence[str], rows: int, places: np.ndarray, replicas: int = 1
    ) -> None:
        self.problem, self.rows, self.places, self.replicas = problem, rows, places, replicas
        self._sums = [layer_sums(problem, (kind,), rows) for kind in kinds]

    @cached_property
    def forward_ns(self) -> np.ndarray:
        """Return the time of one forward, which is also the time of recomputing the whole stage."""
        return _slowest([between(sums.forward_ns[self.places]) for sums in self._sums])

    @cached_property
    def backward_ns(self) -> np.ndarray:
        """Return the time of one backward, without recomputation."""
        return _slowest([between(sums.backward_ns[self.places]) for sums in self._sums])

    @property
    def weight_ns(self) -> np.ndarray:
        """Return the time of a weight gradient, ns: a part of the backward."""
        return _slowest([between(sums.weight_ns[self.places]) for sums in self._sums])

    def work_ns(self, again: bool) -> np.ndarray:
        """Return the time of a forward and a backward on one kind; ``again``: with recomputation of the stage."""
        return _slowest(
            [between(((1 + again) * sums.forward_ns + sums.backward_ns)[self.places]) for sums in self._sums]
        )

    @cached_property
    def kept_bytes(self) -> np.ndarray:
        """Return the bytes that stay alive from the forward to the backward if nothing is recomputed."""
        return _slowest([between(sums.kept_bytes[self.places]) for sums in self._sums])

    @cached_property
    def workspace_bytes(self) -> np.ndarray:
        """Return the workspace of the stage's operations, in bytes."""
        return _slowest([widest_between(sums.workspace_bytes, self.places) for sums in self._sums])

    @cached_property
    def static(self) -> StaticSums:
        """Return the bytes of parameters, gradients and optimizer states."""
        return static_between(self.problem, self.places, self.replicas)

    @property
    def update_ns(self) -> np.ndarray:
        """Return the time of one optimizer step."""
        return step_ns(self.problem, self.places[:, None], self.places[None, :], self.replicas)

    def held_bytes(self, again: bool) -> np.ndarray:
        """Return the bytes that a stage occupies all the time: ``memory.static_bytes`` and ``transient_bytes``."""
        occupied = self.static.total + self.workspace_bytes + (self.kept_bytes if again else 0)
        if self.problem.memory.count_buffers:
            both = self._crossing(0) + self._crossing(1)
            occupied = occupied + both[:, None] + both[None, :]
        return np.asarray(occupied)

    def flight_bytes(self, again: bool) -> np.ndarray:
        """Return the bytes that a stage holds per in-flight micro-batch: ``memory.activation_bytes``."""
        each = np.zeros_like(self.kept_bytes) if again else self.kept_bytes
        if self.problem.memory.count_buffers or again:
            each = each + self._crossing(0)[:, None]
        return np.asarray(each)

    def _crossing(self, direction: int) -> np.ndarray:
        return np.asarray(crossing_bytes(self.problem, direction, self.rows)[self.places])
