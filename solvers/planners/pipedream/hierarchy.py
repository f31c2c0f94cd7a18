"""PipeDream's hierarchical partition [1]_ (ALGORITHMS 7.4), by the paper's formula or the released optimizer's (R-35).

A level is a number of equal machines and the bandwidth between them; a machine of level k is all of level k - 1.
Symbols:

- A^k(i -> j, m): ``value``; T^k(i -> j, m): ``partition_kernel.replicated_ns``.
- |w_l|: parameter bytes; a_s: boundary bytes.
- B_k: ``Level.bandwidth_bytes_per_s``; m_k: ``Level.machines``.

O(sum over k of L^3 m_k^2), O(L^2 m^2) on the last level. All times are of one micro-batch, rounded up.

Machines that a lower level's plan holds are replicas of it, so a stage inside a replicated machine has the replicas
of both levels. The memory rule counts what NOAM keeps in flight: ceil(machines from the stage on / replicas) times
activations and parameters, within its level; the released optimizer counts only the machines after the stage.

.. [1] Narayanan et al., PipeDream (SOSP 2019), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.device_line import device_order
from penstock.solvers.costs.tables.stage_table import StageTable, between, crossing_bytes, cut_places, static_sums
from penstock.solvers.costs.transfer import transfers_ns
from penstock.solvers.grid.row_partition import RatedAllocation
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.pipedream.partition_kernel import run_level


class Level(NamedTuple):
    """A number of equal machines, and the bandwidth between any two of them."""

    machines: int
    bandwidth_bytes_per_s: int


class Part(NamedTuple):
    """Layers [first, stop) and the positions of the devices that hold them."""

    first: int
    stop: int
    positions: tuple[int, ...]


class Plan(NamedTuple):
    """The parts in order, and the value of the formula: time per micro-batch of the slowest stage or transfer."""

    parts: tuple[Part, ...]
    value_ns: int


@dataclass(frozen=True, slots=True)
class Rules:
    """The formula. ``compression`` divides the released optimizer's boundary transfers; 0 leaves them out."""

    released: bool = False
    compression: float = 0.0


@dataclass(frozen=True, eq=False)
class Chain:
    """The input of the formula, by places (the n cuts of the chain, both ends included).

    ``work_ns``, ``weight_bytes`` and ``stashed_bytes`` are (n, n), of the layers between two places. ``boundary_bytes``
    (n,) is of one micro-batch one way; ``room_bytes`` is a device's free memory.
    """

    places: np.ndarray
    work_ns: np.ndarray
    weight_bytes: np.ndarray
    stashed_bytes: np.ndarray
    boundary_bytes: np.ndarray
    room_bytes: int


def allocated(problem: Problem, batch: Batch, rules: Rules) -> RatedAllocation | None:
    """Return the formula's partition of a micro-batch's work over the whole cluster.

    None where its memory rule allows no partition. Raises ``UnsupportedRequest`` for devices of several kinds.
    """
    plan = partition(chain_of(problem, batch), levels_of(problem), rules)
    if plan is None:
        return None
    order = device_order(problem)
    stages = tuple(
        Stage(part.first, part.stop - 1, tuple(sorted(order[p] for p in part.positions))) for part in plan.parts
    )
    return RatedAllocation(single_pipeline(stages, batch.num_micro_batches), plan.value_ns)


def levels_of(problem: Problem) -> tuple[Level, ...]:
    """Return the levels: devices in nodes and nodes in the cluster.

    There is one flat level where nodes differ in size or links are measured.
    """
    network, nodes = problem.network, problem.nodes()
    everyone = tuple(range(problem.num_devices))
    sizes = {len(node) for node in nodes}
    if problem.num_devices == 1:
        return (Level(1, 0),)
    if network.matrix_bytes_per_s is not None or len(sizes) > 1 or len(nodes) == 1 or sizes == {1}:
        return (Level(problem.num_devices, network.ring_bandwidth(everyone)),)
    inside = min(network.ring_bandwidth(node) for node in nodes)
    between = network.bandwidth_across(everyone)
    return Level(sizes.pop(), inside), Level(len(nodes), between)


def chain_of(problem: Problem, batch: Batch) -> Chain:
    """Return the chain for one micro-batch. Raises ``UnsupportedRequest`` for devices of several kinds."""
    kinds = sorted({device.kind for device in problem.devices})
    if len(kinds) > 1:
        raise UnsupportedRequest(
            f"PipeDream's formula takes devices of one kind; the cluster has {', '.join(kinds)}",
            remedy="paper false, which places stages on the devices that there are",
        )
    places = cut_places(problem)
    table = StageTable(problem, kinds, batch.most_rows, places)
    parameters = between(static_sums(problem).parameters[places])
    boundary = crossing_bytes(problem, 0, batch.most_rows)[places]
    room = free_bytes(problem, range(problem.num_devices))
    return Chain(places, table.work_ns(again=False), parameters, table.kept_bytes + parameters, boundary, room)


def partition(chain: Chain, levels: Sequence[Level], rules: Rules) -> Plan | None:
    """Return the plan on all machines with the smallest value, or None where the memory rule allows none."""
    work = chain.work_ns
    solved = []
    for number, level in enumerate(levels, 1):
        final = number == len(levels)
        value, choice = run_level(
            work,
            _twice_ns(chain.weight_bytes, level.bandwidth_bytes_per_s),
            _boundary_ns(chain, level, rules),
            chain.stashed_bytes,
            chain.places,
            level.machines,
            chain.room_bytes,
            1 if final else len(chain.places),
            rules.released,
            levels[number - 2].machines if number > 1 else 1,
        )
        solved.append(choice)
        work = np.ascontiguousarray(value[:, :, level.machines])
    best = int(work[0, -1])
    if best >= NEVER_NS:
        return None
    return Plan(tuple(_parts(chain, levels, solved, len(levels) - 1, 0, len(chain.places) - 1)), best)


def _parts(chain: Chain, levels: Sequence[Level], solved: list[np.ndarray], k: int, i: int, j: int) -> list[Part]:
    """Return stages of layers between two places on all machines of level k, positions counted from 0."""
    if k < 0:
        return [Part(int(chain.places[i]), int(chain.places[j]), (0,))]
    size = int(np.prod([level.machines for level in levels[:k]], dtype=np.int64))
    left, stop = levels[k].machines, j
    parts: list[Part] = []
    while stop > i:
        split, after = (int(v) for v in solved[k][i, stop, left])
        start, used = (i, left) if split < 0 else (split, after)
        machines = range(left - used, left)
        inside = _parts(chain, levels, solved, k - 1, start, stop)
        parts = [
            Part(part.first, part.stop, tuple(m * size + p for m in machines for p in part.positions))
            for part in inside
        ] + parts
        left, stop = left - used, start
    return parts


def _boundary_ns(chain: Chain, level: Level, rules: Rules) -> np.ndarray:
    """Return 2 a_s / B_k at every place; without a compression the released optimizer counts 0."""
    if rules.released and rules.compression == 0:
        return np.zeros(len(chain.places), dtype=np.int64)
    sizes = chain.boundary_bytes
    if rules.released:
        sizes = np.ceil(sizes / rules.compression).astype(np.int64)
    return _twice_ns(sizes, level.bandwidth_bytes_per_s)


def _twice_ns(sizes: np.ndarray, bandwidth: int) -> np.ndarray:
    """Return the time of twice these bytes, exact; NEVER_NS where nothing connects."""
    return np.asarray(np.minimum(NEVER_NS, transfers_ns(2 * np.maximum(0, sizes), bandwidth)))
