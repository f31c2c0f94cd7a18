"""Plans of equally replicated stages, made without a search: fast enough to evaluate hundreds of sets of hosts.

Shapes (stages × replicas) leave few devices idle; their layers are cut so that the slowest stage is fastest among the
cuts that fit memory. An estimate orders the shapes. The first few are judged, with stages side by side in a host and
with replicas side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.infinity import NEVER_NS, UNLIMITED
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.stage import step_ns
from penstock.solvers.costs.tables.device_line import likeness
from penstock.solvers.costs.tables.stage_table import cut_places, layer_sums, static_sums
from penstock.solvers.grid.block_partition import thinnest
from penstock.solvers.grid.memory_cut import Demand, memory_cut
from penstock.solvers.grid.places import Places, apart, least_pass_ns, side_by_side
from penstock.solvers.model.allocation import single_pipeline, stages_on
from penstock.solvers.model.micro_batches import Batch, batch_of, evenly
from penstock.solvers.model.network import Inside, Network
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Result
from penstock.solvers.planners.proposal import Proposal, under
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.driver import judged
from penstock.solvers.solve.judging import Judge

NAME = "regular"
MOST_JUDGED, LEAST_JUDGED = 6, 3
"""Shapes that are judged: all of these on few devices, fewer on many."""
DEVICES_JUDGED = 1536
"""Devices of all the shapes that are judged beyond the least number."""
IDLE = 8
"""Fraction of idle devices that a shape may leave: one in 8."""
MOST_DEPTHS = 48
"""The most numbers of stages that are tried."""
SLICES = (1, 2, 4, 8, 16)
"""Rows of a micro-batch for each replica."""


UNLIMITED_RULES: dict[str, Any] = {"shared": False, "channel": "none", "transfer": "nic"}

Longest = Callable[[int], int]
"""The step time in ns beyond which a plan is of no use, by the number of devices."""


class Shape(NamedTuple):
    """Stages with equal numbers of replicas, the ``bounds`` of their layers, and an estimate of the step's time."""

    estimate_ns: int
    depth: int
    replicas: int
    batch: Batch
    bounds: tuple[int, ...]


def plan(problem: Problem) -> Result:
    """Return the best regular plan that was simulated, with its bound, or the nearest plan's shortage."""
    if shapes := _best(problem):
        proposals = _proposals(problem, shapes)
    else:
        proposals = (under(problem, each, ("early-backward",), "A") for each in thinnest(problem))
    return judged(problem, NAME, proposals, "early-backward")


def may_take(problem: Problem, upper_bound_ns: Longest) -> bool:
    """Return whether a regular plan may take at most ``upper_bound_ns`` with unlimited bandwidth.

    If not, no network allows it.
    """
    free = replace(problem, network=_unlimited(problem), rules=replace(problem.rules, **UNLIMITED_RULES))
    return any(
        _takes(free, shape, upper_bound_ns(shape.depth * shape.replicas)) for shape in _best(free, upper_bound_ns)
    )


def _takes(problem: Problem, shape: Shape, upper_bound_ns: int) -> bool:
    judge = Judge(Setting(problem, schedule="early-backward"), ceiling_ns=lambda: upper_bound_ns)
    judge.judge_all(NAME, _proposals(problem, [shape]))
    return judge.best is not None and judge.best.value_ns <= upper_bound_ns


def _unlimited(problem: Problem) -> Network:
    """Return the problem with all devices in one node with unlimited bandwidth."""
    names, inside = problem.network.device_names, Inside("ports", UNLIMITED, 0, True)
    return Network(names, ("one",), (0,) * len(names), (inside,), ())


def _proposals(problem: Problem, shapes: Sequence[Shape]) -> Iterator[Proposal]:
    for shape in shapes:
        for places in _layouts(problem, shape):
            allocation = single_pipeline(stages_on(places, shape.bounds), shape.batch.num_micro_batches)
            yield under(problem, allocation, ("early-backward",), "A")


def _best(problem: Problem, upper_bound_ns: Longest = lambda _devices: NEVER_NS) -> list[Shape]:
    """Return the shapes with the least estimates, one for each number of replicas and of micro-batches.

    Chains are cut in the order of their lower bounds, until no other can be among the best.
    """
    most = max(LEAST_JUDGED, min(MOST_JUDGED, DEVICES_JUDGED // problem.num_devices))
    best: dict[tuple[int, Batch], Shape] = {}
    for chain in sorted(_chains(problem), key=lambda chain: (chain.least_ns, chain.depth, chain.replicas)):
        ranked = sorted(shape.estimate_ns for shape in best.values())
        if len(ranked) >= most and chain.least_ns >= ranked[most - 1]:
            break
        if chain.proven_ns > upper_bound_ns(chain.depth * chain.replicas):
            continue
        for again in {"never": (False,), "always": (True,), "auto": (False, True)}[problem.recompute]:
            bounds = chain.cuts(again)
            if bounds is None:
                continue
            shape = Shape(chain.estimate_ns(bounds, again), chain.depth, chain.replicas, chain.batch, tuple(bounds))
            key = (shape.replicas, shape.batch)
            best[key] = min(shape, best.get(key, shape))
    return sorted(best.values())[:most]


def _layouts(problem: Problem, shape: Shape) -> list[Places]:
    """Return the devices of each stage: replicas adjacent, and stages adjacent; once where both are the same."""
    used = range(shape.depth * shape.replicas)
    together, spread = side_by_side(used, shape.replicas), apart(used, shape.depth)
    looks = {likeness(device) for device in problem.devices}
    alike = len(looks) == len(problem.network.node_names) == 1
    return [together] if together == spread or alike else [together, spread]


def _depths(problem: Problem) -> list[int]:
    """Return the numbers of stages whose replicas use nearly all devices."""
    devices = problem.num_devices
    near = [s for s in range(1, min(problem.num_blocks, devices) + 1) if (devices % s) * IDLE <= devices]
    return evenly(near, MOST_DEPTHS)


def _chains(problem: Problem) -> Iterator[_Chain]:
    """Yield every number of stages with every number of micro-batches that feeds its replicas."""
    for depth in _depths(problem):
        replicas = problem.num_devices // depth
        sizes = problem.micro_batch_sizes or tuple(rows * replicas for rows in SLICES)
        batches = {batch_of(problem, min(size, problem.global_batch_size)) for size in sizes}
        for batch in sorted(batches):
            if batch.replicas_fed(problem.min_slice) >= replicas:
                yield _Chain(problem, depth, replicas, batch)


class _Chain:
    """The layers' costs for a slice of a micro-batch on the slowest kind, and their bytes on the smallest device.

    Arrays are prefix sums at the places where the chain may be cut. ``crossing``: bytes of the widest cut; 0 for a
    single stage, which receives and sends nothing.
    """

    def __init__(self, problem: Problem, depth: int, replicas: int, batch: Batch) -> None:
        self.problem, self.depth, self.replicas, self.batch = problem, depth, replicas, batch
        share = -(-batch.most_rows // replicas)
        used = problem.devices[: depth * replicas]
        costs = layer_sums(problem, sorted({device.kind for device in used}), share)
        self.places = cut_places(problem)
        forward, backward = costs.forward_ns[self.places], costs.backward_ns[self.places]
        self.times = {False: forward + backward, True: 2 * forward + backward}
        self.stash = costs.kept_bytes[self.places]
        self.static = static_sums(problem, replicas).total[self.places]
        widest = int(problem.forward_bytes.max(initial=0)) * share if depth > 1 else 0
        self.crossing, self.kept_input = (widest, 0) if problem.memory.count_buffers else (0, widest)
        self.room = free_bytes(problem, range(depth * replicas)) - int(costs.workspace_bytes.max())

    @property
    def least_ns(self) -> int:
        """Return a lower bound on every estimate: all stages equally fast, and nothing recomputed unless all is."""
        whole = int(self.times[self.problem.recompute == "always"][-1])
        return whole // self.depth * (self.batch.num_micro_batches - 1) + whole

    @property
    def proven_ns(self) -> int:
        """Return a bound on all plans, with any recomputation: some stage has its share of the layers on some kind."""
        rows = self.batch.least_rows // self.replicas
        again = self.problem.recompute == "always"
        whole_ns = least_pass_ns(self.problem, range(self.depth * self.replicas), rows, again)
        return whole_ns // self.depth * self.batch.num_micro_batches

    def cuts(self, again: bool) -> list[int] | None:
        """Return the fitting cuts whose slowest stage is fastest; None where no cuts fit."""
        flying = np.minimum(np.arange(self.depth, 0, -1), self.batch.num_micro_batches)
        stashed = np.ones_like(flying) if again else flying
        room = self.room - self.crossing * (flying + 2) - (self.kept_input * flying if again else 0)
        size = self.static + stashed[:, None] * self.stash
        parts = memory_cut(Demand(np.tile(self.times[again], (self.depth, 1)), size[None]), room[None])
        return None if parts is None else [int(place) for place in self.places[parts]]

    def estimate_ns(self, bounds: list[int], again: bool) -> int:
        """Estimate a step: the slowest stage per micro-batch, the pass through all, the largest all-reduce, update."""
        steps = np.diff(self.times[again][np.searchsorted(self.places, bounds)])
        heaviest = int(np.diff(self.problem.owned_bytes[bounds]).max())
        ends = np.asarray(bounds)
        update = int(step_ns(self.problem, ends[:-1], ends[1:], self.replicas).max())
        reduced = all_reduce_ns(self.problem, heaviest, range(self.replicas)) if self.replicas > 1 else 0
        return int(steps.max()) * (self.batch.num_micro_batches - 1) + int(steps.sum()) + reduced + update
