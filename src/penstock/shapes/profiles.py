"""Profiles of transformers at several degrees of parallelism, from a shape alone or from a profile and its shape.

At degrees of 1 the numbers are the profile's own. At other degrees they are multiplied by the ratio of the closed form
of `costs` there to the closed form at 1. `profiled_degrees` chooses the degrees. Tensor parallelism includes sequence
parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

from penstock.facts.device_table import (
    ANALYTIC_EXPECTED_ERROR,
    PROFILED,
    DeviceFacts,
    Dtype,
    Level,
    assumed_level,
    device_facts,
)
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.profile import (
    BoundaryTensor,
    DividedCost,
    DividedLayer,
    DividedMeasurement,
    Layer,
    LayerMeasurement,
    Measurement,
    ModelProfile,
    ProfileSource,
    SharedParameter,
    Variant,
)
from penstock.schemas.transformers.degrees import Collective, ContextKind, Degrees, Framework, ModuleCost
from penstock.schemas.transformers.shape import Experts, TransformerShape
from penstock.shapes.costs.case import Case
from penstock.shapes.costs.layers import costs_of, layers_of, local_parameters
from penstock.shapes.gpu_memory import vocabulary_rows
from penstock.shapes.layout import Layout
from penstock.shapes.measured_range import with_range
from penstock.shapes.profiled_degrees import TENSOR_DEGREES, USUAL, DegreeOptions, context_kind_of, layouts_of
from penstock.shapes.roles import Role, roles_of, windowed_layers

UPDATE_KIND = "A100"
"""The kind on which updates are costed where a profile is computed for all kinds, as in the shipped ones."""
FRAMEWORK: Framework = "torch"
"""The framework whose kernels and memory a computed profile has by default, as the shipped ones do."""
SIZES = (1, 2, 4, 8, 16)
"""Sizes of a micro-batch, in samples."""
_KINDS: dict[Role, str] = {
    "embedding": "Embedding",
    "dense": "Block",
    "experts": "ExpertBlock",
    "windowed dense": "WindowBlock",
    "windowed experts": "WindowExpertBlock",
    "head": "Head",
}
_KERNELS: dict[Framework, str] = {
    "megatron": "Megatron-Core with Transformer Engine's fused norms, activations, rotary positions and cross-entropy",
    "torch": "eager PyTorch modules with flash attention",
}
_CONTEXT: dict[ContextKind, str] = {
    "ring": "keys and values go around a ring, hidden by the attention of blocks that are there",
    "all_gather": "keys and values are gathered, hidden by nothing",
    "all_to_all": "heads are exchanged for tokens all-to-all, hidden by nothing",
}


class _Class(NamedTuple):
    """Layers of equal cost: their role, and the first of them."""

    role: Role
    first: int


def every_kind() -> tuple[str, ...]:
    """Return the kinds of a profile where none is named, first the kind of the updates; others are scaled from them."""
    return (UPDATE_KIND, *(kind for kind in PROFILED if kind != UPDATE_KIND))


def computed_profile(
    shape: TransformerShape,
    framework: Framework | None = None,
    device_kinds: Sequence[str] = (),
    micro_batch_sizes: Sequence[int] = (),
    *,
    degrees: DegreeOptions = USUAL,
    context_kind: str | None = None,
    level: Level | None = None,
) -> ModelProfile:
    """Compute the profile of a transformer by the closed forms, for all kinds in the table where no kind is named.

    Raises UnsupportedRequest for illegal degrees, NotFound for a kind that is not known at the level, InvalidDocument
    for an unknown framework or kind of context parallelism.
    """
    if framework is not None and framework not in get_args(Framework):
        raise InvalidDocument(f"the framework {framework!r} is none of {', '.join(get_args(Framework))}")
    kind = None if context_kind is None else context_kind_of(context_kind)
    return profile_of(
        shape,
        framework or FRAMEWORK,
        tuple(device_kinds) or every_kind(),
        micro_batch_sizes=micro_batch_sizes or SIZES,
        degrees=degrees,
        context_kind=kind,
        level=level,
    )


def profile_of(
    shape: TransformerShape,
    framework: Framework,
    device_kinds: Sequence[str],
    *,
    micro_batch_sizes: Sequence[int] = SIZES,
    degrees: DegreeOptions = USUAL,
    context_kind: ContextKind | None = None,
    level: Level | None = None,
) -> ModelProfile:
    """Compute the profile of a transformer in bf16 for these kinds of devices, at ``degrees``.

    ``level`` chooses the efficiencies in the table of devices (None: the usual level of each kind). Raises
    UnsupportedRequest for illegal degrees, NotFound for a kind that the table lacks at this level, InvalidDocument for
    no kind or a size below 1.
    """
    sizes = sorted(set(micro_batch_sizes))
    if not device_kinds or not sizes or sizes[0] < 1:
        raise InvalidDocument("a profile needs a kind of device, and micro-batches of at least 1 sample")
    kinds = tuple(dict.fromkeys(device_kinds))
    single = Layout(framework=framework)
    roles = roles_of(shape)
    costed = layers_of(Case(shape, single, device_facts(kinds[0], level, framework)))
    names = ["embedding", *(f"block.{i}" for i in range(shape.layers)), "head"]
    boundary = 2 * shape.sequence_length * shape.hidden
    plain = ModelProfile(
        name=shape.name,
        layers=tuple(
            Layer(name=name, kind=_KINDS[role], **costed[role].model_dump(exclude={"expert_bytes", "copied_bytes"}))
            for name, role in zip(names, roles, strict=True)
        ),
        boundaries=tuple(
            (BoundaryTensor(name=f"{name}:x", bytes_per_sample=boundary, gradient_bytes_per_sample=boundary),)
            for name in names[:-1]
        ),
        shared_parameters=_tied(shape, single),
        parameter_dtype="bf16",
        measurements=tuple(
            _measured(shape, single, device_facts(kind, level, framework), size, roles)
            for kind in kinds
            for size in sizes
        ),
        scaling="measured",
        assumptions=(
            f"update_ns is one fused step of Adam on {kinds[0]}",
            "the loss belongs to the last layer; decoders compute half of each square of attention",
            *_windows(shape),
            *assumed_level(kinds, level, framework),
        ),
        source=_source(shape, kinds),
    )
    profile = with_variants(plain, shape, framework, degrees=degrees, context_kind=context_kind, level=level)
    return with_range(profile, level)


def _windows(shape: TransformerShape) -> tuple[str, ...]:
    """Return the assumption about layers whose attention sees a window; empty without such layers."""
    number = sum(windowed_layers(shape))
    if shape.windows is None or not number:
        return ()
    seen = f"{number} of {shape.layers} layers attend to {shape.windows.width} positions, and compute those alone"
    return (f"{seen}; where GPUs share sequences they get the keys of all",)


def _source(shape: TransformerShape, kinds: Sequence[str]) -> ProfileSource:
    return ProfileSource(
        method="analytic",
        description=f"closed form of {shape.name}'s layers, times from the table of {', '.join(kinds)}",
        expected_error=ANALYTIC_EXPECTED_ERROR,
    )


def at_degrees(profile: ModelProfile, degrees: DegreeOptions = USUAL) -> ModelProfile:
    """Return a shipped profile with its costs at degrees, if it is a transformer's. Raises UnsupportedRequest."""
    if profile.shape is None or profile.framework is None:
        return profile
    return with_variants(profile, profile.shape, profile.framework, degrees=degrees)


def with_variants(
    profile: ModelProfile,
    shape: TransformerShape,
    framework: Framework,
    *,
    degrees: DegreeOptions = USUAL,
    context_kind: ContextKind | None = None,
    level: Level | None = None,
) -> ModelProfile:
    """Return the profile with its shape and framework, and its costs at ``degrees`` (see `profile_of`).

    Raises UnsupportedRequest for illegal degrees, InvalidDocument where the profile's layers are not embedding, the
    shape's blocks and head, NotFound for a kind that the table of devices lacks.
    """
    _refuse_other_layers(profile, shape)
    single = Layout(framework=framework, context_kind=context_kind)
    layouts, why_none = layouts_of(shape, single, degrees)
    classes, members = _classes(profile, roles_of(shape))
    assumed = [f"kernels and memory are those of {_KERNELS[framework]}"]
    if layouts:
        assumed.append(
            "at tensor degrees sequence parallelism is on, computation hides no collective, and times are"
            " those of degree 1 times the ratio of the closed forms, in which small products and few rows of attention"
            " lose"
        )
        if any(layout.context > 1 for layout in layouts):
            assumed.append(f"at context degrees ({single.context_by}) {_CONTEXT[single.context_by]}")
        if shape.experts is not None:
            assumed.append(_routing(shape.experts))
    else:
        assumed.append(f"of the tensor degrees {', '.join(map(str, TENSOR_DEGREES))} none is legal: {why_none}")
    return profile.model_copy(
        update={
            "shape": shape,
            "framework": framework,
            "classes": classes if layouts else None,
            "variants": tuple(_variant(profile, shape, layout, members, level) for layout in layouts) or None,
            "assumptions": tuple(dict.fromkeys((*profile.assumptions, *assumed))),
        }
    )


def _refuse_other_layers(profile: ModelProfile, shape: TransformerShape) -> None:
    """Raise InvalidDocument where the profile's layers are not the shape's layers."""
    number = len(profile.layers)
    if number != shape.layers + 2:
        raise InvalidDocument(
            f"{profile.name!r} has {number} layers, but {shape.name} has {shape.layers + 2}: embedding, {shape.layers} "
            "blocks and head"
        )
    parameters = local_parameters(shape, Layout())
    for role, layer in list(zip(roles_of(shape), profile.layers, strict=True))[1:-1]:
        block = (4 if profile.parameter_dtype == "fp32" else 2) * parameters[role].total
        if layer.parameter_bytes != block:
            raise InvalidDocument(
                f"layer {layer.name!r} of {profile.name!r} has {layer.parameter_bytes} bytes of parameters, a block of "
                f"{shape.name} {block}"
            )


def _routing(experts: Experts) -> str:
    """Describe how evenly tokens are assumed to be spread over the experts."""
    if experts.capacity_factor is not None:
        return f"every expert gets {experts.capacity_factor:g} times its even share of tokens, dropped or padded"
    busy = f"the busiest GPU's experts get {experts.routing_imbalance:g} times the mean"
    shares = busy if experts.routing_imbalance > 1 else "the experts of all GPUs get the same number"
    return f"no token is dropped, and {shares}; all-to-all is hidden by nothing"


def _classes(profile: ModelProfile, roles: Sequence[Role]) -> tuple[tuple[int, ...], list[_Class]]:
    """Return the class of each layer, and all classes in the order of their first layers."""
    classes: dict[object, int] = {}
    numbers, members = [], []
    for index, (role, layer) in enumerate(zip(roles, profile.layers, strict=True)):
        costs = tuple(tuple(m.layers[index].model_dump().values()) for m in profile.measurements)
        key = (role, layer.parameter_bytes, layer.update_ns, costs)
        if key not in classes:
            classes[key] = len(classes)
            members.append(_Class(role, index))
        numbers.append(classes[key])
    return tuple(numbers), members


def _variant(
    profile: ModelProfile, shape: TransformerShape, shared: Layout, members: Sequence[_Class], level: Level | None
) -> Variant:
    """Multiply the profile's own costs by the ratio of the closed form at the degrees to the closed form at 1."""
    dtype: Dtype = profile.parameter_dtype
    first = device_facts(profile.device_kinds[0], level, shared.framework)
    both = (replace(shared, tensor=1, context=1, expert=1, expert_tensor=1, data=1), shared)
    layer_parameters = [layers_of(Case(shape, layout, first, dtype)) for layout in both]
    measurements = []
    for point in profile.measurements:
        facts, size = device_facts(point.device_kind, level, shared.framework), point.micro_batch_size
        one, divided = (costs_of(Case(shape, replace(layout, micro_batch_size=size), facts, dtype)) for layout in both)
        measurements.append(
            DividedMeasurement(
                device_kind=point.device_kind,
                micro_batch_size=size,
                layers=tuple(_cost(point.layers[each.first], one[each.role], divided[each.role]) for each in members),
            )
        )
    return Variant(
        degrees=Degrees(
            tensor=shared.tensor,
            context=shared.context,
            expert=shared.expert,
            expert_tensor=shared.expert_tensor,
        ),
        boundary="sharded",
        layers=tuple(
            _layer(profile.layers[each.first], layer_parameters[0][each.role], layer_parameters[1][each.role])
            for each in members
        ),
        measurements=tuple(measurements),
    )


def _layer(profiled: Layer, alone: DividedLayer, shared: DividedLayer) -> DividedLayer:
    experts = shared.expert_bytes
    return DividedLayer(
        parameter_bytes=_scaled(profiled.parameter_bytes, alone.parameter_bytes, shared.parameter_bytes),
        expert_bytes=None if experts is None else profiled.parameter_bytes * experts // alone.parameter_bytes,
        copied_bytes=_scaled(profiled.copied_bytes or 0, alone.parameter_bytes, shared.parameter_bytes) or None,
        update_ns=_scaled(profiled.update_ns, alone.update_ns, shared.update_ns),
    )


def _cost(profiled: LayerMeasurement, alone: DividedCost, shared: DividedCost) -> DividedCost:
    """Scale a layer's costs; collectives are the closed form's, and are hidden longer as the pass takes longer."""
    weight = profiled.backward_weight_ns
    backward = _scaled(profiled.backward_ns, alone.backward_ns, shared.backward_ns)
    if weight is not None:
        weight = min(backward, _scaled(weight, alone.backward_weight_ns or 0, shared.backward_weight_ns or 0))
    return DividedCost(
        forward_ns=_scaled(profiled.forward_ns, alone.forward_ns, shared.forward_ns),
        backward_ns=backward,
        backward_weight_ns=weight,
        stash_bytes=_scaled(profiled.stash_bytes, alone.stash_bytes, shared.stash_bytes),
        workspace_bytes=_scaled(profiled.workspace_bytes, alone.workspace_bytes, shared.workspace_bytes),
        collectives=tuple(_hidden(profiled, alone, each) for each in shared.collectives),
        modules=None if shared.modules is None else tuple(_module(profiled, alone, each) for each in shared.modules),
    )


def _hidden(profiled: LayerMeasurement, alone: DividedCost, collective: Collective) -> Collective:
    if not collective.hidden_ns:
        return collective
    profiled_ns, closed_ns = (
        (profiled.forward_ns, alone.forward_ns)
        if collective.phase == "forward"
        else (profiled.backward_ns, alone.backward_ns)
    )
    return collective.model_copy(update={"hidden_ns": collective.hidden_ns * profiled_ns // closed_ns})


def _module(profiled: LayerMeasurement, alone: DividedCost, shared: ModuleCost) -> ModuleCost:
    """Scale the time of a module as the layer's forward, and its freed bytes as the layer's stash."""
    return shared.model_copy(
        update={
            "forward_ns": _scaled(profiled.forward_ns, alone.forward_ns, shared.forward_ns),
            "freed_bytes": profiled.stash_bytes * shared.freed_bytes // alone.stash_bytes,
            "collectives": tuple(_hidden(profiled, alone, each) for each in shared.collectives),
        }
    )


def modules_alone(profile: ModelProfile) -> tuple[tuple[tuple[ModuleCost, ...], ...], ...]:
    """Return the costs of recomputing single modules of a transformer's whole layers, by measurement and layer.

    As at other degrees, a module costs the closed form's share of the layer's own costs. Another model has no such
    costs.
    """
    shape, framework = profile.shape, profile.framework
    if shape is None or framework is None or len(profile.layers) != shape.layers + 2:
        return ((),) * len(profile.measurements)
    single, roles, modules = Layout(framework=framework), roles_of(shape), []
    for point in profile.measurements:
        facts = device_facts(point.device_kind, None, framework)
        closed = costs_of(
            Case(shape, replace(single, micro_batch_size=point.micro_batch_size), facts, profile.parameter_dtype)
        )
        each = ((layer, closed[role]) for layer, role in zip(point.layers, roles, strict=True))
        modules.append(tuple(tuple(_module(layer, one, cost) for cost in one.modules or ()) for layer, one in each))
    return tuple(modules)


def _scaled(profiled: int, alone: int, shared: int) -> int:
    """Return ``profiled`` × ``shared`` / ``alone``, rounded up, or the sum with ``shared`` where ``alone`` is 0."""
    return -(-profiled * shared // alone) if alone else profiled + shared


def _tied(shape: TransformerShape, layout: Layout) -> tuple[SharedParameter, ...]:
    if not shape.tied:
        return ()
    size = 2 * vocabulary_rows(shape, layout) * shape.hidden
    return (SharedParameter(name="embedding.weight", layers=(0, shape.layers + 1), bytes=size),)


def _measured(
    shape: TransformerShape, layout: Layout, facts: DeviceFacts, size: int, roles: Sequence[Role]
) -> Measurement:
    costs = costs_of(Case(shape, Layout(framework=layout.framework, micro_batch_size=size), facts))
    each = {
        role: LayerMeasurement(**cost.model_dump(exclude={"collectives", "modules"})) for role, cost in costs.items()
    }
    return Measurement(device_kind=facts.kind, micro_batch_size=size, layers=tuple(each[role] for role in roles))
