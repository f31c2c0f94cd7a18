"""Many questions at once: one request varied along some axes, and the table of their answers."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.api.jobs import JobState, ResultStatus
from penstock.schemas.document import Document, Part, refuse_doubles
from penstock.schemas.profile import ModelProfile
from penstock.schemas.quantities import Bytes, ContentHash, Count, Flag, Name, Nanoseconds, Number, PositiveCount
from penstock.schemas.request import PlanRequest, UpdateRule
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees, Sharding

SweepState = Literal["running", "succeeded", "cancelled"]
CaseState = JobState | Literal["unsupported", "deleted"]


class Axes(Part):
    """The axes of a sweep. An empty list keeps the request's own value."""

    topologies: tuple[ClusterTopology | ContentHash, ...] = ()
    global_batch_sizes: tuple[PositiveCount, ...] = ()
    planners: tuple[Name, ...] = ()
    schedules: tuple[Name, ...] = ()
    update_rules: tuple[UpdateRule, ...] = Field(default=(), description="one of them in each case")
    profiles: tuple[ModelProfile | ContentHash, ...] | None = Field(
        default=None, description="models, or one model at several sequence lengths"
    )

    @model_validator(mode="after")
    def _unique(self) -> Self:
        for axis in ("global_batch_sizes", "planners", "schedules", "update_rules"):
            refuse_doubles(f"the value in {axis}", [str(value) for value in getattr(self, axis)])
        return self


class SweepRequest(Document):
    """A plan request, asked once for each combination of the values in ``over``."""

    kind: ClassVar[str] = "sweep request"

    request: PlanRequest
    over: Axes = Axes()


class Method(Part):
    """The planner that made a plan, and the order and the rule by which it runs."""

    planner: Name
    schedule: Name
    update_rule: UpdateRule


class SweepRow(Part):
    """One case and its answer; ``method`` has the choices that the plan made itself."""

    topology: Name = Field(description="its name; of unnamed hashes the hash")
    global_batch_size: PositiveCount
    planner: Name
    schedule: Name
    update_rules: tuple[UpdateRule, ...]
    state: CaseState
    job_id: str | None = Field(default=None, description="of the service that was asked")
    status: ResultStatus | None = None
    why: str = ""
    method: Method | None = Field(default=None, description="of the plan")
    plan_hash: ContentHash | None = None
    time_per_global_batch_ns: Nanoseconds | None = None
    samples_per_s: Number | None = None
    peak_memory_bytes: Bytes | None = Field(default=None, description="of the fullest device")
    devices: Count | None = Field(default=None, description="that the plan uses")
    cost_per_sample: Number | None = Field(default=None, description="where the topology prices its devices")
    gap: Number | None = None
    pareto: Flag = Field(
        default=False,
        description="no other row is at least as good in throughput, memory, devices and cost, and better in one;"
        " less than 1 % is no difference",
    )
    seconds: Number | None = None
    profile: Name | None = Field(default=None, description="the model's name")
    sequence_length: PositiveCount | None = Field(default=None, description="tokens of a sample, where it is known")
    degrees: Degrees | None = Field(default=None, description="of the plan; null where they are not in question")
    sharding: Sharding | None = None
    chosen: dict[Name, Name] | None = Field(default=None, description="the values of further axes that a request opens")
    stages: Count | None = Field(default=None, description="groups of devices that hold stages, one after the other")


class SweepOut(Part):
    """A sweep and its progress; ``rows`` are in the order of the cases, and absent in a list of sweeps."""

    id: str
    state: SweepState
    request_hash: ContentHash
    created_at: str
    finished_at: str | None = None
    cases: Count
    ended: Count = Field(description="cases that will not change any more")
    rows: tuple[SweepRow, ...] = ()
    links: dict[str, str] = Field(default_factory=dict)


class SweepPage(Part):
    """Sweeps, the newest first; the next page begins after ``next_cursor``."""

    items: tuple[SweepOut, ...]
    next_cursor: str | None
