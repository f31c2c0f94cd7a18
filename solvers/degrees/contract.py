"""A request at one choice of degrees, as an ordinary problem: every planner, bound and check works on it unchanged.

Devices are cells. Times are those of one GPU with the exposed time of the collectives inside a pass; memory is that of
one GPU, of the smallest in its cell; bytes over a cut and bandwidths are those of one lane (``cell_network``). Batches
are counted in rows of one sample for each mesh of a cell: a measurement of n samples on a mesh is one of n rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.degrees.cell_network import cell_network
from penstock.solvers.degrees.cells import Cells, cells_of
from penstock.solvers.degrees.inner_times import InnerTimes
from penstock.solvers.degrees.times import cell_times, variant_at
from penstock.solvers.model.degrees import Choice, Degrees, Sharding, Variant
from penstock.solvers.model.problem import Copies, Device, MemoryRules, Pin, Problem, frozen, prefix

PLANNED: tuple[Sharding, ...] = ("none", "optimizer")
"""What plans may share out; others are known by name."""


def contract(problem: Problem, choice: Choice) -> Problem:
    """Return the problem at these degrees and this sharding.

    Times between measured sizes are interpolated, and above the largest proportional to it. Raises UnsupportedRequest
    where the profile does not know the degrees, the cluster has no such cells, or what is asked excludes them.
    """
    cells = planned_cells(problem, choice)
    memory = problem.memory
    if choice.sharding is not None:
        memory = replace(memory, shard_states=choice.sharding == "optimizer")
    if choice.degrees == Degrees():
        return replace(problem, choices=(choice,), choice=choice, memory=memory)
    variant = variant_at(problem, choice.degrees)
    inner = InnerTimes(problem, choice.degrees, cells)
    step, measured = cell_times(problem, variant, inner)
    copies = _copies(variant, inner, memory)
    cuts = variant.boundary_tensors
    network = cell_network(problem.network, cells)
    return replace(
        problem,
        parameter_bytes=variant.parameter_bytes,
        trainable_bytes=variant.trainable_bytes,
        update_ns=frozen(_own_updates_ns(variant, copies, memory) + step),
        forward_bytes=frozen(sum(size for _name, size, _back in cut) for cut in cuts),
        backward_bytes=frozen(sum(back for _name, _size, back in cut) for cut in cuts),
        boundary_tensors=cuts,
        shared_parameters=variant.shared_parameters,
        measured=measured,
        linear=False,
        kind_source={kind: (kind, 1.0) for kind in problem.kind_source},
        devices=tuple(_cell(problem, cell, node) for cell, node in zip(cells, network.node_of, strict=True)),
        network=network,
        global_batch_size=problem.global_batch_size // choice.degrees.meshes,
        micro_batch_sizes=_whole_rows(problem, choice.degrees.meshes),
        memory=memory,
        pins=tuple(_pin(problem, pin, cells) for pin in problem.pins),
        choices=(choice,),
        choice=choice,
        real=problem,
        cells=cells,
        copies=copies,
        step_collectives_ns=step,
        update_workspace_bytes=_own_update_workspace(problem, variant, copies, memory),
        _costs={},
    )


def _copies(variant: Variant, inner: InnerTimes, memory: MemoryRules) -> Copies | None:
    """Return what GPUs of a cell hold alike; None where each has parameters of its own."""
    if not _is_copied(variant):
        return None
    degrees = variant.degrees
    holders, expert_holders = degrees.cell // degrees.tensor, degrees.cell // degrees.expert_group
    trained, experts = np.diff(variant.trainable_bytes), np.diff(variant.expert_bytes)
    owned = -(-(trained - experts) // holders) - (-experts // expert_holders)
    return Copies(prefix(owned), prefix(inner.reduce_ns(trained.tolist(), experts.tolist(), memory)), holders)


def _own_updates_ns(variant: Variant, copies: Copies | None, memory: MemoryRules) -> np.ndarray:
    """Return prefix sums of the time in which a GPU steps what it has to: of sharded states its part of the copies."""
    if copies is None or not memory.shard_states:
        return variant.update_ns
    whole, trained, owned = (np.diff(each) for each in (variant.update_ns, variant.trainable_bytes, copies.owned_bytes))
    return prefix(np.where(trained > 0, -(-whole * owned // np.maximum(1, trained)), whole))


def _own_update_workspace(
    problem: Problem, variant: Variant, copies: Copies | None, memory: MemoryRules
) -> np.ndarray | None:
    """Return what a step needs of each layer while it runs: of a whole layer's, the part that a GPU steps."""
    if problem.update_workspace_bytes is None:
        return None
    stepped = copies.owned_bytes if copies is not None and memory.shard_states else variant.trainable_bytes
    sizes = (problem.update_workspace_bytes, np.diff(problem.trainable_bytes), np.diff(stepped))
    each = zip(*(size.tolist() for size in sizes), strict=True)
    return frozen(-(-workspace * own // max(1, whole)) for workspace, whole, own in each)


def _is_copied(variant: Variant) -> bool:
    degrees = variant.degrees
    return degrees.cell > degrees.tensor or (degrees.cell > degrees.expert_group and bool(variant.expert_bytes[-1]))


def _refuse_uneven(problem: Problem, degrees: Degrees) -> None:
    """Raise UnsupportedRequest where the meshes of a cell cannot run equally many samples."""
    meshes, batch, sizes = degrees.meshes, problem.global_batch_size, problem.micro_batch_sizes
    if batch % meshes:
        raise UnsupportedRequest(
            f"a cell at {degrees} has {degrees.meshes_in_words} that run equally many samples, and {batch} samples are "
            f"no multiple of {meshes}",
            remedy=f"a global batch of {max(meshes, batch - batch % meshes)} samples, or a smaller expert degree",
        )
    if sizes and not _whole_rows(problem, meshes):
        raise UnsupportedRequest(
            f"a cell at {degrees} has {degrees.meshes_in_words} that run equally many samples, and no micro-batch of "
            f"{', '.join(map(str, sizes))} samples is a multiple of {meshes}",
            remedy=f"micro-batches of multiples of {meshes} samples, or a smaller expert degree",
        )


def _whole_rows(problem: Problem, meshes: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches in rows of a sample for each mesh of a cell; others are left out."""
    return tuple(size // meshes for size in problem.micro_batch_sizes if size % meshes == 0)


def planned_cells(problem: Problem, choice: Choice) -> Cells:
    """Return the cells of a choice that can be planned; those of degrees of 1 are the GPUs. Raises as ``contract``."""
    refuse_unplanned(choice.sharding)
    if choice.degrees == Degrees():
        return tuple((gpu,) for gpu in range(problem.num_devices))
    if problem.codec:
        raise UnsupportedRequest(
            "codec: auto goes with no degree of parallelism above 1", remedy="leave codec out, or ask for degrees of 1"
        )
    cells = cells_of(problem, choice.degrees)
    variant = variant_at(problem, choice.degrees)
    _refuse_uneven(problem, choice.degrees)
    if "elastic_averaging" in problem.update_rules and _is_copied(variant):
        raise UnsupportedRequest(
            f"pipelines that are averaged do not sum gradients, and at {choice.degrees} the GPUs of a cell have to",
            remedy="other update rules than elastic_averaging, or degrees of 1 but for tensor",
        )
    for pin in problem.pins:
        _pin(problem, pin, cells)
    return cells


def refuse_unplanned(sharding: Sharding | None) -> None:
    """Raise UnsupportedRequest for what replicas share out in ways that plans do not have."""
    if sharding in (None, *PLANNED):
        return
    if sharding == "parameters_kept":
        remedy = "optimizer, which takes the same memory with parameters that stay gathered until the step's end"
    else:
        remedy = "optimizer; `penstock fits` says what the memory of the others is"
    raise UnsupportedRequest(f"plans do not have sharding {sharding}", remedy=remedy)


def _cell(problem: Problem, cell: Sequence[int], node: int) -> Device:
    gpus = [problem.devices[gpu] for gpu in cell]
    prices = [gpu.price for gpu in gpus]
    known = [price for price in prices if price is not None]
    return Device(
        name=gpus[0].name,
        node=node,
        kind=gpus[0].kind,
        memory_bytes=min(gpu.memory_bytes for gpu in gpus),
        context_bytes=max(gpu.context_bytes for gpu in gpus),
        price=sum(known) if len(known) == len(prices) else None,
        edge_bytes=max(gpu.edge_bytes for gpu in gpus),
        group_bytes=max(gpu.group_bytes for gpu in gpus),
    )


def _pin(problem: Problem, pin: Pin, cells: Sequence[Sequence[int]]) -> Pin:
    """Return the pin of the cells whose GPUs are all in it: every GPU of a cell holds the cell's layers."""
    allowed = frozenset(number for number, cell in enumerate(cells) if pin.devices.issuperset(cell))
    if not allowed:
        names = ", ".join(problem.devices[gpu].name for gpu in sorted(pin.devices)[:4])
        raise UnsupportedRequest(
            f"layers {pin.first}–{pin.last} are pinned to {names}, which fill no cell of {len(cells[0])} GPUs",
            remedy="pin them to whole cells, or ask for smaller degrees",
        )
    return replace(pin, devices=allowed)
