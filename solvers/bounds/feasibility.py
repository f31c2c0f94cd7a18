"""``proof_of_infeasibility``: why a request has no plan of any kind, or None if that is not proven.

A search that ends without a plan proves nothing: it lists only some plans. Each condition here holds for *every* plan
that the judge accepts for the request: any cut, replicas by rows or in turn, several stages on a device, several
pipelines, recomputation of any segments, any order, any update rule. All conditions rest on these facts of the judge.

* Every pipeline holds every layer, and cuts only where the profile allows it. So each *block* (the layers between two
  neighbouring cuttable positions) lies in one stage, and each device of that stage is allowed to hold it by the pins.
* A device has, all the time, the parameters of each stage that it holds, and its part of the optimizer states: all of
  them, or one of as many shares as the stage has replicas. Tied parameters count in the first layer that uses them.
* During the backward of a stage, when it takes time, the device has also that stage's gradients, the largest workspace
  of its layers, and the stash of each of its layers, kept since the forward or rebuilt: of all layers together where
  nothing recomputes; where plans may recompute, at least of the layer with the largest, because every layer is kept or
  lies in a segment that is rebuilt at once, and of a layer that recomputes modules the kept and the rebuilt part of its
  stash are there together while it runs backward. A device computes at least the least slice of the smallest
  micro-batch.
* In a flushed step the gradients of all stages of a device stay until it steps after all its operations, so during the
  last backward all of them are there at once. Without a flush, a stage may step before another one's first backward.

Buffers of transfers, inputs of stages, and weight versions that depend on the order are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.schemas.amounts import exact
from penstock.solvers.costs.memory import context_bytes, free_bytes
from penstock.solvers.costs.tables.stage_table import StaticSums, layer_sums, static_sums
from penstock.solvers.model.micro_batches import num_micro_batches
from penstock.solvers.model.pins import unkeepable_pin
from penstock.solvers.model.plan_shape import layers, layers_need
from penstock.solvers.model.problem import Measured, Problem, per_problem
from penstock.solvers.model.result import Shortage

MOST_PAIRS = 1024
"""The most pairs of a block and a device for which every assignment of blocks to devices is searched."""
SEARCHED = 2.0
"""The deterministic seconds of that search."""
MOST_ROUTED = 64
"""The most devices whose connections are looked up pair by pair; larger clusters count as connected."""
SLOP_NS = 2
"""The most that rounding up can subtract from the difference of two times that are not measured themselves."""

Devices = Sequence[int]


class Proof(NamedTuple):
    """The reason why there is no plan, as the end of a sentence, and the block that fits on no device, if any."""

    sentence: str
    shortage: Shortage | None = None


@per_problem
def proof_of_infeasibility(problem: Problem) -> Proof | None:
    """Return the proof that the request has no plan of any kind, or None.

    In every plan some devices that are connected to each other hold all layers (``connected``), so that refuting each
    connected part of the cluster separately is enough.
    """
    sentence = unfed(problem) or unkeepable_pin(problem)
    if sentence is not None:
        return Proof(sentence)
    least = Least(problem)
    parts = connected(problem)
    proofs = []
    for part in parts:
        proof = _too_large(least, part) or _too_much(least, part) or _unpackable(least, part)
        if proof is None:
            return None
        proofs.append(proof)
    first = proofs[0]
    if len(parts) > 1:
        return first._replace(sentence=f"the network has {len(parts)} parts that nothing connects; {first.sentence}")
    return first


def unfed(problem: Problem) -> str | None:
    """Return why no micro-batch gives a replica ``min_slice`` samples; None if one does."""
    if least_rows(problem) > 0:
        return None
    sizes = [size * problem.samples_per_row for size in problem.micro_batch_sizes]
    requested = f"{sizes} samples" if sizes else f"the {problem.batch_samples} samples"
    return f"no micro-batch of {requested} gives every replica min_slice = {problem.min_slice} samples"


def least_rows(problem: Problem) -> int:
    """Return the samples of the smallest micro-batch of any allowed number of them; 0 if no number is allowed."""
    batch, least = problem.global_batch_size, problem.min_slice
    if not problem.micro_batch_sizes:
        return batch // (batch // least) if batch >= least else 0
    sizes = [batch // num_micro_batches(batch, size) for size in problem.micro_batch_sizes]
    return min((rows for rows in sizes if rows >= least), default=0)


def connected(problem: Problem) -> list[list[int]]:
    """Return the parts of the cluster without routes between them, largest first; one part if plans need no routes.

    Row 0 of the first micro-batch of a pipeline is in one device of each stage, and travels wherever two of these are
    not the same, unless nothing is sent over a cut. So these devices, which together hold all layers, are in one part;
    and so are all replicas of a stage that has gradients to sum.
    """
    number = problem.num_devices
    silent = (problem.forward_bytes == 0) & (problem.backward_bytes == 0) & problem.cuttable
    if number > MOST_ROUTED or silent.any():
        return [list(range(number))]
    left, parts = set(range(number)), []
    while left:
        part, waiting = [], [min(left)]
        left.remove(waiting[0])
        while waiting:
            here = waiting.pop()
            part.append(here)
            near = {d for d in left if _joined(problem, here, d)}
            left -= near
            waiting += sorted(near)
        parts.append(sorted(part))
    return sorted(parts, key=lambda part: (-len(part), part))


def _joined(problem: Problem, one: int, other: int) -> bool:
    return problem.network.route(one, other) is not None or problem.network.route(other, one) is not None


class DeviceGroup(NamedTuple):
    """Devices of one kind, allowed by the same pins, with equally many ``free`` bytes after context and headroom."""

    kind: str
    free: int
    devices: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Least:
    """The least bytes of each block in any plan, as arrays (blocks,), int64."""

    problem: Problem

    @cached_property
    def edges(self) -> np.ndarray:
        """The first layer of each block, and L."""
        return np.concatenate(([0], np.flatnonzero(self.problem.cuttable) + 1, [self.problem.num_layers]))

    @property
    def blocks(self) -> int:
        """The number of blocks."""
        return len(self.edges) - 1

    @cached_property
    def _sums(self) -> StaticSums:
        return static_sums(self.problem)

    def groups(self, part: Devices) -> list[DeviceGroup]:
        """Return a part of the cluster in groups of equal kind, memory and pins; groups by their first device."""
        members_of: dict[tuple[str, int, tuple[bool, ...]], list[int]] = {}
        for d in part:
            device = self.problem.devices[d]
            free = free_bytes(self.problem, (d,))
            pinned = tuple(d in pin.devices for pin in self.problem.pins)
            members_of.setdefault((device.kind, free, pinned), []).append(d)
        return [DeviceGroup(kind, free, tuple(members)) for (kind, free, _pinned), members in members_of.items()]

    def may_hold(self, block: int, group: DeviceGroup) -> bool:
        """Return True if the pins allow a group's devices to hold a block."""
        first, stop, device = self.edges[block], self.edges[block + 1], group.devices[0]
        return all(pin.last < first or stop <= pin.first or device in pin.devices for pin in self.problem.pins)

    @cached_property
    def weights(self) -> np.ndarray:
        """Parameters, plus a second copy of the trainable ones if every allowed rule keeps two."""
        twice = self.problem.update_rules == {"double_buffered"}
        return self._of(self._sums.parameters) + (self._of(self._sums.trainable) if twice else 0)

    @cached_property
    def states(self) -> np.ndarray:
        """Optimizer states, all shares together."""
        return self._of(self._sums.optimizer)

    @cached_property
    def share(self) -> np.ndarray:
        """The optimizer states on one device of a stage, shared by as many replicas as possible."""
        if not self.problem.memory.shard_states:
            return self.states
        groups = self.groups(range(self.problem.num_devices))
        most = [sum(len(g.devices) for g in groups if self.may_hold(block, g)) for block in range(self.blocks)]
        return np.asarray(self.states // np.maximum(1, most))

    @cached_property
    def gradients(self) -> np.ndarray:
        """Gradients of blocks whose backward takes time; they stay from its start to the end of the step."""
        kinds = {device.kind for device in self.problem.devices}
        points = [point for kind in kinds for point in self._measured(kind)]
        takes_time = np.min([point.backward_ns for point in points], axis=0) > 0
        return np.where(np.logical_or.reduceat(takes_time, self.edges[:-1]), self._of(self._sums.gradients), 0)

    @property
    def together(self) -> bool:
        """True if the gradients of all stages of a device are in memory at the same time."""
        return self.problem.update_rules <= {"synchronous", "elastic_averaging"}

    @cached_property
    def active(self) -> dict[str, np.ndarray]:
        """The stash and workspace during the backward, by kind of device."""
        kinds = {device.kind for device in self.problem.devices}
        return {kind: np.where(self._takes_time, self._active_on(kind), 0) for kind in sorted(kinds)}

    def _of(self, prefix: np.ndarray) -> np.ndarray:
        return np.asarray(np.diff(prefix[self.edges]))

    def _active_on(self, kind: str) -> np.ndarray:
        costs = [layer_sums(self.problem, (kind,), rows) for rows in self._rows(kind)]
        stash = np.min([np.diff(each.kept_bytes) for each in costs], axis=0)
        workspace = np.min([each.workspace_bytes for each in costs], axis=0)
        together = np.add if self.problem.recompute == "never" else np.maximum
        return np.asarray(
            together.reduceat(stash, self.edges[:-1]) + np.maximum.reduceat(workspace, self.edges[:-1]), dtype=np.int64
        )

    @cached_property
    def _takes_time(self) -> np.ndarray:
        """(blocks,): True if the gradients of a block's inputs take time on every kind, at every size of a slice.

        A split backward is certain to hold the stash of a micro-batch during that part only.
        """
        sure = np.ones(self.problem.num_layers, dtype=bool)
        for kind in {device.kind for device in self.problem.devices}:
            exact = self.problem.kind_source[kind][1] == 1.0 and [p.rows for p in self._measured(kind)] == [1]
            for rows in self._rows(kind):
                costs = self.problem.costs(kind, rows)
                sure &= np.diff(costs.backward_ns) - np.diff(costs.weight_ns) > (0 if exact else SLOP_NS)
        return np.asarray(np.logical_or.reduceat(sure, self.edges[:-1]))

    def _rows(self, kind: str) -> list[int]:
        """Return sizes of slices between which times and bytes are linear in the rows; the first is the least slice."""
        problem = self.problem
        least = max(problem.min_slice, -(-least_rows(problem) // problem.num_devices))
        measured = [point.rows for point in self._measured(kind)]
        return sorted({least, *(rows + more for rows in measured for more in (0, 1) if rows + more > least)})

    def _measured(self, kind: str) -> tuple[Measured, ...]:
        return self.problem.measured[self.problem.kind_source[kind][0]]


def _too_large(least: Least, part: Devices) -> Proof | None:
    """Find a block that fits on no device that may hold it: each of its stages needs at least this on each device."""
    groups = least.groups(part)
    for block in range(least.blocks):
        usable = [group for group in groups if least.may_hold(block, group)]
        if not usable:
            names = least.problem.layer_names
            return Proof(f"none of the devices that may hold {layers(*_span(least, block), names)} is among them")
        least_bytes = int(least.weights[block] + least.share[block] + least.gradients[block])
        lacking = [least_bytes + int(least.active[group.kind][block]) - group.free for group in usable]
        if min(lacking) <= 0:
            continue
        nearest = usable[lacking.index(min(lacking))].devices[0]
        available = free_bytes(least.problem, (nearest,)) + context_bytes(least.problem, nearest)
        needed = available + min(lacking)  # the context included, as in the judge
        short = Shortage(int(least.edges[block]), int(least.edges[block + 1]) - 1, nearest, needed, available)
        name = least.problem.devices[nearest].name
        return Proof(
            f"{layers_need(*_span(least, block), least.problem.layer_names)} at least {exact(needed)} of any device "
            f"allowed to hold that, and the roomiest, {name!r}, has {exact(available)}",
            short,
        )
    return None


def _too_much(least: Least, part: Devices) -> Proof | None:
    """Prove that all blocks need more than all devices have, each less the bytes of computing some block there."""
    total = least.weights + least.states + (least.gradients if least.together else 0)
    room = 0
    for group in least.groups(part):
        usable = [block for block in range(least.blocks) if least.may_hold(block, group)]
        if usable:
            active = least.active[group.kind] + (0 if least.together else least.gradients)
            room += len(group.devices) * max(0, group.free - int(active[usable].min()))
    needed = int(total.sum())
    if needed <= room:
        return None
    kinds = "parameters, optimizer states and gradients" if least.together else "parameters and optimizer states"
    return Proof(
        f"the {kinds} of all layers take {exact(needed)} at least, and all devices together have {exact(room)} for them"
    )


def _unpackable(least: Least, part: Devices) -> Proof | None:
    """Prove by CP-SAT that no assignment of blocks to devices fits the bytes that are in a device's memory together.

    ``holds[b, d]``: device d holds block b, alone or as one of several. During the backward of a held block its
    gradients and stash are in memory with the weights of all held blocks. A flushed step has a last backward, of some
    held block, when the gradients of all held blocks are in memory.
    """
    if least.blocks * len(part) > MOST_PAIRS:
        return None
    from ortools.sat.python import cp_model  # imports pandas: a quarter of the modules of a first plan

    of = {device: group for group in least.groups(part) for device in group.devices}
    pairs = [(b, d) for b in range(least.blocks) for d in part if least.may_hold(b, of[d])]
    model = cp_model.CpModel()
    holds = {pair: model.new_bool_var(f"held {pair}") for pair in pairs}
    for block in range(least.blocks):
        model.add_bool_or([holds[b, d] for b, d in pairs if b == block])
    always, gradients = (least.weights + least.share).tolist(), least.gradients.tolist()
    for device in part:
        allowed, active, free = (
            [b for b, d in pairs if d == device],
            least.active[of[device].kind].tolist(),
            of[device].free,
        )
        weights = sum(always[b] * holds[b, device] for b in allowed)
        kept = weights + sum(gradients[b] * holds[b, device] for b in allowed)
        last = {b: model.new_bool_var(f"last {b} {device}") for b in allowed if least.together}
        for b in allowed:
            model.add(weights + gradients[b] + active[b] <= free).only_enforce_if(holds[b, device])
            if least.together:
                model.add_implication(last[b], holds[b, device])
                model.add_bool_or(last.values()).only_enforce_if(holds[b, device])
                model.add(kept + active[b] <= free).only_enforce_if(last[b])
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = SEARCHED
    if solver.solve(model) != cp_model.INFEASIBLE:
        return None
    return Proof(
        f"however the {least.blocks} blocks of layers are shared out over the {len(part)} devices, one of these would "
        "need more memory than it has"
    )


def _span(least: Least, block: int) -> tuple[int, int]:
    """Return the first and the last layer of a block."""
    return int(least.edges[block]), int(least.edges[block + 1]) - 1
