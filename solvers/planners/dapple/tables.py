"""A problem, one number of micro-batches and the reachable placements as the kernel's arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.device_line import Affine, affine_all_reduce, server_classes
from penstock.solvers.costs.tables.routes import Routes, routes_of
from penstock.solvers.costs.tables.stage_table import layer_sums, static_between, static_sums
from penstock.solvers.model.micro_batches import Batch, largest_slice
from penstock.solvers.model.problem import Problem, per_problem
from penstock.solvers.planners.dapple.kernel_arrays import Layers, Places, SetCosts
from penstock.solvers.planners.dapple.placement import POLICIES, Geometry, Policy, geometry

MAX_TRANSITIONS = 30_000
SERVER_VISITS = 240_000
FEW_DEVICES = 16
MAX_SET_KEYS = 4_000


@dataclass(frozen=True, eq=False)
class PlacementTables:
    """The tables that do not depend on the micro-batches.

    ``restricted``: not every replica count or policy is searched.
    """

    geometry: Geometry
    places: Places
    routes: Routes
    placed: SetCosts
    remaining: SetCosts
    kinds: tuple[str, ...]
    fixed_bytes: np.ndarray
    state_bytes: np.ndarray
    restricted: bool


@per_problem
def shape(problem: Problem, replicas: tuple[int, ...] = (), by_set: bool = True) -> PlacementTables:
    """Return placements and network of a problem.

    ``replicas``: the replica counts allowed (beyond ``FEW_DEVICES`` by append first only); if empty, all counts that
    stay searchable. ``by_set``: the last stage's set is part of the memo key, if there are at most ``MAX_SET_KEYS``
    sets. Otherwise the occupancy alone is the key.
    """
    nodes = problem.nodes()
    sizes = tuple(len(node) for node in nodes)
    classes = server_classes(problem)
    placements, restricted = _placements(sizes, classes, replicas)
    kinds = tuple(sorted({device.kind for device in problem.devices}))
    before = placements.states[placements.source]
    static = static_between(problem, np.arange(problem.num_layers + 1))
    whole = np.broadcast_to(np.asarray(sizes), placements.states.shape)
    return PlacementTables(
        geometry=placements,
        places=_places(problem, placements, by_set and len(placements.source) <= MAX_SET_KEYS),
        routes=routes_of(problem),
        placed=_sets(problem, kinds, classes, before, before + placements.take),
        remaining=_sets(problem, kinds, classes, placements.states, whole),
        kinds=kinds,
        fixed_bytes=static.parameters + static.gradients,
        state_bytes=static.optimizer,
        restricted=restricted,
    )


def _places(problem: Problem, placements: Geometry, by_set: bool) -> Places:
    nodes = problem.nodes()
    sizes = [len(node) for node in nodes]
    node_device = np.full((len(nodes), max(sizes)), -1, dtype=np.int64)
    for n, node in enumerate(nodes):
        node_device[n, : len(node)] = node
    count = len(placements.source) if by_set else len(placements.states)
    key_of = np.arange(count, dtype=np.int64) if by_set else placements.target
    state_of_key = np.append(placements.target if by_set else np.arange(count), 0)
    keys_of = np.argsort(state_of_key, kind="stable").astype(np.int64)
    return Places(
        states=placements.states.astype(np.int64),
        used=placements.used,
        first=placements.first,
        target=placements.target,
        replicas=placements.replicas,
        take=placements.take.astype(np.int64),
        order=placements.order.astype(np.int64),
        node_device=node_device,
        node_size=np.asarray(sizes, dtype=np.int64),
        node_of=np.asarray([device.node for device in problem.devices], dtype=np.int64),
        by_used=np.argsort(placements.used, kind="stable").astype(np.int64),
        key_of=key_of,
        keys_of=keys_of,
        first_key=np.searchsorted(state_of_key[keys_of], np.arange(len(placements.states) + 1)).astype(np.int64),
    )


def _placements(sizes: tuple[int, ...], classes: tuple[int, ...], replicas: tuple[int, ...]) -> tuple[Geometry, bool]:
    """Return the reachable placements, and whether replica counts are restricted.

    All replica counts are tried if that stays searchable. Otherwise counts divide or fill servers, or only fill them.
    """
    total, largest = sum(sizes), max(sizes)
    limit = max(2_500, min(MAX_TRANSITIONS, SERVER_VISITS // len(sizes)))
    inside = [r for r in range(1, largest + 1) if largest % r == 0]
    whole = tuple(sorted({*range(largest, total + 1, largest), total}))
    doubled = tuple(sorted({total, *(largest * 2**e for e in range(total.bit_length()) if largest * 2**e <= total)}))
    tries = [
        (tuple(range(1, total + 1)), POLICIES),
        (tuple(sorted({*inside, *whole})), POLICIES),
        (tuple(sorted({*inside, *whole})), POLICIES[:1]),
        (whole, POLICIES[:1]),
        (doubled, POLICIES[:1]),
    ]
    occupancies = math.comb(len(sizes) + largest, largest)
    start = 0 if occupancies <= limit // 4 else 1 if occupancies <= limit else 3
    if replicas:
        filling: tuple[Policy, ...] = ("append",)
        start, tries = 0, [(replicas, POLICIES if total <= FEW_DEVICES else filling), (replicas, filling)]
    for number, (counts, kept) in enumerate(tries[start:], start):
        placements = geometry(sizes, classes, counts, kept, limit)
        if placements is not None:
            return placements, number > 0
    placements = geometry(sizes, classes, (total,), POLICIES[:1], limit)
    assert placements is not None
    return placements, True


def _sets(
    problem: Problem, kinds: tuple[str, ...], classes: tuple[int, ...], low: np.ndarray, high: np.ndarray
) -> SetCosts:
    """Return the costs of the sets that hold devices ``low[i, n]`` … ``high[i, n] - 1`` of server n."""
    nodes = problem.nodes()
    network = problem.network
    plain = network.matrix_bytes_per_s is None and not any(network.has_own_nic)
    room_of = [free_bytes(problem, [d]) for d in range(problem.num_devices)]
    bit_of = [1 << kinds.index(device.kind) for device in problem.devices]
    reductions: dict[tuple[object, ...], Affine] = {}
    rows = []
    for before, after in zip(low.tolist(), high.tolist(), strict=True):
        devices = tuple(d for node, a, b in zip(nodes, before, after, strict=True) for d in node[a:b])
        mark = _shape_of_set(classes, [b - a for a, b in zip(before, after, strict=True)]) if plain else devices
        if mark not in reductions:
            reductions[mark] = affine_all_reduce(problem, devices)
        mask = 0
        for device in devices:
            mask |= bit_of[device]
        rows.append((min((room_of[d] for d in devices), default=0), mask, *reductions[mark][:2]))
    room, masks, slope, fixed = zip(*rows, strict=True)
    return SetCosts(
        np.asarray(room, dtype=np.int64),
        np.asarray(masks, dtype=np.int64),
        np.asarray(slope, dtype=np.float64),
        np.asarray(fixed, dtype=np.int64),
    )


def _shape_of_set(classes: tuple[int, ...], counts: list[int]) -> tuple[object, ...]:
    """Return all that an all-reduce depends on.

    For each class: the devices, the servers, and the fewest and the most devices on a server.
    """
    groups: dict[int, list[int]] = {}
    for kind, count in zip(classes, counts, strict=True):
        if count:
            groups.setdefault(kind, []).append(count)
    return tuple((kind, sum(group), len(group), min(group), max(group)) for kind, group in sorted(groups.items()))


def layers(problem: Problem, base: PlacementTables, batch: Batch) -> Layers:
    """Return the costs of the largest micro-batch, for the largest slice of every number of replicas."""
    devices = problem.num_devices
    shares = [largest_slice(batch.most_rows, r) for r in range(1, devices + 1)]
    rows = sorted(set(shares))
    share_of = np.asarray([0, *(rows.index(share) for share in shares)], dtype=np.int64)
    costs = [[layer_sums(problem, (kind,), share) for share in rows] for kind in base.kinds]
    static = static_sums(problem)

    def stacked(name: str) -> np.ndarray:
        return np.asarray([[getattr(each, name) for each in line] for line in costs], dtype=np.int64)

    forward, backward, workspace = stacked("forward_ns"), stacked("backward_ns"), stacked("workspace_bytes")
    work = np.diff(forward + backward, axis=2)
    if problem.recompute == "always":
        work = work + np.diff(forward, axis=2)
    fed = max(1, min(devices, batch.replicas_fed(problem.min_slice)))
    least = np.min([r * work[:, share_of[r]].min(axis=0) for r in range(1, fed + 1)], axis=0)
    cut = np.ones(problem.num_layers + 1, dtype=np.bool_)
    cut[1:-1] = problem.cuttable
    widest_from = np.maximum.accumulate(workspace[:, :, ::-1], axis=2)[:, :, ::-1]
    return Layers(
        share_of=share_of,
        rows=np.asarray(rows, dtype=np.int64),
        forward_ns=forward,
        backward_ns=backward,
        kept_bytes=stacked("kept_bytes"),
        workspace_bytes=workspace,
        workspace_from=np.ascontiguousarray(widest_from),
        least_stages=_least_stages(problem, base),
        least_work_ns=np.append(np.cumsum(least[::-1])[::-1], 0).astype(np.int64),
        trained_bytes=np.array(static.owned, dtype=np.int64),
        sent_bytes=np.array(problem.forward_bytes, dtype=np.int64),
        returned_bytes=np.array(problem.backward_bytes, dtype=np.int64),
        cut=cut,
        fixed_bytes=base.fixed_bytes,
        state_bytes=base.state_bytes,
    )


def _least_stages(problem: Problem, base: PlacementTables) -> np.ndarray:
    """Return the least number of stages that the layers from each one on need.

    Their fixed bytes are compared with the free memory of the roomiest device.

    Optimizer states are divided by all devices where the request shards them. A number above the number of layers means
    that the layers never fit.
    """
    room = max(free_bytes(problem, [d]) for d in range(problem.num_devices))
    shared_by = problem.num_devices if problem.memory.shard_states else 1
    resident = base.fixed_bytes + base.state_bytes // shared_by
    count = problem.num_layers
    least = np.zeros(count + 1, dtype=np.int64)
    for i in range(count - 1, -1, -1):
        j = i + int(np.searchsorted(resident[i, i + 1 :], room, side="right"))
        least[i] = count + 1 if j == i else min(count + 1, 1 + least[j])
    return least
