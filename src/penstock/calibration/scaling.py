"""Times of a profile multiplied, at every degree: of one kind of device by one factor, or as its layers at degree 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from penstock.schemas.profile import DividedCost, DividedMeasurement, LayerMeasurement, ModelProfile, Variant

AnyCost = TypeVar("AnyCost", bound=LayerMeasurement)


class Factors(NamedTuple):
    """Factors on forward, on input gradients and on weight gradients."""

    forward: float
    inputs: float
    weight: float


def scaled(profile: ModelProfile, kind: str, factor: float) -> ModelProfile:
    """Return the profile with all computation on devices of ``kind`` multiplied; updates and communication stay."""
    alike = Factors(factor, factor, factor)
    measurements = tuple(
        one
        if one.device_kind != kind
        else one.model_copy(update={"layers": tuple(with_factors(layer, alike) for layer in one.layers)})
        for one in profile.measurements
    )
    result = profile.model_copy(update={"measurements": measurements})
    return _divided(
        result, lambda measurement: [alike] * len(measurement.layers) if measurement.device_kind == kind else None
    )


def with_kind(profile: ModelProfile, kind: str, source: str, speed: float) -> ModelProfile:
    """Return the profile with costs of ``kind``, which are the costs of ``source``, ``speed`` times faster."""
    if kind in profile.device_kinds:
        return profile
    added = [one.model_copy(update={"device_kind": kind}) for one in profile.measurements if one.device_kind == source]
    variants = None if profile.variants is None else tuple(_with_kind(one, kind, source) for one in profile.variants)
    update = {"measurements": (*profile.measurements, *added), "variants": variants}
    return scaled(profile.model_copy(update=update), kind, 1 / speed)


def _with_kind(variant: Variant, kind: str, source: str) -> Variant:
    added = [one.model_copy(update={"device_kind": kind}) for one in variant.measurements if one.device_kind == source]
    return variant.model_copy(update={"measurements": (*variant.measurements, *added)})


def followed(before: ModelProfile, after: ModelProfile) -> ModelProfile:
    """Return ``after`` with its costs at degrees changed as the costs of the same layers at degree 1.

    A size that ``before`` lacks at degree 1 takes the factors of the nearest one.
    """
    classes = after.classes or ()

    def factors(measurement: DividedMeasurement) -> list[Factors] | None:
        sizes = [one.micro_batch_size for one in before.measurements if one.device_kind == measurement.device_kind]
        if not sizes:
            return None
        size = min(sizes, key=lambda each: abs(each - measurement.micro_batch_size))
        layers = [
            next(
                one.layers
                for one in profile.measurements
                if (one.device_kind, one.micro_batch_size) == (measurement.device_kind, size)
            )
            for profile in (before, after)
        ]
        members = [[i for i, each in enumerate(classes) if each == number] for number in range(len(measurement.layers))]
        return [_ratios(*([measurement[i] for i in each] for measurement in layers)) for each in members]

    return _updated(before, _divided(after, factors))


def _ratios(before: Sequence[LayerMeasurement], after: Sequence[LayerMeasurement]) -> Factors:
    """Return the ratios of the sums of several layers; 1 where the sum was 0."""

    def parts(layers: Sequence[LayerMeasurement]) -> Factors:
        weight = sum(layer.weight_ns for layer in layers)
        back = sum(layer.backward_ns for layer in layers)
        return Factors(sum(layer.forward_ns for layer in layers), back - weight, weight)

    return Factors(*(new / old if old else 1.0 for old, new in zip(parts(before), parts(after), strict=True)))


def _updated(before: ModelProfile, after: ModelProfile) -> ModelProfile:
    """Return ``after`` with updates at degrees changed as at degree 1."""
    if after.variants is None or after.classes is None:
        return after
    totals = [[0, 0] for _ in range(max(after.classes) + 1)]
    for number, old, new in zip(after.classes, before.layers, after.layers, strict=True):
        totals[number][0] += old.update_ns
        totals[number][1] += new.update_ns
    variants = []
    for variant in after.variants:
        layers = (
            layer.model_copy(update={"update_ns": round(layer.update_ns * new / old) if old else layer.update_ns})
            for layer, (old, new) in zip(variant.layers, totals, strict=True)
        )
        variants.append(variant.model_copy(update={"layers": tuple(layers)}))
    return after.model_copy(update={"variants": tuple(variants)})


def _divided(profile: ModelProfile, factors: Callable[[DividedMeasurement], Sequence[Factors] | None]) -> ModelProfile:
    """Return the profile with the costs at degrees multiplied by class of layers; None changes nothing."""
    if profile.variants is None:
        return profile
    variants = []
    for variant in profile.variants:
        measurements = []
        for measurement in variant.measurements:
            factors_by_class = factors(measurement)
            if factors_by_class is not None:
                layers = (
                    _divided_cost(layer, each) for layer, each in zip(measurement.layers, factors_by_class, strict=True)
                )
                measurement = measurement.model_copy(update={"layers": tuple(layers)})
            measurements.append(measurement)
        variants.append(variant.model_copy(update={"measurements": tuple(measurements)}))
    return profile.model_copy(update={"variants": tuple(variants)})


def _divided_cost(cost: DividedCost, factors: Factors) -> DividedCost:
    """Multiply a cost; the hidden time of collectives, and recomputed modules, change with their pass."""
    backward = (cost.backward_ns - cost.weight_ns) * factors.inputs + cost.weight_ns * factors.weight
    by_phase = {"forward": factors.forward, "backward": backward / cost.backward_ns if cost.backward_ns else 1.0}
    collectives = tuple(
        collective.model_copy(update={"hidden_ns": round(collective.hidden_ns * by_phase.get(collective.phase, 1.0))})
        for collective in cost.collectives
    )
    modules = None
    if cost.modules is not None:
        modules = tuple(
            one.model_copy(update={"forward_ns": round(one.forward_ns * factors.forward)}) for one in cost.modules
        )
    return with_factors(cost, factors).model_copy(update={"collectives": collectives, "modules": modules})


def with_factors(layer: AnyCost, factors: Factors) -> AnyCost:
    """Return a layer with its times multiplied."""
    weight_ns = layer.weight_ns
    return with_times(
        layer,
        layer.forward_ns * factors.forward,
        (layer.backward_ns - weight_ns) * factors.inputs,
        weight_ns * factors.weight,
    )


def with_times(layer: AnyCost, forward: float, inputs: float, weight: float) -> AnyCost:
    """Return a layer with other times, in ns."""
    weight_ns = round(weight)
    return layer.model_copy(
        update={"forward_ns": round(forward), "backward_ns": round(inputs) + weight_ns, "backward_weight_ns": weight_ns}
    )
