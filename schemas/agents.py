"""The one call between an agent and the service: ``POST /v1/agents/{id}/sync``.

The service keeps one ``state_version`` per agent; it changes whenever the agent's assignments change. A reply always
carries the complete list of assignments: a run that is no longer listed is forgotten by the agent (its ranks stopped,
if any are left). A sync is answered at once when it carries events, when ``hold`` is false or when the version that
the agent has seen is not the present one; otherwise on the next change, or after 20 s. A second sync of the same
incarnation releases the one that is still held. Events are numbered from 1 in each incarnation, kept by the agent
until they are acknowledged, and may be sent twice. A name whose other incarnation is alive gets 409 (``conflict``):
one that is held, or spoke in the last ten seconds and has not said that it is ``leaving``. An agent that the service
does not know (a fresh database) is simply taken up.

A run goes: ``prepare`` → every agent says ``prepared`` and the one that hosts the store ``store_ready`` → ``start``
(with ``store_address``) → ``started``, ``progress``, ``trace``, ``rank_done`` per rank → no longer listed. A failure
or a cancellation: ``stop`` → ``stopped`` → no longer listed. What ``data`` of an event holds:

============ ======================================================================================================
prepared     nothing: programs, devices and model are good
refused      ``{reason}``
store_ready  ``{address}``: host:port of the store of this generation
started      ``{ranks}``
progress     ``{rank, step, loss, time_ns}``: the newest step; earlier ones may be left out
trace        ``{rank_trace}``: a ``schemas.trace.RankTrace``
rank_done    ``{rank, losses, step_times_ns, gradient_check, peak_memory_bytes}``; what a rank does not know is null
rank_failed  ``{rank, reason, instruction, signal, exit_code, last_lines}``: the first rank that failed there
stopped      nothing
============ ======================================================================================================
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.schemas.document import Part
from penstock.schemas.quantities import Bytes, ContentHash, Count, Name, Nanoseconds
from penstock.schemas.trace import RankTrace


class AgentDevice(Part):
    """A device that an agent offers."""

    id: Name
    kind: Name
    memory_bytes: Bytes


class AgentEvent(Part):
    """Something that happened on a node; ``sequence`` grows by one within an incarnation."""

    sequence: Count
    kind: Literal[
        "prepared", "refused", "store_ready", "started", "progress", "rank_done", "rank_failed", "stopped", "trace"
    ]
    run: str
    generation: Count
    data: dict[str, Any] = Field(default_factory=dict)


class EventData(BaseModel):
    """What an event carries; fields that this service does not know are for a later one."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Refused(EventData):
    """Why this node cannot run the programs."""

    reason: str


class StoreReady(EventData):
    """Where the store of this generation listens."""

    address: Name


class Progress(EventData):
    """The newest step of a rank; loss over the global batch, null where the rank does not know it."""

    rank: Count
    step: Count
    loss: float | None = None
    time_ns: Nanoseconds | None = None


class Traced(EventData):
    """One traced step of one rank."""

    rank_trace: RankTrace


class RankDone(EventData):
    """All steps of a rank."""

    rank: Count
    losses: tuple[float | None, ...] | None = None
    step_times_ns: tuple[Nanoseconds, ...] | None = None
    gradient_check: float | None = None
    peak_memory_bytes: Bytes | None = None


class RankFailed(EventData):
    """The first rank that failed on an agent."""

    rank: Count
    reason: str
    instruction: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()


EVENT_DATA: dict[str, type[EventData]] = {
    "prepared": EventData,
    "refused": Refused,
    "store_ready": StoreReady,
    "started": EventData,
    "progress": Progress,
    "trace": Traced,
    "rank_done": RankDone,
    "rank_failed": RankFailed,
    "stopped": EventData,
}


class SyncRequest(Part):
    """What an agent tells: who it is, which state it has seen, what happened since."""

    incarnation: Name
    state_version: Count
    devices: tuple[AgentDevice, ...]
    models: tuple[Name, ...] = Field(description="keys of its configuration; `*` where any module:attribute may run")
    address: Name = Field(description="where other agents reach this node's store and ranks")
    events: tuple[AgentEvent, ...] = ()
    hold: bool = Field(default=True, description="answer only on change, after 20 s at the latest")
    leaving: bool = Field(default=False, description="the last call of this incarnation: its name is free afterwards")


class RankAssignment(Part):
    """One rank of a run on this agent."""

    rank: Count
    device: Name
    program: dict[str, Any] = Field(description="the rank's program (`schemas.program.Program.to_json`)")


class Assignment(Part):
    """What an agent has to have for one run."""

    run: str
    generation: Count
    phase: Literal["prepare", "start", "stop"]
    plan_hash: ContentHash
    digest: str = Field(description="SHA-256 of the canonical JSON of the list of this agent's programs, by rank")
    model: Name
    world_size: Count
    steps: Count
    seed: Count
    check: bool
    trace_steps: Count
    hosts_store: bool = Field(description="rank 0's agent starts the store")
    store_address: str | None = None
    ranks: tuple[RankAssignment, ...] = Field(description="this agent's ranks; none when phase is stop")
    layers: tuple[Name, ...] = Field(description="the chain's layer names, to be checked against the model")


class SyncReply(Part):
    """What the service wants of the agent."""

    state_version: Count
    assignments: tuple[Assignment, ...]
    ack: Count = Field(description="the last event that is stored; the agent forgets up to here")


class AgentOut(Part):
    """An agent as the service sees it."""

    id: Name
    incarnation: Name
    alive: bool
    last_seen: str
    address: Name
    devices: tuple[AgentDevice, ...]
    models: tuple[Name, ...]
    runs: tuple[str, ...] = Field(description="runs that it has an assignment for")
