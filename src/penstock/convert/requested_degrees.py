"""Degrees in: a profile's variants, the choices that a request allows, and the problem that a plan was made for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import product

import numpy as np

from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.plan import Plan
from penstock.schemas.profile import WITH_DEGREES, DividedCost, DividedLayer, DividedMeasurement, Layer, ModelProfile
from penstock.schemas.profile import Variant as ProfileVariant
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers import degrees as wire
from penstock.solvers.degrees.axes import AXES
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.degrees import (
    CellMeasured,
    CellModule,
    Choice,
    Collective,
    Degrees,
    Module,
    Sharding,
    Variant,
)
from penstock.solvers.model.problem import Problem, frozen, prefix

AUTO: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")
"""Shardings that are tried where all are open.

``parameters_kept`` takes the time of ``optimizer``, and no less memory.
"""
UNDIVIDED = ((Choice(),), (Choice(sharding="none"),))
"""Choices of a request that has the same plans as a request without degrees and sharding."""


def degrees_of(document: wire.Degrees | None) -> Degrees:
    """Return the degrees of a document; None means 1 each."""
    return Degrees() if document is None else Degrees(**document.model_dump())


def to_degrees(degrees: Degrees) -> wire.Degrees:
    """Return degrees as documents have them."""
    return wire.Degrees(**degrees._asdict())


def choices_of(request: PlanRequest, profile: ModelProfile, topology: ClusterTopology) -> tuple[Choice, ...]:
    """Return the choices that a request allows; empty where it states none, or degrees of 1 alone.

    Raises InvalidDocument for degrees that the profile has no costs at, and for degrees of devices that are already
    groups of GPUs.
    """
    values = list(_values(request))
    if request.degrees is None and request.sharding is None and values == [()]:
        return ()
    available = [Degrees(), *(degrees_of(variant.degrees) for variant in profile.variants or ())]
    degrees = _degrees_of_request(request, available)
    unknown = [(number, each) for number, each in enumerate(degrees) if each not in available]
    if unknown:
        raise InvalidDocument(
            f"the profile {profile.name!r} has no costs at {unknown[0][1]}",
            faults=tuple(Fault("/degrees", f"{each} is not in the profile") for _number, each in unknown),
            remedy=_remedy(profile, available),
        )
    if (group := topology.group) is not None:
        if request.degrees != "auto" and degrees != [Degrees()]:
            raise InvalidDocument(
                f"degrees need a topology with a device per GPU; device {group[0]!r} is a group of {group[1]} GPUs",
                faults=(Fault("/degrees", "not with groups of GPUs"),),
                remedy="write each GPU as a device, or leave degrees out",
            )
        degrees = [Degrees()]
    sharding = request.sharding
    shardings: Sequence[Sharding | None]
    if sharding is None or isinstance(sharding, tuple):
        shardings = (None,) if sharding is None else tuple(dict.fromkeys(sharding))
    else:
        shardings = AUTO if sharding == "auto" else (sharding,)
    for each in shardings:
        refuse_sharding(profile, each)
    choices = tuple(Choice(*each) for each in product(degrees, shardings, [None], values))
    return () if choices in UNDIVIDED else choices


def _values(request: PlanRequest) -> Iterator[tuple[tuple[str, str], ...]]:
    """Yield the values of further axes that a request chooses from, one of each axis.

    Raises InvalidDocument for an unknown axis or value.
    """
    choose = request.choose or {}
    for name in choose.keys() - AXES.keys():
        raise InvalidDocument(
            f"choose names the unknown axis {name!r}",
            faults=(Fault("/choose", name, "axis"),),
            remedy=f"one of {', '.join(AXES)}",
        )
    listed = {name: (each,) if isinstance(each, str) else each for name, each in choose.items()}
    for name, values in listed.items():
        if unknown := [value for value in values if value not in AXES[name].values]:
            raise InvalidDocument(
                f"{name} {unknown[0]!r} is unknown",
                faults=(Fault(f"/choose/{name}", unknown[0], "value"),),
                remedy=f"one of {', '.join(AXES[name].values)}",
            )
    every = product(*([(name, value) for value in dict.fromkeys(values)] for name, values in sorted(listed.items())))
    return (tuple(each) for each in every)


def refuse_sharding(profile: ModelProfile, sharding: Sharding | None) -> None:
    """Raise UnsupportedRequest for a sharding that the trainer of the profile's kernels does not have."""
    if sharding == "parameters_kept" and profile.framework == "megatron":
        raise UnsupportedRequest(
            f"the profile {profile.name!r} is for megatron; only torch's FSDP2 has sharding parameters_kept",
            remedy="sharding optimizer, or a profile of framework torch",
        )


def refuse_several_stages(profile: ModelProfile, sharding: Sharding | None, stages: int) -> None:
    """Raise UnsupportedRequest for several stages under a sharding that communicates with every micro-batch."""
    if stages > 1 and Choice(sharding=sharding).in_one_stage:
        what = "parameters would be gathered" if sharding == "parameters" else "gradients would be summed"
        kept = sharding == "parameters" and profile.framework != "megatron"
        raise UnsupportedRequest(
            f"sharding {sharding} needs one stage, not {stages}: {what} again for each micro-batch of each stage",
            remedy=f"sharding {'parameters_kept' if kept else 'optimizer'}, or one stage",
        )


def _degrees_of_request(request: PlanRequest, available: list[Degrees]) -> list[Degrees]:
    if request.degrees is None:
        return [Degrees()]
    if request.degrees == "auto":
        return available
    requested = request.degrees if isinstance(request.degrees, tuple) else (request.degrees,)
    return list(dict.fromkeys(degrees_of(each) for each in requested))


def degrees_with(degrees: Iterable[Degrees], named: Mapping[str, int]) -> list[Degrees]:
    """Return the degrees that have the named values; unnamed ones are free."""
    return [each for each in degrees if all(getattr(each, name) == value for name, value in named.items())]


def named_degrees(profile: ModelProfile | str, named: Mapping[str, Sequence[int] | str]) -> str | list[dict[str, int]]:
    """Return the ``degrees`` of a request that names values of some degrees, each a list or ``auto``.

    They are the degrees that the profile has costs at, with the named values; unnamed ones are free. Values that the
    profile does not have are included, for ``choices_of`` to refuse. For a profile named by hash they are all products,
    with 1 for unlisted degrees.
    """
    listed = {name: tuple(values) for name, values in named.items() if not isinstance(values, str)}
    if not listed:
        return "auto"
    products = [dict(zip(listed, values, strict=True)) for values in product(*listed.values())]
    if isinstance(profile, str):
        return products
    available = [Degrees(), *(degrees_of(variant.degrees) for variant in profile.variants or ())]
    single = ({name: value} for name, values in listed.items() for value in values)
    unknown = [each for each in single if not degrees_with(available, each)]
    matching = [
        {name: value for name, value in each._asdict().items() if value > 1}
        for values in products
        for each in degrees_with(available, values)
    ]
    return unknown + matching or products[:1]


def _remedy(profile: ModelProfile, available: list[Degrees]) -> str:
    return (
        f"choose degrees that the profile has costs at: {wire.listed(map(to_degrees, available))}"
        if len(available) > 1
        else WITH_DEGREES
    )


def choice_of(plan: Plan) -> Choice | None:
    """Return the choice that a plan states; None where it states no choice."""
    if plan.degrees is None and plan.sharding is None and plan.chosen is None:
        return None
    return Choice(degrees_of(plan.degrees), plan.sharding, None, tuple(sorted((plan.chosen or {}).items())))


def refuse_divided(plan: Plan, what: str) -> None:
    """Raise UnsupportedRequest for a plan whose layers several GPUs share; ``what`` cannot be done with it yet."""
    degrees = degrees_of(plan.degrees)
    if degrees != Degrees():
        raise UnsupportedRequest(
            f"{what} at {degrees}, only where each device holds whole layers",
            remedy="plan with --tensor 1 (degrees: [{}] in a request)",
        )


def at_choice_of(problem: Problem, plan: Plan) -> Problem:
    """Return the problem at the degrees and the sharding of a plan.

    A plan that uses no device of one kind belongs to the other devices, if its GPU groups are no groups of all devices.
    Raises InvalidPlan where the request does not allow the choice, UnsupportedRequest where no groups can be made.
    """
    choice = choice_of(plan)
    if choice is None:
        return problem
    stages = [stage.devices for pipeline in plan.pipelines for stage in pipeline.stages]
    kinds = {device.kind for device in problem.devices}
    unused = kinds - {device.kind for device in problem.devices if device.name in set().union(*stages)}
    if len(unused) != 1 or unused == kinds:
        return contract(problem, choice)
    part = choice._replace(excluded=next(iter(unused)))
    with suppress(UnsupportedRequest):
        whole = contract(problem, choice)
        cells = set(map(whole.names, range(whole.num_devices)))
        size = len(min(cells))
        groups = {names[at : at + size] for names in stages for at in range(0, len(names), size)}
        if groups <= cells:
            return whole
    return contract(problem, part)


# ---- variants --------------------------------------------------------------------------------------------------------


def variants_of(profile: ModelProfile, modules: Set[Module]) -> tuple[Variant, ...]:
    """Return the model at each of the degrees that the profile has costs at besides 1.

    ``modules`` are the modules that plans may recompute by themselves.
    """
    return tuple(_variant(profile, variant, modules) for variant in profile.variants or ())


def _variant(profile: ModelProfile, variant: ProfileVariant, modules: Set[Module]) -> Variant:
    assert profile.classes is not None
    classes = np.asarray(profile.classes)
    layers = [variant.layers[number] for number in profile.classes]
    trainable = [layer.trainable for layer in profile.layers]
    degrees = degrees_of(variant.degrees)
    lanes = degrees.mesh if variant.boundary == "sharded" else degrees.context
    points = sorted(variant.measurements, key=lambda each: each.micro_batch_size)
    return Variant(
        degrees=degrees,
        parameter_bytes=prefix(each.parameter_bytes + (each.copied_bytes or 0) for each in layers),
        trainable_bytes=prefix(
            each.parameter_bytes * is_trainable for each, is_trainable in zip(layers, trainable, strict=True)
        ),
        expert_bytes=prefix(
            (each.expert_bytes or 0) * is_trainable for each, is_trainable in zip(layers, trainable, strict=True)
        ),
        update_ns=prefix(each.update_ns for each in layers),
        boundary_tensors=tuple(
            tuple((t.name, -(-t.bytes_per_sample // lanes), -(-t.gradient_bytes_per_sample // lanes)) for t in cut)
            for cut in profile.boundaries
        ),
        shared_parameters=tuple((s.name, s.layers, -(-s.bytes // degrees.tensor)) for s in profile.shared_parameters),
        measured={
            kind: tuple(_measured(each, classes, modules) for each in points if each.device_kind == kind)
            for kind in profile.device_kinds
        },
        copied_bytes=copied_bytes(layers),
    )


def copied_bytes(layers: Sequence[Layer | DividedLayer]) -> np.ndarray | None:
    """Return prefix sums (L + 1,) of the copies of layers' parameters; None without copies."""
    sizes = [layer.copied_bytes or 0 for layer in layers]
    return prefix(sizes) if any(sizes) else None


def _measured(measurement: DividedMeasurement, classes: np.ndarray, modules: Set[Module]) -> CellMeasured:
    """Return a measurement with an entry for each layer instead of each class."""
    rows, layers = measurement.micro_batch_size, measurement.layers

    def every(values: Iterable[int]) -> np.ndarray:
        return frozen(np.fromiter(values, dtype=np.int64)[classes])

    present = {each.module for number in set(classes.tolist()) for each in layers[number].modules or ()}
    collectives = [tuple(_collective(each, rows) for each in layer.collectives) for layer in layers]
    return CellMeasured(
        rows=rows,
        forward_ns=every(layer.forward_ns for layer in layers),
        backward_ns=every(layer.backward_ns for layer in layers),
        weight_ns=every(layer.weight_ns for layer in layers),
        stash_bytes=every(layer.stash_bytes for layer in layers),
        workspace_bytes=every(layer.workspace_bytes for layer in layers),
        collectives=tuple(collectives[number] for number in classes),
        modules={module: _module(layers, module, rows, classes) for module in sorted(present & modules)},
    )


def _module(layers: Sequence[DividedCost], module: Module, rows: int, classes: np.ndarray) -> CellModule:
    """Return the costs of recomputing a module in each layer; 0 in layers without the module."""
    costs = [next((each for each in layer.modules or () if each.module == module), None) for layer in layers]
    moved = [tuple(_collective(one, rows) for one in each.collectives) if each else () for each in costs]
    return CellModule(
        forward_ns=frozen(each.forward_ns if each else 0 for each in costs)[classes],
        freed_bytes=frozen(each.freed_bytes if each else 0 for each in costs)[classes],
        collectives=tuple(moved[number] for number in classes),
    )


def _collective(collective: wire.Collective, rows: int) -> Collective:
    moved = collective.bytes_per_sample * (1 if collective.phase == "step" else rows)
    return Collective(
        collective.phase, collective.operation, collective.over, moved, collective.count, collective.hidden_ns
    )
