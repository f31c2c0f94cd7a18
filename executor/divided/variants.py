"""The variants of an analytic profile: what one GPU holds, computes, keeps and sends at some degrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from penstock.executor.divided.division import refuse_without_experts
from penstock.executor.divided.tensor_group import expert_bytes, first_of
from penstock.executor.divided.tracer import DividedTracer, divided
from penstock.executor.profiling.meta_cost import time_ns
from penstock.executor.profiling.tracing import LayerCost, Run, Tracer, update_ns
from penstock.executor.run.chain import Chain
from penstock.executor.stage.recomputed_modules import recomputable
from penstock.facts.device_table import DeviceFacts, Dtype
from penstock.schemas.profile import DividedCost, DividedLayer, DividedMeasurement, ModelProfile, Variant
from penstock.schemas.transformers.degrees import Degrees, ModuleCost


class _At(NamedTuple):
    """All layers at some degrees: one GPU's sizes of each, and its costs by kind of device and micro-batch size."""

    degrees: Degrees
    sharded: bool
    layers: list[DividedLayer]
    costs: dict[tuple[str, int], list[DividedCost]]


def with_variants(
    profile: ModelProfile,
    whole: Tracer,
    sizes: Sequence[int],
    degrees: Sequence[Degrees],
    facts: Sequence[DeviceFacts],
    update_facts: DeviceFacts,
    progress: Callable[[str], None] | None = None,
) -> ModelProfile:
    """Add the costs at each of ``degrees`` to a profile; ``whole`` runs whole layers, at these micro-batch sizes.

    Raises UnsupportedRequest for a layer that cannot be divided so, and Conflict in a process with a process group.
    """
    variants = []
    for each in degrees:
        if progress is not None:
            progress(f"{profile.name}: {len(profile.layers)} layers at {each} on the meta device")
        variants.append(_at(profile, whole, sizes, each, facts, update_facts))
    classes, firsts = _classes(variants)
    assumed = [
        "at degrees above 1 torch's DTensor divides layers as the job's `parallel` says; numbers are of the GPU with"
        " the largest parts, and computation hides no collective"
    ]
    if any(each.expert > 1 for each in degrees):
        assumed.append("at expert degrees every GPU sends equally many tokens to each expert")
    return profile.model_copy(
        update={
            "framework": "torch",
            "classes": classes,
            "variants": tuple(_variant(each, firsts) for each in variants),
            "assumptions": (*profile.assumptions, *assumed),
        }
    )


def _at(
    profile: ModelProfile,
    whole: Tracer,
    sizes: Sequence[int],
    degrees: Degrees,
    facts: Sequence[DeviceFacts],
    update_facts: DeviceFacts,
) -> _At:
    with first_of(degrees) as meshes:
        refuse_without_experts(whole.chain, meshes)
        shared = divided(whole, meshes)
        runs = {size: shared.run(size) for size in sizes}
        layers = _layers(shared, runs[sizes[0]], update_facts)
        recomputing = {name: shared.recomputing((name,)) for name in recomputable(whole.chain.specs)}
        again = {name: {size: each.run(size) for size in sizes} for name, each in recomputing.items()}
        sharded = _is_sharded(whole.chain, runs[sizes[0]], shared.whole.run(sizes[0]))
    return _At(
        degrees,
        sharded,
        layers,
        {
            (device.kind, size): [
                _cost(
                    cost,
                    {name: recomputed[size].costs[i] for name, recomputed in again.items()},
                    device,
                    profile.parameter_dtype,
                )
                for i, cost in enumerate(run.costs)
            ]
            for device in facts
            for size, run in runs.items()
        },
    )


def _layers(tracer: DividedTracer, run: Run, device: DeviceFacts) -> list[DividedLayer]:
    """Return one GPU's sizes of each layer; a tied parameter counts in the first of its layers alone."""
    chain = tracer.chain
    experts = [expert_bytes(tracer.module(i)) for i in range(len(chain.specs))]
    layer_sizes = [tracer.sizes(i) for i in range(len(chain.specs))]
    sizes = [dict(each.parameters) for each in layer_sizes]
    for tie in chain.ties:
        for layer, name in tie.places:
            if layer != tie.layers[0]:
                del sizes[layer][name]
    return [
        DividedLayer(
            parameter_bytes=sum(each.values()),
            expert_bytes=shared or None,
            copied_bytes=cost.copied_bytes or None,
            update_ns=update_ns(local, cost, device),
        )
        for local, each, shared, cost in zip(layer_sizes, sizes, experts, run.costs, strict=True)
    ]


def _is_sharded(chain: Chain, run: Run, whole: Run) -> bool:
    """Return whether a GPU has only a part of every tensor that crosses a cut."""
    crossing = {each for cut, names in enumerate(chain.cuts) for each in zip(chain.writers(cut), names, strict=True)}
    places = [(writer, chain.specs[writer].writes.index(name)) for writer, name in crossing]
    parts = [run.written[writer][place] != whole.written[writer][place] for writer, place in places]
    return bool(parts) and all(parts)


def _cost(cost: LayerCost, again: Mapping[str, LayerCost], device: DeviceFacts, dtype: Dtype) -> DividedCost:
    """Return a layer's cost; ``again``: its costs with each of its modules recomputed."""
    modules = (_module(name, cost, each, device, dtype) for name, each in again.items())
    return DividedCost(
        forward_ns=time_ns(cost.forward, device, dtype),
        backward_ns=time_ns(cost.backward, device, dtype),
        stash_bytes=cost.stash_bytes,
        workspace_bytes=cost.workspace_bytes,
        collectives=cost.collectives,
        modules=tuple(each for each in modules if each.forward_ns or each.freed_bytes) or None,
    )


def _module(name: str, kept: LayerCost, again: LayerCost, device: DeviceFacts, dtype: Dtype) -> ModuleCost:
    """Return the cost of recomputing a module: the longer backward, the collectives added, and the bytes freed."""
    longer = time_ns(again.backward, device, dtype) - time_ns(kept.backward, device, dtype)
    before = {(each.phase, each.operation, each.over): each for each in kept.collectives}
    moved = []
    for each in again.collectives:
        previous = before.get((each.phase, each.operation, each.over))
        count, size = (
            (each.count, each.bytes_per_sample)
            if previous is None
            else (each.count - previous.count, each.bytes_per_sample - previous.bytes_per_sample)
        )
        if count > 0:
            moved.append(each.model_copy(update={"phase": "forward", "count": count, "bytes_per_sample": size}))
    return ModuleCost.model_validate(
        {
            "module": name,
            "forward_ns": max(0, longer),
            "freed_bytes": max(0, kept.stash_bytes - again.stash_bytes),
            "collectives": tuple(moved),
        }
    )


def _classes(all_degrees: Sequence[_At]) -> tuple[tuple[int, ...], list[int]]:
    """Return each layer's class, layers with equal costs at all degrees being one, and each class's first layer."""
    numbers: dict[str, int] = {}
    classes, firsts = [], []
    for i in range(len(all_degrees[0].layers)):
        parts = [part for at in all_degrees for part in (at.layers[i], *(costs[i] for costs in at.costs.values()))]
        key = "".join(part.model_dump_json() for part in parts)
        if key not in numbers:
            numbers[key] = len(numbers)
            firsts.append(i)
        classes.append(numbers[key])
    return tuple(classes), firsts


def _variant(at: _At, firsts: Sequence[int]) -> Variant:
    return Variant(
        degrees=at.degrees,
        boundary="sharded" if at.sharded else "whole",
        layers=tuple(at.layers[i] for i in firsts),
        measurements=tuple(
            DividedMeasurement(device_kind=kind, micro_batch_size=size, layers=tuple(costs[i] for i in firsts))
            for (kind, size), costs in at.costs.items()
        ),
    )
