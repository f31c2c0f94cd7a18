"""Costs of a model: ``ModelProfile`` per layer, ``PipelineProfile`` per rank of a running pipeline."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.document import Document, Part, refuse_doubles
from penstock.schemas.quantities import Bytes, BytesPerSecond, Count, Flag, Fraction, Name, Nanoseconds, PositiveCount
from penstock.schemas.ranks.assignment import BoundarySizes
from penstock.schemas.transformers.degrees import ALONE, WITHIN, Collective, Degrees, Framework, ModuleCost
from penstock.schemas.transformers.shape import TransformerShape

Scaling = Literal["linear", "measured"]
WITH_DEGREES = "a profile with degrees: `penstock profile --example NAME --framework megatron`, or `--hf config.json`"
"""Remedy for a profile without degrees."""


class Layer(Part):
    """One element of the chain: a layer, or several merged where no cut was possible."""

    name: Name
    kind: str = Field(default="", description="description for people: 'TransformerBlock', 'Conv2d'")
    parameter_bytes: Bytes = Field(description="as stored for training, without gradients and optimizer states")
    trainable: Flag = True
    update_ns: Nanoseconds = Field(default=0, description="one optimizer step over this layer's parameters")
    update_workspace_bytes: Bytes | None = Field(
        default=None, description="what that step needs only while it runs; left out: nothing, as of a fused step"
    )
    copied_bytes: Bytes | None = Field(
        default=None,
        description="copies of parameters that stay with them, as of weights in 16 bits for autocast; left out: none",
    )
    cuttable: Flag = Field(default=True, description="whether a stage may end after this layer")
    members: tuple[Name, ...] = Field(default=(), description="the original layers, where several were merged")


class BoundaryTensor(Part):
    """One distinct tensor that crosses a cut; a tensor with later consumers travels hop by hop."""

    name: Name
    bytes_per_sample: Bytes
    gradient_bytes_per_sample: Bytes = Field(description="bytes of its gradient; 0 for a tensor without gradient")


class SharedParameter(Part):
    """Parameters that several layers use (tied weights); counted once, in the first of its layers."""

    name: Name
    layers: Annotated[tuple[Count, ...], Field(min_length=2)]
    bytes: Bytes


class LayerMeasurement(Part):
    """One layer's cost for one micro-batch on one device."""

    forward_ns: Nanoseconds
    backward_ns: Nanoseconds = Field(description="input and weight gradients together")
    backward_weight_ns: Nanoseconds | None = Field(
        default=None, description="the weight-gradient part of backward_ns; absent: half"
    )
    stash_bytes: Bytes = Field(description="storage newly kept alive from forward to backward, each storage once")
    workspace_bytes: Bytes = Field(default=0, description="needed only while the layer runs")

    @property
    def weight_ns(self) -> int:
        """The weight-gradient part of the backward: half of it, rounded down, where it was not measured."""
        return self.backward_ns // 2 if self.backward_weight_ns is None else self.backward_weight_ns

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.backward_weight_ns is not None and self.backward_weight_ns > self.backward_ns:
            raise ValueError(
                f"backward_weight_ns {self.backward_weight_ns} exceeds backward_ns {self.backward_ns}, of which it "
                "is a part"
            )
        return self


class Measurement(Part):
    """All layers at one micro-batch size on one kind of device."""

    device_kind: Name
    micro_batch_size: PositiveCount
    concurrency: PositiveCount = Field(default=1, description="devices of the host that were busy at the same time")
    layers: Annotated[tuple[LayerMeasurement, ...], Field(min_length=1)]


class DividedLayer(Part):
    """The part of a layer that one GPU holds when several GPUs share the layer."""

    parameter_bytes: Bytes = Field(description="as stored for training, of one GPU")
    expert_bytes: Bytes | None = Field(
        default=None, description="the part of parameter_bytes that are experts', which fewer GPUs have copies of"
    )
    copied_bytes: Bytes | None = Field(
        default=None, description="copies of the GPU's parameters that stay with them, as of a layer; left out: none"
    )
    update_ns: Nanoseconds = Field(default=0, description="one optimizer step over the GPU's own parameters")

    @model_validator(mode="after")
    def _experts_are_a_part(self) -> Self:
        if (self.expert_bytes or 0) > self.parameter_bytes:
            raise ValueError(
                f"expert_bytes {self.expert_bytes} exceeds parameter_bytes {self.parameter_bytes}, of which it is a "
                "part"
            )
        return self


class DividedCost(LayerMeasurement):
    """A layer's cost on one of the GPUs that share it: its own work and storage. Collectives are listed apart."""

    collectives: tuple[Collective, ...] = ()
    modules: tuple[ModuleCost, ...] | None = Field(
        default=None, description="those that can be recomputed by themselves; the others are kept, or the whole layer"
    )

    @model_validator(mode="after")
    def _modules_are_parts(self) -> Self:
        modules = self.modules or ()
        refuse_doubles("module", [each.module for each in modules])
        by_name = {each.module: each for each in modules}
        apart = [each.freed_bytes for each in modules if each.module in ALONE]
        others = [each for each in modules if each.module not in ALONE and WITHIN.get(each.module) not in by_name]
        freed = max(sum(each.freed_bytes for each in others), *apart, 0)
        if freed > self.stash_bytes:
            raise ValueError(f"the modules free {freed} bytes together, more than stash_bytes {self.stash_bytes}")
        for whole in set(WITHIN.values()) & by_name.keys():
            parts = [each for each in modules if WITHIN.get(each.module) == whole]
            for name in ("freed_bytes", "forward_ns"):
                total, most = sum(getattr(each, name) for each in parts), getattr(by_name[whole], name)
                if total > most:
                    raise ValueError(
                        f"the parts of {whole} have {name} {total} together, more than {whole} itself ({most})"
                    )
        for each in modules:
            other = next((collective.phase for collective in each.collectives if collective.phase != "forward"), None)
            if other is not None:
                raise ValueError(
                    f"module {each.module!r} has a collective of phase {other!r}; recomputing it repeats only phase "
                    "'forward'"
                )
        return self


class DividedMeasurement(Part):
    """All classes of layers for one micro-batch on GPUs of one kind that share it."""

    device_kind: Name
    micro_batch_size: PositiveCount
    layers: Annotated[tuple[DividedCost, ...], Field(min_length=1)]


class Variant(Part):
    """The model at some degrees, seen from one GPU; ``layers`` are the profile's ``classes`` of layers."""

    degrees: Degrees
    boundary: Literal["sharded", "whole"] = Field(
        description="what a GPU sends to the next stage: its own part of each tensor (sequence parallelism), or all of"
        " its sequence's"
    )
    layers: Annotated[tuple[DividedLayer, ...], Field(min_length=1)]
    measurements: Annotated[tuple[DividedMeasurement, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _one_entry_per_class(self) -> Self:
        if self.degrees == Degrees():
            raise ValueError(
                "a variant needs a degree above 1; costs at degrees of 1 belong in the profile's `layers` and "
                "`measurements`"
            )
        seen: set[tuple[str, int]] = set()
        for m in self.measurements:
            key = (m.device_kind, m.micro_batch_size)
            if len(m.layers) != len(self.layers):
                raise ValueError(
                    f"at {self.degrees} the measurement for {key[0]!r} at {key[1]} samples has {len(m.layers)} classes"
                    f" of layers, but the variant has {len(self.layers)}"
                )
            if key in seen:
                raise ValueError(f"at {self.degrees} {key[0]!r} at {key[1]} samples is measured twice")
            seen.add(key)
        return self


class CodecSpeed(Part):
    """The speed at which a kind of device converts fp32 to the codec's fp16 and back (WPipe, appendix A.3)."""

    device_kind: Name
    encode_bytes_per_s: BytesPerSecond = Field(description="bytes of fp32 of the input")
    decode_bytes_per_s: BytesPerSecond = Field(description="bytes of fp32 of the output")


class ProfileSource(Part):
    """The origin of the numbers, and how far off they may be."""

    method: Literal["imported", "analytic", "measured", "calibrated"]
    description: str = ""
    expected_error: Fraction = Field(description="stated relative error of predictions made from it: 0.15 is ±15 %")


class ModelProfile(Document):
    """Costs of a model as a topological chain of layers; every position is a possible cut."""

    kind: ClassVar[str] = "profile"

    name: Name
    layers: Annotated[tuple[Layer, ...], Field(min_length=1)]
    boundaries: tuple[tuple[BoundaryTensor, ...], ...] = Field(
        description="boundaries[i]: the tensors between layer i and layer i+1; one fewer than layers"
    )
    shared_parameters: tuple[SharedParameter, ...] = ()
    parameter_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    measurements: Annotated[tuple[Measurement, ...], Field(min_length=1)]
    codec_speeds: tuple[CodecSpeed, ...] | None = Field(
        default=None, description="of the kinds that were measured; plans with codecs need that of their devices"
    )
    scaling: Scaling = Field(
        default="linear",
        description="linear: proportional to the samples, both ways; measured: piecewise linear, clamped below",
    )
    update_in_turn: Flag | None = Field(
        default=None,
        description="true: a step goes through parameters one after the other, and needs the most of its layers'"
        " update_workspace_bytes; left out or false: their sum",
    )
    assumptions: tuple[str, ...] = ()
    source: ProfileSource
    shape: TransformerShape | None = Field(
        default=None, description="of a transformer: what degrees are legal, and how many FLOPs a sample takes"
    )
    framework: Framework | None = Field(default=None, description="whose kernels and memory the numbers describe")
    classes: tuple[Count, ...] | None = Field(
        default=None, description="of each layer, the number of its class in every variant's `layers`"
    )
    variants: tuple[Variant, ...] | None = Field(
        default=None, description="the model at other degrees of parallelism than 1"
    )

    @model_validator(mode="after")
    def _variants_have_every_class(self) -> Self:
        if bool(self.variants) != bool(self.classes):
            raise ValueError("`variants` and `classes` go together: a variant has one entry per class of layers")
        if self.classes is None or self.variants is None:
            return self
        if len(self.classes) != len(self.layers):
            raise ValueError(f"classes has {len(self.classes)} entries, but the profile has {len(self.layers)} layers")
        refuse_doubles("variant", [str(variant.degrees) for variant in self.variants])
        for variant in self.variants:
            if max(self.classes) >= len(variant.layers):
                raise ValueError(
                    f"`classes` names class {max(self.classes)}, but the variant at {variant.degrees} has "
                    f"{len(variant.layers)}"
                )
            missing = set(self.device_kinds) - {m.device_kind for m in variant.measurements}
            if missing:
                raise ValueError(f"the variant at {variant.degrees} has no measurement on {sorted(missing)[0]!r}")
        return self

    @model_validator(mode="after")
    def _chain_is_whole(self) -> Self:
        length = len(self.layers)
        if len(self.boundaries) != length - 1:
            raise ValueError(
                f"boundaries has {len(self.boundaries)} entries, but {length} layers have {length - 1} boundaries"
            )
        refuse_doubles("layer", [layer.name for layer in self.layers])
        for i, boundary in enumerate(self.boundaries):
            refuse_doubles(f"tensor in boundary {i}", [tensor.name for tensor in boundary])
        for shared in self.shared_parameters:
            outside = [i for i in shared.layers if i >= length]
            if outside:
                raise ValueError(
                    f"shared parameter {shared.name!r} names layers {outside}; the last layer is {length - 1}"
                )
        seen: set[tuple[str, int]] = set()
        for measurement in self.measurements:
            key = (measurement.device_kind, measurement.micro_batch_size)
            if len(measurement.layers) != length:
                raise ValueError(
                    f"the measurement for {key[0]!r} at {key[1]} samples has {len(measurement.layers)} layers, "
                    f"but the profile has {length}"
                )
            if key in seen:
                raise ValueError(f"{key[0]!r} at {key[1]} samples is measured twice")
            seen.add(key)
        if not any(m.forward_ns + m.backward_ns for m in self.measurements[0].layers):
            raise ValueError("all layers take 0 ns; a profile needs at least one layer with a cost")
        return self

    def held_bytes(self, first: int, last: int) -> int:
        """Return the bytes of parameters that a replica of layers ``first`` to ``last`` holds, with copies of tied
        ones.
        """
        total = sum(layer.parameter_bytes for layer in self.layers[first : last + 1])
        span = range(first, last + 1)
        for tie in self.shared_parameters:
            if tie.layers[0] not in span and any(layer in span for layer in tie.layers):
                total += tie.bytes
        return total

    def boundary_sizes(self) -> BoundarySizes | None:
        """Return the tensors of each cut, for ranks to compare; None where they were computed and not measured."""
        if self.source.method != "measured":
            return None
        return tuple(
            tuple((one.name, one.bytes_per_sample, one.gradient_bytes_per_sample) for one in cut)
            for cut in self.boundaries
        )

    @property
    def device_kinds(self) -> tuple[str, ...]:
        """The kinds that were measured, in the order of the profile."""
        return tuple(dict.fromkeys(m.device_kind for m in self.measurements))


class PipelineStageMeasurement(Part):
    """One rank of a running pipeline (AvgPipe, section IV: the twenty-batch profile)."""

    compute_ns: Nanoseconds = Field(description="computation per batch")
    send_ns: Nanoseconds
    receive_ns: Nanoseconds
    utilisation: tuple[Fraction, ...] = Field(description="φ: share of the processor used, in equal slices of a batch")
    model_bytes: Bytes = Field(description="parameters and gradients of one pipeline")
    optimizer_bytes: Bytes
    activation_bytes: Bytes = Field(description="per micro-batch in flight")


class PipelineProfile(Document):
    """Measurements of a pipeline at m micro-batches and n parallel pipelines, from which others are predicted."""

    kind: ClassVar[str] = "pipeline profile"

    plan_hash: str
    device_kind: Name
    num_micro_batches: PositiveCount
    num_pipelines: PositiveCount
    batches: PositiveCount
    ranks: Annotated[tuple[PipelineStageMeasurement, ...], Field(min_length=1)]
