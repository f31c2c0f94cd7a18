"""The one call between an agent and the service: ``POST /v1/agents/{id}/sync``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from penstock.schemas.document import Part
from penstock.schemas.quantities import Bytes, ContentHash, Count, Name


class AgentDevice(Part):
    """A device that an agent offers."""

    id: Name
    kind: Name
    memory_bytes: Bytes


class AgentEvent(Part):
    """Something that happened on a node; ``sequence`` grows by one within an incarnation."""

    sequence: Count
    kind: Literal["prepared", "refused", "store_ready", "started", "progress", "rank_done", "rank_failed", "stopped", "trace"]
    run: str
    generation: Count
    data: dict[str, Any] = Field(default_factory=dict)


class SyncRequest(Part):
    """What an agent tells: who it is, which state it has seen, what happened since."""

    incarnation: Name
    state_version: Count
    devices: tuple[AgentDevice, ...]
    models: tuple[Name, ...]
    address: Name = Field(description="where other agents reach this node's store and ranks")
    events: tuple[AgentEvent, ...] = ()
    hold: bool = Field(default=True, description="answer only on change, after 20 s at the latest")


class RankAssignment(Part):
    """One rank of a run on this agent."""

    rank: Count
    device: Name
    program: dict[str, Any] = Field(description="the rank's program (`schemas.program.Program.to_json`)")


class Assignment(Part):
    """What an agent has to have for one run: nothing is sent twice that it already holds."""

    run: str
    generation: Count
    phase: Literal["prepare", "start", "stop"]
    plan_hash: ContentHash
    digest: str = Field(description="SHA-256 of the programs, checked before start")
    model: Name
    world_size: Count
    steps: Count
    seed: Count
    check: bool
    trace_steps: Count
    hosts_store: bool = Field(description="rank 0's agent starts the store")
    store_address: str | None = None
    ranks: tuple[RankAssignment, ...]
    layers: tuple[Name, ...] = Field(description="the chain's layer names, to be checked against the model")


class SyncReply(Part):
    """What the service wants of the agent."""

    state_version: Count
    assignments: tuple[Assignment, ...]
    ack: Count = Field(description="the last event that is stored; the agent forgets up to here")
