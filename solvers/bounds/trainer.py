"""Lower bounds on all plans that another trainer can express (``within``), by order; docs/explaining.md has the proof.

All stages have r replicas, each gets the same number of rows of a micro-batch, and p r devices are used. Each r and
number of rows is bounded separately, and the least of these is the bound.

*Stages apart* (1F1B, GPipe): a stage of layers [i, j) begins when the first micro-batch has come through the layers
before, works through all M, and then its last gradient has to go back through them, or it reduces its gradients and
updates. Counted from the last stage, the t-th one of 1F1B holds min(t, M) micro-batches when its first backward begins;
where they do not fit, at least the necessary number of layers recompute. The cuts whose longest stage is shortest are
found from the last layer on: U_t(i) = min over j of max(c_t(i, j), U_{t-1}(j)), O(p L^2).

*Several stages on a device*: all work, shared by all ranks, where their memory holds the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.contiguous.stage_costs import Stages
from penstock.solvers.bounds.coverage import class_bound, target_plans
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.stage import least_update_ns
from penstock.solvers.costs.tables.stage_table import between, crossing_bytes, layer_sums, static_sums
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.pins import devices_allowed
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.result import Bound
from penstock.solvers.model.trainer_limits import Within
from penstock.solvers.schedules.catalogue import schedule_row
from penstock.solvers.schedules.trainer_orders import ONE_STAGE

MOST_STEPS = 400_000_000
"""The most steps of the search for the best cuts; above, a trainer's plans have only the bounds of all other plans."""


def within_bounds(problem: Problem) -> list[Bound]:
    """Return a bound for each order with one stage per rank, and for all orders; none if cuts are too many."""
    within = problem.within
    assert within is not None
    pairs = list(_pairs(problem))
    layers = problem.num_layers
    steps = sum(min(problem.num_devices // replicas, layers) for replicas, _rows in pairs) * layers**2
    if steps > MOST_STEPS:
        return []
    tables = Tables(problem, within)
    bounds = {}
    for name in within.schedules:
        least = tables.one_stage_ns if name in ONE_STAGE else tables.shared_ns
        bounds[name] = min((least(name, *pair) for pair in pairs), default=FAR_NS)
    named = {name: value for name, value in bounds.items() if name in ONE_STAGE}
    method = "best cuts into stages with equally many replicas"
    everything = target_plans(problem)
    classes = [(replace(everything, order=frozenset({name})), value) for name, value in named.items()]
    classes.append((everything, min(bounds.values())))
    return [class_bound(problem, covers, value, method) for covers, value in classes if value < FAR_NS]


def _pairs(problem: Problem) -> Iterator[tuple[int, int]]:
    """Yield pairs of a number of replicas, and the rows of a micro-batch on each."""
    whole = problem.global_batch_size
    sizes = problem.micro_batch_sizes or range(1, whole + 1)
    for size in sizes:
        for replicas in range(1, min(size, problem.num_devices) + 1) if whole % size == 0 else ():
            if size % replicas == 0:
                yield replicas, size // replicas


class Tables:
    """Times and bytes of all stages, by first layer and the one after the last: arrays (L + 1, L + 1)."""

    def __init__(self, problem: Problem, within: Within) -> None:
        self.problem, self.within = problem, within
        self._capacity = max(free_bytes(problem, (d,)) for d in range(problem.num_devices))
        low, high = within.span
        self._links = Links(problem)
        self._spans = np.asarray([low <= layer <= high for layer in range(problem.num_layers)])
        self._kinds = sorted({device.kind for device in problem.devices})
        may_end = np.asarray(within.cuts, dtype=bool) & problem.cuttable
        self._begins = np.concatenate(([True], may_end, [True]))
        self.times = lru_cache(maxsize=4)(self._times)

    def _times(self, rows: int) -> tuple[np.ndarray, ...]:
        """Return for each layer (L,) the least over all kinds: forward, backward, stash, workspace."""
        least = layer_sums(self.problem, self._kinds, rows, "down")
        each = (np.diff(sums) for sums in (least.forward_ns, least.backward_ns, least.kept_bytes))
        return (*each, least.workspace_bytes)

    def _static(self, replicas: int) -> np.ndarray:
        """Return prefix sums (L + 1,) of the bytes that a replica holds all the time."""
        whole = static_sums(self.problem)
        states = whole.optimizer
        if self.problem.memory.shard_states:
            states = states // replicas - np.arange(len(states))  # each difference rounded down
        return np.asarray(whole.parameters + whole.gradients + states)

    def shared_ns(self, _name: str, replicas: int, rows: int) -> int:
        """Return all work divided by all ranks."""
        ranks = self.problem.num_devices // replicas
        if int(self._static(replicas)[-1]) > ranks * self._capacity:
            return FAR_NS
        forward, backward, _stash, _workspace = self.times(rows)
        work = int((forward + backward).sum()) * (self.problem.global_batch_size // (replicas * rows))
        return -(-work // ranks)

    def one_stage_ns(self, name: str, replicas: int, rows: int) -> int:
        """Return the shortest longest stage over all cuts into up to N / r stages."""
        number = self.problem.global_batch_size // (replicas * rows)
        layers = self.problem.num_layers
        lasting = self._lasting_ns(number, replicas, rows)
        best = least = np.full(layers + 1, FAR_NS)
        best = np.where(np.arange(layers + 1) == layers, 0, best)
        least_ns = FAR_NS
        for stage in range(1, min(self.problem.num_devices // replicas, layers) + 1):
            flying = schedule_row(name).trained_in_flight(stage, number)[0]
            if stage <= number or stage == 1:
                cost = lasting + self._again_ns(flying, number, replicas, rows)
            least = np.maximum(cost, best[None, :]).min(axis=1)
            best = np.where(self._begins, least, FAR_NS)
            least_ns = min(least_ns, int(best[0]))
        return least_ns

    def _lasting_ns(self, number: int, replicas: int, rows: int) -> np.ndarray:
        """Return the least step time due to one stage that recomputes nothing, by its layers.

        ``FAR_NS`` if there are no layers, or pins allow them fewer devices than a stage has.
        """
        forward, backward, _stash, _workspace = self.times(rows)
        there, back = prefix_sums(forward), prefix_sums(backward)
        work = number * between(there + back)
        batch = batch_of(self.problem, replicas * rows)
        after_stage = np.min(Stages(self.problem, batch, self._links, replicas).after(), axis=0)
        first = np.where(np.arange(len(back)) > 0, least_update_ns(self.problem)[1], 0)
        after = np.maximum(after_stage, (back + first)[:, None])
        lasting = np.minimum(there[:, None] + work + after, FAR_NS)
        none = np.tri(len(there), dtype=bool) | (devices_allowed(self.problem) < replicas)
        return np.where(none, FAR_NS, lasting)

    def _again_ns(self, flying: int, number: int, replicas: int, rows: int) -> np.ndarray:
        """Return the least time of recomputation with which ``flying`` micro-batches in flight fit."""
        forward, backward, stash, workspace = self.times(rows)
        problem = self.problem
        inside = np.where(self._spans, forward, 0)
        everything = number * between(prefix_sums(inside))
        if problem.recompute == "always":
            return everything
        kept = between(prefix_sums(stash))
        if problem.memory.count_buffers:
            kept = kept + crossing_bytes(problem, 0, rows)[:, None]
        used = np.where(between(prefix_sums(backward)) > 0, _most(workspace), 0)
        lacking = between(self._static(replicas)) + flying * kept + used - self._capacity
        droppable = flying * between(prefix_sums(np.where(self._spans, stash, 0)))
        if problem.recompute == "never":
            needed = np.full_like(lacking, FAR_NS)
        elif "block" in self.within.recompute:
            largest = np.maximum(1, flying * _most(np.where(self._spans, stash, 0)))
            needed = number * -(-lacking // largest) * -_most(np.where(self._spans, -forward, -FAR_NS // number))
            needed = np.minimum(needed, everything)
        else:
            needed = everything
        return np.where(lacking <= 0, 0, np.where(lacking > droppable, FAR_NS, needed))


def _most(values: np.ndarray) -> np.ndarray:
    """Return the largest value of layers i to j - 1 at [i, j]."""
    count = len(values)
    grid = np.where(np.arange(count)[None, :] >= np.arange(count + 1)[:, None], values[None, :], values.min(initial=0))
    return np.concatenate((np.full((count + 1, 1), values.min(initial=0)), np.maximum.accumulate(grid, axis=1)), axis=1)
