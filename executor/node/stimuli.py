"""The inputs of the agent's state machine and the actions that it returns: plain values between `state` and `agent`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from penstock.schemas.api.agents import SyncReply
from penstock.schemas.ranks.assignment import RankAssignment


class Process(NamedTuple):
    """A child of the agent for one generation of a run; ``rank`` is -1 for the check and the store."""

    kind: Literal["check", "store", "rank"]
    rank: int = -1

    def __str__(self) -> str:
        return f"rank {self.rank}" if self.kind == "rank" else self.kind


CHECK = Process("check")
STORE = Process("store")


@dataclass(frozen=True, slots=True)
class Synced:
    """An answer of the service."""

    reply: SyncReply

    def __str__(self) -> str:
        assigned = [f"{one.run}/{one.generation} {one.phase}" for one in self.reply.assignments]
        version, ack = self.reply.state_version, self.reply.ack
        return f"synced: version {version}, ack {ack}, {', '.join(assigned) or 'nothing assigned'}"


@dataclass(frozen=True, slots=True)
class ChildMessage:
    """A JSON line that a child has written."""

    run: str
    generation: int
    process: Process
    message: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.run}/{self.generation} {self.process} said {self.message.get('kind')}"


@dataclass(frozen=True, slots=True)
class Exited:
    """The exit of a child: its code, negative for a signal, the last lines of its stderr, and a rank's instruction."""

    run: str
    generation: int
    process: Process
    code: int
    last_lines: tuple[str, ...] = ()
    instruction: str | None = None

    def __str__(self) -> str:
        return f"{self.run}/{self.generation} {self.process} ended with {self.code}"

    @property
    def how(self) -> str:
        """The exit in words, with the last line that the child wrote."""
        how = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return f"{how}: {self.last_lines[-1].strip()}" if self.last_lines else how


@dataclass(frozen=True, slots=True)
class GraceOver:
    """The end of the time in which a better culprit could have shown itself."""

    run: str
    generation: int

    def __str__(self) -> str:
        return f"{self.run}/{self.generation} grace is over"


@dataclass(frozen=True, slots=True)
class Drain:
    """A request that the agent leave."""

    reason: str

    def __str__(self) -> str:
        return f"asked to leave: {self.reason}"


Stimulus = Synced | ChildMessage | Exited | GraceOver | Drain


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a child. It reads ``arguments`` as a JSON line; a rank, ``assignment`` with the plan's device."""

    run: str
    generation: int
    process: Process
    arguments: Mapping[str, Any] = field(default_factory=dict)
    assignment: RankAssignment | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of every child of this generation: SIGKILL; ``gently``: SIGTERM, time to save, then SIGKILL."""

    run: str
    generation: int
    gently: bool = False


@dataclass(frozen=True, slots=True)
class SetTimer:
    """A timer that returns GraceOver after ``delay_ns``."""

    run: str
    generation: int
    delay_ns: int


Action = Start | Stop | SetTimer
