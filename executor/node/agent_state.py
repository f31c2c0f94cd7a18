"""The state of the agent: its offer, and a record of each run that the service has assigned to it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import PurePath
from typing import NamedTuple

from penstock.executor.node.outbox import Outbox
from penstock.executor.node.stimuli import CHECK, Action, Process, Start
from penstock.schemas.api.agents import Assignment

ASKED_TO_END = "was asked to end"
_PEER_LOST = (
    "closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "timed out",
    "remote peer",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "remote process exited",
    ASKED_TO_END,
)


class Phase(StrEnum):
    """The progress of a generation of a run on this agent."""

    CHECKING = "checking"
    PREPARED = "prepared"
    REFUSED = "refused"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Suspect(NamedTuple):
    """A rank that failed, and the evidence about it. ``is_final``: the same steps would fail again."""

    rank: int
    reason: str
    instruction: str | None
    code: int | None = None
    last_lines: tuple[str, ...] = ()
    is_final: bool = False

    @property
    def is_root_cause(self) -> bool:
        """True if it failed by itself, by a signal or an error, not by the loss of a peer."""
        if self.code is not None and self.code < 0:
            return True
        return not lost_a_peer(self.reason)


@dataclass(frozen=True, slots=True)
class Record:
    """One generation of a run on this agent.

    ``parting``: the reason why this agent ends it without a request. ``is_checked``: the model fits the plan.
    """

    assignment: Assignment
    phase: Phase
    alive: frozenset[Process] = frozenset()
    store_address: str | None = None
    ready: frozenset[int] = frozenset()
    done: frozenset[int] = frozenset()
    suspects: tuple[Suspect, ...] = ()
    first_times_ns: Mapping[int, int] = field(default_factory=dict)
    successor: Assignment | None = None
    parting: str | None = None
    is_checked: bool = False
    listed: bool = True

    @property
    def generation(self) -> int:
        return self.assignment.generation

    def has_checked(self, wanted: Assignment) -> bool:
        """Return whether the model of a later generation is checked already."""
        return self.is_checked and (self.assignment.model, self.assignment.layers) == (wanted.model, wanted.layers)


@dataclass(frozen=True, slots=True)
class Offer:
    """The agent's resources: device ids, each model key's job, and the places of outputs (``outputs``; None: anywhere).

    ``directory``: the directory in which ranks run; a relative path of a run begins there.
    """

    agent: str
    devices: frozenset[str]
    models: Mapping[str, str]
    any_model: bool = False
    outputs: tuple[str, ...] | None = None
    directory: str = "/"

    def reference(self, model: str) -> str | None:
        """Return the job of a model key, or None."""
        return self.models.get(model) or (model if self.any_model and ":" in model else None)

    def may_use(self, path: str) -> bool:
        """Return whether a run may use a path, by its text alone; ``check_model`` resolves its links."""
        place = PurePath(os.path.normpath(os.path.join(self.directory, path)))
        return self.outputs is None or any(place.is_relative_to(allowed) for allowed in self.outputs)


@dataclass(frozen=True, slots=True)
class State:
    """All state of the agent."""

    offer: Offer
    runs: Mapping[str, Record] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)
    state_version: int = 0
    draining: str | None = None
    history: tuple[str, ...] = ()

    def current(self, run: str, generation: int) -> Record | None:
        """Return the record of this generation, if it is the present one."""
        record = self.runs.get(run)
        return record if record is not None and record.generation == generation else None

    @property
    def is_living(self) -> bool:
        """True if any child is alive."""
        return any(record.alive for record in self.runs.values())


def lost_a_peer(reason: str) -> bool:
    """Return whether a rank's last message reports the loss of a peer, in the words of gloo or of our time-outs."""
    return any(words in reason.lower() for words in _PEER_LOST)


class ImpossibleStateError(RuntimeError):
    """A step broke an invariant, which is a bug of ours. Its text ends with the stimuli that led there."""

    def __init__(self, sentence: str, history: tuple[str, ...]) -> None:
        super().__init__(sentence + "; what happened:\n" + "\n".join(f"  {line}" for line in history))


def broken_invariants(state: State, actions: Iterable[Action] = ()) -> list[str]:
    """Return the faults of a state and of the actions that led to it; none if all is well."""
    faults = []
    numbers = [event.sequence for event in state.outbox.events]
    if any(b <= a for a, b in pairwise([*numbers, state.outbox.next_sequence])):
        faults.append(f"events are out of order: {numbers} before {state.outbox.next_sequence}")
    for run, record in state.runs.items():
        if record.phase in (Phase.STOPPED, Phase.REFUSED, Phase.DONE) and any(p.kind == "rank" for p in record.alive):
            faults.append(f"run {run} is {record.phase} with living ranks {sorted(record.alive)}")
        if record.phase is Phase.STOPPED and record.alive:
            faults.append(f"run {run} is stopped, but {sorted(record.alive)} live")
        if record.phase is Phase.CHECKING and CHECK not in record.alive:
            faults.append(f"run {run} is checking without a check")
        if record.successor is not None and record.phase is not Phase.STOPPING:
            faults.append(f"run {run} is {record.phase} and has a successor")
    for action in actions:
        if isinstance(action, Start) and state.current(action.run, action.generation) is None:
            faults.append(f"{action.process} of generation {action.generation} started next to another generation")
    return faults
