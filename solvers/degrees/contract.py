"""A request at one choice of degrees, as an ordinary problem: every planner, bound and check works on it unchanged.

Devices are cells. Times are those of one GPU with the exposed time of the collectives inside a pass; memory is that of
one GPU, of the smallest in its cell; bytes over a cut and bandwidths are those of one lane (``cell_network``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.degrees.cell_network import cell_network
from penstock.solvers.degrees.cells import Cells, cells_of
from penstock.solvers.degrees.inner_times import InnerTimes
from penstock.solvers.degrees.times import cell_times, variant_at
from penstock.solvers.model.degrees import Choice, Degrees, Sharding
from penstock.solvers.model.problem import Device, Pin, Problem, frozen

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
    update_ns, measured = cell_times(problem, variant, InnerTimes(problem, choice.degrees, cells))
    cuts = variant.boundary_tensors
    network = cell_network(problem.network, cells)
    return replace(
        problem,
        parameter_bytes=variant.parameter_bytes,
        trainable_bytes=variant.trainable_bytes,
        update_ns=update_ns,
        forward_bytes=frozen(sum(size for _name, size, _back in cut) for cut in cuts),
        backward_bytes=frozen(sum(back for _name, _size, back in cut) for cut in cuts),
        boundary_tensors=cuts,
        shared_parameters=variant.shared_parameters,
        measured=measured,
        linear=False,
        kind_source={kind: (kind, 1.0) for kind in problem.kind_source},
        devices=tuple(_cell(problem, cell, node) for cell, node in zip(cells, network.node_of, strict=True)),
        network=network,
        memory=memory,
        pins=tuple(_pin(problem, pin, cells) for pin in problem.pins),
        choices=(choice,),
        choice=choice,
        real=problem,
        cells=cells,
        _costs={},
    )


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
    variant_at(problem, choice.degrees)
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
