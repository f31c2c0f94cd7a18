"""What the service says of its work: jobs, their events, runs, and problem details (RFC 9457)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from penstock.schemas.document import Document, Part
from penstock.schemas.plan import Certificate, Plan, PlanFile
from penstock.schemas.quantities import ContentHash, Count, Name, Nanoseconds

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ResultStatus = Literal["optimal", "feasible", "infeasible", "time_limit"]
RunState = Literal["preparing", "running", "succeeded", "failed", "cancelled"]


class FaultOut(Part):
    """One fault of a document."""

    pointer: str
    detail: str
    code: str


class ProblemDetails(Part):
    """Every error's body, as application/problem+json."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    code: str
    errors: tuple[FaultOut, ...] = ()
    remedy: str | None = None
    instance: str | None = None


class Infeasibility(Part):
    """Why no plan exists, and the first remedy that works."""

    stage: str | None = Field(default=None, description="the layers of the tightest stage")
    device: str | None = None
    missing_bytes: Count | None = None
    sentence: str
    remedy: str | None = None


class ResultOut(Part):
    """A planner's answer."""

    status: ResultStatus
    why: str
    infeasibility: Infeasibility | None = None
    plan_hash: ContentHash | None = None
    plan: Plan | None = None
    certificates: tuple[Certificate, ...] = ()
    seconds: float = Field(ge=0)


class JobOut(Part):
    """One request and how far it is."""

    id: str
    state: JobState
    request_hash: ContentHash
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    attempt: Count = 0
    cached: bool = False
    result: ResultOut | None = None
    incumbent_ns: Nanoseconds | None = Field(default=None, description="best plan so far")
    bound_ns: Nanoseconds | None = None
    error: ProblemDetails | None = None
    links: dict[str, str] = Field(default_factory=dict)


class JobEvent(Part):
    """One line of a job's story; ``sequence`` grows by one."""

    sequence: Count
    kind: Literal["state", "progress", "log"]
    at: str
    data: dict[str, Any]


class PlanComparison(Part):
    """One row of ``compare``."""

    planner: Name
    schedule: str | None
    update_rule: str | None
    status: ResultStatus
    iteration_ns: Nanoseconds | None = Field(description="time per global batch")
    peak_memory_bytes: Count | None
    bound_ns: Nanoseconds | None
    gap: float | None
    speedup_vs_one_device: float | None
    seconds: float
    why: str = ""


class RunRequest(Document):
    """Train with a plan on agents; ``model`` is a key of the agents' own configuration."""

    kind: ClassVar[str] = "run request"

    plan: PlanFile | ContentHash
    model: Name
    steps: Count = 3
    seed: Count = 0
    check: bool = Field(default=False, description="compare loss and gradients with a single process")
    trace_steps: Count = Field(default=1, description="how many of the last steps are traced")


class RunOut(Part):
    """A plan on agents."""

    id: str
    state: RunState
    plan_hash: ContentHash
    model: Name
    generation: Count
    created_at: str
    finished_at: str | None = None
    steps: Count
    steps_done: Count = 0
    losses: tuple[float, ...] = ()
    step_times_ns: tuple[Nanoseconds, ...] = ()
    predicted_time_per_global_batch_ns: Nanoseconds
    measured_time_per_global_batch_ns: Nanoseconds | None = None
    gradient_check: float | None = Field(
        default=None, description="largest difference from one process, over the largest gradient"
    )
    error: ProblemDetails | None = None
    agents: tuple[str, ...] = ()
