"""The one call between an agent and the service: ``POST /v1/agents/{id}:sync``.

The service keeps one ``state_version`` per agent; it changes whenever the agent's assignments change. A reply always
carries the complete list of assignments: a run that is no longer listed is forgotten by the agent (its ranks stopped,
if any are left). A sync is answered at once when it carries events, when ``hold`` is false or when the version that
the agent has seen is not the present one; otherwise on the next change, or after 20 s. A second sync of the same
incarnation releases the one that is still held. Events are numbered from 1 in each incarnation, kept by the agent
until they are acknowledged, and may be sent twice. A name whose other incarnation is alive gets 409 (``conflict``):
one that is held, or spoke in the last ten seconds and has not said that it is ``leaving``. An agent that the service
does not know (a fresh database) is simply taken up.

A generation of a run goes: ``prepare`` → every agent says ``prepared`` and the one that hosts the store
``store_ready`` → ``start`` (with ``store_address``) → ``started``, ``progress``, ``trace``, ``rank_done`` per rank → no
longer listed. A failure or a cancellation: ``stop`` → ``stopped`` → no longer listed, or the next generation's
``prepare``. Nothing that an agent says of an older generation counts. What ``data`` of an event holds:

============ ======================================================================================================
prepared     nothing: programs, devices and model are good
refused      ``{reason}``
store_ready  ``{address}``: host:port of the store of this generation
started      ``{ranks}``
progress     ``{rank, step, losses, times_ns}``: steps from ``step`` on, one after the other
trace        ``{rank_trace}``: a ``schemas.trace.RankTrace``
resumed      ``{step, directory}``: training goes on from this checkpoint
checkpoint   ``{step, directory}``: a complete one, of the weights after ``step`` steps
evaluation   ``{step, loss}``: after ``step`` steps
rung         ``{step, index}``: from ``step`` on the ladder's program ``index`` is run
warning      ``{rank, step, text}``: something went wrong, and training goes on
rank_done    ``{rank, losses, step_times_ns, gradient_check, collectives, collectives_differ, peak_memory_bytes,
             hardware}``; unknown values are null
rank_failed  ``{rank, reason, instruction, signal, exit_code, last_lines}``: the first rank that failed there
stopped      nothing: no process of this generation is left
============ ======================================================================================================

The end of a rank's log is fetched separately: the service lists what it wants in ``SyncReply.log_wishes``, and the
agent answers in the ``log_tails`` of its next call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import rfc8785
from pydantic import BaseModel, ConfigDict, Field

from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.document import Part
from penstock.schemas.quantities import Bytes, ContentHash, Count, Flag, Loss, Name, Nanoseconds, Number
from penstock.schemas.trace import Hardware, RankTrace

BoundarySize = tuple[Name, Count, Count]
"""A tensor that crosses a cut: its name, bytes per sample, bytes per sample of the gradient."""

EventKind = Literal[
    "prepared",
    "refused",
    "store_ready",
    "started",
    "progress",
    "resumed",
    "checkpoint",
    "evaluation",
    "rung",
    "warning",
    "rank_done",
    "rank_failed",
    "stopped",
    "trace",
]


class AgentDevice(Part):
    """A device that an agent offers."""

    id: Name
    kind: Name
    memory_bytes: Bytes


class AgentEvent(Part):
    """An event on a node; ``sequence`` grows by one within an incarnation."""

    sequence: Count
    kind: EventKind
    run: str
    generation: Count
    data: dict[str, Any] = Field(default_factory=dict)


class EventData(BaseModel):
    """The data of an event. Fields that this service does not know are ignored: a later version defines them."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Refused(EventData):
    """The reason why this node cannot run the programs."""

    reason: str


class StoreReady(EventData):
    """The address at which the store of this generation listens."""

    address: Name


class Progress(EventData):
    """Steps of a rank, from ``step`` on; losses over the global batch.

    A loss is null where the rank does not have it, and a text where it is not finite.
    """

    rank: Count
    step: Count
    losses: tuple[Loss | None, ...] = ()
    times_ns: tuple[Nanoseconds | None, ...] = ()


class StepReported(EventData):
    """One step, as a rank reports it to its agent."""

    step: Count
    loss: Loss | None = None
    time_ns: Nanoseconds | None = None


class Traced(EventData):
    """One traced step of one rank."""

    rank_trace: RankTrace


class Checkpointed(EventData):
    """A complete checkpoint."""

    step: Count
    directory: str


class Evaluated(EventData):
    """The loss of the evaluation data."""

    step: Count
    loss: Loss | None


class Climbed(EventData):
    """Another program of the ladder."""

    step: Count
    index: Count


class Warned(EventData):
    """A problem that did not end the training."""

    rank: Count
    step: Count | None = None
    text: str


class RankDone(EventData):
    """All steps of a rank, from ``first_step`` on."""

    rank: Count
    first_step: Count = 0
    losses: tuple[Loss | None, ...] | None = None
    step_times_ns: tuple[Nanoseconds, ...] | None = None
    gradient_check: Number | None = None
    collectives: dict[str, Count] | None = Field(default=None, description="how many of each kind ran as predicted")
    collectives_differ: str | None = Field(default=None, description="the first that is not as predicted")
    peak_memory_bytes: Bytes | None = None
    hardware: Hardware | None = None


class RankFailed(EventData):
    """The first rank that failed on an agent."""

    rank: Count
    reason: str
    instruction: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()
    is_final: bool = Field(default=False, description="the same steps would fail again")


EVENT_DATA: dict[EventKind, type[EventData]] = {
    "prepared": EventData,
    "refused": Refused,
    "store_ready": StoreReady,
    "started": EventData,
    "progress": Progress,
    "trace": Traced,
    "resumed": Checkpointed,
    "checkpoint": Checkpointed,
    "evaluation": Evaluated,
    "rung": Climbed,
    "warning": Warned,
    "rank_done": RankDone,
    "rank_failed": RankFailed,
    "stopped": EventData,
}


class LogRequest(Part):
    """A request for the end of a rank's log, which a client waits for."""

    number: Count
    run: str
    generation: Count
    rank: Count
    max_bytes: Bytes


class LogTail(Part):
    """The end of a rank's log; ``path`` is the file on the agent's node, or null without a file."""

    number: Count
    path: str | None
    text: str


class SyncRequest(Part):
    """The report of an agent: its identity, the state that it has seen, and the events since."""

    incarnation: Name
    state_version: Count
    devices: tuple[AgentDevice, ...]
    models: tuple[Name, ...] = Field(description="keys of its configuration; `*` where any module:attribute may run")
    address: Name = Field(description="where other agents reach this node's store and ranks")
    probe_address: Name | None = Field(default=None, description="host:port where it answers `penstock probe`")
    events: tuple[AgentEvent, ...] = ()
    log_tails: tuple[LogTail, ...] = ()
    hold: Flag = Field(default=True, description="answer only on change, after 20 s at the latest")
    leaving: Flag = Field(default=False, description="the last call of this incarnation: its name is free afterwards")


class RankPrograms(Part):
    """One rank of a run on this agent."""

    rank: Count
    device: Name
    programs: tuple[dict[str, Any], ...] = Field(
        description="the rank's programs (`schemas.program.Program.to_json`): one per length of a segment"
    )


class Assignment(Part):
    """The state that an agent has to reach for one run."""

    run: str
    generation: Count
    phase: Literal["prepare", "start", "stop"]
    plan_hash: ContentHash
    digest: str = Field(description="SHA-256 of the canonical JSON of the list of this agent's programs, rank by rank")
    model: Name
    world_size: Count
    steps: Count
    seed: Count
    check: Flag
    trace_steps: Count
    options: RunOptions = RunOptions()
    segments: tuple[Count, ...] = Field(
        default=(), description="programs in the order in which they train, from step 0; none: the first one, each step"
    )
    save: Flag = Field(default=False, description="of a stop: ranks may write a checkpoint before they end")
    hosts_store: Flag = Field(description="rank 0's agent starts the store")
    store_address: str | None = None
    ranks: tuple[RankPrograms, ...] = Field(description="this agent's ranks; none when phase is stop")
    layers: tuple[Name, ...] = Field(description="the chain's layer names, to be checked against the model")
    boundaries: tuple[tuple[BoundarySize, ...], ...] | None = Field(
        default=None, description="the tensors at each cut, where measured, to be checked against the model"
    )


def digest_of(programs: Iterable[Mapping[str, Any]]) -> str:
    """Return the SHA-256 (hex) of the canonical JSON of a list of programs, in the order of the ranks."""
    return hashlib.sha256(rfc8785.dumps(list(programs))).hexdigest()


class SyncReply(Part):
    """The reply to an agent's report: the state that the service wants of the agent."""

    state_version: Count
    assignments: tuple[Assignment, ...]
    ack: Count = Field(description="the last event that is stored; the agent drops events up to it")
    log_wishes: tuple[LogRequest, ...] = ()


class AgentOut(Part):
    """An agent as the service sees it."""

    id: Name
    incarnation: Name
    alive: Flag
    last_seen: str
    address: Name
    probe_address: Name | None = Field(default=None, description="where it answers `penstock probe`")
    devices: tuple[AgentDevice, ...]
    models: tuple[Name, ...]
    runs: tuple[str, ...] = Field(description="runs that it has an assignment for")
