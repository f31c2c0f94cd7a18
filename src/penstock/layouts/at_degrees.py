"""A layout whose layers several GPUs share: its request, and its problem, whose devices are GPU groups."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.convert import to_problem
from penstock.convert.requested_degrees import degrees_of, to_degrees
from penstock.convert.requests import inline_documents
from penstock.layouts.drawn import Drawn, wrong
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.profile import WITH_DEGREES, ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.shapes.layout import Layout
from penstock.shapes.legality import broken
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem

_BY_PLACING = ("product", "layers", "interleaving", "batch", "sharding")
"""Rules that are checked elsewhere for a layout's own cuts and batch, by the text of the file."""


def at_degrees(request: PlanRequest, drawn: Drawn, source: str, gpus: int) -> tuple[PlanRequest, Problem]:
    """Return the request at the layout's degrees, and its problem.

    Raises UnsupportedRequest for degrees that the trainer refuses, by its rule; InvalidDocument where the profile has
    no costs at them.
    """
    in_one_stage = drawn.sharding is not None and drawn.ranks == len(drawn.stages) == 1
    if drawn.degrees == Degrees():
        problem = to_problem(request)
        if in_one_stage and gpus == problem.num_devices:
            return _in_one_stage(request, drawn)
        return request, problem
    profile, _topology = inline_documents(request)
    stated = f"{source} has {', '.join(name for name, _place in drawn.named)}"
    _refuse_illegal(profile, drawn, stated, gpus)
    available = [degrees_of(variant.degrees) for variant in profile.variants or ()]
    if drawn.degrees not in available:
        raise InvalidDocument(
            f"{stated}, and the profile {profile.name!r} has no costs at {drawn.degrees}",
            faults=_places(drawn),
            remedy=f"choose degrees that the profile has costs at: {'; '.join(map(str, available))}"
            if available
            else WITH_DEGREES,
        )
    request = request.model_copy(update={"degrees": to_degrees(drawn.degrees)})
    problem = to_problem(request)
    if in_one_stage and gpus == problem.num_devices:
        return _in_one_stage(request, drawn)
    return request, contract(problem, Choice(drawn.degrees))


def _in_one_stage(request: PlanRequest, drawn: Drawn) -> tuple[PlanRequest, Problem]:
    """Return the request with the layout's sharding over replicas, and its problem."""
    request = request.model_copy(update={"degrees": to_degrees(drawn.degrees), "sharding": drawn.sharding})
    return request, contract(to_problem(request), Choice(drawn.degrees, drawn.sharding))


def cells_in(problem: Problem, world: Sequence[int]) -> tuple[int, ...]:
    """Return the GPU groups of a job in the order of its ranks.

    Raises InvalidDocument for GPUs that are no whole groups.
    """
    if problem.real is None:
        return tuple(world)
    size = len(problem.gpus(0))
    number_of = {cell: number for number, cell in enumerate(problem.cells)}
    groups = [tuple(world[at : at + size]) for at in range(0, len(world), size)]
    if apart := [group for group in groups if group not in number_of]:
        names = ", ".join(problem.real.devices[gpu].name for gpu in apart[0][:4])
        raise wrong(
            f"{len(world)} GPUs do not form groups of {size}, which {problem.degrees} needs: {names} … "
            "are not one group",
            "name nodes whose GPUs form such groups, one after the other (--nodes)",
        )
    return tuple(number_of[group] for group in groups)


def _refuse_illegal(profile: ModelProfile, drawn: Drawn, stated: str, gpus: int) -> None:
    """Raise UnsupportedRequest for a layout that the trainer refuses for this model.

    ``stated`` names the file's degrees.
    """
    if profile.shape is None:
        return
    degrees = drawn.degrees
    layout = Layout(
        **degrees._asdict(),
        pipeline=drawn.ranks,
        data=gpus // (degrees.mesh * drawn.ranks),
        sequence_parallel=drawn.sequence_parallel is not False,
        framework=profile.framework or "megatron",
    )
    rules = [each for each in broken(profile.shape, layout, gpus) if each.rule not in _BY_PLACING]
    if rules:
        raise UnsupportedRequest(
            f"{stated}, and no trainer has such a layout: {rules[0].sentence}", faults=_places(drawn)
        )


def _places(drawn: Drawn) -> tuple[Fault, ...]:
    return tuple(Fault(place, name, "degree") for name, place in drawn.named)
