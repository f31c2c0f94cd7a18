"""The choices that can be planned: their cells, and why others have no cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.degrees.axes import at_values
from penstock.solvers.degrees.cells import Cells, cells_of
from penstock.solvers.degrees.times import variant_at
from penstock.solvers.model.degrees import Choice, Degrees, Variant
from penstock.solvers.model.problem import Pin, Problem, per_problem


def keeping(problem: Problem, devices: Sequence[int]) -> Problem:
    """Return the problem with these of its devices alone.

    Raises UnsupportedRequest where layers are pinned to others.
    """
    network = problem.network.keeping(devices)
    number_of = {device: number for number, device in enumerate(devices)}
    kept = tuple(replace(problem.devices[device], node=network.node_of[number]) for device, number in number_of.items())
    kinds = {device.kind for device in kept}
    pins = []
    for pin in problem.pins:
        remaining = frozenset(number_of[device] for device in pin.devices if device in number_of)
        if not remaining:
            raise UnsupportedRequest(f"layers {pin.first}–{pin.last} are pinned only to devices that are left out")
        pins.append(replace(pin, devices=remaining))
    sources = {kind: source for kind, source in problem.kind_source.items() if kind in kinds}
    return replace(problem, devices=kept, kind_source=sources, network=network, pins=tuple(pins), _costs={})


@per_problem
def remaining(problem: Problem, excluded: str | None) -> Problem:
    """Return the problem without the devices of a kind."""
    if excluded is None:
        return problem
    return keeping(problem, [d for d, device in enumerate(problem.devices) if device.kind != excluded])


@per_problem
def asked_at(problem: Problem, excluded: str | None, values: tuple[tuple[str, str], ...]) -> Problem:
    """Return the problem without the devices of a kind, at the values of axes. Raises as ``axes.at_values``."""
    return at_values(remaining(problem, excluded), values)


def planned_cells(problem: Problem, choice: Choice) -> Cells:
    """Return the cells of a choice that can be planned; at degrees of 1 the cells are the GPUs. Raises as ``contract``.

    Where one stage is sharded over all GPUs, these are one cell.
    """
    cells = cells_apart(problem, choice.degrees)
    if choice.in_one_stage:
        cells = (tuple(gpu for cell in cells for gpu in cell),)
        _refuse_in_one_stage(problem, choice)
        meshes = len(cells[0]) // choice.degrees.mesh
        _refuse_uneven(problem, choice, f"at {choice} one stage has {meshes} replicas", meshes)
    for pin in problem.pins:
        pin_of(problem, pin, cells)
    return cells


def cells_apart(problem: Problem, degrees: Degrees) -> Cells:
    """Return the cells at some degrees, each of which may hold a replica of a stage."""
    if degrees == Degrees():
        return tuple((gpu,) for gpu in range(problem.num_devices))
    if problem.codec:
        raise UnsupportedRequest(
            "codec auto cannot be combined with degrees of parallelism above 1",
            remedy="leave codec out, or request degrees of 1",
        )
    cells = cells_of(problem, degrees)
    variant = variant_at(problem, degrees)
    _refuse_uneven(problem, Choice(degrees), f"a GPU group at {degrees} has {degrees.meshes_in_words}", degrees.meshes)
    if "elastic_averaging" in problem.update_rules and is_copied(variant):
        raise UnsupportedRequest(
            f"elastic_averaging does not sum gradients, but at {degrees} the GPUs of a group have to",
            remedy="other update rules than elastic_averaging, or degrees of 1 except tensor",
        )
    return cells


def is_copied(variant: Variant) -> bool:
    """Return whether GPUs of a cell hold parameters alike."""
    degrees = variant.degrees
    return degrees.cell > degrees.tensor or (degrees.cell > degrees.expert_group and bool(variant.expert_bytes[-1]))


def _refuse_in_one_stage(problem: Problem, choice: Choice) -> None:
    """Raise UnsupportedRequest for a request that excludes one stage shared out by all GPUs."""
    if "synchronous" not in problem.update_rules:
        raise UnsupportedRequest(
            f"at {choice} all GPUs hold parts of one version of the model, but {_listed(problem.update_rules)} updates "
            "need several versions or models",
            remedy="update_rules: [synchronous], or sharding optimizer",
        )
    if problem.codec:
        raise UnsupportedRequest(
            f"codec auto encodes what stages send each other, but at {choice} there is only one stage",
            remedy="leave codec out, or request sharding optimizer",
        )


def _listed(rules: Sequence[str] | frozenset[str]) -> str:
    return " or ".join(sorted(rules))


def _refuse_uneven(problem: Problem, choice: Choice, whose: str, meshes: int) -> None:
    """Raise UnsupportedRequest where ``meshes`` cannot run equally many samples."""
    batch, sizes = problem.global_batch_size, problem.micro_batch_sizes
    smaller = "sharding optimizer" if choice.in_one_stage else "a smaller expert degree"
    if batch % meshes:
        raise UnsupportedRequest(
            f"{whose} that need equally many samples, but the global batch of {batch} is not a multiple of {meshes}",
            remedy=f"a global batch of {max(meshes, batch - batch % meshes)} samples, or {smaller}",
        )
    if sizes and not whole_rows(problem, meshes):
        raise UnsupportedRequest(
            f"{whose} that need equally many samples, but no micro-batch of {', '.join(map(str, sizes))} samples is a "
            f"multiple of {meshes}",
            remedy=f"micro-batches of multiples of {meshes} samples, or {smaller}",
        )


def whole_rows(problem: Problem, meshes: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches in rows of a sample for each mesh of a cell; others are left out."""
    return tuple(size // meshes for size in problem.micro_batch_sizes if size % meshes == 0)


def pin_of(problem: Problem, pin: Pin, cells: Sequence[Sequence[int]]) -> Pin:
    """Return the pin of the cells whose GPUs are all in it: every GPU of a cell holds the cell's layers."""
    allowed = frozenset(number for number, cell in enumerate(cells) if pin.devices.issuperset(cell))
    if not allowed:
        names = ", ".join(problem.devices[gpu].name for gpu in sorted(pin.devices)[:4])
        raise UnsupportedRequest(
            f"layers {pin.first}–{pin.last} are pinned to {names}, which contain no whole group of {len(cells[0])} "
            "GPUs",
            remedy="pin the layers to whole GPU groups, or request smaller degrees",
        )
    return replace(pin, devices=allowed)
