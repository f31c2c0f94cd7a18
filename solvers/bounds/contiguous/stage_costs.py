"""All stages of one number of micro-batches, for the label search: the least cost of each over all placements.

With micro-batches of two sizes, single steps count with the quicker size, work with the actual sizes
(``StageTimes``). If devices differ, a stage on r of them is at least as slow as the r-th fastest for its layers, and
has at most the r-th largest memory. A stage that may recompute has a second variant, but only if the first cannot
hold all micro-batches, because otherwise recomputation gains nothing.
"""

from __future__ import annotations

import numpy as np

from penstock.solvers.bounds.contiguous.exposure_kernel import exposures
from penstock.solvers.bounds.contiguous.label_steps import Pieces
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.contiguous.own_links import carried_ns
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.stage_table import StageTable, crossing_bytes
from penstock.solvers.costs.ties import bytes_of_spans
from penstock.solvers.model.micro_batches import Batch, largest_slice, row_classes
from penstock.solvers.model.pins import devices_allowed
from penstock.solvers.model.problem import Problem, prefix_sums


def make_pieces(problem: Problem, batch: Batch, links: Links, *, split: bool = False) -> Pieces:
    """Return the tables of a number of micro-batches: arrays (variants, replicas + 1, L + 1, L + 1), see ``Pieces``.

    ``split``: backwards may be split into input and weight gradients.
    """
    most = min(problem.num_devices, batch.replicas_fed(problem.min_slice))
    each = [Stages(problem, batch, links, r, split=split) for r in range(1, most + 1)]
    rows = tuple(size for size, _count in row_classes(problem.global_batch_size, batch.num_micro_batches))
    plain = np.stack([stages.table() for stages in each])
    variants = [plain] if problem.recompute == "never" else [np.stack([s.table(recompute=True) for s in each])]
    if problem.recompute == "auto":
        variants[0][:, 3][plain[:, 3] == batch.num_micro_batches] = 0
        variants.insert(0, plain)
    tables = np.zeros((plain.shape[1], len(variants), most + 1, *plain.shape[2:]), dtype=np.int64)
    tables[:, :, 1:] = np.minimum(np.stack(variants), FAR_NS).transpose(2, 0, 1, 3, 4)
    after = np.zeros((2, most + 1, *plain.shape[2:]), dtype=np.int64)
    for r, stages in enumerate(each, start=1):
        after[:, r] = np.minimum(stages.after(), FAR_NS)
    shape = _shapes(most, links)
    sent = np.stack([crossing_bytes(problem, direction) for direction in (0, 1)])
    rate = links.rates(rows, most)
    return Pieces(
        forward=tables[0],
        backward=tables[1],
        work=tables[2],
        whole_work=tables[4] if split else tables[2],
        weight=tables[5] if split else np.zeros_like(tables[2]),
        limit=tables[3],
        after=after,
        carried=carried_ns(links, sent, rate, tables[0].min(axis=0), batch.num_micro_batches),
        sent=sent,
        rate=rate,
        spread_rate=links.spread_rates(rate, rows),
        latency_ns=links.latencies(),
        channel=links.channels(),
        least_forward=_quickest([stages.least(0) for stages in each], problem.num_devices),
        least_backward=_quickest([stages.least(1) for stages in each], problem.num_devices),
        least_work=prefix_sums(np.min([r * stages.least(2) for r, stages in enumerate(each, start=1)], axis=0)),
        shape=shape,
        shapes=int(shape.max()) + 1,
        batches=batch.num_micro_batches,
        devices=problem.num_devices,
        node_size=links.node_size,
        spans=links.spans,
    )


def _quickest(each: list[np.ndarray], devices: int) -> np.ndarray:
    """Return (devices + 1, L + 1) prefix sums; row g: each layer as quick as on any number of replicas up to g."""
    least = np.minimum.accumulate(np.stack(each), axis=0)
    rows = [np.zeros_like(least[0]), *(least[min(g, len(each)) - 1] for g in range(1, devices + 1))]
    return prefix_sums(np.stack(rows))


def _shapes(most: int, links: Links) -> np.ndarray:
    """Return (most + 1, node + 1) numbers of the pairs of replicas and devices of a node run, -1 for other pairs."""
    table = np.full((most + 1, links.node_size + 1), -1, dtype=np.int64)
    number = 0
    for r in range(1, most + 1):
        spanning = r > links.node_size or (links.spans and r > 1)
        for run in [*([0] if spanning else []), *range(r, links.node_size + 1)]:
            table[r, run] = number
            number += 1
    return table


class Stages:
    """The tables of all stages on a number of replicas; ``split``: backwards may be split."""

    def __init__(self, problem: Problem, batch: Batch, links: Links, replicas: int, *, split: bool = False) -> None:
        self.problem, self.links, self.replicas, self.split = problem, links, replicas, split
        self.batches = batch.num_micro_batches
        classes = row_classes(problem.global_batch_size, self.batches)
        self.counts = [count for _rows, count in classes]
        self.share = min(largest_slice(rows, replicas) for rows, _count in classes)
        self.places = np.arange(problem.num_layers + 1)
        kinds = sorted({device.kind for device in problem.devices})
        self.tables = [
            [StageTable(problem, (kind,), largest_slice(rows, replicas), self.places, replicas) for rows, _ in classes]
            for kind in kinds
        ]
        self.devices_of_kind = [sum(device.kind == kind for device in problem.devices) for kind in kinds]

    def table(self, recompute: bool = False) -> np.ndarray:
        """Return (4, L + 1, L + 1): forward, backward, work and limit; limit 0 where there is no such stage.

        Where backwards may be split, (6, L + 1, L + 1): then all work, and the weight gradient of a micro-batch.
        """
        forward, backward, work = (self._ranked(self._times(which, recompute)) for which in range(3))
        if not self.split:
            return np.triu(np.stack([forward, backward, work, self._limit(recompute, backward)]))
        weight = self._ranked([np.min([table.weight_ns for table in tables], axis=0) for tables in self.tables])
        limit = self._limit(recompute, weight)
        # The most micro-batches that wait for their weight gradients when the last input gradient ends.
        first = self._before_last_input(recompute) + np.maximum(0, self.batches - limit) * weight
        return np.triu(np.stack([forward, self._input_gradients(recompute), first, limit, work, weight]))

    def _input_gradients(self, recompute: bool) -> np.ndarray:
        """Return the least time of an input gradient, with its recomputation, on any kind of device.

        On several kinds, a stage's time is the longest backward less the longest weight gradient: at least one kind's.
        """
        gradients = [
            table.backward_ns - table.weight_ns + (table.forward_ns if recompute else 0)
            for tables in self.tables
            for table in tables
        ]
        return np.asarray(np.maximum(0, np.min(gradients, axis=0)))

    def _before_last_input(self, recompute: bool) -> np.ndarray:
        """Return the least work of all micro-batches without their weight gradients, on any kind of device."""
        each = [
            np.sum(
                [count * (t.work_ns(recompute) - t.weight_ns) for count, t in zip(self.counts, tables, strict=True)],
                axis=0,
            )
            for tables in self.tables
        ]
        return np.asarray(np.maximum(0, np.min(each, axis=0)))

    def least(self, which: int) -> np.ndarray:
        """Return (L,) each layer's forward, backward or work on the quickest kind; with recomputation if always."""
        again = self.problem.recompute == "always"
        tables = [self._input_gradients(again)] if which == 1 and self.split else self._times(which, again)
        return np.asarray(np.min([np.diagonal(table, 1) for table in tables], axis=0))

    def _times(self, which: int, recompute: bool) -> list[np.ndarray]:
        """Return one table for each device kind."""
        tables_of_kinds = []
        for tables in self.tables:
            if which == 0:
                tables_of_kinds.append(np.min([table.forward_ns for table in tables], axis=0))
            elif which == 1:
                again = [table.forward_ns if recompute else 0 for table in tables]
                tables_of_kinds.append(
                    np.min([table.backward_ns + a for table, a in zip(tables, again, strict=True)], axis=0)
                )
            else:
                steps = zip(self.counts, tables, strict=True)
                tables_of_kinds.append(np.sum([count * table.work_ns(recompute) for count, table in steps], axis=0))
        return tables_of_kinds

    def _ranked(self, tables: list[np.ndarray]) -> np.ndarray:
        """Return the table of the r-th fastest device, from the tables by kind."""
        if len(tables) == 1:
            return tables[0]
        stacked = np.stack(tables)
        order = np.argsort(stacked, axis=0, kind="stable")
        reached = np.cumsum(np.asarray(self.devices_of_kind)[order], axis=0) >= self.replicas
        place = np.argmax(reached, axis=0)
        kind = np.take_along_axis(order, place[None], axis=0)
        return np.asarray(np.take_along_axis(stacked, kind, axis=0)[0])

    def _limit(self, recompute: bool, last: np.ndarray) -> np.ndarray:
        """Return the limit of ``StageTimes.in_flight``, at most M; 0 where no micro-batch fits (``shortage_of``).

        ``last``: the time of the operation that ends a micro-batch on the stage; it needs a workspace if it takes any.
        """
        problem, sent = self.problem, [crossing_bytes(self.problem, way, self.share) for way in (0, 1)]
        each = [table for tables in self.tables for table in tables]
        kept = np.min([table.kept_bytes for table in each], axis=0)
        flying = np.zeros_like(kept) if recompute else kept
        workspace = np.min([table.workspace_bytes + (table.kept_bytes if recompute else 0) for table in each], axis=0)
        workspace = np.where(last > 0, workspace, 0)
        gradient = np.zeros(problem.num_layers + 1, dtype=np.int64)
        if problem.memory.count_buffers or recompute:
            flying = flying + sent[0][:, None]
        if problem.memory.count_buffers:
            gradient = sent[1]
        room = sorted(free_bytes(problem, (d,)) for d in range(problem.num_devices))
        free = room[-self.replicas] - each[0].static.total - workspace
        fits = (free - flying >= 0) & self._legal()
        number = np.maximum(1, (free - gradient) // np.maximum(1, flying))
        number = np.where(flying == 0, self.batches, np.minimum(number, self.batches))
        return np.where(fits, number, 0)

    def _legal(self) -> np.ndarray:
        """Return where stages may begin and end, and where pins allow that number of devices to hold all layers."""
        cut = np.concatenate(([True], self.problem.cuttable, [True]))
        legal = cut[:, None] & cut[None, :] & (devices_allowed(self.problem) >= self.replicas)
        return np.asarray(np.triu(legal, 1))

    def after(self) -> np.ndarray:
        """Return (2, L + 1, L + 1): exposed all-reduce and update, in one node and spanning nodes."""
        places = [self._exposed(spanning) for spanning in (False, True)]
        if not self.links.spans and self.replicas <= self.links.node_size:
            places[0] = np.minimum(places[0], places[1])
        return np.asarray(np.stack(places) + np.triu(self.tables[0][0].update_ns))

    def _exposed(self, spanning: bool) -> np.ndarray:
        problem = self.problem
        table = np.zeros((problem.num_layers + 1, problem.num_layers + 1), dtype=np.int64)
        rate, latency = self.links.ring(self.replicas, spanning)
        if self.replicas == 1:
            return table
        if rate == np.inf:
            return table + FAR_NS
        lead = np.zeros(problem.num_layers + 1, dtype=np.int64)
        if problem.rules.overlap_all_reduce:
            each = [np.diagonal(table.backward_ns, 1) for tables in self.tables for table in tables]
            lead = prefix_sums(np.max(each, axis=0))
        for spans, sums in bytes_of_spans(problem):
            exposed = np.zeros_like(table)
            sizes = np.maximum(0, sums[None, :] - sums[:, None])
            times = np.where(sizes > 0, np.ceil(sizes * (rate * (1 - 1e-12))).astype(np.int64) + latency, 0)
            times = self.links.or_measured(times, sizes, self.replicas, spanning)
            exposures(np.array(sums), lead, problem.rules.bucket_bytes, times, exposed)
            table = np.where(spans, exposed, table)
        return table
