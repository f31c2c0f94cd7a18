"""One stage that all GPUs share out: its gradients (ZeRO-2), or its parameters too (ZeRO-3, FSDP2 with reshard).

Shards move with every micro-batch, in a group that no sum over layers can describe. This is therefore planned only
where
one stage holds the whole model and the group is all GPUs. That problem has one device, the cell of all GPUs, whose
meshes run equally many samples. Of L layers, each a separate FSDP unit:

* parameters: a forward gathers layer 0, and then each layer while the one before computes. A backward gathers the
  last layer, and then, while each layer computes, gathers the one before and sums the gradients of the one after;
  layer 0's are summed at the end. A pass is as long as the longer of both, layer by layer.
* gradients: a backward sums the gradients of each layer while the one before computes, and layer 0's at the end;
  parameters are gathered once, after the step.

The bytes that move do not grow with the rows, so costs are stated for each number of rows that a micro-batch may have.
A layer that is recomputed takes its forward again, gathers included. Memory is every GPU's part and, while operations
run, the largest sum of two gathered layers and the gradients of one.

.. [1] Rajbhandari et al., ZeRO (2020), sections 5 and 7; PyTorch, ``fully_shard`` with ``reshard_after_forward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.costs.collectives import group_of
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.degrees.inner_times import STATED, InnerTimes, TimeFactors, scaled
from penstock.solvers.degrees.planned import whole_rows
from penstock.solvers.degrees.sharding import Parts, copied_bytes, parts
from penstock.solvers.model.degrees import Choice, Operation, Variant
from penstock.solvers.model.micro_batches import num_micro_batches
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Device, Measured, Problem, prefix


class _Moved(NamedTuple):
    """(L,) ns in which all GPUs gather the parameters of a layer, and sum its gradients in parts."""

    gather_ns: np.ndarray
    scatter_ns: np.ndarray


def joined(
    problem: Problem, apart: Problem, variant: Variant | None, choice: Choice, times: TimeFactors = STATED
) -> Problem:
    """Return the problem of one stage on all cells of ``apart``, the problem of ``problem``'s GPUs at the degrees.

    ``variant``: the model on one GPU of a cell, None where a GPU holds whole layers. ``times``: see ``TimeFactors``.
    Raises UnsupportedRequest where nothing connects the cells.
    """
    cells = apart.cells or tuple((gpu,) for gpu in range(problem.num_devices))
    replicas, kind = len(cells), apart.devices[0].kind
    shares = parts(apart, replicas, choice)
    moved = _moved(apart, choice, shares, variant, InnerTimes(problem, choice.degrees, cells, times))
    moved = _Moved(*(np.asarray(scaled(each, times.data)) for each in moved))
    sums = np.diff(apart.step_sums_ns) + (moved.gather_ns if choice.sharding == "gradients" else 0)
    steps = np.diff(apart.update_ns) - np.diff(apart.step_sums_ns)
    workspace = apart.update_workspace_bytes
    batch, sizes = apart.global_batch_size // replicas, whole_rows(apart, replicas)
    rows_met = _rows_met(batch, sizes, apart.min_slice)
    return replace(
        apart,
        parameter_bytes=prefix(shares.resident),
        trainable_bytes=prefix(shares.kept),
        update_ns=prefix(-(-steps // replicas) + sums),
        step_collectives_ns=prefix(sums),
        update_workspace_bytes=workspace if workspace is None or apart.update_in_turn else -(-workspace // replicas),
        cuttable=np.zeros_like(apart.cuttable),
        measured={kind: tuple(_measured(apart, rows, moved, choice) for rows in rows_met)},
        linear=False,
        kind_source={kind: (kind, 1.0)},
        devices=(_device(apart),),
        network=Network((apart.devices[0].name,), (apart.network.node_names[0],), (0,), (None,), ()),
        global_batch_size=batch,
        micro_batch_sizes=sizes,
        update_rules=frozenset({"synchronous"}),
        pins=(),
        collectives=(),
        choices=(choice,),
        choice=choice,
        real=problem,
        cells=(tuple(gpu for cell in cells for gpu in cell),),
        copies=None,
        copied_bytes=None,
        _costs={},
    )


def _rows_met(batch: int, sizes: Sequence[int], least: int) -> list[int]:
    """Return the numbers of rows of all micro-batches, for any allowed number of micro-batches."""
    if sizes:
        numbers = {num_micro_batches(batch, size) for size in sizes}
        return sorted({rows for number in numbers for rows in (batch // number, -(-batch // number))})
    rows_met, number = set(), 1
    while number <= batch // least:
        rows = batch // number
        rows_met |= {rows, min(rows + 1, batch)}
        number = batch // rows + 1
    return sorted(rows_met)


def _moved(apart: Problem, choice: Choice, shares: Parts, variant: Variant | None, inner: InnerTimes) -> _Moved:
    """Return the times of each layer's moves: inside cells of the parameters held alike, among cells of the parts.

    A layer that uses another's parameter gathers it as well.
    """
    whole, trained = np.diff(apart.parameter_bytes - copied_bytes(apart)), np.diff(apart.trainable_bytes)
    tied = np.zeros_like(whole)
    for _name, layers, size in apart.shared_parameters:
        tied[[layer for layer in layers if layer != layers[0]]] += size
    experts = np.zeros_like(whole) if variant is None else np.diff(variant.expert_bytes)
    factor = apart.memory.gradient_factor
    inside = (
        inner.half_ns("all_gather", (whole + tied).tolist(), experts.tolist(), 1),
        inner.half_ns("reduce_scatter", trained.tolist(), experts.tolist(), factor),
    )
    between = (
        _between_ns(apart, choice, "all_gather", shares.gathered + tied),
        _between_ns(apart, choice, "reduce_scatter", np.diff(apart.owned_bytes) * factor),
    )
    return _Moved(inside[0] + between[0], inside[1] + between[1])


def _between_ns(apart: Problem, choice: Choice, operation: Operation, sizes: np.ndarray) -> np.ndarray:
    """Return (L,) ns of a collective of each layer's bytes among all cells, all channels at once."""
    if apart.num_devices == 1:
        return np.zeros_like(sizes)
    group = group_of(apart, tuple(range(apart.num_devices)))
    times = {size: group.time_ns(operation, size) for size in set(sizes.tolist())}
    if max(times.values()) >= NEVER_NS:
        raise UnsupportedRequest(
            f"at {choice} all GPUs share one stage, but some of the GPUs are not connected",
            remedy="sharding optimizer, or a topology whose nodes are connected",
        )
    return np.asarray([times[size] for size in sizes.tolist()], dtype=np.int64)


def _measured(apart: Problem, rows: int, moved: _Moved, choice: Choice) -> Measured:
    """Return the costs of ``rows`` samples on each mesh: layer by layer of the slowest kind, as all wait for it."""
    kinds = sorted({device.kind for device in apart.devices})
    costs = [apart.costs(kind, rows) for kind in kinds]

    def most(name: str) -> np.ndarray:
        return np.asarray(np.max([np.diff(getattr(each, name)) for each in costs], axis=0))

    forward, backward = most("forward_ns"), most("backward_ns")
    if choice.sharding == "parameters":
        forward = _together_ns(apart, forward, np.append(moved.gather_ns[1:], 0))
        forward[0] += moved.gather_ns[0]
        moving = np.append(0, moved.gather_ns[:-1]) + np.append(moved.scatter_ns[1:], 0)
    else:
        moving = np.append(moved.scatter_ns[1:], 0)
    backward = _together_ns(apart, backward, moving)
    backward[0] += moved.scatter_ns[0]
    if choice.sharding == "parameters":
        backward[-1] += moved.gather_ns[-1]
    whole = np.max([each.workspace_bytes for each in costs], axis=0)
    return Measured(
        rows=rows,
        forward_ns=forward,
        backward_ns=backward,
        weight_ns=most("weight_ns"),
        stash_bytes=most("stash_bytes"),
        workspace_bytes=whole + _gathered_bytes(apart, choice),
        modules={
            module: (
                np.max([each.modules[module][0] for each in costs], axis=0),
                np.min([each.modules[module][1] for each in costs], axis=0),
            )
            for module in apart.modules
        },
    )


def _together_ns(apart: Problem, computing_ns: np.ndarray, moving_ns: np.ndarray) -> np.ndarray:
    """Return the time of layers while something moves: the longer of both, or their sum where nothing overlaps."""
    together = np.maximum if apart.rules.overlap_all_reduce else np.add
    return np.asarray(together(computing_ns, moving_ns))


def _gathered_bytes(apart: Problem, choice: Choice) -> int:
    """Return the bytes gathered while operations run: two layers' parameters with their copies, and one's gradients."""
    gathered = 2 * int(np.diff(apart.parameter_bytes).max()) if choice.sharding == "parameters" else 0
    return gathered + int(np.diff(apart.trainable_bytes).max()) * apart.memory.gradient_factor


def _device(apart: Problem) -> Device:
    """Return the cell of all GPUs as a device, in which each GPU has the least memory of all."""
    prices = [device.price for device in apart.devices]
    stated = [price for price in prices if price is not None]
    first = apart.devices[0]
    return replace(
        first,
        node=0,
        memory_bytes=min(device.memory_bytes for device in apart.devices),
        context_bytes=max(device.context_bytes for device in apart.devices),
        price=sum(stated) if len(stated) == len(prices) else None,
        edge_bytes=max(device.edge_bytes for device in apart.devices),
        group_bytes=max(device.group_bytes for device in apart.devices),
    )
