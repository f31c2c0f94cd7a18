"""Import of a trainer's layout: its text and request, its plan, and the best plans to compare with."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from penstock.schemas.api.explanation import LayoutComparison
from penstock.schemas.document import Document, Part
from penstock.schemas.options.planning import about
from penstock.schemas.plan import Plan
from penstock.schemas.profile import ModelProfile
from penstock.schemas.quantities import Bytes, ContentHash, Flag, Name, Nanoseconds, Number, PositiveCount
from penstock.schemas.request import Choices, Pin, PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import ContextKind, Framework
from penstock.schemas.transformers.shape import Ratio, TransformerShape, Width

LayoutFormat = Literal["megatron", "torchtitan", "deepspeed", "ranges"]
MOST_CHARACTERS = 1_000_000


class LayoutJob(Choices, Document):
    """The model, the cluster and the training of a layout; fields that are left out follow the layout's text.

    One of ``profile``, ``shape`` and ``hugging_face`` at most. A profile keeps its costs. Costs
    of a shape or a configuration are computed, with the trainer's kernels and at the layout's degrees.
    """

    kind: ClassVar[str] = "layout job"

    profile: ModelProfile | ContentHash | None = Field(default=None, description="the model with its costs")
    shape: TransformerShape | None = Field(default=None, description="the model, of which costs are computed")
    hugging_face: dict[str, Any] | None = Field(
        default=None, description="the content of a model's config.json, in place of `shape`"
    )
    topology: ClusterTopology | ContentHash
    global_batch_size: PositiveCount | None = Field(default=None, description="left out: the layout's own")
    sequence_length: Width | None = Field(default=None, description=about("sequence_length"))
    framework: Framework | None = Field(default=None, description=about("framework"))
    context_kind: ContextKind | None = Field(default=None, description=about("context_kind"))
    routing_imbalance: Ratio | None = Field(default=None, description=about("routing_imbalance"))
    capacity_factor: Ratio | None = Field(default=None, description=about("capacity_factor"))
    pins: tuple[Pin, ...] = Field(default=(), description="layers with the devices that alone may hold them")

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if sum(model is not None for model in (self.profile, self.shape, self.hugging_face)) > 1:
            raise ValueError(
                "give at most one of `profile`, `shape` and `hugging_face`; give none if the layout describes the model"
            )
        return self


class LayoutRequest(Document):
    """A user's present configuration, in the trainer's terms."""

    kind: ClassVar[str] = "layout request"

    format: LayoutFormat
    layout: Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)] = Field(
        description="megatron: a script, a configuration or the layout string; torchtitan: TOML, JSON, flags or Python;"
        " deepspeed: Python or JSON; ranges: JSON"
    )
    source: Annotated[str, Field(min_length=1, max_length=512)] = Field(
        default="the layout", description="the text's name in messages"
    )
    request: LayoutJob = Field(description="model, cluster and training; its target is the format's trainer")
    micro_batch_size: PositiveCount | None = Field(
        default=None, description="samples of a micro-batch on each replica, where the text does not say"
    )
    pipeline_parallel_size: PositiveCount | None = Field(
        default=None, description="ranks of the pipeline, where the text does not say; else one for each stage"
    )
    nodes: Annotated[str, Field(max_length=MOST_CHARACTERS)] = Field(
        default="", description="hostlist of the nodes that the job runs on, as its ranks count them; else all"
    )
    devices_per_node: PositiveCount | None = Field(
        default=None, description="use only this number of devices of each node, the first ones; default: all"
    )
    values: dict[Name, Annotated[str, Field(max_length=512)]] = Field(
        default_factory=dict, description="values that the text leaves open, by variable or flag: {PP: 8}"
    )
    config: Name | None = Field(default=None, description="which of the configurations of a Python text is meant")
    compare: Flag = Field(default=True, description="also find the best plan within the trainer's limits, and without")

    @field_validator("request", mode="before")
    @classmethod
    def _of_plan_request(cls, job: Any) -> Any:
        """Take a plan request for a layout's job, without what only planners ask for."""
        if not isinstance(job, PlanRequest):
            return job
        return {name: getattr(job, name) for name in job.model_fields_set & LayoutJob.model_fields.keys()}


class Rival(Part):
    """The best plan of a wider choice, and how the layout (``theirs``) compares with it (``ours``)."""

    choice: str = Field(description="within the trainer's limits, or without")
    status: Literal["optimal", "feasible", "infeasible", "none_found", "time_limit"]
    why: str
    time_ns: Nanoseconds | None
    bound_ns: Nanoseconds | None = Field(description="no plan of this choice takes less")
    saved: Number | None = Field(description="share of the layout's time")
    plan: Plan | None
    comparison: LayoutComparison | None
    request: PlanRequest | None = Field(
        default=None, description="what the plan answers, where its degrees are open; else the layout's request"
    )


class LayoutImported(Part):
    """The layout as a plan with the judge's numbers; ``faults``: why it cannot run as it is."""

    format: LayoutFormat
    plan: Plan
    request: PlanRequest
    fits: Flag | None = Field(
        description="null: not known, as it does not fit by a count that leaves out something that lowers memory"
    )
    faults: tuple[str, ...]
    missing_bytes: Bytes = Field(description="on the device that lacks most, by that count")
    sentences: tuple[str, ...]
    assumptions: tuple[str, ...]
    rivals: tuple[Rival, ...]
