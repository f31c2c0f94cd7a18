"""Request for a plan: a profile, a topology, and how to train the model."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.document import Document, Part
from penstock.schemas.options.planning import PLAN_OPTIONS, about
from penstock.schemas.profile import ModelProfile, PipelineProfile
from penstock.schemas.quantities import (
    Bytes,
    ContentHash,
    Count,
    Flag,
    Fraction,
    Name,
    Nanoseconds,
    PositiveCount,
    Scalar,
)
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees, Sharding, ShardingChoice

UpdateRule = Literal["synchronous", "weight_stashing", "double_buffered", "double_grouped", "elastic_averaging"]
Recompute = Literal["never", "auto", "always"]
Effort = Literal["quick", "normal", "thorough"]
Target = Literal["megatron", "torchtitan", "deepspeed"]
"""Trainers whose limits a plan may have to keep."""
FP32_GRADIENTS = ("megatron", "torchtitan")
"""Trainers that add up gradients in fp32 unless configured otherwise, whatever width parameters have.

Megatron-LM: ``accumulate_allreduce_grads_in_fp32``, which ``--bf16`` sets; torchtitan: ``mixed_precision_reduce``, the
width in which FSDP keeps the sums of a pipeline's micro-batches.
"""


class MemoryModel(Part):
    """The memory that a device holds in addition to the activations (ALGORITHMS 1.7)."""

    optimizer: Literal["sgd", "momentum", "adam"] = Field(default="adam", description=about("optimizer"))
    precision: Literal["mixed", "full"] = Field(default="mixed", description=about("precision"))
    gradient: Literal["parameter", "fp32"] = Field(
        default="parameter",
        description=f"{about('gradient')}; commands without a target write fp32 for 16-bit profiles, as "
        "Penstock's own ranks have them, and for all with degrees of parallelism",
    )
    optimizer_sharding: Literal["none", "over_replicas"] = Field(
        default="none", description=about("optimizer_sharding")
    )
    headroom_bytes: Bytes = Field(default=0, description=about("headroom"))
    buffers: Literal["exact", "none"] = Field(
        default="exact", description="count send and receive buffers while they live, or not at all, as the papers do"
    )


class NetworkModel(Part):
    """The costs of transfers and all-reduces (ALGORITHMS 1.5, 1.6)."""

    sharing: Literal["shared", "private"] = Field(default="shared", description=about("network"))
    channel: Literal["half", "full", "none"] = Field(default="half", description="kind of a private channel")
    transfer: Literal["nic", "spp", "dapple", "madpipe"] = Field(
        default="nic", description="duration of a transfer in a private network; a shared one always uses nic"
    )
    all_reduce: Literal["flat", "hierarchical", "dapple"] = Field(
        default="hierarchical", description=about("all_reduce")
    )
    bucket_bytes: PositiveCount = 25_000_000
    overlap_all_reduce: Flag = Field(default=True, description="buckets leave as the last backward passes their layers")


LIMITS = ("effort", "max_plans", "time_limit_ns")
"""Fields of ``Termination`` that say when a search ends without a plan that is good enough."""


class Termination(Part):
    """The limits at which the search for a better plan stops."""

    time_limit_ns: Nanoseconds | None = Field(default=None, description=about("time_limit"))
    gap: Fraction = Field(default=0.0, description=about("gap"))
    max_plans: PositiveCount | None = Field(default=None, description=about("max_plans"))
    effort: Effort | None = Field(
        default=None,
        description=f"{PLAN_OPTIONS['effort'].help}; left out: thorough, but commands, pages, penstock.plan and bodies "
        "over HTTP that name a model or cluster write normal where neither time_limit_ns nor max_plans is given",
    )

    @model_validator(mode="after")
    def _one_count(self) -> Self:
        if self.effort == "thorough" and self.max_plans is not None:
            raise ValueError(
                f"effort 'thorough' lets every planner search to its end, but max_plans {self.max_plans} ends it "
                "earlier; leave one of them out"
            )
        return self

    @property
    def planned_effort(self) -> Effort:
        """The effort that planners get: ``thorough`` where a document names none."""
        return self.effort or "thorough"

    @property
    def has_limit(self) -> bool:
        """Whether a limit can end a search before it has a plan that is good enough."""
        return any(getattr(self, name) is not None for name in LIMITS)


class Pin(Part):
    """Layers that these devices and no others may hold."""

    layers: tuple[Count, Count]
    devices: Annotated[tuple[Name, ...], Field(min_length=1)]


class Choices(Part):
    """Choices of a training, wherever the model is placed and however many samples a step takes."""

    micro_batch_sizes: tuple[PositiveCount, ...] = Field(default=(), description=about("micro_batch_sizes"))
    min_slice: PositiveCount = Field(default=1, description="smallest slice of a micro-batch that a replica may get")
    memory: MemoryModel = MemoryModel()
    network: NetworkModel = NetworkModel()
    update_rules: Annotated[tuple[UpdateRule, ...], Field(min_length=1)] = Field(
        default=("synchronous",), description=about("update_rules")
    )
    recompute: Recompute = Field(default="auto", description=about("recompute"))
    codec: Literal["auto"] | None = Field(default=None, description=about("codec"))
    planner: Name = Field(default="auto", description=about("planner"))
    schedule: Name = Field(default="auto", description=about("schedule"))
    options: dict[str, Scalar] = Field(
        default_factory=dict, description="options of the planner, as GET /v1/planners lists them"
    )
    termination: Termination = Termination()
    seed: Count = Field(default=0, description=about("seed"))
    target: Target | None = Field(default=None, description=about("target"))
    degrees: Literal["auto"] | Degrees | Annotated[tuple[Degrees, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="degrees of parallelism to choose from; auto: all that the profile has costs at; left out: 1 each",
    )
    sharding: ShardingChoice | Annotated[tuple[Sharding, ...], Field(min_length=1)] | None = Field(
        default=None,
        description=f"{PLAN_OPTIONS['sharding'].help}; auto: whichever is best; left out: as "
        "memory.optimizer_sharding says",
    )
    choose: dict[Name, Name | Annotated[tuple[Name, ...], Field(min_length=1)]] | None = Field(
        default=None, description=about("choose")
    )

    @model_validator(mode="before")
    @classmethod
    def _network_by_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("network") in ("shared", "private"):
            return data | {"network": {"sharing": data["network"]}}
        return data

    @model_validator(mode="before")
    @classmethod
    def _gradients_of_the_target(cls, data: Any) -> Any:
        """Set the gradients' width, where nothing states it, to the target's own width; so canonical forms state it."""
        if not isinstance(data, dict) or data.get("target") not in FP32_GRADIENTS:
            return data
        memory = data.get("memory", {})
        if isinstance(memory, dict) and "gradient" not in memory:
            return data | {"memory": memory | {"gradient": "fp32"}}
        if isinstance(memory, MemoryModel) and "gradient" not in memory.model_fields_set:
            return data | {"memory": memory.model_copy(update={"gradient": "fp32"})}
        return data

    @model_validator(mode="after")
    def _one_sharding(self) -> Self:
        if self.sharding == "none" and self.memory.optimizer_sharding == "over_replicas":
            raise ValueError("sharding is none, but memory.optimizer_sharding is over_replicas; leave one of them out")
        return self


class Training(Choices):
    """Training and planning options of a model, wherever it is placed."""

    global_batch_size: PositiveCount = Field(description=about("global_batch_size"))

    @model_validator(mode="after")
    def _within_the_batch(self) -> Self:
        too_big = [size for size in self.micro_batch_sizes if size > self.global_batch_size]
        if too_big:
            raise ValueError(f"micro_batch_sizes {too_big} exceed the global batch of {self.global_batch_size} samples")
        return self


class PlanRequest(Training, Document):
    """One question to the planners."""

    kind: ClassVar[str] = "plan request"

    profile: ModelProfile | ContentHash
    topology: ClusterTopology | ContentHash
    pipeline_profile: PipelineProfile | None = Field(
        default=None, description="measured run of a pipeline, for planner avgpipe: how far pipelines may share devices"
    )
    pins: tuple[Pin, ...] = Field(default=(), description="layers with the devices that alone may hold them")

    @model_validator(mode="after")
    def _within_the_chain(self) -> Self:
        if isinstance(self.profile, ModelProfile):
            last = len(self.profile.layers) - 1
            for pin in self.pins:
                if not pin.layers[0] <= pin.layers[1] <= last:
                    raise ValueError(f"pin {list(pin.layers)} is not a range of the layers 0…{last}")
        return self
