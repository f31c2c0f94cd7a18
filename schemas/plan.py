"""The answer: stages, devices, orders, the judge's prediction and the proven bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.coverage import DOMAINS, FEATURES, NEUTRAL, Covers, Scope, model_of
from penstock.schemas.document import Document, Part, refuse_doubles
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.quantities import Bytes, ContentHash, Count, Flag, Name, Nanoseconds, Number, PositiveCount
from penstock.schemas.request import PlanRequest, UpdateRule
from penstock.schemas.transformers.degrees import Degrees, Module, Sharding

LayerRange = tuple[Count, Count]
"""First and last layer, both included."""


class RecomputedModules(Part):
    """Modules that every layer of a stage makes again before its backward."""

    modules: Annotated[tuple[Module, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        refuse_doubles("module", list(self.modules))
        return self


class Stage(Part):
    """Consecutive layers, held by one device or by several replicas."""

    layers: LayerRange
    devices: Annotated[tuple[Name, ...], Field(min_length=1)] = Field(
        description="with degrees, the GPUs of one replica after the other; in a replica tensor fastest, then context"
    )
    dispatch: Literal["rows", "round_robin"] = Field(
        default="rows", description="replicas share each micro-batch by rows, or take whole micro-batches in turn"
    )
    recompute: Literal["none", "full"] | tuple[LayerRange, ...] | RecomputedModules = Field(
        default="none", description="whole layers from their inputs, those of some ranges, or modules of every layer"
    )


class Pipeline(Part):
    """Stages that cover all layers once, and the micro-batches they process."""

    stages: Annotated[tuple[Stage, ...], Field(min_length=1)]
    micro_batches: LayerRange = Field(description="first and last micro-batch, both included")
    codecs: tuple[Literal["fp16s"] | None, ...] | None = Field(
        default=None, description="of each edge between neighbouring stages; absent: tensors are sent unchanged"
    )

    @model_validator(mode="after")
    def _a_codec_per_edge(self) -> Self:
        if self.codecs is not None and len(self.codecs) != len(self.stages) - 1:
            raise ValueError(
                f"codecs has {len(self.codecs)} entries, but {len(self.stages)} stages have {len(self.stages) - 1} "
                "edges"
            )
        return self


class ScheduleRow(Part):
    """The order of operations of some devices, in the compact text of ``schemas.program``.

    With degrees, a device means the replica whose first GPU it is.
    """

    devices: Annotated[tuple[Name, ...], Field(min_length=1)]
    text: str


class PatternOperation(Part):
    """One operation of a periodic schedule: its start in the period, and by how many periods it lags."""

    operation: str
    start_ns: Nanoseconds
    shift: Count


class Pattern(Part):
    """A steady state repeated for ever: one micro-batch of each pipeline per period, unless said otherwise."""

    period_ns: PositiveCount
    micro_batches_per_period: PositiveCount = 1
    operations: Annotated[tuple[PatternOperation, ...], Field(min_length=1)]


class PlanSchedule(Part):
    """Orders of one flushed step (``rows``), or a ``pattern``."""

    name: Name
    rows: tuple[ScheduleRow, ...] = ()
    pattern: Pattern | None = None
    warmup: tuple[Count, ...] = Field(default=(), description="K per stage: forwards before the first backward")

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if bool(self.rows) == (self.pattern is not None):
            raise ValueError("a schedule needs either `rows` or a `pattern`, not both")
        return self


class MemoryBreakdown(Part):
    """One device's memory at its peak, by use."""

    parameters_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    versions_bytes: Bytes = 0
    activations_bytes: Bytes
    buffers_bytes: Bytes
    workspace_bytes: Bytes
    context_bytes: Bytes


class DevicePrediction(Part):
    """One device during one global batch; busy + communication + idle = the whole time.

    With degrees, the GPUs of a replica do the same at the same time; the first one is listed.
    """

    device: Name
    busy_ns: Nanoseconds
    communication_ns: Nanoseconds = Field(description="neither computing nor waiting: only transfers or reductions run")
    idle_ns: Nanoseconds
    peak_memory_bytes: Bytes
    memory_bytes: Bytes = Field(description="the device's capacity")
    memory: MemoryBreakdown


class Prediction(Part):
    """The judge's prediction; no other part of Penstock writes these numbers."""

    time_per_global_batch_ns: PositiveCount
    fill_ns: Nanoseconds
    drain_ns: Nanoseconds
    bubble: Number = Field(ge=0, le=1, description="share of the used devices' time in which they do not compute")
    peak_memory_bytes: Bytes
    devices: tuple[DevicePrediction, ...]
    basis: Literal["imported", "analytic", "measured", "calibrated"]
    expected_error: Number = Field(ge=0, le=1, description="stated relative error, from the profile")
    cost_per_sample: Number | None = Field(default=None, description="where the topology prices its devices")
    tokens_per_s_per_gpu: Number | None = Field(
        default=None, description="of the GPUs that the plan uses; of transformers whose shape the profile has"
    )
    model_flops_utilisation: Number | None = Field(
        default=None,
        description="FLOPs of the model's forward and backward, without recomputation, of the GPUs' dense bf16 peak",
    )


MicroBatchNumbers = Annotated[tuple[tuple[PositiveCount, PositiveCount], ...], Field(min_length=1)]


class Coverage(Part):
    """The class of plans that a bound covers: the values that each feature of a plan may have.

    A feature that is absent has its neutral value alone; ``any`` means every value where they cannot be listed.
    """

    pipelines: tuple[Literal["one", "several"], ...] | None = None
    devices: tuple[Literal["one_stage", "several_stages"], ...] | None = Field(
        default=None, description="whether a device holds one stage, or may hold several"
    )
    dispatch: tuple[Literal["rows", "round_robin"], ...] | None = None
    backward: tuple[Literal["whole", "split"], ...] | None = None
    recompute: tuple[Literal["none", "stage", "segments"], ...] | None = None
    recompute_modules: tuple[Literal["none", "some"], ...] | None = Field(
        default=None, description="whether stages may recompute single modules of their layers"
    )
    recompute_runs: tuple[Literal["in_backward", "apart"], ...] | None = None
    codecs: tuple[Literal["none", "fp16s"], ...] | None = None
    update_rule: tuple[UpdateRule, ...] | None = None
    degrees: Literal["any"] | tuple[Name, ...] | None = Field(
        default=None, description="degrees of parallelism and what replicas share out, where they are a choice"
    )
    all_reduce: tuple[Literal["overlapped", "after_backward"], ...] | None = None
    replica_order: tuple[Literal["cluster", "other"], ...] | None = None
    memory: tuple[Literal["fits", "exceeds"], ...] | None = None
    pins: tuple[Literal["kept", "broken"], ...] | None = None
    trainer: Literal["any"] | tuple[Name, ...] | None = Field(default=None, description="whose limits the plan keeps")
    order: Literal["any"] | tuple[Name, ...] | None = Field(default=None, description="names of schedules")
    micro_batches: Literal["any"] | MicroBatchNumbers | None = Field(
        default=None, description="how many a step may have: ranges, both ends included"
    )

    @classmethod
    def of(cls, covers: Covers) -> Self:
        """Return the class as documents write it, without features that have only their neutral value."""
        features: dict[str, Any] = {}
        for name in FEATURES:
            value = getattr(covers, name)
            if value != getattr(NEUTRAL, name):
                ordered = value if name == "micro_batches" else sorted(value or (), key=_place(name))
                features[name] = "any" if value is None else tuple(ordered)
        return cls(**features)

    def covers(self) -> Covers:
        """Return the class that these fields describe."""
        features = {name: value for name in FEATURES if (value := getattr(self, name)) is not None}
        numbers = features.get("micro_batches")
        values = {name: None if value == "any" else frozenset(value) for name, value in features.items()}
        return Covers(**(values if numbers in (None, "any") else values | {"micro_batches": numbers}))


def _place(feature: str) -> Callable[[str], int | str]:
    """Return the key that sorts values in the order of their domain, and an open feature's values by name."""
    domain = DOMAINS.get(feature)
    return (lambda value: value) if domain is None else domain.index


class Certificate(Part):
    """A proven lower bound, and the class of plans that it holds for."""

    scope: Scope
    model: str = Field(description="which plans the bound covers, in the words that ``covers`` gives")
    covers: Coverage
    bound_ns: Nanoseconds
    tolerance_ns: Nanoseconds = 0
    gap: Number = Field(ge=0, description="value / bound - 1")
    method: str

    @model_validator(mode="after")
    def _says_what_it_covers(self) -> Self:
        if self.model != (expected := model_of(self.scope, self.covers.covers())):
            raise ValueError(f"`model` is {self.model!r}, but `covers` corresponds to {expected!r}")
        return self


class Plan(Document):
    """A plan. It is immutable; its address is the SHA-256 of its canonical JSON."""

    kind: ClassVar[str] = "plan"

    request_hash: ContentHash
    planner: Name
    global_batch_size: PositiveCount
    micro_batch_size: PositiveCount = Field(description="rows of the largest micro-batch")
    num_micro_batches: PositiveCount
    pipelines: Annotated[tuple[Pipeline, ...], Field(min_length=1)]
    update_rule: UpdateRule
    degrees: Degrees | None = Field(
        default=None, description="how many GPUs share a layer; absent: 1, every device holds whole layers"
    )
    sharding: Sharding | None = Field(
        default=None, description="what replicas share out; absent: as the request's memory.optimizer_sharding says"
    )
    chosen: dict[Name, Name] | None = Field(default=None, description="the values of further axes that a request opens")
    overlap_all_reduce: Flag = True
    schedule: PlanSchedule
    prediction: Prediction | None = Field(
        default=None, description="absent in a plan of one's own that has not been judged yet"
    )
    certificates: tuple[Certificate, ...] = ()
    assumptions: tuple[str, ...] = ()
    versions: dict[str, str] = Field(default_factory=dict)
    seed: Count = 0

    @model_validator(mode="after")
    def _no_bound_above_the_time(self) -> Self:
        if self.prediction is None:
            return self
        time_ns = self.prediction.time_per_global_batch_ns
        for number, each in enumerate(self.certificates):
            if each.bound_ns > time_ns:
                raise ValueError(
                    f"certificates/{number}/bound_ns is {each.bound_ns} ns, above the plan's own time of {time_ns} ns"
                )
        return self


class PlanFile(Document):
    """A plan with its request inline: it can be judged, run and explained alone."""

    kind: ClassVar[str] = "plan file"

    plan: Plan
    request: PlanRequest
    why: tuple[str, ...] = Field(
        default=(),
        description="what the search said of it, by clauses: its gaps, and which planners were not asked, with reasons",
    )

    @model_validator(mode="after")
    def _inline(self) -> Self:
        for field in ("profile", "topology"):
            if isinstance(getattr(self.request, field), str):
                raise ValueError(f"request.{field} is a hash; a plan file contains the document itself")
        return self


class PlanQuestion(Document):
    """A plan to judge, inline or by its hash; a plan file alone stands for the question about it."""

    kind: ClassVar[str] = "plan question"

    plan: PlanFile | ContentHash

    @property
    def file(self) -> PlanFile:
        """Return the plan file. Raises InvalidDocument for a hash, which only a service can resolve."""
        if isinstance(self.plan, PlanFile):
            return self.plan
        raise InvalidDocument(
            f"the plan is given as the hash {self.plan}, not as a document",
            remedy="give the plan file, or ask the service that stores the plan",
        )

    @classmethod
    def parse(cls, data: Any, *, units: bool = False, by_hand: bool = False, origin: str = "") -> Self:
        """Validate plain data as ``Document.parse`` does; a plan file is the question's plan."""
        if is_plan_file(data):
            return cls(plan=PlanFile.parse(data, units=units, by_hand=by_hand, origin=origin))
        return super().parse(data, units=units, by_hand=by_hand, origin=origin)


def is_plan_file(data: Any) -> bool:
    """Return whether plain data look like a plan file, which has its request beside the plan."""
    return isinstance(data, dict) and data.keys() >= {"plan", "request"}
