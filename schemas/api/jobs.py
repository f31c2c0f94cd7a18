"""Documents about the service's work: jobs, their events, runs, and problem details (RFC 9457)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.document import Document, Part
from penstock.schemas.errors import Fault, PenstockError
from penstock.schemas.options.running import about
from penstock.schemas.plan import Certificate, Plan, PlanFile
from penstock.schemas.quantities import ContentHash, Count, Flag, Loss, Name, Nanoseconds, Number, PositiveCount
from penstock.schemas.request import PlanRequest
from penstock.schemas.trace import Hardware
from penstock.schemas.transformers.degrees import Degrees, Sharding

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ResultStatus = Literal["optimal", "feasible", "infeasible", "none_found", "time_limit"]
RunState = Literal["preparing", "running", "recovering", "succeeded", "failed", "cancelled"]


class FaultOut(Part):
    """One fault of a document."""

    pointer: str
    detail: str
    code: str

    @classmethod
    def of(cls, fault: Fault) -> Self:
        """Return the fault in the form in which it is sent."""
        return cls(pointer=fault.pointer, detail=fault.detail, code=fault.code)


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
    request_id: str | None = Field(default=None, description="names the request in the service's log")

    @classmethod
    def of(cls, error: PenstockError) -> Self:
        """Return the error in the form in which it is sent."""
        return cls(
            title=error.title,
            status=error.status,
            detail=error.detail,
            code=error.code,
            errors=tuple(FaultOut.of(fault) for fault in error.faults),
            remedy=error.remedy,
        )

    def as_error(self) -> PenstockError:
        """Return the error that these details describe."""
        kind = next((kind for kind in _kinds(PenstockError) if kind.code == self.code), PenstockError)
        faults = tuple(Fault(fault.pointer, fault.detail, fault.code) for fault in self.errors)
        return kind(self.detail, faults=faults, remedy=self.remedy)


def _kinds(kind: type[PenstockError]) -> Iterator[type[PenstockError]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _kinds(inner)


class Infeasibility(Part):
    """The reason why no plan was found: what the nearest plan lacks, and the first remedy that works.

    Status ``infeasible``: it is proven that no plan exists. Status ``none_found``: no requested planner found a plan.
    """

    stage: str | None = Field(default=None, description="the layers of the tightest stage")
    device: str | None = None
    missing_bytes: Count | None = None
    sentence: str
    remedy: str | None = None


class Alternative(Part):
    """A choice of degrees that was compared: its best plan, the bound on its plans, and why it is not the answer."""

    degrees: Degrees = Degrees()
    sharding: Sharding | None = None
    excluded: Name | None = Field(default=None, description="the kind of devices that it leaves out")
    chosen: dict[Name, Name] | None = Field(default=None, description="the values of further axes that a request opens")
    time_ns: Nanoseconds | None = Field(default=None, description="null where no plan was found")
    peak_memory_bytes: Count | None = Field(default=None, description="of the fullest device")
    bound_ns: Nanoseconds | None = Field(default=None, description="null where it cannot be made")
    why: str = Field(default="", description="empty for the answer's choice")


class ResultOut(Part):
    """A planner's answer."""

    status: ResultStatus
    why: tuple[str, ...] = Field(description="clauses: the plan or what stands in its way, gaps, planners not asked")
    infeasibility: Infeasibility | None = None
    plan_hash: ContentHash | None = None
    plan: Plan | None = None
    certificates: tuple[Certificate, ...] = ()
    seconds: Number = Field(ge=0)
    alternatives: tuple[Alternative, ...] = Field(default=(), description="where degrees are open, the best first")

    @property
    def sentence(self) -> str:
        """The clauses as one sentence."""
        return "; ".join(self.why)


class JobOut(Part):
    """One request and the progress of its solve."""

    id: str
    state: JobState
    request_hash: ContentHash
    planner: str | None = Field(default=None, description="that was asked for")
    tag: str | None = None
    priority: int = Field(default=0, description="higher ones start first")
    parent_id: str | None = Field(default=None, description="the sweep that it belongs to")
    created_at: str
    started_at: str | None = None
    finished_at: str | None = None
    attempt: Count = 0
    result: ResultOut | None = None
    incumbent_ns: Nanoseconds | None = Field(default=None, description="best plan so far")
    bound_ns: Nanoseconds | None = None
    error: ProblemDetails | None = None
    links: dict[str, str] = Field(default_factory=dict)


class JobEvent(Part):
    """One event of a job; ``sequence`` grows by one."""

    sequence: Count
    kind: Literal["state", "progress", "log"]
    at: str
    data: dict[str, Any]


class PlanComparison(Part):
    """One row of ``compare``; ``unsupported``: the planner cannot take the request, and ``why`` says what it can."""

    planner: Name = Field(description="or yours: a layout that was given")
    schedule: str | None
    update_rule: str | None
    status: ResultStatus | Literal["unsupported"]
    iteration_ns: Nanoseconds | None = Field(description="time per global batch")
    peak_memory_bytes: Count | None
    bound_ns: Nanoseconds | None
    gap: Number | None
    speedup_vs_one_device: Number | None
    seconds: Number
    why: str = ""
    degrees: Degrees | None = Field(default=None, description="of the plan; null where they are not in question")
    sharding: Sharding | None = None
    chosen: dict[Name, Name] | None = Field(default=None, description="the values of further axes that a request opens")
    stages: Count | None = Field(default=None, description="groups of devices that hold stages, one after the other")
    layout: str | None = Field(default=None, description="a given layout as trainers call it: TP8 PP4 DP2")


class Recover(Part):
    """The reaction of a run to deaths: it restarts from its newest checkpoint, on other devices where necessary."""

    max_restarts: PositiveCount = Field(default=10, description="over the whole run")


class RunRequest(Document):
    """Train with a plan on agents; ``model`` is a key of the agents' own configuration."""

    kind: ClassVar[str] = "run request"

    plan: PlanFile | ContentHash
    model: Name
    steps: PositiveCount = Field(default=5, description=about("steps"))
    seed: Count = Field(default=0, description=about("seed"))
    check: Flag = Field(default=False, description=about("check"))
    trace_steps: Count = Field(default=1, description=about("trace_steps"))
    options: RunOptions = RunOptions()
    recover: Recover | None = Field(default=None, description="none: the first death ends the run")

    @model_validator(mode="after")
    def _has_checkpoints_to_recover_from(self) -> Self:
        if self.recover is not None and not self.options.checkpoint_every:
            raise ValueError(
                "recover needs options.checkpoint_every, and options.checkpoint_directory on storage that all nodes "
                "share"
            )
        return self


class GenerationOut(Part):
    """One generation of a run: its plan and its agents, from its start to its end."""

    generation: Count
    plan_hash: ContentHash
    agents: tuple[Name, ...]
    began_at: str
    ended_at: str | None = None
    why: str | None = Field(default=None, description="why it ended before the run was done")


class EvaluationOut(Part):
    """The loss of the evaluation data after ``step`` steps."""

    step: Count
    loss: Loss | None


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
    losses: tuple[Loss | None, ...] = Field(
        default=(),
        description="of each step from 0 on; null where it was lost with a process, a text where it is not finite",
    )
    step_times_ns: tuple[Nanoseconds, ...] = ()
    predicted_time_per_global_batch_ns: Nanoseconds
    measured_time_per_global_batch_ns: Nanoseconds | None = None
    gradient_check: Number | None = Field(
        default=None, description="largest difference from one process, over the largest gradient"
    )
    collectives: dict[str, Count] | None = Field(
        default=None, description="how many of each kind ran as predicted on all ranks; null where not compared"
    )
    collectives_differ: str | None = Field(default=None, description="the first that is not as predicted")
    error: ProblemDetails | None = None
    agents: tuple[str, ...] = ()
    checkpoint_step: Count | None = Field(default=None, description="steps in the newest complete checkpoint")
    evaluations: tuple[EvaluationOut, ...] = ()
    restarts: Count = 0
    max_restarts: Count = 0
    generations: tuple[GenerationOut, ...] = ()
    hardware: tuple[Hardware, ...] = Field(
        default=(), description="of ranks that are done; those alike as one, with the largest load and summed times"
    )


class RunEvent(Part):
    """One event of a run; ``sequence`` grows by one."""

    sequence: Count
    kind: Literal["state", "resumed", "checkpoint", "evaluation", "rung", "warning"]
    at: str
    data: dict[str, Any]


class RunEventPage(Part):
    """A run's events after a number; ``done`` when no more will come."""

    items: tuple[RunEvent, ...]
    last: Count
    done: Flag


class RankLog(Part):
    """The end of a rank's standard output and error."""

    agent: Name
    rank: Count
    generation: Count
    path: str = Field(description="the file on the agent's node")
    text: str


class RequestChecked(Part):
    """A request that can be answered; ``cached``: its answer is stored already."""

    request_hash: ContentHash
    cached: Flag


class CompareRequest(Document):
    """Planners, schedules and layouts to be compared on one request."""

    kind: ClassVar[str] = "compare request"

    request: PlanRequest
    planners: Annotated[tuple[Name, ...], Field(max_length=64)] = Field(
        default=(), description="names; none: every planner"
    )
    schedules: Annotated[tuple[Name, ...], Field(max_length=64)] = Field(
        default=(), description="names; none: every schedule of each planner"
    )
    layouts: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=64)] = Field(
        default=(), description="layouts of yours to list as well, such as `tensor=8,pipeline=4,micro-batch=1`"
    )


class Verdict(Part):
    """The judge's verdict on a user's own plan; ``sentences`` are the plan's faults."""

    valid: Flag
    plan_hash: ContentHash
    sentences: tuple[str, ...]


class Simulation(Part):
    """The judge's answer to a plan: the plan with its prediction, and whether it keeps the rules."""

    valid: Flag
    sentences: tuple[str, ...]
    plan: Plan


class DocumentStored(Part):
    """A document that is stored from now on, under the hash of its canonical JSON."""

    hash: ContentHash
    href: str


class DocumentOut(Part):
    """A stored document, in a list."""

    hash: ContentHash
    name: str | None = Field(description="its name; null for documents stored before names were")
    size_bytes: Count | None = Field(description="of its canonical JSON")
    created_at: str
    href: str


class DocumentPage(Part):
    """Stored documents of a kind, the newest first; the next page begins after ``next_cursor``."""

    items: tuple[DocumentOut, ...]
    next_cursor: str | None


class JobPage(Part):
    """Jobs, the newest first; the next page begins after ``next_cursor``."""

    items: tuple[JobOut, ...]
    next_cursor: str | None


class EventPage(Part):
    """A job's events after a number; ``done`` when no more will come."""

    items: tuple[JobEvent, ...]
    last: Count
    done: Flag


class RunPage(Part):
    """Runs, the newest first."""

    items: tuple[RunOut, ...]
    next_cursor: str | None


class PlannerOut(Part):
    """A planner that requests may name."""

    name: Name
    summary: str
    cites: str
    exact: Flag
    schedules: tuple[str, ...]
    options: dict[str, Any]


class ExampleOut(Part):
    """A request that can be POSTed to ``/v1/plans`` as it is."""

    name: Name
    summary: str
    request: dict[str, Any]


class VersionOut(Part):
    """The program that answers at this address."""

    name: Name
    version: str
    code: str = Field(default="", description="digest of the code that answers depend on")
