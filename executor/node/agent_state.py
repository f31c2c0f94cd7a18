"""What the agent knows: its offer, and a record of each run that the service has assigned to it."""

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
    """How far a generation of a run is on this agent."""

    CHECKING = "checking"
    PREPARED = "prepared"
    REFUSED = "refused"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


class Suspect(NamedTuple):
    """A rank that failed, and what is known of it. ``is_final``: the same steps would fail again."""

    rank: int
    reason: str
    instruction: str | None
    code: int | None = None
    last_lines: tuple[str, ...] = ()
    is_final: bool = False

    @property
    def is_root_cause(self) -> bool:
        """Whether it failed by itself: a signal or an error of its own, not the loss of a peer."""
        if self.code is not None and self.code < 0:
            return True
        return not lost_a_peer(self.reason)


@dataclass(frozen=True, slots=True)
class Record:
    """One generation of a run on this agent.

    ``parting``: why this agent ends it by itself. ``is_checked``: the model has been found to fit the plan.
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
        """Whether the model of a later generation needs no check any more."""
        return self.is_checked and (self.assignment.model, self.assignment.layers) == (wanted.model, wanted.layers)


@dataclass(frozen=True, slots=True)
class Offer:
    """What this agent has: device ids, each model key's job, and where runs may write (``outputs``; None: anywhere).

    ``directory``: where ranks run; a relative path of a run begins there.
    """

    agent: str
    devices: frozenset[str]
    models: Mapping[str, str]
    any_model: bool = False
    outputs: tuple[str, ...] | None = None
    directory: str = "/"

    def reference(self, model: str) -> str | None:
        """The job of a model key, or None."""
        return self.models.get(model) or (model if self.any_model and ":" in model else None)

    def may_use(self, path: str) -> bool:
        """Whether a run may write and read there, by the words of the path; ``check_model`` resolves its links."""
        place = PurePath(os.path.normpath(os.path.join(self.directory, path)))
        return self.outputs is None or any(place.is_relative_to(allowed) for allowed in self.outputs)


@dataclass(frozen=True, slots=True)
class State:
    """Everything that the agent knows."""

    offer: Offer
    runs: Mapping[str, Record] = field(default_factory=dict)
    outbox: Outbox = field(default_factory=Outbox)
    state_version: int = 0
    draining: str | None = None
    history: tuple[str, ...] = ()

    def current(self, run: str, generation: int) -> Record | None:
        """The record of this very generation, if it is the present one."""
        record = self.runs.get(run)
        return record if record is not None and record.generation == generation else None

    @property
    def is_living(self) -> bool:
        """Whether any child is alive."""
        return any(record.alive for record in self.runs.values())


def lost_a_peer(reason: str) -> bool:
    """Whether a rank's last words say that another rank went away, in the words of gloo and of our time-outs."""
    return any(words in reason.lower() for words in _PEER_LOST)


class ImpossibleStateError(RuntimeError):
    """A step broke an invariant: our mistake. Its text ends with the stimuli that led there."""

    def __init__(self, sentence: str, history: tuple[str, ...]) -> None:
        super().__init__(sentence + "; what happened:\n" + "\n".join(f"  {line}" for line in history))


def broken_invariants(state: State, actions: Iterable[Action] = ()) -> list[str]:
    """What is wrong with a state and the actions that led to it; nothing when all is well."""
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
