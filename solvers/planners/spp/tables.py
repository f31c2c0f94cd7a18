"""A problem on one order of its devices as the arrays of PRM's kernel (SPP section IV-B2, symbols of Table I).

p_l^f + p_l^b and the all-reduce A of eq. (1) become one prefix sum per class of stage devices, in ns a step; the
b_{r', r} of neighbouring stages become a rate per pair of windows. Times are taken from ``costs`` under the request's
rules: the paper's private network (``transfer: spp``), or row slices over shared links (``nic``). Devices of several
kinds run every layer as fast as the slowest kind among a stage's replicas. The sums are exact within 2 ns a stage: an
all-reduce's ns are rounded up per prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.buckets import inner_ns
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.device_line import Affine, affine_all_reduce, server_classes
from penstock.solvers.costs.tables.routes import routes_of
from penstock.solvers.costs.tables.stage_table import StageTable, layer_sums
from penstock.solvers.model.micro_batches import Batch, largest_slice, row_classes
from penstock.solvers.model.pins import last_ends
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.spp.ordering import dense_bandwidths
from penstock.solvers.planners.spp.prm_kernel import WORD, ChainArrays
from penstock.solvers.planners.spp.rates_kernel import adjacent_rates, sliced_rates

MODES = {"nic": 0, "spp": 1, "madpipe": 2, "dapple": 3}


class Depth(NamedTuple):
    """A rule: stages with at most ``stages_after`` stages after them keep ``in_flight`` micro-batches."""

    stages_after: int
    in_flight: int


class Windows(NamedTuple):
    """The tables that depend on the order only.

    - ``bandwidth`` (V, V) in the order.
    - ``nodes_before`` (V + 1, N) and ``kinds_before`` (V + 1, kinds): how many devices of each node and of each kind
      stand before a place.
    - ``node_class``: the nodes' classes.
    - ``reductions``: all-reduces as ns per byte and ns, filled as they are needed.
    - ``keeping``: stages lie where the pins allow it; otherwise devices are exchanged afterwards.
    """

    order: tuple[int, ...]
    bandwidth: np.ndarray
    nodes_before: np.ndarray
    kinds: tuple[str, ...]
    kinds_before: np.ndarray
    node_class: np.ndarray
    reductions: dict[object, Affine]
    keeping: bool = False


def windows(problem: Problem, order: Sequence[int], keeping: bool = False) -> Windows:
    """Build the order's part of the tables."""
    index = np.asarray(order)
    kinds = tuple(sorted({device.kind for device in problem.devices}))
    node = [problem.devices[d].node for d in order]
    kind = [kinds.index(problem.devices[d].kind) for d in order]
    return Windows(
        tuple(order),
        dense_bandwidths(problem)[np.ix_(index, index)],
        _counted(node, len(problem.network.node_names)),
        kinds,
        _counted(kind, len(kinds)),
        np.asarray(server_classes(problem)),
        {},
        keeping,
    )


def _counted(numbers: list[int], width: int) -> np.ndarray:
    """Return how often each number stands before each place."""
    table = np.zeros((len(numbers) + 1, width), dtype=np.int64)
    table[np.arange(1, len(numbers) + 1), numbers] = 1
    return np.cumsum(table, axis=0)


def chain_of(
    problem: Problem,
    line: Windows,
    batch: Batch,
    replicas: Sequence[int],
    most_stages: int,
    *,
    unused: bool,
    depths: Sequence[Depth] = (),
) -> ChainArrays:
    """Build the kernel's arrays.

    ``depths``: micro-batches that stages hold in flight; if empty, memory is ignored.
    """
    counts = np.asarray(replicas, dtype=np.int64)
    devices = problem.num_devices
    classes: dict[tuple[object, ...], int] = {}
    lags: list[int] = []
    spent, fits, least = (list[np.ndarray]() for _ in range(3))
    stage_of = np.full((devices, len(counts)), -1, dtype=np.int64)
    everywhere = np.full(problem.num_layers + 1, problem.num_layers)
    rooms = np.asarray([free_bytes(problem, [d]) for d in line.order])
    owned, inner = problem.owned_bytes, inner_ns(problem)
    for i, a, r in _windows(devices, counts):
        reduction = _reduction(problem, line, i, r)
        if not reduction.connected:
            continue
        present = np.flatnonzero(line.kinds_before[i + r] - line.kinds_before[i])
        room = int(rooms[i : i + r].min()) if depths else 0
        ends = last_ends(problem, line.order[i : i + r]) if line.keeping else everywhere
        key = (r, present.tobytes(), reduction, room, ends.tobytes())
        if key not in classes:
            classes[key] = len(spent)
            kinds = [line.kinds[k] for k in present]
            work = _work(problem, batch, kinds, r, both=bool(depths))
            spent.append(work + inner + np.ceil(owned * reduction.ns_per_byte).astype(np.int64))
            lags.append(reduction.fixed_ns)
            least.append(r * np.diff(spent[-1][0]))
            fits.append(np.minimum(ends, _fits(problem, batch, kinds, r, room, depths, len(work))))
        stage_of[i, a] = classes[key]
    rate, hop_ns = _rates(problem, line, batch, counts)
    cut = np.concatenate(([True], problem.cuttable, [True]))
    return ChainArrays(
        replicas=counts,
        stage_of=stage_of,
        spent_ns=np.stack(spent, axis=1),
        lag_ns=np.asarray(lags, dtype=np.int64),
        fits=np.stack(fits, axis=2),
        depth_bits=_depth_bits(most_stages, depths),
        moved=np.concatenate(([0.0], _moved(problem), [0.0])),
        rate=rate,
        hop_ns=hop_ns,
        worst_rate=_largest(rate, counts),
        worst_hop_ns=_largest(hop_ns, counts),
        cut=cut,
        least_ns=np.concatenate(([0], np.cumsum(np.min(least, axis=0)))).astype(np.int64),
        unused=unused,
    )


def _windows(devices: int, counts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield (first place, index of the replica count, replica count) of every window of the order."""
    for i in range(devices):
        for a, r in enumerate(counts.tolist()):
            if i + r <= devices:
                yield i, a, r


def _largest(table: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the largest entry over the possible replica counts of the next stage, (V, R)."""
    place = np.arange(len(table))[:, None, None] + counts[None, :, None] + counts[None, None, :]
    return np.asarray(np.where(place <= len(table), table, 0).max(axis=2))


def _work(problem: Problem, batch: Batch, kinds: Sequence[str], replicas: int, both: bool) -> np.ndarray:
    """Return the prefix sums (ways, L + 1) of the computation of the layers in a step.

    ``both``: with recomputation as a second way.
    """
    total = np.zeros((2, problem.num_layers + 1), dtype=np.int64)
    for rows, count in row_classes(problem.global_batch_size, batch.num_micro_batches):
        sums = layer_sums(problem, kinds, largest_slice(rows, replicas))
        total += count * np.stack((sums.forward_ns + sums.backward_ns, 2 * sums.forward_ns + sums.backward_ns))
    return {"never": total[:1], "always": total[1:], "auto": total if both else total[:1]}[problem.recompute]


def _reduction(problem: Problem, line: Windows, first: int, replicas: int) -> Affine:
    """Return the all-reduce of a window of the order.

    Windows with equally many devices on nodes of the same classes cost the same where a node's devices share its cards.
    """
    key: object = (first, replicas)
    if problem.network.matrix_bytes_per_s is None and not any(problem.network.has_own_nic):
        per_node = line.nodes_before[first + replicas] - line.nodes_before[first]
        key = np.sort((per_node * len(per_node) + line.node_class)[per_node > 0]).tobytes()
    if key not in line.reductions:
        line.reductions[key] = affine_all_reduce(problem, line.order[first : first + replicas])
    return line.reductions[key]


def _rates(problem: Problem, line: Windows, batch: Batch, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ns per byte and ns a step between every two neighbouring windows, (V, R, R) each.

    The rate is infinite where nothing connects them.
    """
    shape = (problem.num_devices, len(counts), len(counts))
    rate, lag_ns = np.full(shape, np.inf), np.zeros(shape, dtype=np.int64)
    mode = "nic" if problem.rules.shared else problem.rules.transfer
    if mode in ("spp", "madpipe"):
        adjacent_rates(line.bandwidth, counts, mode == "spp", rate)
    else:
        node_of = np.asarray(problem.network.node_of, dtype=np.int64)
        order = np.asarray(line.order, dtype=np.int64)
        sliced_rates(routes_of(problem), node_of, order, MODES[mode], batch.most_rows, counts, rate, lag_ns)
    directions = 2 if _one_at_a_time(problem) else 1
    return rate, lag_ns * directions * batch.num_micro_batches


def _moved(problem: Problem) -> np.ndarray:
    """Return the bytes over each cut in a step, (L - 1,) float64.

    A channel carries both directions, or only the larger one counts.
    """
    if not problem.rules.shared and problem.rules.channel == "none":
        return np.zeros(problem.num_layers - 1)
    join = np.add if _one_at_a_time(problem) else np.maximum
    return np.asarray(join(problem.forward_bytes, problem.backward_bytes) * problem.global_batch_size, dtype=np.float64)


def _one_at_a_time(problem: Problem) -> bool:
    """Return whether the two directions of a channel exclude each other (c^f + c^b in Lemma 1)."""
    if not problem.rules.shared:
        return problem.rules.channel == "half"
    network = problem.network
    ways = [
        *(cable.full_duplex for cable in network.cables),
        *(i.full_duplex for i in network.insides if i is not None),
    ]
    return not all(ways)


def _depth_bits(most_stages: int, depths: Sequence[Depth]) -> np.ndarray:
    """Return bits of the depths, (G, words) uint64.

    Bit k of word w is set for the depth of a stage with 64 w + k stages after it.
    """
    words = -(-most_stages // WORD)
    ends = [depth.stages_after + 1 for depth in depths] or [most_stages]
    bits = np.zeros((len(ends), words), dtype=np.uint64)
    begin = 0
    for g, end in enumerate(ends):
        for after in range(begin, min(end, most_stages)):
            bits[g, after // WORD] |= np.uint64(1) << np.uint64(after % WORD)
        begin = end
    return bits


def _fits(
    problem: Problem, batch: Batch, kinds: Sequence[str], replicas: int, room: int, depths: Sequence[Depth], ways: int
) -> np.ndarray:
    """Return the last end of a stage from each layer, (ways, G, L + 1).

    The stage and all shorter stages hold the depth.
    """
    size = problem.num_layers + 1
    if not depths:
        return np.full((ways, 1, size), size - 1, dtype=np.int64)
    ends = np.arange(size)
    later = ends[None, :] > ends[:, None]
    fits = np.empty((ways, len(depths), size), dtype=np.int64)
    table = StageTable(problem, kinds, largest_slice(batch.most_rows, replicas), ends, replicas)
    for k in range(ways):
        again = problem.recompute == "always" or k == 1
        resident, each = table.held_bytes(again), table.flight_bytes(again)
        for g, depth in enumerate(depths):
            over = later & (resident + depth.in_flight * each > room)
            fits[k, g] = np.where(over.any(axis=1), np.argmax(over, axis=1) - 1, size - 1)
    return fits
